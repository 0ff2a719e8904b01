"""What the supervisor knows about its processes, as the admin port tells it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from gateway.api import documents as to


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One child. `process_id` is None while it is down; `restarts` counts since the start of the gateway; `generation`
    is that of the settings which it keeps to. `hangs`: its event loop has not turned for seconds. `last_end` says how
    it has ended unasked the last time, `last_end_at` when (seconds since 1970)."""

    name: str
    process_id: int | None
    ready: bool
    restarts: int
    generation: int = 0
    hangs: bool = False
    last_end: str | None = None
    last_end_at: float | None = None


@dataclass(frozen=True, slots=True)
class GatewayState:
    """The gateway as a whole. `started_at` is in seconds since 1970, `closed` why there is no cache.

    `generation` counts the changes of settings while it runs; `settings_problem` says why the last one was refused.
    `answers` are the last changes that were asked for over the admin port, by their ids, with why they were refused
    or the keys of what they have changed. `config_file` is where the settings come from, besides the environment.
    """

    version: str
    instance_id: str
    process_id: int
    started_at: float
    s3_url: str
    admin_url: str
    directory: str
    draining: bool
    processes: tuple[ProcessState, ...]
    closed: str | None = None
    generation: int = 0
    settings_problem: str | None = None
    answers: tuple[tuple[str, str | None, Sequence[str]], ...] = ()
    config_file: str | None = None

    @property
    def ready(self) -> bool:
        """Every process serves, and none is being stopped."""
        return not self.draining and all(one.ready for one in self.processes)

    @property
    def is_followed(self) -> bool:
        return all(one.ready and one.generation == self.generation for one in self.processes)

    def document(self) -> to.GatewayStatus:
        return to.GatewayStatus.model_validate(self, from_attributes=True)

    def to_line(self) -> bytes:
        return orjson.dumps(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> GatewayState:
        document = orjson.loads(line)
        processes = tuple(ProcessState(**one) for one in document.pop("processes"))
        answers = tuple((asked, problem, changed) for asked, problem, changed in document.pop("answers"))
        return cls(**document, processes=processes, answers=answers)


class StateHolder:
    """The latest state; written by one thread, read by the event loop."""

    def __init__(self) -> None:
        self._state: GatewayState | None = None

    def take(self, line: bytes) -> None:
        """A state as the supervisor sent it."""
        self._state = GatewayState.from_line(line)

    @property
    def state(self) -> GatewayState | None:
        """None until the supervisor has spoken."""
        return self._state


CURRENT = StateHolder()
"""This process's."""

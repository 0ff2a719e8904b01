"""The supervisor's knowledge of its processes, for the admin port."""

from __future__ import annotations

from typing import Any

from gateway.api import documents as to


class GatewayState(to.GatewayStatus):
    """The gateway, and `answers` to the last changes over the admin port: id, reason of refusal, changed keys."""

    answers: tuple[tuple[str, str | None, tuple[str, ...]], ...] = ()

    @property
    def is_followed(self) -> bool:
        return all(one.ready and one.generation == self.generation for one in self.processes)

    def status(self) -> to.GatewayStatus:
        return to.GatewayStatus.model_validate(self.model_dump(exclude={"answers"}))

    def changed(self, **fields: Any) -> GatewayState:
        """Return the state with other fields. It is ready while every process serves, and none is being stopped."""
        state = self.model_copy(update=fields)
        ready = not state.draining and all(one.ready for one in state.processes)
        return state.model_copy(update={"ready": ready})

    def to_line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"


class StateHolder:
    """The latest state; written by one thread, read by the event loop."""

    def __init__(self) -> None:
        self._state: GatewayState | None = None

    def take(self, line: bytes) -> None:
        """Replace the state by the one in a line from the supervisor."""
        self._state = GatewayState.model_validate_json(line)

    @property
    def state(self) -> GatewayState | None:
        """None until the supervisor has spoken."""
        return self._state


CURRENT = StateHolder()
"""This process's."""

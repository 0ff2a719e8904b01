"""The parts of the gateway behind the admin port: the cache directory's, the processes' state, changes of settings."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import orjson

from gateway.admin.operations import RefusedRequest
from gateway.api import documents as to
from gateway.core.errors import BufferUnavailable
from gateway.s3.events import ObjectEvent

if TYPE_CHECKING:
    from gateway.cluster.polling import Polling
    from gateway.cluster.registry_beats import RegistryBeats
    from gateway.cluster.stores import PeerStores
    from gateway.jobs.event_feed import EventFeed
    from gateway.jobs.explaining import Explainer
    from gateway.jobs.indexing.indexes import Indexes
    from gateway.jobs.runner import Jobs
    from gateway.jobs.snapshot_service import SnapshotService
    from gateway.writeback.admin.writeback_admin import NoWriteback, WritebackAdmin


T = TypeVar("T")


class Changes(Protocol):
    """`operations.origin_events.OriginEvents`, which applies events."""

    async def apply(self, events: Sequence[ObjectEvent]) -> list[str | None]:
        """Return why each was left alone, None where it was applied."""

    async def forget_bucket(self, bucket: str) -> None:
        """Forget all that is remembered of a bucket here."""

    async def forget_elsewhere(self, bucket: str) -> None:
        """Make the other nodes of the cluster forget it, too."""


class Scrubs(Protocol):
    """`blocks.scrubber.Scrubber`; its progress has the fields of a `Scrub`."""

    @property
    def progress(self) -> object | None: ...


@dataclass(slots=True)
class Backends:
    """A part is None while the cache directory is not open."""

    jobs: Jobs | None = None
    changes: Changes | None = None
    snapshots: SnapshotService | None = None
    explainer: Explainer | None = None
    indexes: Indexes | None = None
    writeback: WritebackAdmin | NoWriteback | None = None
    scrubber: Scrubs | None = None
    cluster: Polling | None = None
    """None without a cluster. It needs no directory."""
    registry: RegistryBeats | None = None
    """None without Redis, too."""

    feeds: Sequence[EventFeed] | None = None
    stores: PeerStores | None = None
    """The other nodes' buffers. None without a cluster."""

    def take_back(self) -> None:
        """Lend nothing of the directory any more."""
        for one in fields(self):
            if one.name != "cluster":
                setattr(self, one.name, None)

    async def pending(self) -> to.Writeback | None:
        """Return what the origin does not have yet, slot by slot; None while that is not known."""
        try:
            return await self.writeback.summary() if self.writeback is not None else None
        except BufferUnavailable:
            return None


def opened(part: T | None) -> T:
    """Return the part, or refuse the request while the cache directory is not open."""
    if part is None:
        raise RefusedRequest(503, "the cache directory is not open yet")
    return part


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

    def take(self, line: bytes) -> bool:
        """Replace the state by the one in a line from the supervisor; return whether the gateway is ready by it."""
        self._state = GatewayState.model_validate_json(line)
        return self._state.ready

    @property
    def state(self) -> GatewayState | None:
        """None until the supervisor has spoken."""
        return self._state


CURRENT = StateHolder()
"""This process's."""


ANSWER_SECONDS = 30.0
"""Seconds that the supervisor may take to read, check and write."""

FOLLOW_SECONDS = 10.0
"""Seconds to wait until all processes follow a change. A stopped process follows when it goes on."""

_LOOK_SECONDS = 0.01
_ASKED_MAX = 16
_LINE_BYTES_MAX = 32 * 1024


class Made(NamedTuple):
    """A change that was taken: whether all processes keep to it by now, what changed, and which file was read."""

    is_followed: bool
    changed: Sequence[str]
    config_file: str | None


class SlotChanges:
    """Asks over `tell`, and hears of it by the state of the gateway."""

    def __init__(self, tell: Callable[[str], bool], holder: StateHolder) -> None:
        self._tell = tell
        self._holder = holder
        self._asked = 0

    async def make(self, name: str | None, slot: Mapping[str, Any] | None, remote: str | None = None) -> Made:
        """Set a slot (None: remove it) for the client at `remote`; without a name, reload settings. RefusedRequest."""
        if self._asked >= _ASKED_MAX:
            raise RefusedRequest(503, "too many changes are under way: try again")
        asked = secrets.token_hex(8)
        line = orjson.dumps({"asked": asked, "name": name, "slot": slot, "remote": remote})
        if len(line) > _LINE_BYTES_MAX:
            raise RefusedRequest(400, "the description of the slot is too long")
        self._asked += 1
        try:
            if not self._tell(f"asks {line.decode()}"):
                raise RefusedRequest(503, "the supervisor takes no changes now: try again")
            state = await self._until(lambda state: any(one[0] == asked for one in state.answers), ANSWER_SECONDS)
            if state is None:
                raise RefusedRequest(
                    503, "the supervisor has not answered: look with forebay slots whether the change is in force"
                )
            _, problem, changed = next(one for one in state.answers if one[0] == asked)
            if problem is not None:
                raise RefusedRequest(409, problem)
            wanted = state.generation
            followed = await self._until(
                lambda state: all(one.ready and one.generation >= wanted for one in state.processes), FOLLOW_SECONDS
            )
            return Made(followed is not None, changed, state.config_file)
        finally:
            self._asked -= 1

    async def _until(self, holds: Callable[[GatewayState], bool], seconds: float) -> GatewayState | None:
        end = monotonic() + seconds
        while True:
            state = self._holder.state
            if state is not None and holds(state):
                return state
            if monotonic() > end:
                return None
            await asyncio.sleep(_LOOK_SECONDS)

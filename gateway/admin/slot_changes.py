"""Slots set and removed over the admin port, while the gateway runs: asked of the supervisor, who has the settings."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple

import orjson

from gateway.admin.responses import Refused
from gateway.admin.state import GatewayState, StateHolder

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
        """Set a slot (None: remove it) for the client at `remote`; without a name, reload settings. Raises Refused."""
        if self._asked >= _ASKED_MAX:
            raise Refused(503, "too many changes are under way: try again")
        asked = secrets.token_hex(8)
        line = orjson.dumps({"asked": asked, "name": name, "slot": slot, "remote": remote})
        if len(line) > _LINE_BYTES_MAX:
            raise Refused(400, "the description of the slot is too long")
        self._asked += 1
        try:
            if not self._tell(f"asks {line.decode()}"):
                raise Refused(503, "the supervisor takes no changes now: try again")
            state = await self._until(lambda state: any(one[0] == asked for one in state.answers), ANSWER_SECONDS)
            if state is None:
                raise Refused(
                    503, "the supervisor has not answered: look with forebay slots whether the change is in force"
                )
            _, problem, changed = next(one for one in state.answers if one[0] == asked)
            if problem is not None:
                raise Refused(409, problem)
            wanted = state.generation
            followed = await self._until(lambda state: _all_follow(state, wanted), FOLLOW_SECONDS)
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


def _all_follow(state: GatewayState, generation: int) -> bool:
    return all(one.ready and one.generation >= generation for one in state.processes)

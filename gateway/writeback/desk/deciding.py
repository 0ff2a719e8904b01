"""What people decide about a pending object that cannot get to the origin by itself."""

from __future__ import annotations

from enum import Enum

import structlog

from gateway.errors import NotToBeDecided, OriginUnreachable
from gateway.writeback.desk.overview import Shown
from gateway.writeback.flushing.reconciler import Tools
from gateway.writeback.flushing.state import Headed, Lost, Refused
from gateway.writeback.journal.records import Base, Fixed, Write

_log = structlog.get_logger("forebay.writeback")


class Decision(Enum):
    """About a conflict, or, `discard`, about whatever does not get to the origin."""

    KEEP_OURS = "keep-ours"
    """Overwrite what the origin has now, and nothing that comes after that: then it is a conflict again."""

    KEEP_THEIRS = "keep-theirs"
    """Give this node's write up; what the origin has stays."""

    DISCARD = "discard"
    """Give it up though it is no conflict: damaged, or refused by the origin for ever."""


def decision_of(name: str) -> Decision:
    """ValueError for what is none."""
    try:
        return Decision(name)
    except ValueError:
        raise ValueError(f"the decision must be one of {', '.join(one.value for one in Decision)}") from None


class Decider:
    """Carries decisions out."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._clock = tools.clock

    async def decide(self, shown: Shown, decision: Decision) -> str | None:
        """The ETag that the origin has under the key, where it was asked for that.

        NotToBeDecided when the object is in another state by now; OriginUnreachable when the origin does not say what
        it has; BufferUnavailable when the journal does not take it.
        """
        if decision is Decision.KEEP_OURS:
            return await self._overwrite(shown)
        await self._give_up(shown, decision)
        return None

    async def _overwrite(self, shown: Shown) -> str | None:
        write = shown.write
        if write is None or not shown.is_conflict:
            raise _not_to_be_decided(shown)
        found = await self._tools.requests.head(write)
        if not isinstance(found, Headed):
            reason = found.code if isinstance(found, Refused) else found.reason if isinstance(found, Lost) else ""
            raise OriginUnreachable(f"the origin does not say what it has under {shown.key}: {reason}")
        base, now = Base.exactly(found.etag), self._clock.now()
        if not await self._tools.journal.change(lambda book: book.overwrite(shown.id, base, now)):
            raise _not_to_be_decided(shown)
        _log.warning(
            "a conflict is decided: what the origin has is overwritten", object=str(shown.key), etag=found.etag
        )
        return found.etag

    async def _give_up(self, shown: Shown, decision: Decision) -> None:
        hopeless = shown.is_damaged or shown.turn.attempts > 0
        if not shown.is_conflict and not (hopeless and decision is Decision.DISCARD):
            raise _not_to_be_decided(shown)
        await self._tools.publication.publish(_gone(shown), None)
        now, only = self._clock.now(), shown.is_conflict
        if not await self._tools.journal.change(lambda book: book.discard(shown.id, now, only_conflict=only)):
            raise _not_to_be_decided(shown)
        _log.warning("an acknowledged write was given up", object=str(shown.key), decision=decision.value)


def _gone(shown: Shown) -> Write:
    """The object as far as it matters to those who are to ask the origin about its key again."""
    return Write(Fixed(shown.key, {}, shown.slot), Base(), 0.0, deleted=True)


def _not_to_be_decided(shown: Shown) -> NotToBeDecided:
    kind = "a conflict" if shown.is_conflict else "on its way to the origin, and no conflict"
    return NotToBeDecided(f"what is pending under {shown.key} is {kind}: look at it again")

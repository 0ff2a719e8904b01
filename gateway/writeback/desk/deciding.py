"""What people decide about a pending object that cannot get to the origin by itself."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import structlog

from gateway.clock import Clock
from gateway.errors import NotToBeDecided, OriginUnreachable
from gateway.writeback.desk.alarms import Alarms
from gateway.writeback.desk.overview import Shown
from gateway.writeback.flushing.flush import Tools
from gateway.writeback.flushing.upload_state import Headed, Lost, Refused
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.records import Base, Fixed, PendingObject, State

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

    def __init__(self, tools: Tools, alarms: Alarms, clock: Clock) -> None:
        self._tools = tools
        self._alarms = alarms
        self._clock = clock

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
        pending = shown.pending
        if pending is None or not shown.is_conflict:
            raise _not_to_be_decided(shown)
        found = await self._tools.requests.head(pending)
        if not isinstance(found, Headed):
            reason = found.code if isinstance(found, Refused) else found.reason if isinstance(found, Lost) else ""
            raise OriginUnreachable(f"the origin does not say what it has under {shown.key}: {reason}")

        def again(book: Book) -> bool:
            now = book.object(shown.sequence)
            if now is None or now.state is not State.CONFLICT:
                return False
            return book.change(replace(now, state=State.WAITING, base=Base.exactly(found.etag)))

        if not await self._tools.journal.change(again):
            raise _not_to_be_decided(shown)
        _log.warning(
            "a conflict is decided: what the origin has is overwritten", object=str(shown.key), etag=found.etag
        )
        return found.etag

    async def _give_up(self, shown: Shown, decision: Decision) -> None:
        hopeless = shown.pending is None or self._alarms.of(shown.sequence) is not None
        if not shown.is_conflict and not (hopeless and decision is Decision.DISCARD):
            raise _not_to_be_decided(shown)
        await self._tools.publication.publish(_gone(shown), None)
        now, only = self._clock.now(), shown.is_conflict
        if not await self._tools.journal.change(lambda book: book.discard(shown.sequence, now, only_conflict=only)):
            raise _not_to_be_decided(shown)
        _log.warning("an acknowledged write was given up", object=str(shown.key), decision=decision.value)


def _gone(shown: Shown) -> PendingObject:
    """The object as far as it matters to those who are to ask the origin about its key again."""
    return PendingObject(shown.sequence, Fixed(shown.key, {}, shown.slot), Base(), 0.0, "", 0, deleted=True)


def _not_to_be_decided(shown: Shown) -> NotToBeDecided:
    kind = "a conflict" if shown.is_conflict else "on its way to the origin, and no conflict"
    return NotToBeDecided(f"what is pending under {shown.key} is {kind}: look at it again")

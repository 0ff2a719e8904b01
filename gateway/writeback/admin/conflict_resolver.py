"""Operators' decisions about pending objects that cannot reach the origin by themselves."""

from __future__ import annotations

from enum import Enum

import structlog

from gateway.core.clock import Moment
from gateway.core.errors import NotToBeDecided, OriginUnreachable
from gateway.writeback.admin.queries import PendingRow
from gateway.writeback.flushing.reconciler import FlushDependencies
from gateway.writeback.flushing.state import Headed, Lost, WriteRefused
from gateway.writeback.journal.records import ExpectedVersion, Write, WriteSpec

_log = structlog.get_logger("forebay.writeback")


class Decision(Enum):
    """A decision about a conflict, or about a manifest that waits for its files."""

    KEEP_OURS = "keep-ours"
    """Overwrite the version that the origin has now; if it changes again, the object is a conflict again. A waiting
    manifest is sent without its files."""

    KEEP_THEIRS = "keep-theirs"
    """Give this node's write up; the origin's version stays."""

    DISCARD = "discard"
    """Give up a write that does not reach the origin and is no conflict: damaged, or refused by it for ever."""


def decision_of(name: str) -> Decision:
    """Raise ValueError for an unknown name."""
    try:
        return Decision(name)
    except ValueError:
        raise ValueError(f"the decision must be one of {', '.join(one.value for one in Decision)}") from None


class ConflictResolver:
    def __init__(self, tools: FlushDependencies) -> None:
        self._tools = tools
        self._clock = tools.clock

    async def decide(self, row: PendingRow, decision: Decision) -> str | None:
        """Carry out a decision. Return the origin's ETag if KEEP_OURS asked for it.

        Raises NotToBeDecided when the object has changed its state, OriginUnreachable when the origin does not say what
        it has, BufferUnavailable when the journal cannot be written.
        """
        if decision is Decision.KEEP_OURS:
            return await self._overwrite(row)
        await self._give_up(row, decision)
        return None

    async def _overwrite(self, row: PendingRow) -> str | None:
        write = row.write
        if write is not None and self._tools.manifests.is_waiting(row.id):
            await self._send_without_files(row)
            return None
        if write is None or not row.is_conflict:
            raise _not_to_be_decided(row)
        found = await self.at_origin(row)
        expected, now = ExpectedVersion.exactly(found.etag), self._clock.now()
        if not await self._tools.journal.change(lambda tx: tx.writes.overwrite(row.id, expected, now)):
            raise _not_to_be_decided(row)
        _log.warning(
            "a conflict was resolved: this node's write overwrites what the origin has",
            object=str(row.key),
            etag=found.etag,
        )
        return found.etag

    async def at_origin(self, row: PendingRow) -> Headed:
        """Return the origin's version of the key. OriginUnreachable when the origin does not say."""
        found = await self._tools.requests.head(row.write or _gone(row))
        if isinstance(found, Headed):
            return found
        reason = found.code if isinstance(found, WriteRefused) else found.reason if isinstance(found, Lost) else ""
        raise OriginUnreachable(f"the origin does not say what it has under {row.key}: {reason}")

    async def _send_without_files(self, row: PendingRow) -> None:
        self._tools.manifests.waive(row.id)
        now = self._clock.now()
        await self._tools.journal.change(lambda tx: tx.turns.try_now(*row.key, now, [row.id]))
        _log.warning("a manifest is sent although the origin lacks files that it names", object=str(row.key))

    async def _give_up(self, row: PendingRow, decision: Decision) -> None:
        hopeless = row.is_damaged or row.turn.attempts > 0 or self._tools.manifests.is_waiting(row.id)
        if not row.is_conflict and not (hopeless and decision is Decision.DISCARD):
            raise _not_to_be_decided(row)
        await self._tools.publication.publish(_gone(row), None)
        now, only = Moment.of(self._clock), row.is_conflict
        if not await self._tools.journal.change(lambda tx: tx.writes.discard(row.id, now, only_conflict=only)):
            raise _not_to_be_decided(row)
        _log.warning("an acknowledged write was given up", object=str(row.key), decision=decision.value)


def _gone(row: PendingRow) -> Write:
    """Return a stand-in for the write, enough to ask the origin about its key."""
    return Write(WriteSpec(row.key, {}, row.slot), ExpectedVersion(), 0.0, deleted=True)


def _not_to_be_decided(row: PendingRow) -> NotToBeDecided:
    kind = "a conflict" if row.is_conflict else "on its way to the origin, and no conflict"
    if row.is_damaged:
        return NotToBeDecided(f"what is pending under {row.key} is damaged: you can discard it, not keep it")
    return NotToBeDecided(f"what is pending under {row.key} is {kind}: look at it again")

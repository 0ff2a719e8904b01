"""The claims that this node must have in the registry of the cluster, read from its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gateway.core.errors import BufferDamaged
from gateway.core.model import ObjectKey, PendingClaim
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.transaction import JournalTransaction

DAMAGED = "damaged"
"""The token of a write whose row cannot be read."""


class PendingClaims:
    """Event loop only; BufferUnavailable. Each call takes some milliseconds at most."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def page(self, after: int, count_max: int) -> tuple[Sequence[PendingClaim], int]:
        """Return claims of pending writes behind a place in the journal, in order, and the last one's place.

        While a write is being sent a later one of its key may be pending too. The claim is that one's: the end of the
        earlier write must not take it out of the registry.
        """

        def look(tx: JournalTransaction) -> tuple[Sequence[PendingClaim], int]:
            rows = tx.writes.pending_after(after, count_max)
            claims = [_last(tx, key) or PendingClaim(key, DAMAGED, 0) for _, key in rows]
            return claims, rows[-1][0] if rows else after

        return self._journal.read(look)

    def last(self, keys: Iterable[ObjectKey]) -> Mapping[ObjectKey, PendingClaim]:
        """Return the claim of the last pending write of each key that has one."""

        def look(tx: JournalTransaction) -> Mapping[ObjectKey, PendingClaim]:
            return {key: claim for key in keys if (claim := _last(tx, key)) is not None}

        return self._journal.read(look)

    def highest_order(self) -> int:
        return self._journal.read(lambda tx: tx.writes.highest_order())

    def slots(self) -> Sequence[str]:
        """Return the names of the slots in which something is pending, as they were called then."""
        return self._journal.read(lambda tx: [name for name, one in tx.files.usages().items() if one.objects])

    def buckets(self) -> Sequence[str]:
        return sorted(self._journal.read(lambda tx: tx.writes.buckets_in_use()))


def _last(tx: JournalTransaction, key: ObjectKey) -> PendingClaim | None:
    try:
        write = tx.writes.latest(key)
    except BufferDamaged:
        return PendingClaim(key, DAMAGED, 0)
    return PendingClaim(key, write.token, write.order) if write is not None else None

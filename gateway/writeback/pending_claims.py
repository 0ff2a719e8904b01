"""The claims that this node must have in the registry of the cluster, read from its journal."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.errors import BufferDamaged
from gateway.core.model import Claim
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.transaction import JournalTransaction

DAMAGED = "damaged"
"""The token of a write whose row cannot be read."""


class PendingClaims:
    """Event loop only; BufferUnavailable. Each call takes some milliseconds at most."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def page(self, after: int, count_max: int) -> tuple[Sequence[Claim], int]:
        """Return claims of pending writes behind a place in the journal, in order, and the last one's place."""

        def look(tx: JournalTransaction) -> tuple[Sequence[Claim], int]:
            rows = tx.writes.pending_after(after, count_max)
            return [Claim(key, _token(tx, write_id)) for write_id, _, key in rows], rows[-1][1] if rows else after

        return self._journal.read(look)

    def over(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Return those of whose key nothing is pending."""
        return self._journal.read(lambda tx: [one for one in claims if not tx.writes.is_pending(one.key)])

    def slots(self) -> Sequence[str]:
        """Return the names of the slots in which something is pending, as they were called then."""
        return self._journal.read(lambda tx: [name for name, one in tx.files.usages().items() if one.objects])

    def buckets(self) -> Sequence[str]:
        return sorted(self._journal.read(lambda tx: tx.writes.buckets_in_use()))


def _token(tx: JournalTransaction, write_id: int) -> str:
    try:
        write = tx.writes.get(write_id)
    except BufferDamaged:
        return DAMAGED
    return write.token if write is not None else DAMAGED

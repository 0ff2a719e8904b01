"""Open uploads that the origin is being asked to complete: written down before, as it may do so and nobody hears of it.

One for each upload, the last that was asked for; it goes with the upload. What comes of it where nobody hears,
flushing/lost_completions.py finds out.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.writeback.journal import codec
from gateway.writeback.journal.intent_rows import IntentRows
from gateway.writeback.journal.records import Ended


class CompletingRows(IntentRows):
    """One transaction's view. An `Ended` says here how the upload ends if the origin does it, and when it was asked."""

    def begin_completing(self, asked: Ended) -> bool:
        """The origin is about to be asked; whether it has been before, and nobody knows what came of that."""
        was_asked = self._row("SELECT 1 FROM completing WHERE upload_id = ?", asked.upload_id) is not None
        self._rows.execute(  # not of one that has just ended
            "INSERT OR REPLACE INTO completing SELECT upload_id, ?, ? FROM uploads WHERE upload_id = ?",
            (asked.ended_at, codec.pack_completing(asked), asked.upload_id),
        )
        return was_asked

    def end_completing(self, upload_id: str, asked_at: float) -> None:
        """What was asked for then it has not done, or nobody looks any more."""
        self._rows.execute("DELETE FROM completing WHERE upload_id = ? AND asked_at = ?", (upload_id, asked_at))

    def completing(self, upload_id: str) -> Ended | None:
        """What the origin was asked for last."""
        row = self._row("SELECT record FROM completing WHERE upload_id = ?", upload_id)
        return codec.unpack_completing(upload_id, row[0]) if row else None

    def all_completing(self, after: str, count_max: int) -> Sequence[tuple[str, float]]:
        """The uploads, and when the origin was asked, in the order of their ids behind one."""
        found = self._rows.execute(
            "SELECT upload_id, asked_at FROM completing WHERE upload_id > ? ORDER BY upload_id LIMIT ?",
            (after, count_max),
        )
        return [(upload_id, asked_at) for upload_id, asked_at in found]

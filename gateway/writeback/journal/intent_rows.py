"""Uploads that the origin is being asked to begin: written down before, for after a kill nobody else knows of them.

An intent goes in the transaction that notes the upload. One whose asker has died, or does not know what came of it, is
a suspect: flushing/lost_uploads.py finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.errors import BufferDamaged
from gateway.objects import ObjectKey
from gateway.writeback.journal import codec
from gateway.writeback.journal.file_rows import encoded
from gateway.writeback.journal.records import Intent
from gateway.writeback.journal.usage_rows import UsageRows


class IntentRows(UsageRows):
    """One transaction's view."""

    def intend(self, intent: Intent) -> None:
        """The origin is about to be asked for an upload."""
        row = (intent.token, intent.worker, 0, intent.key.bucket, encoded(intent.key), codec.pack_intent(intent))
        self._rows.execute("INSERT INTO intents VALUES (?, ?, ?, ?, ?, ?)", row)

    def forget_intent(self, token: str) -> None:
        """The upload is known of, or there is none."""
        self._rows.execute("DELETE FROM intents WHERE token = ?", (token,))

    def suspect(self, token: str, now: float) -> None:
        """Nobody will ever tell what the origin has done."""
        intent = self.intent(token)
        if intent is not None:
            self._suspect(intent, now)

    def suspect_all(self, now: float, worker: int | None = None) -> None:
        """The same of all that a worker slot (None: any) has left, whose process is dead."""
        found = self._rows.execute(
            "SELECT token, record FROM intents WHERE suspect = 0 AND worker = coalesce(?, worker)", (worker,)
        )
        for token, record in found.fetchall():
            try:
                self._suspect(codec.unpack_intent(token, record), now)
            except BufferDamaged:  # who looks at it tells
                self._rows.execute("UPDATE intents SET suspect = 1 WHERE token = ?", (token,))

    def suspected(self, after: str, count_max: int) -> Sequence[str]:
        """The tokens of those of which nobody knows what came of them, behind one."""
        found = self._rows.execute(
            "SELECT token FROM intents WHERE suspect = 1 AND token > ? ORDER BY token LIMIT ?", (after, count_max)
        )
        return [token for (token,) in found]

    def intent(self, token: str) -> Intent | None:
        row = self._row("SELECT record FROM intents WHERE token = ?", token)
        return codec.unpack_intent(token, row[0]) if row else None

    def intents(self, key: ObjectKey) -> Sequence[Intent]:
        """All of a key, those of living processes too."""
        found = self._rows.execute(
            "SELECT token, record FROM intents WHERE bucket = ? AND key = ?", (key.bucket, encoded(key))
        )
        return [codec.unpack_intent(token, record) for token, record in found]

    def _suspect(self, intent: Intent, now: float) -> None:
        if intent.suspect_since is None:
            record = codec.pack_intent(replace(intent, suspect_since=now))
            self._rows.execute("UPDATE intents SET suspect = 1, record = ? WHERE token = ?", (record, intent.token))

"""Uploads that the origin is being asked to begin: written down before, for after a kill nobody else knows of them.

An intent goes in the transaction that notes the upload. One whose asker has died, or does not know what came of it, is
a suspect: flushing/lost_uploads.py finds out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
        row = self._row("SELECT record FROM intents WHERE token = ?", token)
        if row is not None:
            self._suspect(codec.unpack_intent(token, row[0]), now)

    def suspect_all(self, now: float, worker: int | None = None) -> None:
        """The same of all that a worker slot (None: any) has left, whose process is dead."""
        found = self._rows.execute(
            "SELECT token, record FROM intents WHERE suspect = 0 AND worker = coalesce(?, worker)", (worker,)
        )
        for token, record in found.fetchall():
            self._suspect(codec.unpack_intent(token, record), now)

    def suspects(self, after: str, count_max: int) -> Sequence[Intent]:
        """Those of which nobody knows what came of them, behind a token."""
        found = self._rows.execute(
            "SELECT token, record FROM intents WHERE suspect = 1 AND token > ? ORDER BY token LIMIT ?",
            (after, count_max),
        )
        return [codec.unpack_intent(token, record) for token, record in found]

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

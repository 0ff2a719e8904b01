"""What the journal knows of the origin: its buckets, what this gateway has done there, what is to be cleared away."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.objects import ObjectKey
from gateway.writeback.journal import codec
from gateway.writeback.journal.completing_rows import CompletingRows
from gateway.writeback.journal.file_rows import encoded
from gateway.writeback.journal.records import Orphan, OwnDoing, Profile
from gateway.writeback.presence import News

OWN_DOING_KEPT_SECONDS = 7 * 24 * 3600.0
"""An upload that was begun longer ago takes what this gateway has written since for somebody else's."""


class OriginRows(CompletingRows):
    """One transaction's view."""

    # Buckets.

    def profile(self, bucket: str) -> Profile | None:
        """What was learned of a bucket."""
        row = self._row("SELECT record FROM profiles WHERE bucket = ?", bucket)
        return codec.unpack_profile(bucket, row[0]) if row else None

    def learn(self, bucket: str, profile: Profile) -> None:
        """What one of its answers has just told."""
        self._rows.execute(
            "INSERT OR REPLACE INTO profiles VALUES (?, ?)", (bucket, codec.pack_profile(bucket, profile))
        )

    def forget_profile(self, bucket: str) -> None:
        """What was learned holds no more: its next write is to tell."""
        self._rows.execute("DELETE FROM profiles WHERE bucket = ?", (bucket,))

    # Keys.

    def did(self, key: ObjectKey, own: OwnDoing) -> None:
        """This gateway has changed what the origin has under a key."""
        self._rows.execute(
            "INSERT OR REPLACE INTO origin VALUES (?, ?, ?, ?)",
            (key.bucket, encoded(key), own.at, codec.pack_own_doing(key, own)),
        )

    def own_doing(self, key: ObjectKey) -> OwnDoing | None:
        """What it has last done to it, as far as is remembered."""
        row = self._row("SELECT record FROM origin WHERE bucket = ? AND key = ?", key.bucket, encoded(key))
        return codec.unpack_own_doing(key, row[0]) if row else None

    def _forget_own_doings(self, now: float, count_max: int) -> int:
        forgotten = self._rows.execute(
            "DELETE FROM origin WHERE (bucket, key) IN (SELECT bucket, key FROM origin WHERE at < ? LIMIT ?)",
            (now - OWN_DOING_KEPT_SECONDS, count_max),
        )
        return forgotten.rowcount

    # Uploads that nothing will complete.

    def orphan_ids(self, count_max: int, after: str = "") -> Sequence[str]:
        """Uploads to be aborted at the origin: their ids there, in order, behind one."""
        found = self._rows.execute(
            "SELECT origin_upload_id FROM orphans WHERE origin_upload_id > ? ORDER BY origin_upload_id LIMIT ?",
            (after, count_max),
        )
        return [origin_upload_id for (origin_upload_id,) in found]

    def orphan_of(self, origin_upload_id: str) -> Orphan | None:
        row = self._row("SELECT record FROM orphans WHERE origin_upload_id = ?", origin_upload_id)
        return codec.unpack_orphan(origin_upload_id, row[0]) if row else None

    def is_orphan(self, origin_upload_id: str) -> bool:
        """Whether an upload of the origin is to be aborted there."""
        return self._row("SELECT 1 FROM orphans WHERE origin_upload_id = ?", origin_upload_id) is not None

    def forget_orphan(self, origin_upload_id: str) -> None:
        """The origin has no such upload any more."""
        self._rows.execute("DELETE FROM orphans WHERE origin_upload_id = ?", (origin_upload_id,))

    def orphan(self, key: ObjectKey, origin_upload_id: str) -> None:
        """Nothing will complete it."""
        self.news.add(News.OBJECTS)
        record = codec.pack_orphan(Orphan(key, origin_upload_id))
        self._rows.execute("INSERT OR REPLACE INTO orphans VALUES (?, ?)", (origin_upload_id, record))

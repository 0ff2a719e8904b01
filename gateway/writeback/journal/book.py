"""The journal inside one transaction: uploads, parts and pending objects, changed as S3 and the flush change them.

What belongs together changes in one transaction, so that a kill at any moment leaves it before or after. Methods that
let go of staged files add them to `freed`: they are unlinked once the transaction is durable, and where that was missed
when the next process opens the buffer. Pending objects are in object_rows.py, what is known of the origin in
origin_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from gateway.objects import ObjectKey
from gateway.writeback.journal import codec
from gateway.writeback.journal.file_rows import encoded, text
from gateway.writeback.journal.object_rows import ObjectRows, Places
from gateway.writeback.journal.records import Ended, OwnDoing, Part, PendingObject, Upload
from gateway.writeback.presence import News

__all__ = ["ENDED_KEPT_SECONDS", "Book", "Places"]

ENDED_KEPT_SECONDS = 24 * 3600.0
"""How long a repeated Complete or Abort is answered as the first was."""

FORGOTTEN_AT_ONCE = 1000
"""Writers wait meanwhile."""


class Book(ObjectRows):
    """One transaction's view of all of it."""

    def open_upload(self, upload: Upload) -> None:
        """CreateMultipartUpload was answered by the origin, or is to be."""
        key = upload.fixed.key
        self._rows.execute(
            "INSERT INTO uploads VALUES (?, ?, ?, ?, ?)",
            (upload.upload_id, key.bucket, encoded(key), upload.fixed.slot, codec.pack_upload(upload)),
        )

    def upload(self, upload_id: str) -> Upload | None:
        row = self._row("SELECT record FROM uploads WHERE upload_id = ?", upload_id)
        return codec.unpack_upload(upload_id, row[0]) if row else None

    def uploads(self, bucket: str, prefix: str = "", after: tuple[str, str] = ("", "")) -> Iterator[Upload]:
        """The open uploads of a bucket under a prefix in the order of key and id, behind such a pair."""
        start = max(text(prefix), text(after[0]))
        found = self._rows.execute(
            "SELECT upload_id, key, record FROM uploads WHERE bucket = ? AND key >= ? ORDER BY key, upload_id",
            (bucket, start),
        )
        for upload_id, key, record in found:
            if not key.startswith(text(prefix)):
                return
            if (key, upload_id) > (text(after[0]), after[1]):
                yield codec.unpack_upload(upload_id, record)

    def begun_at_origin(self, upload_id: str, key: ObjectKey, origin_upload_id: str) -> str | None:
        """The origin has an upload for this one; parts may go there before the client has completed it.

        The origin's id that counts: of two that were asked for at once the first. None: ours is over.
        """
        upload = self.upload(upload_id)
        if upload is None or upload.origin_upload_id is not None:
            self.orphan(key, origin_upload_id)
            return None if upload is None else upload.origin_upload_id
        record = codec.pack_upload(replace(upload, origin_upload_id=origin_upload_id))
        self._rows.execute("UPDATE uploads SET record = ? WHERE upload_id = ?", (record, upload_id))
        return origin_upload_id

    def origin_upload_ids(self, key: ObjectKey) -> set[str | None]:
        """Of the origin's uploads behind those of a key that are open here, or have become pending objects."""
        of_key = takewhile(lambda one: one.fixed.key == key, self.uploads(key.bucket, key.key))
        ids = {one.origin_upload_id for one in of_key}
        return ids | {one.origin_upload_id for one in self._pending_of(key)}

    def put_part(self, upload_id: str, part: Part) -> bool:
        """Store a part, in place of one of the same number; False when there is no such upload (any more)."""
        upload = self.upload(upload_id)
        if upload is None:
            return False
        replaced = self._row("SELECT file FROM parts WHERE upload_id = ? AND number = ?", upload_id, part.number)
        self._put_file(part.file, upload.fixed.slot)
        place = ("parts", upload_id, part.number)
        done = part.origin_etag is not None or upload.origin_upload_id is None
        self._rows.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?)",
            (upload_id, part.number, part.file.name, upload.fixed.slot, done, codec.pack_part(place, part)),
        )
        self._free([replaced[0]] if replaced else [])
        if not done:
            self.news.add(News.PARTS)
        return True

    def parts(self, upload_id: str, after: int = 0) -> Iterator[Part]:
        """The parts of an open upload behind a number, in order."""
        yield from self._parts_of("parts", "upload_id", upload_id, after)

    def part(self, upload_id: str, number: int) -> Part | None:
        return next(self._parts_of("parts", "upload_id", upload_id, number - 1, number), None)

    def sent(self, upload_id: str, part: Part) -> None:
        """The origin has a part, unless the client has replaced it meanwhile."""
        now = self.part(upload_id, part.number)
        if now is not None and now.file.name == part.file.name:
            place = ("parts", upload_id, part.number)
            record = codec.pack_part(place, replace(now, origin_etag=part.origin_etag))
            self._rows.execute(
                "UPDATE parts SET record = ?, sent = 1 WHERE upload_id = ? AND number = ?",
                (record, upload_id, part.number),
            )

    # Parts of open uploads that the origin might have by now.

    def slots_with_unsent(self) -> Sequence[str]:
        """The slots in which there are any."""
        return self._distinct("SELECT min(slot) FROM parts WHERE sent = 0 AND slot > ?")

    def next_with_unsent(self, slot: str, after: str) -> str | None:
        """The first upload of a slot behind another that has any; in the order of their ids."""
        row = self._row("SELECT min(upload_id) FROM parts WHERE sent = 0 AND slot = ? AND upload_id > ?", slot, after)
        return row[0] if row else None

    def unsent(self, slot: str, upload_id: str, count_max: int) -> Sequence[tuple[int, str]]:
        """The first of them of an upload: numbers and names of their files."""
        found = self._rows.execute(
            "SELECT number, file FROM parts WHERE sent = 0 AND slot = ? AND upload_id = ? ORDER BY number LIMIT ?",
            (slot, upload_id, count_max),
        )
        return [(number, file) for number, file in found]

    # How uploads end.

    def complete(self, pending: PendingObject, ended: Ended) -> PendingObject | None:
        """Make an upload's chosen parts an acknowledged object; parts that were not chosen go.

        None where the upload has ended: what was acknowledged since would be lost to an object that was there before.
        """
        if self.upload(ended.upload_id) is None:
            return None
        stored = self._enter(pending)
        self._close_upload(ended)
        return stored

    def completed_at_origin(self, ended: Ended) -> None:
        """The origin has made the object itself, by this time: nothing of the upload is needed here any more."""
        self._close_upload(ended)
        later = self.own_doing(ended.key)
        if later is None or later.at <= ended.ended_at:
            self.did(ended.key, OwnDoing(ended.ended_at, ended.etag))

    def abort(self, ended: Ended) -> bool:
        """End an upload without an object: its parts go, here and at the origin. False where it has ended."""
        upload = self.upload(ended.upload_id)
        if upload is None:
            return False
        if upload.origin_upload_id is not None:
            self.orphan(upload.fixed.key, upload.origin_upload_id)
        self._close_upload(ended)
        return True

    def ended(self, upload_id: str) -> Ended | None:
        """How an upload ended, for who repeats its last request."""
        row = self._row("SELECT record FROM ended WHERE upload_id = ?", upload_id)
        return codec.unpack_ended(upload_id, row[0]) if row else None

    def forget_ended(self, now: float, count_max: int = FORGOTTEN_AT_ONCE) -> bool:
        """Nobody repeats what ended so long ago, and no upload is older; whether there may be more of it."""
        forgotten = self._rows.execute(
            "DELETE FROM ended WHERE upload_id IN (SELECT upload_id FROM ended WHERE ended_at < ? LIMIT ?)",
            (now - ENDED_KEPT_SECONDS, count_max),
        )
        return max(forgotten.rowcount, self._forget_own_doings(now, count_max)) >= count_max

    def _close_upload(self, ended: Ended) -> None:
        files = self._files("parts", "upload_id", ended.upload_id)
        self._rows.execute("DELETE FROM parts WHERE upload_id = ?", (ended.upload_id,))
        self._rows.execute("DELETE FROM uploads WHERE upload_id = ?", (ended.upload_id,))
        self._rows.execute("DELETE FROM completing WHERE upload_id = ?", (ended.upload_id,))
        self._rows.execute(
            "INSERT OR REPLACE INTO ended VALUES (?, ?, ?)", (ended.upload_id, ended.ended_at, codec.pack_ended(ended))
        )
        self._free(files)

    def counts(self) -> tuple[int, int]:
        """How many objects are pending, and how many uploads open."""
        row = self._row("SELECT (SELECT count(*) FROM objects), (SELECT count(*) FROM uploads)")
        return (row[0], row[1]) if row else (0, 0)

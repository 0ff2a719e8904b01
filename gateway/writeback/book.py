"""The journal inside one transaction: uploads, parts and pending objects, changed as S3 and the flush change them.

What belongs together changes in one transaction, so that a kill at any moment leaves it before or after. Methods that
let go of staged files add them to `freed`: they are unlinked once the transaction is durable, and swept at the next
start where that was missed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gateway.objects import ObjectKey
from gateway.writeback import codec
from gateway.writeback.presence import place_of
from gateway.writeback.records import Base, Ended, Orphan, OwnDoing, Part, PendingObject, Profile, State, Upload
from gateway.writeback.staged_file import StagedFile

ENDED_KEPT_SECONDS = 24 * 3600.0
"""How long a repeated Complete or Abort is answered as the first was."""

_BEHIND_ALL = b"\xff"
"""No byte of UTF-8 is as great."""


OWN_DOING_KEPT_SECONDS = 7 * 24 * 3600.0
"""An upload that was begun longer ago takes what this gateway has written since for somebody else's."""


class Places(Protocol):
    """Of presence.py: told before something is pending."""

    def set(self, place: int) -> None: ...


class Book:
    """One transaction's view. `freed` are the names of the files that nothing refers to any more."""

    def __init__(self, connection: sqlite3.Connection, presence: Places) -> None:
        self._rows = connection
        self._presence = presence
        self.freed: list[str] = []

    # Uploads.

    def open_upload(self, upload: Upload) -> None:
        """CreateMultipartUpload was answered by the origin, or is to be."""
        key = upload.fixed.key
        self._rows.execute(
            "INSERT INTO uploads VALUES (?, ?, ?, ?)",
            (upload.upload_id, key.bucket, _encoded(key), codec.pack_upload(upload)),
        )

    def upload(self, upload_id: str) -> Upload | None:
        row = self._row("SELECT record FROM uploads WHERE upload_id = ?", upload_id)
        return codec.unpack_upload(upload_id, row[0]) if row else None

    def uploads(self, bucket: str, prefix: str = "", after: tuple[str, str] = ("", "")) -> Iterator[Upload]:
        """The open uploads of a bucket under a prefix in the order of key and id, behind such a pair."""
        start = max(_text(prefix), _text(after[0]))
        found = self._rows.execute(
            "SELECT upload_id, key, record FROM uploads WHERE bucket = ? AND key >= ? ORDER BY key, upload_id",
            (bucket, start),
        )
        for upload_id, key, record in found:
            if not key.startswith(_text(prefix)):
                return
            if (key, upload_id) > (_text(after[0]), after[1]):
                yield codec.unpack_upload(upload_id, record)

    def begun_at_origin(self, upload_id: str, origin_upload_id: str) -> None:
        """The origin has an upload for this one; parts may go there before the client has completed it."""
        upload = self.upload(upload_id)
        if upload is not None:
            record = codec.pack_upload(replace(upload, origin_upload_id=origin_upload_id))
            self._rows.execute("UPDATE uploads SET record = ? WHERE upload_id = ?", (record, upload_id))

    def put_part(self, upload_id: str, part: Part) -> bool:
        """Store a part, in place of one of the same number; False when there is no such upload (any more)."""
        if self.upload(upload_id) is None:
            return False
        replaced = self._row("SELECT file FROM parts WHERE upload_id = ? AND number = ?", upload_id, part.number)
        self._put_file(part.file)
        place = ("parts", upload_id, part.number)
        self._rows.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?)",
            (upload_id, part.number, part.file.name, part.origin_etag is not None, codec.pack_part(place, part)),
        )
        self._free([replaced[0]] if replaced else [])
        return True

    def parts(self, upload_id: str, after: int = 0) -> Iterator[Part]:
        """The parts of an open upload behind a number, in order."""
        yield from self._parts_of("parts", "upload_id", upload_id, after)

    def part(self, upload_id: str, number: int) -> Part | None:
        return next((part for part in self.parts(upload_id, number - 1) if part.number == number), None)

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

    def unsent(self, after: tuple[str, int], count_max: int) -> Sequence[tuple[str, int]]:
        """Parts of open uploads that the origin does not have, by upload and number, behind such a pair."""
        found = self._rows.execute(
            "SELECT upload_id, number FROM parts WHERE sent = 0 AND (upload_id, number) > (?, ?) "
            "ORDER BY upload_id, number LIMIT ?",
            (*after, count_max),
        )
        return [(upload_id, number) for upload_id, number in found]

    def complete(self, pending: PendingObject, ended: Ended) -> PendingObject:
        """Make an upload's chosen parts an acknowledged object; parts that were not chosen go."""
        stored = self._enter(pending)
        self._close_upload(ended)
        return stored

    def completed_at_origin(self, ended: Ended) -> None:
        """The origin has made the object itself: nothing of the upload is needed here any more."""
        self._close_upload(ended)
        self.did(ended.key, OwnDoing(ended.ended_at, ended.etag))

    def abort(self, ended: Ended) -> None:
        """End an upload without an object: its parts go, here and at the origin."""
        upload = self.upload(ended.upload_id)
        if upload is not None and upload.origin_upload_id is not None:
            self._orphan(upload.fixed.key, upload.origin_upload_id)
        self._close_upload(ended)

    def orphans(self, count_max: int) -> Sequence[Orphan]:
        """Uploads to be aborted at the origin."""
        found = self._rows.execute("SELECT origin_upload_id, record FROM orphans LIMIT ?", (count_max,))
        return [codec.unpack_orphan(origin_upload_id, record) for origin_upload_id, record in found]

    def is_orphan(self, origin_upload_id: str) -> bool:
        """Whether an upload of the origin is to be aborted there."""
        return self._row("SELECT 1 FROM orphans WHERE origin_upload_id = ?", origin_upload_id) is not None

    def forget_orphan(self, origin_upload_id: str) -> None:
        """The origin has no such upload any more."""
        self._rows.execute("DELETE FROM orphans WHERE origin_upload_id = ?", (origin_upload_id,))

    def _orphan(self, key: ObjectKey, origin_upload_id: str) -> None:
        record = codec.pack_orphan(Orphan(key, origin_upload_id))
        self._rows.execute("INSERT OR REPLACE INTO orphans VALUES (?, ?)", (origin_upload_id, record))

    def ended(self, upload_id: str) -> Ended | None:
        """How an upload ended, for who repeats its last request."""
        row = self._row("SELECT record FROM ended WHERE upload_id = ?", upload_id)
        return codec.unpack_ended(upload_id, row[0]) if row else None

    def forget_ended(self, now: float) -> None:
        """Nobody repeats what ended so long ago, and no upload was begun before that."""
        self._rows.execute("DELETE FROM ended WHERE ended_at < ?", (now - ENDED_KEPT_SECONDS,))
        self._rows.execute("DELETE FROM origin WHERE at < ?", (now - OWN_DOING_KEPT_SECONDS,))

    def _close_upload(self, ended: Ended) -> None:
        files = self._files("parts", "upload_id", ended.upload_id)
        self._rows.execute("DELETE FROM parts WHERE upload_id = ?", (ended.upload_id,))
        self._rows.execute("DELETE FROM uploads WHERE upload_id = ?", (ended.upload_id,))
        self._rows.execute(
            "INSERT OR REPLACE INTO ended VALUES (?, ?, ?)", (ended.upload_id, ended.ended_at, codec.pack_ended(ended))
        )
        self._free(files)

    # Pending objects.

    def put(self, pending: PendingObject) -> PendingObject:
        """Acknowledge an object, or a tombstone; its sequence is given now."""
        return self._enter(pending)

    def latest(self, key: ObjectKey) -> PendingObject | None:
        """What is pending under a key: the object or tombstone that was acknowledged last."""
        row = self._row(
            "SELECT sequence, record FROM objects WHERE bucket = ? AND key = ? ORDER BY sequence DESC LIMIT 1",
            key.bucket,
            _encoded(key),
        )
        return self._with_parts(codec.unpack_object(row[0], row[1])) if row else None

    def object(self, sequence: int) -> PendingObject | None:
        row = self._row("SELECT record FROM objects WHERE sequence = ?", sequence)
        return self._with_parts(codec.unpack_object(sequence, row[0])) if row else None

    def has_object(self, sequence: int) -> bool:
        """Whether it is still pending."""
        return self._row("SELECT 1 FROM objects WHERE sequence = ?", sequence) is not None

    def earliest(self, key: ObjectKey) -> PendingObject | None:
        """What is to be dealt with first under a key: without its parts."""
        row = self._row(
            "SELECT sequence, record FROM objects WHERE bucket = ? AND key = ? ORDER BY sequence LIMIT 1",
            key.bucket,
            _encoded(key),
        )
        return codec.unpack_object(row[0], row[1]) if row else None

    def waiting(self, after: int, count_max: int) -> Sequence[PendingObject]:
        """What is pending in the order of its acknowledgement, without its parts, behind a sequence."""
        found = self._rows.execute(
            "SELECT sequence, record FROM objects WHERE sequence > ? ORDER BY sequence LIMIT ?", (after, count_max)
        )
        return [codec.unpack_object(sequence, record) for sequence, record in found]

    def newest(self) -> int:
        """The sequence of what was acknowledged last of all that is pending; 0: nothing is."""
        row = self._row("SELECT max(sequence) FROM objects")
        return (row[0] or 0) if row else 0

    def counts(self) -> tuple[int, int]:
        """How many objects are pending, and how many uploads open."""
        row = self._row("SELECT (SELECT count(*) FROM objects), (SELECT count(*) FROM uploads)")
        return (row[0], row[1]) if row else (0, 0)

    def slots(self) -> Sequence[str]:
        """The slots in which something is pending."""
        found: list[str] = []
        after = ""
        while (row := self._row("SELECT min(slot) FROM objects WHERE slot > ?", after)) and row[0] is not None:
            after = row[0]
            found.append(after)
        return found

    def startable(self, slot: str, after: int, count_max: int) -> Sequence[PendingObject]:
        """What of a slot's may be flushed, in the order of its acknowledgement, without its parts."""
        found = self._rows.execute(
            "SELECT sequence, record FROM objects WHERE slot = ? AND startable = 1 AND sequence > ? "
            "ORDER BY sequence LIMIT ?",
            (slot, after, count_max),
        )
        return [codec.unpack_object(sequence, record) for sequence, record in found]

    def listing(self, bucket: str, start: bytes, stop: bytes | None, count_max: int) -> Sequence[PendingObject]:
        """What is pending under keys from `start` to before `stop`, the latest of each, in order, without parts.

        Reads nothing outside of the range.
        """
        found = self._rows.execute(
            "SELECT max(sequence), record FROM objects WHERE bucket = ? AND key >= ? AND key < ? "
            "GROUP BY key ORDER BY key LIMIT ?",
            (bucket, start, _BEHIND_ALL if stop is None else stop, count_max),
        )
        return [codec.unpack_object(sequence, record) for sequence, record in found]

    def change(self, pending: PendingObject) -> bool:
        """Write down where an object is on its way; its parts stay as they are. False when it is pending no more."""
        changed = self._rows.execute(
            "UPDATE objects SET record = ?, startable = ? WHERE sequence = ?",
            (codec.pack_object(pending), pending.state is not State.CONFLICT, pending.sequence),
        )
        return changed.rowcount > 0

    def start_over(self, pending: PendingObject) -> None:
        """The origin's upload of an object is of no use: it is to be aborted, and its parts are to be sent again."""
        before = self.object(pending.sequence)
        if before is None:
            return
        if before.origin_upload_id is not None:
            self._orphan(before.key, before.origin_upload_id)
        self.change(replace(pending, origin_upload_id=None))
        for part in before.parts:
            self.piece_sent(pending.sequence, replace(part, origin_etag=None))

    def piece_sent(self, sequence: int, part: Part) -> None:
        """The origin has a part of a pending object."""
        place = ("pieces", sequence, part.number)
        self._rows.execute(
            "UPDATE pieces SET record = ? WHERE sequence = ? AND number = ?",
            (codec.pack_part(place, part), sequence, part.number),
        )

    def settle(self, sequence: int, etag: str | None, now: float) -> None:
        """The origin has this version under the key now (None: no object), by our doing: nothing is pending of it.

        What was acknowledged after it expects to find that.
        """
        done = self.object(sequence)
        if done is not None:
            self._remove(sequence)
            self._expect(done.key, Base.exactly(etag))
            self.did(done.key, OwnDoing(now, etag))

    def did(self, key: ObjectKey, own: OwnDoing) -> None:
        """This gateway has changed what the origin has under a key."""
        self._rows.execute(
            "INSERT OR REPLACE INTO origin VALUES (?, ?, ?, ?)",
            (key.bucket, _encoded(key), own.at, codec.pack_own_doing(key, own)),
        )

    def own_doing(self, key: ObjectKey) -> OwnDoing | None:
        """What it has last done to it, as far as is remembered."""
        row = self._row("SELECT record FROM origin WHERE bucket = ? AND key = ?", key.bucket, _encoded(key))
        return codec.unpack_own_doing(key, row[0]) if row else None

    def drop(self, sequence: int) -> None:
        """Give up an object that was never sent: something later took its place, or somebody has decided so."""
        given_up = self.object(sequence)
        if given_up is not None:
            self._remove_unsent(given_up)
            self._expect(given_up.key, given_up.base)

    def places(self) -> set[int]:
        """The places of presence.py where something is pending."""
        return {place for (place,) in self._rows.execute("SELECT DISTINCT place FROM objects")}

    def _enter(self, pending: PendingObject) -> PendingObject:
        earlier = [one for one in self._pending_of(pending.key) if one.state is not State.SENDING]
        base = earlier[0].base if earlier else self._base_now(pending)
        place = place_of(pending.key)
        self._presence.set(place)
        inserted = self._rows.execute(
            "INSERT INTO objects (bucket, key, place, slot, startable, record) VALUES (?, ?, ?, ?, 1, ?)",
            (pending.key.bucket, _encoded(pending.key), place, pending.fixed.slot, b""),
        )
        stored = replace(pending, sequence=int(inserted.lastrowid or 0), base=base)
        self.change(stored)
        for part in stored.parts:
            self._put_file(part.file)
            packed = codec.pack_part(("pieces", stored.sequence, part.number), part)
            row = (stored.sequence, part.number, part.file.name, packed)
            self._rows.execute("INSERT INTO pieces VALUES (?, ?, ?, ?)", row)
        for one in earlier:
            self._remove_unsent(one)
        return stored

    def _base_now(self, pending: PendingObject) -> Base:
        """What was there when the absorb began, or what this gateway itself has put there since."""
        own, base = self.own_doing(pending.key), pending.base
        if own is None or not own.known:
            return base
        if own.at >= base.asked_at:
            return Base.exactly(own.etag)
        return base if base.known else replace(base, etags=(own.etag,) if own.etag is not None else ())

    def _expect(self, key: ObjectKey, base: Base) -> None:
        following = self.earliest(key)
        if following is not None:
            self.change(replace(following, base=base))

    def _remove_unsent(self, pending: PendingObject) -> None:
        if pending.origin_upload_id is not None:
            self._orphan(pending.key, pending.origin_upload_id)
        self._remove(pending.sequence)

    def _remove(self, sequence: int) -> None:
        files = self._files("pieces", "sequence", sequence)
        self._rows.execute("DELETE FROM pieces WHERE sequence = ?", (sequence,))
        self._rows.execute("DELETE FROM objects WHERE sequence = ?", (sequence,))
        self._free(files)

    def _pending_of(self, key: ObjectKey) -> list[PendingObject]:
        found = self._rows.execute(
            "SELECT sequence, record FROM objects WHERE bucket = ? AND key = ? ORDER BY sequence",
            (key.bucket, _encoded(key)),
        )
        return [codec.unpack_object(sequence, record) for sequence, record in found.fetchall()]

    def _with_parts(self, pending: PendingObject) -> PendingObject:
        return replace(pending, parts=tuple(self._parts_of("pieces", "sequence", pending.sequence, 0)))

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

    # Files.

    def knows_file(self, name: str) -> bool:
        """Whether anything refers to a staged file."""
        return self._row("SELECT 1 FROM files WHERE name = ?", name) is not None

    def file(self, name: str) -> StagedFile | None:
        row = self._row("SELECT record FROM files WHERE name = ?", name)
        return codec.unpack_file(name, row[0]) if row else None

    def staged_bytes(self) -> int:
        """What all files take that something refers to."""
        return sum(
            codec.unpack_file(name, record).size_bytes for name, record in self._rows.execute("SELECT * FROM files")
        )

    def _put_file(self, file: StagedFile) -> None:
        self._rows.execute("INSERT OR IGNORE INTO files VALUES (?, ?)", (file.name, codec.pack_file(file)))

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            if self._row(
                "SELECT 1 FROM parts WHERE file = ? UNION ALL SELECT 1 FROM pieces WHERE file = ?", name, name
            ):
                continue
            self._rows.execute("DELETE FROM files WHERE name = ?", (name,))
            self.freed.append(name)

    def _files(self, table: str, column: str, value: str | int) -> list[str]:
        found = self._rows.execute(f"SELECT DISTINCT file FROM {table} WHERE {column} = ?", (value,))  # noqa: S608
        return [name for (name,) in found.fetchall()]

    def _parts_of(self, table: str, column: str, value: str | int, after: int) -> Iterator[Part]:
        found = self._rows.execute(
            f"SELECT number, {table}.record, name, files.record FROM {table} JOIN files ON file = name "  # noqa: S608
            f"WHERE {column} = ? AND number > ? ORDER BY number",
            (value, after),
        )
        for number, record, name, file in found:
            yield codec.unpack_part((table, value, number), number, record, codec.unpack_file(name, file))

    def _row(self, query: str, *values: str | int | bytes) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._rows.execute(query, values).fetchone()
        return row


def _encoded(key: ObjectKey) -> bytes:
    return _text(key.key)


def _text(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")

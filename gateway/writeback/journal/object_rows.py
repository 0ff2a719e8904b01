"""Pending objects in the journal: a chain for each key, the first of which is to reach the origin before the next."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from gateway.errors import BufferDamaged
from gateway.objects import ObjectKey
from gateway.writeback.journal import codec
from gateway.writeback.journal.file_rows import STARTABLE, URGENT, decoded, encoded
from gateway.writeback.journal.origin_rows import OriginRows
from gateway.writeback.journal.records import Base, OwnDoing, Part, PendingObject, State, Waiting
from gateway.writeback.presence import News, place_of

_BEHIND_ALL = b"\xff"
"""No byte of UTF-8 is as great."""


class Places(Protocol):
    """Of presence.py: told before something is pending."""

    def set(self, place: int) -> None: ...


class ObjectRows(OriginRows):
    """One transaction's view."""

    def __init__(self, connection: sqlite3.Connection, presence: Places) -> None:
        super().__init__(connection)
        self._presence = presence

    # What is pending.

    def latest(self, key: ObjectKey, parts_of: Callable[[int], Sequence[Part]] | None = None) -> PendingObject | None:
        """What is pending under a key: the object or tombstone that was acknowledged last.

        Its parts are looked up by its sequence, unless `parts_of` gives them.
        """
        row = self._row(
            "SELECT sequence, record FROM objects WHERE bucket = ? AND key = ? ORDER BY sequence DESC LIMIT 1",
            key.bucket,
            encoded(key),
        )
        if row is None:
            return None
        found = codec.unpack_object(row[0], row[1])
        return replace(found, parts=(parts_of or self.pieces)(found.sequence))

    def pieces(self, sequence: int) -> Sequence[Part]:
        """The parts of a pending object."""
        return tuple(self._parts_of("pieces", "sequence", sequence, 0))

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
            encoded(key),
        )
        return codec.unpack_object(row[0], row[1]) if row else None

    def first_sequence(self, key: ObjectKey) -> int | None:
        """Of what is to be dealt with first under a key."""
        row = self._row("SELECT min(sequence) FROM objects WHERE bucket = ? AND key = ?", key.bucket, encoded(key))
        return row[0] if row else None

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

    def slots(self) -> Sequence[str]:
        """The slots in which something is pending."""
        return self._distinct("SELECT min(slot) FROM objects WHERE slot > ?")

    def startable(self, slot: str, after: int, count_max: int) -> Sequence[Waiting]:
        """What of a slot's may be flushed, in the order of its acknowledgement; without what is urgent."""
        return self._startable(slot, STARTABLE, after, count_max)

    def urgent(self, slot: str, after: int, count_max: int) -> Sequence[Waiting]:
        """What somebody waits for."""
        return self._startable(slot, URGENT, after, count_max)

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

    def places(self) -> set[int]:
        """The places of presence.py where something is pending."""
        return {place for (place,) in self._rows.execute("SELECT DISTINCT place FROM objects")}

    def _startable(self, slot: str, how: int, after: int, count_max: int) -> Sequence[Waiting]:
        found = self._rows.execute(
            "SELECT sequence, bucket, key FROM objects WHERE slot = ? AND startable = ? AND sequence > ? "
            "ORDER BY sequence LIMIT ?",
            (slot, how, after, count_max),
        )
        return [Waiting(sequence, ObjectKey(bucket, decoded(key))) for sequence, bucket, key in found]

    # What becomes of it.

    def put(self, pending: PendingObject) -> PendingObject:
        """Acknowledge an object, or a tombstone; its sequence is given now."""
        return self._enter(pending)

    def change(self, pending: PendingObject) -> bool:
        """Write down where an object is on its way; its parts stay as they are. False when it is pending no more."""
        changed = self._rows.execute(
            "UPDATE objects SET record = ?, startable = ? * max(1, startable) WHERE sequence = ?",
            (codec.pack_object(pending), pending.state is not State.CONFLICT, pending.sequence),
        )
        return changed.rowcount > 0

    def begun(self, pending: PendingObject) -> bool:
        """The origin has begun its upload for an object; False when it is pending no more: the upload goes, too."""
        if self.change(pending):
            return True
        if pending.origin_upload_id is not None:
            self.orphan(pending.key, pending.origin_upload_id)
        return False

    def hurry(self, key: ObjectKey) -> None:
        """Somebody waits for what is pending under a key: it is flushed before what nobody waits for."""
        hurried = self._rows.execute(
            "UPDATE objects SET startable = ? WHERE bucket = ? AND key = ? AND startable = ?",
            (URGENT, key.bucket, encoded(key), STARTABLE),
        )
        if hurried.rowcount:
            self.news.add(News.OBJECTS)

    def start_over(self, pending: PendingObject) -> None:
        """The origin's upload of an object is of no use: it is to be aborted, and its parts are to be sent again."""
        before = self.object(pending.sequence)
        if before is None:
            return
        if before.origin_upload_id is not None:
            self.orphan(before.key, before.origin_upload_id)
        self.change(replace(pending, origin_upload_id=None))
        for part in before.parts:
            self.piece_sent(pending.sequence, replace(part, origin_etag=None))

    def piece_sent(self, sequence: int, part: Part) -> None:
        """The origin has a part of a pending object, or, without an ETag of its own, has it no more."""
        place = ("pieces", sequence, part.number)
        self._rows.execute(
            "UPDATE pieces SET record = ?, sent = ? WHERE sequence = ? AND number = ?",
            (codec.pack_part(place, part), part.origin_etag is not None, sequence, part.number),
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

    def drop(self, sequence: int) -> None:
        """Give up an object that was never sent: something later took its place, or somebody has decided so."""
        given_up = self.object(sequence)
        if given_up is not None:
            self._remove_unsent(given_up)
            self._expect(given_up.key, given_up.base)

    def discard(self, sequence: int, now: float, *, only_conflict: bool) -> bool:
        """Give up an object because somebody has decided so, also one whose row is damaged; False when it is pending
        no more, or, with `only_conflict`, is none."""
        row = self._row("SELECT record FROM objects WHERE sequence = ?", sequence)
        if row is None:
            return False
        try:
            given_up = codec.unpack_object(sequence, row[0])
        except BufferDamaged:
            self._remove(sequence)
            return True
        if only_conflict and given_up.state is not State.CONFLICT:
            return False
        self._remove_unsent(given_up)
        base = given_up.base
        if given_up.state is State.SENDING:  # it may have arrived, or still do
            base = replace(base, etags=(*base.etags, given_up.etag))
            self.did(given_up.key, OwnDoing(now, known=False))
        self._expect(given_up.key, base)
        return True

    def _enter(self, pending: PendingObject) -> PendingObject:
        earlier = [one for one in self._pending_of(pending.key) if one.state is not State.SENDING]
        base = earlier[0].base if earlier else self._base_now(pending)
        place = place_of(pending.key)
        self._presence.set(place)
        self.news.add(News.OBJECTS)
        how = URGENT if pending.deleted else STARTABLE  # who deletes waits until the origin has done it, too
        inserted = self._rows.execute(
            "INSERT INTO objects (bucket, key, place, slot, startable, size_bytes, record) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (pending.key.bucket, encoded(pending.key), place, pending.fixed.slot, how, pending.size_bytes, b""),
        )
        stored = replace(pending, sequence=int(inserted.lastrowid or 0), base=base)
        self.change(stored)
        for part in stored.parts:
            self._put_file(part.file, stored.fixed.slot)
            packed = codec.pack_part(("pieces", stored.sequence, part.number), part)
            is_sent = part.origin_etag is not None
            row = (stored.sequence, part.number, part.file.name, is_sent, part.file.size_bytes, packed)
            self._rows.execute("INSERT INTO pieces VALUES (?, ?, ?, ?, ?, ?)", row)
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
            self.orphan(pending.key, pending.origin_upload_id)
        self._remove(pending.sequence)

    def _remove(self, sequence: int) -> None:
        files = self._files("pieces", "sequence", sequence)
        self._rows.execute("DELETE FROM pieces WHERE sequence = ?", (sequence,))
        self._rows.execute("DELETE FROM objects WHERE sequence = ?", (sequence,))
        self._free(files)

    def _pending_of(self, key: ObjectKey) -> list[PendingObject]:
        found = self._rows.execute(
            "SELECT sequence, record FROM objects WHERE bucket = ? AND key = ? ORDER BY sequence",
            (key.bucket, encoded(key)),
        )
        return [codec.unpack_object(sequence, record) for sequence, record in found.fetchall()]

    def _with_parts(self, pending: PendingObject) -> PendingObject:
        return replace(pending, parts=self.pieces(pending.sequence))

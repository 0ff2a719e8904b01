"""What is pending, for people: figures and pages, read on a thread of its own, over a connection of its own.

Nothing here is asked on behalf of S3 requests. Figures cost a look at every row of what they are about, so they are not
asked for often; pages cost what they show.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from gateway.errors import BufferDamaged, BufferUnavailable
from gateway.objects import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.journal import codec
from gateway.writeback.journal.file_rows import text
from gateway.writeback.journal.records import PendingObject, Upload
from gateway.writeback.journal.schema import connect_reading
from gateway.writeback.threads import BufferThreads

R = TypeVar("R")

_BEHIND = b"\xff"
"""Behind a prefix, this is behind every key that begins with it: no byte of UTF-8 is as great."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A pending object without its parts; `pending` None: its row in the journal is damaged, `problem` says how.

    Of its parts, `sent_parts`, together `sent_bytes`, are at the origin already.
    """

    sequence: int
    key: ObjectKey
    slot: str
    size_bytes: int
    is_conflict: bool
    pending: PendingObject | None
    problem: str | None
    parts: int
    sent_parts: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Of what is pending under a prefix: objects and deletions, bytes, how many of these the origin has as parts."""

    objects: int = 0
    size_bytes: int = 0
    sent_bytes: int = 0
    conflicts: int = 0
    behind_conflicts: int = 0
    """Acknowledged later under the key of a conflict: they wait for it."""
    oldest_at: float | None = None
    uploads: int = 0


@dataclass(frozen=True, slots=True)
class SlotFigures:
    """Of what is pending in a slot; `oldest_at` in seconds since 1970, None: nothing is, or it cannot be read."""

    objects: int = 0
    size_bytes: int = 0
    conflicts: int = 0
    oldest_at: float | None = None
    uploads: int = 0
    staged_bytes: int = 0
    """What its files take, those of open uploads too."""


@dataclass(frozen=True, slots=True)
class ShownUpload:
    """An open upload, without its parts, which take `size_bytes` here; `upload` None: its row is damaged."""

    upload_id: str
    key: ObjectKey
    slot: str
    upload: Upload | None
    parts: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Where:
    """A condition on bucket and key."""

    condition: str
    values: Sequence[str | bytes | int] = field(default_factory=tuple)


class Overview:
    """Of one buffer. BufferUnavailable when the journal cannot be read."""

    def __init__(self, directory: Path) -> None:
        self._path = str(directory / "journal")
        self._thread = BufferThreads(1)
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        """Finish what was asked, and close. Blocks."""
        self._thread.shut_down()
        if self._connection is not None:
            self._connection.close()

    async def newest(self) -> int:
        """The sequence of what was acknowledged last of all that is pending; 0: nothing is."""
        return await self._look(lambda rows: int(_one(rows, "SELECT coalesce(max(sequence), 0) FROM objects")))

    async def figures(self, prefix: Prefix, through: int) -> Figures:
        """Of what lies under a prefix and was acknowledged as `through` or before it."""
        return await self._look(lambda rows: _figures(rows, _where(prefix), through))

    async def slots(self) -> Mapping[str, SlotFigures]:
        """Of every slot that ever had something here."""
        return await self._look(_slots)

    async def conflicts_by_slot(self) -> Mapping[str, int]:
        """How many there are, where there are any."""
        counted = "SELECT slot, count(*) FROM objects WHERE startable = 0 GROUP BY slot"
        return await self._look(lambda rows: dict(rows.execute(counted).fetchall()))

    async def page(self, prefix: Prefix, after: tuple[str, str, int], count: int) -> Sequence[Shown]:
        """What is pending under a prefix in the order of bucket, key and sequence, behind such a place."""
        where = _where_behind(prefix, "sequence", after, -1)
        condition = f"{where.condition} ORDER BY bucket, key, sequence"
        return await self._look(lambda rows: _shown(rows, condition, where.values, count))

    async def conflicts(self, prefix: Prefix, after: int, count: int) -> Sequence[Shown]:
        """The conflicts under a prefix, behind a sequence."""
        where = _where(prefix)
        condition = f"{where.condition} AND startable = 0 AND sequence > ? ORDER BY sequence"
        return await self._look(lambda rows: _shown(rows, condition, (*where.values, after), count))

    async def of(self, sequences: Collection[int]) -> Sequence[Shown]:
        """Those of them that are pending still."""
        found = await self._look(lambda rows: [_shown(rows, "sequence = ?", (one,), 1) for one in sequences])
        return [one for shown in found for one in shown]

    async def pending_of(self, sequences: Collection[int]) -> set[int]:
        """The same, their sequences only."""
        asked = "SELECT 1 FROM objects WHERE sequence = ?"
        return await self._look(lambda rows: {one for one in sequences if rows.execute(asked, (one,)).fetchone()})

    async def first_of(self, key: ObjectKey) -> Shown | None:
        """What is to be dealt with first under a key."""
        values = (key.bucket, text(key.key))
        found = await self._look(lambda rows: _shown(rows, "bucket = ? AND key = ? ORDER BY sequence", values, 1))
        return found[0] if found else None

    async def behind(self, key: ObjectKey, sequence: int, through: int) -> int:
        """How many were acknowledged under a key behind a sequence, up to another."""
        counted = "SELECT count(*) FROM objects WHERE bucket = ? AND key = ? AND sequence > ? AND sequence <= ?"
        return await self._look(lambda rows: int(_one(rows, counted, key.bucket, text(key.key), sequence, through)))

    async def uploads(self, prefix: Prefix, after: tuple[str, str, str], count: int) -> Sequence[ShownUpload]:
        """Uploads that are open under a prefix, in the order of bucket, key and id, behind such a place."""
        where = _where_behind(prefix, "upload_id", after, "")
        return await self._look(lambda rows: list(_uploads(rows, where, count)))

    async def _look(self, at: Callable[[sqlite3.Connection], R]) -> R:
        return await self._thread.run(self._looked, at)

    def _looked(self, at: Callable[[sqlite3.Connection], R]) -> R:
        try:
            if self._connection is None:
                self._connection = connect_reading(self._path)
            self._connection.execute("BEGIN")
            try:
                return at(self._connection)
            finally:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise BufferUnavailable(f"the write-back journal cannot be read: {error}") from error


def _where(prefix: Prefix) -> _Where:
    if not prefix.bucket:
        return _Where("1")
    start = text(prefix.key_prefix)
    return _Where("bucket = ? AND key >= ? AND key < ?", (prefix.bucket, start, start + _BEHIND))


def _where_behind(prefix: Prefix, last: str, after: tuple[str, str, str | int], least: str | int) -> _Where:
    """In the order of bucket, key and a `last` column, of which `least` is before every value; found by index."""
    bucket, key, value = after
    if not prefix.bucket:
        return _Where(f"(bucket, key, {last}) > (?, ?, ?)", (bucket, text(key), value))
    start = text(prefix.key_prefix)
    place = (text(key), value) if bucket == prefix.bucket and text(key) >= start else (start, least)
    return _Where(f"bucket = ? AND (key, {last}) > (?, ?) AND key < ?", (prefix.bucket, *place, start + _BEHIND))


def _one(rows: sqlite3.Connection, query: str, *values: str | bytes | int) -> int:
    value: int = rows.execute(query, values).fetchone()[0]
    return value


def _figures(rows: sqlite3.Connection, where: _Where, through: int) -> Figures:
    these = f"{where.condition} AND sequence <= ?"
    of = f"FROM objects WHERE {these}"
    values = (*where.values, through)
    sums = f"SELECT count(*), coalesce(sum(size_bytes), 0), coalesce(sum(startable = 0), 0), min(sequence) {of}"
    objects, size_bytes, conflicts, first = rows.execute(sums, values).fetchone()
    sent_pieces = (
        "pieces CROSS JOIN objects USING (sequence)"  # of what is pending few are sent: they are looked at first
    )
    sent = f"SELECT sum(pieces.size_bytes) FROM {sent_pieces} WHERE sent = 1 AND {these}"  # noqa: S608
    earlier = (
        "SELECT 1 FROM objects AS first WHERE first.bucket = objects.bucket AND first.key = objects.key "
        "AND first.sequence < objects.sequence AND first.startable = 0"
    )
    behind = f"SELECT count(*) {of} AND startable <> 0 AND EXISTS ({earlier})"
    return Figures(
        objects,
        size_bytes,
        _one(rows, sent, *values) or 0,
        conflicts,
        _one(rows, behind, *values) if conflicts else 0,
        _acknowledged_at(rows, first),
        _one(rows, f"SELECT count(*) FROM uploads WHERE {where.condition}", *where.values),  # noqa: S608
    )


def _slots(rows: sqlite3.Connection) -> dict[str, SlotFigures]:
    sums = "SELECT slot, count(*), sum(size_bytes), sum(startable = 0), min(sequence) FROM objects GROUP BY slot"
    uploads = dict(rows.execute("SELECT slot, count(*) FROM uploads GROUP BY slot").fetchall())
    staged = dict(rows.execute("SELECT slot, staged_bytes FROM usage").fetchall())
    sums_of = {slot: of for slot, *of in rows.execute(sums).fetchall()}
    found = {}
    for slot in {*uploads, *staged, *sums_of}:
        objects, size_bytes, conflicts, first = sums_of.get(slot, (0, 0, 0, None))
        oldest_at, open_uploads = _acknowledged_at(rows, first), uploads.get(slot, 0)
        found[slot] = SlotFigures(objects, size_bytes, conflicts, oldest_at, open_uploads, staged.get(slot, 0))
    return found


def _acknowledged_at(rows: sqlite3.Connection, sequence: int | None) -> float | None:
    if sequence is None:
        return None
    [record] = rows.execute("SELECT record FROM objects WHERE sequence = ?", (sequence,)).fetchone()
    try:
        return codec.unpack_object(sequence, record).acknowledged_at
    except BufferDamaged:
        return None


def _shown(
    rows: sqlite3.Connection, condition: str, values: Sequence[str | bytes | int], count: int
) -> Sequence[Shown]:
    """`condition` may end with an order."""
    found = rows.execute(
        f"SELECT sequence, bucket, key, slot, size_bytes, startable, record FROM objects WHERE {condition} LIMIT ?",  # noqa: S608
        (*values, count),
    )
    return [_show(rows, *row) for row in found.fetchall()]


def _show(
    rows: sqlite3.Connection,
    sequence: int,
    bucket: str,
    key: bytes,
    slot: str,
    size_bytes: int,
    startable: int,
    record: bytes,
) -> Shown:
    parts, sent_parts, sent_bytes = rows.execute(
        "SELECT count(*), coalesce(sum(sent), 0), coalesce(sum(sent * size_bytes), 0) FROM pieces WHERE sequence = ?",
        (sequence,),
    ).fetchone()
    try:
        pending, problem = codec.unpack_object(sequence, record), None
    except BufferDamaged as error:
        pending, problem = None, str(error)
    at = ObjectKey(bucket, key.decode(errors="replace"))
    return Shown(sequence, at, slot, size_bytes, startable == 0, pending, problem, parts, sent_parts, sent_bytes)


def _uploads(rows: sqlite3.Connection, where: _Where, count: int) -> Iterator[ShownUpload]:
    found = rows.execute(
        f"SELECT upload_id, bucket, key, slot, record FROM uploads WHERE {where.condition} "  # noqa: S608
        "ORDER BY bucket, key, upload_id LIMIT ?",
        (*where.values, count),
    )
    for upload_id, bucket, key, slot, record in found.fetchall():
        parts, size_bytes = rows.execute(
            "SELECT count(*), coalesce(sum(size_bytes), 0) FROM parts LEFT JOIN files ON file = name "
            "WHERE upload_id = ?",
            (upload_id,),
        ).fetchone()
        try:
            upload = codec.unpack_upload(upload_id, record)
        except BufferDamaged:
            upload = None
        at = ObjectKey(bucket, key.decode(errors="replace"))
        yield ShownUpload(upload_id, at, slot, upload, parts, size_bytes)

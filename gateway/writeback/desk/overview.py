"""What is pending, for people: figures and pages, read on a thread of its own, over a connection of its own.

Nothing here is asked on behalf of S3 requests. Figures cost a look at every row of what they are about, so they are not
asked for often; pages cost what they show.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gateway.clock import Moment
from gateway.errors import BufferDamaged, BufferUnavailable
from gateway.objects import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.journal import codec
from gateway.writeback.journal.records import Priority, Profile, State, Turn, Write
from gateway.writeback.journal.rows import Rows, text
from gateway.writeback.journal.schema import connect_reading
from gateway.writeback.threads import BufferThreads

R = TypeVar("R")

TOUCHED_MAX = 10_000
"""Their rows are read whole: some 20 ms for a thousand."""

_PENDING = "pending = 1 AND state < 5 AND sequence IS NOT NULL"
_OPEN = "upload_id IS NOT NULL AND pending = 0 AND state < 3"

# By the indexes of schema.py, which hold nothing else: of what is pending few are.
_CONFLICTS = "SELECT id FROM writes WHERE state = 3"
_FAILED = "SELECT id FROM writes WHERE (attempts > 0 OR damaged = 1)"
_STUCK = f"id IN ({_CONFLICTS} UNION ALL {_FAILED} AND damaged = 1)"
_PROBLEM = f"id IN ({_CONFLICTS} UNION ALL {_FAILED})"

_BEHIND = b"\xff"
"""Behind a prefix, this is behind every key that begins with it: no byte of UTF-8 is as great."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A pending write without its parts; `write` None: its row in the journal is damaged, `problem` says how.

    Of its parts, `sent_parts`, together `sent_bytes`, are at the origin already.
    """

    id: int
    sequence: int
    key: ObjectKey
    slot: str
    size_bytes: int
    state: State
    turn: Turn
    write: Write | None
    problem: str | None
    parts: int
    sent_parts: int
    sent_bytes: int

    @property
    def is_conflict(self) -> bool:
        return self.state is State.CONFLICT

    @property
    def is_damaged(self) -> bool:
        return self.write is None or self.turn.damaged


@dataclass(frozen=True, slots=True)
class Figures:
    """Of what is pending under a prefix: objects and deletions, bytes, how many of these the origin has as parts."""

    objects: int = 0
    size_bytes: int = 0
    sent_bytes: int = 0
    conflicts: int = 0
    damaged: int = 0
    failing: int = 0
    stuck: int = 0
    """Conflicts, what is damaged, and what waits for these."""
    held_up: int = 0
    """The same, and what fails, and what waits for that."""
    oldest_at: float | None = None
    uploads: int = 0
    upload_bytes: int = 0
    """What the parts of open uploads take here."""


@dataclass(frozen=True, slots=True)
class UploadFigures:
    """Of the open uploads of a slot, whose parts take `size_bytes` here. `touched` is when the client of the one that
    was left alone longest has last done something about it; of the first `TOUCHED_MAX` that were begun."""

    uploads: int = 0
    size_bytes: int = 0
    touched: Moment | None = None


@dataclass(frozen=True, slots=True)
class SlotFigures:
    """Of what is pending in a slot; `oldest_at` in seconds since 1970, None: nothing is, or it cannot be read."""

    objects: int = 0
    size_bytes: int = 0
    conflicts: int = 0
    damaged: int = 0
    failing: int = 0
    reason: str | None = None
    """Why the last of its flushes failed that do."""
    oldest_at: float | None = None
    uploads: UploadFigures = UploadFigures()
    staged_bytes: int = 0
    """What its files take, those of open uploads too."""


@dataclass(frozen=True, slots=True)
class JournalFigures:
    """What is remembered of what is over, which is bounded, and the size of the journal's files."""

    ended_uploads: int
    own_writes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ShownUpload:
    """An open upload, without its parts, which take `size_bytes` here; `upload` None: its row is damaged."""

    id: int
    upload_id: str
    key: ObjectKey
    slot: str
    upload: Write | None
    turn: Turn
    parts: int
    size_bytes: int
    sent_parts: int


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
        asked = f"SELECT coalesce(max(sequence), 0) FROM writes WHERE {_PENDING}"
        return await self._look(lambda rows: int(_one(rows, asked)))

    async def figures(self, prefix: Prefix, through: int) -> Figures:
        """Of what lies under a prefix and was acknowledged as `through` or before it."""
        return await self._look(lambda rows: _figures(rows, _where(prefix), through))

    async def slots(self) -> Mapping[str, SlotFigures]:
        """Of every slot that ever had something here."""
        return await self._look(_slots)

    async def problems_by_slot(self) -> Mapping[str, tuple[int, int, int]]:
        """How many conflicts there are, how much is damaged, and how much fails, where there is any."""
        counted = (
            "SELECT slot, sum(state = 3), sum(damaged), sum(state <> 3 AND damaged = 0) FROM writes "
            f"WHERE {_PENDING} AND {_PROBLEM} GROUP BY slot"
        )
        found = await self._look(lambda rows: rows.execute(counted).fetchall())
        return {slot: (conflicts, damaged, failing) for slot, conflicts, damaged, failing in found}

    async def uploads_by_slot(self) -> Mapping[str, UploadFigures]:
        """Of the slots that have open uploads."""
        return await self._look(_uploads_by_slot)

    async def journal(self) -> JournalFigures:
        """What of it is not about anything pending, and its size."""

        def look(rows: sqlite3.Connection) -> JournalFigures:
            ended = _one(rows, "SELECT count(*) FROM writes WHERE state = 5")
            return JournalFigures(ended, Rows(rows).own_doings(), self._size_bytes())

        return await self._look(look)

    def _size_bytes(self) -> int:
        sizes = 0
        for path in (self._path, f"{self._path}-wal"):
            with suppress(FileNotFoundError):  # the log goes with the last process that has the journal open
                sizes += os.stat(path).st_size
        return sizes

    async def page(self, prefix: Prefix, after: tuple[str, str, int], count: int) -> Sequence[Shown]:
        """What is pending under a prefix in the order of bucket, key and sequence, behind such a place."""
        where = _where_behind(prefix, "sequence", after, -1)
        condition = f"{where.condition} AND {_PENDING} ORDER BY bucket, key, sequence"
        return await self._look(lambda rows: _shown(rows, condition, where.values, count))

    async def problems(self, prefix: Prefix, after: int, count: int, through: int = 2**62) -> Sequence[Shown]:
        """What under a prefix does not get to the origin, behind a sequence."""
        where = _where(prefix)
        condition = (
            f"{where.condition} AND {_PENDING} AND {_PROBLEM} AND sequence > ? AND sequence <= ? ORDER BY sequence"
        )
        return await self._look(lambda rows: _shown(rows, condition, (*where.values, after, through), count))

    async def worst(self, prefix: Prefix, through: int, count: int) -> Sequence[Shown]:
        """The same, conflicts first, then what is damaged, then what fails."""
        where = _where(prefix)
        condition = (
            f"{where.condition} AND {_PENDING} AND {_PROBLEM} AND sequence <= ? "
            "ORDER BY state = 3 DESC, damaged DESC, sequence"
        )
        return await self._look(lambda rows: _shown(rows, condition, (*where.values, through), count))

    async def first_of(self, key: ObjectKey) -> Shown | None:
        """What is to be dealt with first under a key."""
        values = (key.bucket, text(key.key))
        condition = f"bucket = ? AND key = ? AND {_PENDING} ORDER BY sequence"
        found = await self._look(lambda rows: _shown(rows, condition, values, 1))
        return found[0] if found else None

    async def uploads(self, prefix: Prefix, after: tuple[str, str, str], count: int) -> Sequence[ShownUpload]:
        """Uploads that are open under a prefix, in the order of bucket, key and id, behind such a place."""
        where = _where_behind(prefix, "upload_id", after, "")
        return await self._look(lambda rows: list(_uploads(rows, where, count)))

    async def open_uploads(self, upload_ids: Sequence[str]) -> Sequence[ShownUpload]:
        """Those of these ids that are open."""
        where = _Where(f"upload_id IN ({','.join('?' * len(upload_ids))})", upload_ids)
        return await self._look(lambda rows: list(_uploads(rows, where, len(upload_ids))))

    async def conditions(self) -> Sequence[tuple[str, Profile]]:
        """What is known of each bucket."""
        return await self._look(lambda rows: Rows(rows).profiles())

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
    these = f"{where.condition} AND sequence <= ? AND {_PENDING}"
    values = (*where.values, through)
    sums = (
        "SELECT count(*), coalesce(sum(size_bytes), 0), coalesce(sum(state = 3), 0), coalesce(sum(damaged), 0), "
        f"coalesce(sum(attempts > 0 AND state <> 3 AND damaged = 0), 0), min(sequence) FROM writes WHERE {these}"
    )
    objects, size_bytes, conflicts, damaged, failing, first = rows.execute(sums, values).fetchone()
    sent_parts = "parts CROSS JOIN writes ON write_id = id"  # of what is pending few are sent: they are looked at first
    sent = f"SELECT sum(parts.size_bytes) FROM {sent_parts} WHERE sent = 1 AND {these}"
    behind = (
        f"WITH RECURSIVE held_up (at) AS (SELECT sequence FROM writes WHERE {_PENDING} AND {{roots}} "
        "UNION SELECT sequence FROM writes JOIN held_up ON after_sequence = at) "
        f"SELECT count(*) FROM writes WHERE {these} AND sequence IN held_up"
    )
    open_here = f"FROM writes LEFT JOIN parts ON write_id = id AND file <> '' WHERE {where.condition} AND {_OPEN}"
    uploads, upload_bytes = rows.execute(
        f"SELECT count(DISTINCT id), coalesce(sum(parts.size_bytes), 0) {open_here}", tuple(where.values)
    ).fetchone()
    return Figures(
        objects,
        size_bytes,
        _one(rows, sent, *values) or 0,
        conflicts,
        damaged,
        failing,
        _one(rows, behind.format(roots=_STUCK), *values),
        _one(rows, behind.format(roots=_PROBLEM), *values),
        _acknowledged_at(rows, first),
        uploads,
        upload_bytes,
    )


def _slots(rows: sqlite3.Connection) -> dict[str, SlotFigures]:
    sums = (
        "SELECT slot, count(*), sum(size_bytes), sum(state = 3), sum(damaged), "
        "sum(attempts > 0 AND state <> 3 AND damaged = 0), min(sequence) FROM writes "
        f"WHERE {_PENDING} GROUP BY slot"
    )
    last = f"SELECT slot, last_error, max(due_at) FROM writes WHERE {_PENDING} AND attempts > 0 GROUP BY slot"
    uploads = _uploads_by_slot(rows)
    staged = dict(rows.execute("SELECT slot, staged_bytes FROM usage").fetchall())
    reasons = {slot: reason for slot, reason, _ in rows.execute(last).fetchall()}
    sums_of = {slot: of for slot, *of in rows.execute(sums).fetchall()}
    found = {}
    for slot in {*uploads, *staged, *sums_of}:
        objects, size_bytes, conflicts, damaged, failing, first = sums_of.get(slot, (0, 0, 0, 0, 0, None))
        found[slot] = SlotFigures(
            objects,
            size_bytes,
            conflicts,
            damaged,
            failing,
            reasons.get(slot),
            _acknowledged_at(rows, first),
            uploads.get(slot, UploadFigures()),
            staged.get(slot, 0),
        )
    return found


def _uploads_by_slot(rows: sqlite3.Connection) -> dict[str, UploadFigures]:
    counts = rows.execute(f"SELECT slot, count(*) FROM writes WHERE {_OPEN} GROUP BY slot").fetchall()
    sizes = dict(
        rows.execute(
            "SELECT slot, sum(parts.size_bytes) FROM writes JOIN parts ON write_id = id "
            f"WHERE {_OPEN} AND file <> '' GROUP BY slot"
        ).fetchall()
    )
    touched: dict[str, Moment] = {}
    found = rows.execute(f"SELECT id, slot, record FROM writes WHERE {_OPEN} ORDER BY id LIMIT ?", (TOUCHED_MAX,))
    for write_id, slot, record in found:
        with suppress(BufferDamaged):  # the reconciler tells
            at = codec.unpack_write(write_id, record).touched_then
            touched[slot] = min(at, touched.get(slot, at), key=lambda one: one.at)
    return {slot: UploadFigures(count, sizes.get(slot, 0), touched.get(slot)) for slot, count in counts}


def _acknowledged_at(rows: sqlite3.Connection, sequence: int | None) -> float | None:
    if sequence is None:
        return None
    row = rows.execute("SELECT id, record FROM writes WHERE sequence = ?", (sequence,)).fetchone()
    try:
        return codec.unpack_write(*row).acknowledged_at
    except BufferDamaged:
        return None


_COLUMNS = (
    "id, sequence, upload_id, bucket, key, slot, size_bytes, state, due_at, attempts, failing_since, last_error, "
    "priority, after_sequence, damaged, record"
)


def _shown(
    rows: sqlite3.Connection, condition: str, values: Sequence[str | bytes | int], count: int
) -> Sequence[Shown]:
    """`condition` may end with an order."""
    found = rows.execute(f"SELECT {_COLUMNS} FROM writes WHERE {condition} LIMIT ?", (*values, count))
    return [_show(rows, row) for row in found.fetchall()]


def _show(rows: sqlite3.Connection, row: Sequence[Any]) -> Shown:
    write_id, sequence, _, bucket, key, slot, size_bytes, state, *columns, record = row
    parts, sent_parts, sent_bytes, _ = _parts(rows, write_id)
    try:
        write, problem = codec.unpack_write(write_id, record), None
    except BufferDamaged as error:
        write, problem = None, str(error)
    at = ObjectKey(bucket, key.decode(errors="replace"))
    turn = _turn(columns)
    return Shown(
        write_id, sequence, at, slot, size_bytes, State(state), turn, write, problem, parts, sent_parts, sent_bytes
    )


def _turn(columns: Sequence[Any]) -> Turn:
    due_at, attempts, failing_since, last_error, priority, after_sequence, damaged = columns
    return Turn(due_at, attempts, failing_since, last_error, Priority(priority), after_sequence, bool(damaged))


def _parts(rows: sqlite3.Connection, write_id: int) -> tuple[int, int, int, int]:
    """How many there are; how many are sent, and these parts' bytes; the bytes of those that are here."""
    found: tuple[int, int, int, int] = rows.execute(
        "SELECT count(*), coalesce(sum(sent), 0), coalesce(sum(sent * size_bytes), 0), "
        "coalesce(sum((file <> '') * size_bytes), 0) FROM parts WHERE write_id = ?",
        (write_id,),
    ).fetchone()
    return found


def _uploads(rows: sqlite3.Connection, where: _Where, count: int) -> Iterator[ShownUpload]:
    found = rows.execute(
        f"SELECT {_COLUMNS} FROM writes WHERE {where.condition} AND {_OPEN} ORDER BY bucket, key, upload_id LIMIT ?",
        (*where.values, count),
    )
    for write_id, _, upload_id, bucket, key, slot, _, _, *columns, record in found.fetchall():
        parts, sent_parts, _, here_bytes = _parts(rows, write_id)
        try:
            upload = codec.unpack_write(write_id, record)
        except BufferDamaged:
            upload = None
        at = ObjectKey(bucket, key.decode(errors="replace"))
        yield ShownUpload(write_id, upload_id, at, slot, upload, _turn(columns), parts, here_bytes, sent_parts)

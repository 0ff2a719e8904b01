"""Queries about pending writes for operators, on a thread and a connection of their own.

S3 requests never use them. Figures read each row that they count, so callers ask rarely; pages read what they show.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged, BufferUnavailable
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.admin.named_prefix import Name
from gateway.writeback.journal import codec
from gateway.writeback.journal.records import State, Turn, Write
from gateway.writeback.journal.rows import BEHIND_ALL, OPEN, PENDING, text
from gateway.writeback.journal.schema import connect_reading
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.turns import TURN_COLUMNS, turn_of
from gateway.writeback.threads import BufferThreads

R = TypeVar("R")
Values: TypeAlias = Sequence[str | bytes | int]

TOUCHED_MAX = 10_000
"""The most open uploads whose last activity is read; a thousand rows take some 20 ms."""

_HERE = f"{PENDING} AND sequence IS NOT NULL"
_PENDING = f"{_HERE} AND state >= 0"
"""Writes to send; `_HERE` includes local ones."""

# The indexes of schema.py hold only these: few of the pending writes.
_CONFLICTS = "SELECT id FROM writes WHERE state = 3"
_FAILED = "SELECT id FROM writes WHERE (attempts > 0 OR damaged = 1)"
_STUCK = f"id IN ({_CONFLICTS} UNION ALL {_FAILED} AND damaged = 1)"
_HELD_UP = f"id IN ({_CONFLICTS} UNION ALL {_FAILED})"
_PROBLEM = f"id IN ({_CONFLICTS} UNION ALL {_FAILED} AND (failing_since IS NOT NULL OR damaged = 1))"
"""Writes that need a person; the rest of the held-up ones wait for the bucket."""

_FAILING = "attempts > 0 AND state <> 3 AND damaged = 0 AND failing_since IS"

_STATS = (
    "count(*), coalesce(sum(size_bytes), 0), coalesce(sum(state = 3), 0), coalesce(sum(damaged), 0), "
    f"coalesce(sum({_FAILING} NOT NULL), 0), coalesce(sum({_FAILING} NULL), 0), min(sequence)"
)


@dataclass(frozen=True, slots=True)
class PendingRow:
    """A pending write or an open upload, without its parts. If its row in the journal is damaged, `write` is None and
    `problem` says how.

    `sent_parts` of its parts, `sent_bytes` together, are at the origin; `here_bytes` are on this node. `sequence` is 0
    for an open upload.
    """

    id: int
    sequence: int
    upload_id: str | None
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
    here_bytes: int

    @property
    def is_conflict(self) -> bool:
        return self.state is State.CONFLICT

    @property
    def is_damaged(self) -> bool:
        return self.write is None or self.turn.damaged


@dataclass(frozen=True, slots=True)
class PendingStats:
    """Pending objects and deletions, and their bytes. `oldest_at` is in seconds since 1970; None: nothing is pending,
    or the row cannot be read."""

    objects: int = 0
    size_bytes: int = 0
    conflicts: int = 0
    damaged: int = 0
    failing: int = 0
    waiting: int = 0
    """Writes that wait for the bucket: tried without success, and not in need of a person."""
    oldest_at: float | None = None


@dataclass(frozen=True, slots=True)
class UploadStats:
    """Open uploads; their parts take `size_bytes` here. `touched` is the last activity of the longest idle client,
    among the `TOUCHED_MAX` oldest uploads."""

    uploads: int = 0
    size_bytes: int = 0
    touched: Moment | None = None


@dataclass(frozen=True, slots=True)
class FlushStats:
    """The rest of a flush. `sent_bytes` of the pending bytes are at the origin, as parts.

    `stuck` counts conflicts, damaged writes and those behind them; `held_up` also failing writes and those behind them.
    `local_objects` do not flush.
    """

    pending: PendingStats = PendingStats()
    sent_bytes: int = 0
    stuck: int = 0
    held_up: int = 0
    uploads: UploadStats = UploadStats()
    local_objects: int = 0


@dataclass(frozen=True, slots=True)
class SlotStats:
    """The figures of one slot. `reason` is the error of its latest failing flush; `staged_bytes` are those of its
    files, open uploads included."""

    pending: PendingStats = PendingStats()
    uploads: UploadStats = UploadStats()
    staged_bytes: int = 0
    reason: str | None = None
    local_objects: int = 0
    local_bytes: int = 0
    """Local objects are not in `pending`."""


class JournalStats(NamedTuple):
    """The records of ended uploads and of own writes, both bounded, and the size of the journal's files."""

    ended_uploads: int
    own_writes: int
    size_bytes: int


class _Where(NamedTuple):
    """A condition on bucket and key."""

    condition: str
    values: Values = ()


class PendingQueries:
    """Queries on one buffer. They raise BufferUnavailable when the journal cannot be read."""

    def __init__(self, directory: Path) -> None:
        self._path = str(directory / "journal")
        self._thread = BufferThreads(1)
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        self._thread.shut_down()
        if self._connection is not None:
            self._connection.close()

    async def flush(self, prefix: Prefix, through: int) -> FlushStats:
        """Return the figures of the writes under a prefix with sequence `through` or before."""
        return await self.look(lambda rows: _flush(rows, _where(prefix), through))

    async def slots(self) -> Mapping[str, SlotStats]:
        return await self.look(_slots)

    async def problems_by_slot(self) -> Mapping[str, tuple[int, int, int, int]]:
        """Return the numbers of conflicts and of damaged, failing and waiting writes, for each slot that has any."""
        counted = (
            f"SELECT slot, sum(state = 3), sum(damaged), sum({_FAILING} NOT NULL), sum({_FAILING} NULL) FROM writes "
            f"WHERE {_PENDING} AND {_HELD_UP} GROUP BY slot"
        )
        found = await self.look(lambda rows: rows.execute(counted).fetchall())
        return {slot: (conflicts, damaged, failing, waiting) for slot, conflicts, damaged, failing, waiting in found}

    async def oldest_conflicts_by_slot(self) -> Mapping[str, Moment]:
        """Return when the first of the conflicting writes was acknowledged, for each slot that has any."""
        return await self.look(_oldest_conflicts)

    async def uploads_by_slot(self) -> Mapping[str, UploadStats]:
        return await self.look(_uploads_by_slot)

    async def journal(self) -> JournalStats:
        def look(rows: sqlite3.Connection) -> JournalStats:
            ended = _one(rows, "SELECT count(*) FROM writes WHERE state = 5")
            return JournalStats(ended, JournalTransaction(rows).buckets.own_writes_count(), self._size_bytes())

        return await self.look(look)

    def _size_bytes(self) -> int:
        size_bytes = 0
        for path in (self._path, f"{self._path}-wal"):
            with suppress(FileNotFoundError):  # the log goes with the last process that has the journal open
                size_bytes += os.stat(path).st_size
        return size_bytes

    async def page(self, prefix: Prefix, after: tuple[str, str, int], count: int) -> Sequence[PendingRow]:
        """Return pending writes under a prefix in the order of bucket, key and sequence, behind `after`."""
        where = _where_behind(prefix, "sequence", after, -1)
        return await self._rows(where, f"{_HERE} ORDER BY bucket, key, sequence", count)

    async def problems(self, prefix: Prefix, after: int, count: int) -> Sequence[PendingRow]:
        """Return writes under a prefix that need a person, behind a sequence."""
        condition = f"{_PENDING} AND {_PROBLEM} AND sequence > ? ORDER BY sequence"
        return await self._rows(_where(prefix), condition, count, after)

    async def worst(self, prefix: Prefix, through: int, count: int) -> Sequence[PendingRow]:
        """Return held-up writes up to a sequence: conflicts first, then damaged, failing and waiting ones."""
        order = "ORDER BY state = 3 DESC, damaged DESC, failing_since IS NULL, sequence"
        condition = f"{_PENDING} AND {_HELD_UP} AND sequence <= ? {order}"
        return await self._rows(_where(prefix), condition, count, through)

    async def first_of(self, key: ObjectKey) -> PendingRow | None:
        where = _Where("bucket = ? AND key = ?", (key.bucket, text(key.key)))
        return next(iter(await self._rows(where, f"{_HERE} ORDER BY sequence", 1)), None)

    async def uploads(self, prefix: Prefix, after: tuple[str, str, str], count: int) -> Sequence[PendingRow]:
        """Return open uploads under a prefix in the order of bucket, key and id, behind `after`."""
        where = _where_behind(prefix, "upload_id", after, "")
        return await self._rows(where, f"{OPEN} ORDER BY bucket, key, upload_id", count)

    async def open_uploads(self, upload_ids: Sequence[str]) -> Sequence[PendingRow]:
        where = _Where(f"upload_id IN ({','.join('?' * len(upload_ids))})", upload_ids)
        return await self._rows(where, OPEN, len(upload_ids))

    async def _rows(self, where: _Where, condition: str, count: int, *values: int) -> Sequence[PendingRow]:
        """`condition` may end with an order; `values` are its own."""
        columns = f"id, coalesce(sequence, 0), upload_id, bucket, key, slot, size_bytes, state, record, {TURN_COLUMNS}"
        asked = f"SELECT {columns} FROM writes WHERE {where.condition} AND {condition} LIMIT ?"

        def look(rows: sqlite3.Connection) -> list[PendingRow]:
            return [_row(rows, one) for one in rows.execute(asked, (*where.values, *values, count)).fetchall()]

        return await self.look(look)

    async def look(self, at: Callable[[sqlite3.Connection], R]) -> R:
        """Return what `at` returns, run in a read transaction on the thread of the queries. BufferUnavailable."""
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
    if isinstance(prefix, Name):
        condition = "bucket = ? AND key >= ? AND key < ? AND (key = ? OR key >= ?)"
        return _Where(condition, (prefix.bucket, start, start + b"0", start, start + b"/"))
    return _Where("bucket = ? AND key >= ? AND key < ?", (prefix.bucket, start, start + BEHIND_ALL))


def _where_behind(prefix: Prefix, last: str, after: tuple[str, str, str | int], least: str | int) -> _Where:
    """Return a condition for rows behind `after` by bucket, key and column `last`; `least` sorts before values."""
    bucket, key, value = after
    if not prefix.bucket:
        return _Where(f"(bucket, key, {last}) > (?, ?, ?)", (bucket, text(key), value))
    start = text(prefix.key_prefix)
    place = (text(key), value) if bucket == prefix.bucket and text(key) >= start else (start, least)
    return _Where(f"bucket = ? AND (key, {last}) > (?, ?) AND key < ?", (prefix.bucket, *place, start + BEHIND_ALL))


def _one(rows: sqlite3.Connection, query: str, values: Values = ()) -> int:
    value: int = rows.execute(query, tuple(values)).fetchone()[0]
    return value


def _flush(rows: sqlite3.Connection, where: _Where, through: int) -> FlushStats:
    these, values = f"{where.condition} AND sequence <= ? AND {_PENDING}", (*where.values, through)
    sent_parts = "parts CROSS JOIN writes ON write_id = id"  # few of the pending parts are sent: look at those first
    behind = (
        f"WITH RECURSIVE held_up (at) AS (SELECT sequence FROM writes WHERE {_PENDING} AND {{roots}} "
        "UNION SELECT sequence FROM writes JOIN held_up ON after_sequence = at) "
        f"SELECT count(*) FROM writes WHERE {these} AND sequence IN held_up"
    )
    open_here = f"FROM writes LEFT JOIN parts ON write_id = id AND file <> '' WHERE {where.condition} AND {OPEN}"
    uploads = f"SELECT count(DISTINCT id), coalesce(sum(parts.size_bytes), 0) {open_here}"
    return FlushStats(
        _stats(rows, rows.execute(f"SELECT {_STATS} FROM writes WHERE {these}", values).fetchone()),
        _one(rows, f"SELECT coalesce(sum(parts.size_bytes), 0) FROM {sent_parts} WHERE sent = 1 AND {these}", values),
        _one(rows, behind.format(roots=_STUCK), values),
        _one(rows, behind.format(roots=_HELD_UP), values),
        UploadStats(*rows.execute(uploads, tuple(where.values)).fetchone()),
        _one(
            rows,
            f"SELECT count(*) FROM writes WHERE {where.condition} AND sequence <= ? AND {_HERE} AND state = -1",
            values,
        ),
    )


def _slots(rows: sqlite3.Connection) -> dict[str, SlotStats]:
    found = rows.execute(f"SELECT slot, {_STATS} FROM writes WHERE {_PENDING} GROUP BY slot").fetchall()
    pending = {slot: _stats(rows, stats) for slot, *stats in found}
    last_at = "max(due_at + 1e12 * (failing_since IS NOT NULL))"  # failing ones before those that wait for the bucket
    last = f"SELECT slot, last_error, {last_at} FROM writes WHERE {_PENDING} AND attempts > 0 GROUP BY slot"
    reasons = {slot: reason for slot, reason, _ in rows.execute(last).fetchall()}
    uploads, usages = _uploads_by_slot(rows), JournalTransaction(rows).files.usages()
    return {
        slot: SlotStats(
            pending.get(slot, PendingStats()),
            uploads.get(slot, UploadStats()),
            usages[slot].staged_bytes if slot in usages else 0,
            reasons.get(slot),
            usages[slot].local_objects if slot in usages else 0,
            usages[slot].local_bytes if slot in usages else 0,
        )
        for slot in {*uploads, *usages, *pending}
    }


def _uploads_by_slot(rows: sqlite3.Connection) -> dict[str, UploadStats]:
    counts = rows.execute(f"SELECT slot, count(*) FROM writes WHERE {OPEN} GROUP BY slot").fetchall()
    of_parts = (
        "SELECT slot, sum(parts.size_bytes) FROM writes JOIN parts ON write_id = id "
        f"WHERE {OPEN} AND file <> '' GROUP BY slot"
    )
    sizes = dict(rows.execute(of_parts).fetchall())
    touched: dict[str, Moment] = {}
    found = rows.execute(f"SELECT id, slot, record FROM writes WHERE {OPEN} ORDER BY id LIMIT ?", (TOUCHED_MAX,))
    for write_id, slot, record in found:
        with suppress(BufferDamaged):  # the reconciler reports it
            at = codec.unpack_write(write_id, record).touched_then
            touched[slot] = min(at, touched.get(slot, at), key=lambda one: one.at)
    return {slot: UploadStats(count, sizes.get(slot, 0), touched.get(slot)) for slot, count in counts}


def _oldest_conflicts(rows: sqlite3.Connection) -> dict[str, Moment]:
    found: dict[str, Moment] = {}
    firsts = f"SELECT min(sequence) FROM writes WHERE {_PENDING} AND id IN ({_CONFLICTS}) GROUP BY slot"
    for slot, write_id, record in rows.execute(f"SELECT slot, id, record FROM writes WHERE sequence IN ({firsts})"):
        with suppress(BufferDamaged):  # listed among the damaged
            found[slot] = codec.unpack_write(write_id, record).acknowledged_then
    return found


def _stats(rows: sqlite3.Connection, stats: Sequence[int]) -> PendingStats:
    objects, size_bytes, conflicts, damaged, failing, waiting, first = stats
    oldest_at = None
    if first is not None:
        row = rows.execute("SELECT id, record FROM writes WHERE sequence = ?", (first,)).fetchone()
        with suppress(BufferDamaged):  # listed among the damaged
            oldest_at = codec.unpack_write(*row).acknowledged_at
    return PendingStats(objects, size_bytes, conflicts, damaged, failing, waiting, oldest_at)


def _row(rows: sqlite3.Connection, columns: Sequence[Any]) -> PendingRow:
    write_id, sequence, upload_id, bucket, key, slot, size_bytes, state, record, *turn = columns
    try:
        write, problem = codec.unpack_write(write_id, record), None
    except BufferDamaged as error:
        write, problem = None, str(error)
    parts = rows.execute(
        "SELECT count(*), coalesce(sum(sent), 0), coalesce(sum(sent * size_bytes), 0), "
        "coalesce(sum((file <> '') * size_bytes), 0) FROM parts WHERE write_id = ?",
        (write_id,),
    ).fetchone()
    at = ObjectKey(bucket, key.decode(errors="replace"))
    return PendingRow(
        write_id, sequence, upload_id, at, slot, size_bytes, State(state), turn_of(turn), write, problem, *parts
    )

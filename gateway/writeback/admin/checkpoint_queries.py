"""Queries about checkpoints for operators and metrics, run on the thread of `PendingQueries`, a page at a time.

A durable checkpoint without open uploads is remembered, and read again only when its objects change.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gateway.core.errors import BufferDamaged
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.admin.queries import PendingQueries
from gateway.writeback.checkpoints.layouts import CheckpointName, rank_of
from gateway.writeback.checkpoints.restores import CheckpointFile
from gateway.writeback.checkpoints.retention import Save
from gateway.writeback.checkpoints.state import (
    CheckpointFacts,
    CheckpointState,
    ObjectFacts,
    UploadFacts,
    facts_of,
)
from gateway.writeback.journal import codec
from gateway.writeback.journal.buckets import as_last_own_write
from gateway.writeback.journal.records import State
from gateway.writeback.journal.rows import BEHIND_ALL, OPEN, PENDING, decoded, text

UPLOADS_MAX = 1000
"""The most open uploads of one checkpoint that a query reads: it reads their rows whole."""

_REMEMBERED_MAX = 2000

_SLASH = ord("/")


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint with its facts. `id` is the journal's, which may reuse it once the checkpoint is gone."""

    id: int
    name: CheckpointName
    slot: str
    facts: CheckpointFacts
    run: bytes = b""
    ordinal: int = 0
    save_order: int = 0


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run's checkpoints in a slot, the newest first. `unsent` names those with objects that are still to go out."""

    slot: str
    rows: Sequence[CheckpointRow]
    unsent: frozenset[int] = frozenset()

    @property
    def saves(self) -> list[Save]:
        return [
            Save(row.id, row.ordinal, row.save_order, facts.state, _is_whole(facts), facts.objects, facts.last_at)
            for row in self.rows
            for facts in (row.facts,)
        ]


UNGROUPED_MAX = 1000
"""Objects that belong to no checkpoint are counted up to this."""


@dataclass(frozen=True, slots=True)
class Ungrouped:
    """Acknowledged objects of no checkpoint, UNGROUPED_MAX at most. `slot` is that of `first`; None once it is
    flushed."""

    count: int
    first: ObjectKey
    slot: str | None


_COLUMNS = "id, bucket, prefix, run, slot, step, layout, began_at, ordinal, save_order"


class CheckpointQueries:
    """Queries over the connection of `PendingQueries`. They raise BufferUnavailable when the journal cannot be read."""

    def __init__(self, queries: PendingQueries) -> None:
        self._queries = queries
        self._settled = OrderedDict[int, tuple[tuple[Any, ...], CheckpointRow]]()

    async def page(
        self, prefix: Prefix, after: tuple[str, str], count: int, now: float, states: frozenset[str]
    ) -> tuple[Sequence[CheckpointRow], tuple[str, str] | None]:
        """Return checkpoints in the order of bucket and prefix behind `after`, in any of `states` (empty: all), and the
        place of the next page. A page looks at `count` checkpoints, so with `states` it may hold fewer, or none."""
        return await self._queries.look(lambda rows: self._page(rows, prefix, after, count, now, states))

    async def ungrouped(self, prefix: Prefix) -> Ungrouped | None:
        """Return the objects of no checkpoint that are pending or were flushed in the last minutes; None if there are
        none."""
        return await self._queries.look(lambda rows: _ungrouped(rows, prefix))

    async def states(self, now: float) -> Mapping[str, Mapping[str, int]]:
        """Return slot → state → number of checkpoints."""
        return await self._queries.look(lambda rows: self._states(rows, now))

    async def unfinished(self, now: float) -> Sequence[CheckpointRow]:
        return await self._queries.look(lambda rows: self._unfinished(rows, now))

    async def runs(self, slots: Collection[str], now: float) -> Sequence[RunRow]:
        return await self._queries.look(lambda rows: self._runs(rows, slots, now))

    async def unsent_runs(self, slots: Collection[str], now: float) -> Sequence[RunRow]:
        """Return the runs in which a checkpoint has objects that `keep_here` may leave out."""
        return await self._queries.look(lambda rows: self._unsent_runs(rows, slots, now))

    async def local(self, slots: Collection[str]) -> Sequence[tuple[str, int | None, Sequence[Any] | None]]:
        """Return slot, id and run of checkpoints with local objects; id and run are None for objects of no
        checkpoint."""
        return await self._queries.look(lambda rows: self._local(rows, slots))

    async def run_of(self, run: Sequence[Any], now: float) -> RunRow:
        """Return one run, as `local` names it."""
        return await self._queries.look(lambda rows: self._run(rows, run, now))

    async def durable_objects(self, checkpoint_id: int) -> Sequence[tuple[ObjectKey, int]]:
        """Return the keys, and sizes in bytes, of a checkpoint's objects that the origin has."""
        query = (
            "SELECT bucket, key, size_bytes FROM checkpoint_objects WHERE checkpoint_id = ? AND durable_at IS NOT NULL"
        )
        found = await self._queries.look(lambda rows: rows.execute(query, (checkpoint_id,)).fetchall())
        return [(ObjectKey(bucket, decoded(key)), size_bytes) for bucket, key, size_bytes in found]

    async def files(self, checkpoint_id: int) -> Sequence[CheckpointFile]:
        """Return a checkpoint's objects that are durable or still pending."""
        found = await self._queries.look(lambda rows: _objects(rows, checkpoint_id))
        return [CheckpointFile(one.key, one.size_bytes, one.rank) for one in found]

    def _local(
        self, rows: sqlite3.Connection, slots: Collection[str]
    ) -> Sequence[tuple[str, int | None, Sequence[Any] | None]]:
        marks = ",".join("?" * len(slots))
        query = (
            "SELECT DISTINCT w.slot, c.id, c.slot, c.bucket, c.run FROM writes w LEFT JOIN checkpoint_objects o "
            "ON o.bucket = w.bucket AND o.key = w.key AND o.write_id = w.id "
            f"LEFT JOIN checkpoints c ON c.id = o.checkpoint_id WHERE w.state = -1 AND w.slot IN ({marks})"
        )
        found = rows.execute(query, tuple(slots)).fetchall()
        return [
            (slot, checkpoint_id, run if checkpoint_id is not None else None) for slot, checkpoint_id, *run in found
        ]

    def _runs(self, rows: sqlite3.Connection, slots: Collection[str], now: float) -> Sequence[RunRow]:
        marks = ",".join("?" * len(slots))
        query = f"SELECT DISTINCT slot, bucket, run FROM checkpoints WHERE slot IN ({marks})"
        return [self._run(rows, one, now) for one in rows.execute(query, tuple(slots)).fetchall()]

    def _unsent_runs(self, rows: sqlite3.Connection, slots: Collection[str], now: float) -> Sequence[RunRow]:
        marks = ",".join("?" * len(slots))
        query = (
            "SELECT DISTINCT c.id, c.slot, c.bucket, c.run FROM checkpoint_objects o "
            "JOIN checkpoints c ON c.id = o.checkpoint_id JOIN writes w ON w.id = o.write_id "
            f"WHERE o.durable_at IS NULL AND w.state = 1 AND w.damaged = 0 AND w.priority <> 0 AND c.slot IN ({marks})"
        )
        unsent: dict[tuple[Any, ...], set[int]] = {}
        for checkpoint_id, *run in rows.execute(query, tuple(slots)).fetchall():
            unsent.setdefault(tuple(run), set()).add(checkpoint_id)
        return [replace(self._run(rows, run, now), unsent=frozenset(ids)) for run, ids in unsent.items()]

    def _run(self, rows: sqlite3.Connection, run: Sequence[Any], now: float) -> RunRow:
        slot, bucket, name = run
        query = f"SELECT {_COLUMNS} FROM checkpoints WHERE bucket = ? AND run = ? AND slot = ? ORDER BY save_order DESC"
        found = rows.execute(query, (bucket, name, slot)).fetchall()
        return RunRow(slot, [row for one in found if (row := self._row(rows, one, now)) is not None])

    def _page(
        self,
        rows: sqlite3.Connection,
        prefix: Prefix,
        after: tuple[str, str],
        count: int,
        now: float,
        states: frozenset[str],
    ) -> tuple[Sequence[CheckpointRow], tuple[str, str] | None]:
        within, values = _within(prefix)
        found = rows.execute(
            f"SELECT {_COLUMNS} FROM checkpoints WHERE {within} AND (bucket, prefix) > (?, ?) "
            "ORDER BY bucket, prefix LIMIT ?",
            (*values, after[0], text(after[1]), count),
        ).fetchall()
        made = [row for one in found if (row := self._row(rows, one, now)) is not None]
        following = (found[-1][1], decoded(found[-1][2])) if len(found) == count else None
        return [one for one in made if not states or one.facts.state in states], following

    def _states(self, rows: sqlite3.Connection, now: float) -> Mapping[str, Mapping[str, int]]:
        counts: dict[str, Counter[str]] = {}
        for one in rows.execute(f"SELECT {_COLUMNS} FROM checkpoints").fetchall():
            if (row := self._row(rows, one, now)) is not None:
                counts.setdefault(row.slot, Counter())[row.facts.state.value] += 1
        return counts

    def _unfinished(self, rows: sqlite3.Connection, now: float) -> Sequence[CheckpointRow]:
        left = (
            f"SELECT {_COLUMNS} FROM checkpoints WHERE id IN "
            "(SELECT DISTINCT checkpoint_id FROM checkpoint_objects WHERE durable_at IS NULL)"
        )
        return [row for one in rows.execute(left).fetchall() if (row := self._row(rows, one, now)) is not None]

    def _row(self, rows: sqlite3.Connection, columns: Sequence[Any], now: float) -> CheckpointRow | None:
        checkpoint_id, bucket, prefix, run, slot, step, layout, began_at, ordinal, save_order = columns
        uploads = _uploads(rows, bucket, prefix)
        mark = self._mark(rows, columns) if not uploads else None
        if mark is not None and self._settled.get(checkpoint_id, (None,))[0] == mark:
            self._settled.move_to_end(checkpoint_id)
            return self._settled[checkpoint_id][1]
        objects = _objects(rows, checkpoint_id)
        if not objects and not uploads:
            return None
        facts = facts_of(objects, uploads, began_at, _ranks_before(rows, bucket, run, save_order), now)
        name = CheckpointName(bucket, decoded(prefix), step, layout)
        row = CheckpointRow(checkpoint_id, name, slot, facts, run, ordinal, save_order)
        if mark is not None and facts.state is CheckpointState.DURABLE:
            self._settled[checkpoint_id] = mark, row
            while len(self._settled) > _REMEMBERED_MAX:
                self._settled.popitem(last=False)
        return row

    def _mark(self, rows: sqlite3.Connection, columns: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return a value that changes with each change to a durable checkpoint; None while it is not durable."""
        query = (
            "SELECT count(*), max(acknowledged_at), max(durable_at), sum(durable_at IS NULL) FROM checkpoint_objects "
            "WHERE checkpoint_id = ?"
        )
        *found, left = rows.execute(query, (columns[0],)).fetchone()
        return None if left or not found[0] else (*columns, *found)


def _objects(rows: sqlite3.Connection, checkpoint_id: int) -> list[ObjectFacts]:
    sent = "SELECT coalesce(sum(parts.size_bytes), 0) FROM parts WHERE write_id = writes.id AND sent = 1"
    found = rows.execute(
        "SELECT o.key, o.size_bytes, o.began_at, o.acknowledged_at, o.rank, o.durable_at, writes.state, "
        f"writes.attempts, writes.failing_since, writes.damaged, writes.last_error, ({sent}) "
        "FROM checkpoint_objects o LEFT JOIN writes ON writes.id = o.write_id AND pending = 1 AND durable_at IS NULL "
        "WHERE checkpoint_id = ? AND (durable_at IS NOT NULL OR writes.id IS NOT NULL)",
        (checkpoint_id,),
    )
    return [_object(*one) for one in found]


def _object(
    key: bytes,
    size_bytes: int,
    began_at: float,
    acknowledged_at: float,
    rank: int | None,
    durable_at: float | None,
    state: int | None,
    attempts: int | None,
    failing_since: float | None,
    damaged: int | None,
    last_error: str | None,
    sent_bytes: int,
) -> ObjectFacts:
    return ObjectFacts(
        decoded(key),
        size_bytes,
        began_at,
        acknowledged_at,
        rank,
        durable_at is not None,
        state == State.LOCAL,
        state == State.CONFLICT,
        failing_since is not None or bool(damaged),
        bool(attempts) and failing_since is None,
        state == State.PUBLISHING,
        sent_bytes,
        last_error,
    )


def _uploads(rows: sqlite3.Connection, bucket: str, prefix: bytes) -> list[UploadFacts]:
    stop = prefix + BEHIND_ALL if prefix.endswith(b"/") else prefix + b"\0"
    found = rows.execute(
        f"SELECT id, record FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND {OPEN} LIMIT ?",
        (bucket, prefix, stop, UPLOADS_MAX),
    ).fetchall()
    uploads = list[UploadFacts]()
    for write_id, record in found:
        with suppress(BufferDamaged):  # the reconciler reports it
            write = codec.unpack_write(write_id, record)
            if write.member is None or text(write.member.checkpoint.prefix) == prefix:
                rank = rank_of(write.key) if write.member is None else write.member.rank
                uploads.append(UploadFacts(write.key.key, write.began_at, write.touched_then.at, rank=rank))
    return uploads


def _ranks_before(rows: sqlite3.Connection, bucket: str, run: bytes, save_order: int) -> set[int]:
    before = (
        "SELECT id FROM checkpoints WHERE bucket = ? AND run = ? AND save_order < ? ORDER BY save_order DESC LIMIT 1"
    )
    row = rows.execute(before, (bucket, run, save_order)).fetchone()
    if row is None:
        return set()
    ranks = "SELECT DISTINCT rank FROM checkpoint_objects WHERE checkpoint_id = ? AND rank IS NOT NULL"
    return {rank for (rank,) in rows.execute(ranks, row)}


def _is_whole(facts: CheckpointFacts) -> bool:
    return facts.objects > 0 and not facts.missing and facts.state is not CheckpointState.WRITING


def _ungrouped(rows: sqlite3.Connection, prefix: Prefix) -> Ungrouped | None:
    within, values = "1", tuple[str | bytes, ...]()
    if prefix.bucket:
        start = text(prefix.key_prefix)
        within, values = "f.bucket = ? AND f.key >= ? AND f.key < ?", (prefix.bucket, start, start + BEHIND_ALL)
    alone = "NOT EXISTS (SELECT 1 FROM checkpoint_objects o WHERE o.bucket = f.bucket AND o.key = f.key) LIMIT ?"
    pending = rows.execute(
        f"SELECT f.bucket, f.key, f.slot, f.id, f.record FROM writes f WHERE {PENDING} AND {within} AND {alone}",
        (*values, UNGROUPED_MAX),
    ).fetchall()
    found, deleted = dict[ObjectKey, str | None](), set[ObjectKey]()
    for bucket, name, slot, write_id, record in pending:
        with suppress(BufferDamaged):  # the reconciler reports it
            key = ObjectKey(bucket, decoded(name))
            if codec.unpack_write(write_id, record).deleted:
                deleted.add(key)
            else:
                found[key] = slot
    flushed = rows.execute(
        f"SELECT f.bucket, f.key, f.record FROM origin f WHERE {within} AND {alone}", (*values, UNGROUPED_MAX)
    ).fetchall()
    for bucket, name, record in flushed:
        key = ObjectKey(bucket, decoded(name))
        if key not in found and key not in deleted and as_last_own_write(key, 0.0, record).etag is not None:
            found[key] = None
    first = next(iter(found), None)
    return None if first is None else Ungrouped(min(len(found), UNGROUPED_MAX), first, found[first])


def _within(prefix: Prefix) -> tuple[str, Sequence[str | bytes]]:
    """Return the condition for checkpoints under a prefix, and for those in whose directories the prefix lies."""
    if not prefix.bucket:
        return "1", ()
    start = text(prefix.key_prefix)
    above = [start[: at + 1] for at, byte in enumerate(start[:-1]) if byte == _SLASH]
    marks = ",".join("?" * len(above))
    return (
        f"bucket = ? AND ((prefix >= ? AND prefix < ?) OR prefix IN ({marks}))",
        (prefix.bucket, start, start + BEHIND_ALL, *above),
    )


def key_of(row: CheckpointRow) -> ObjectKey:
    """Return a checkpoint's bucket and prefix as a key, for tokens and messages."""
    return ObjectKey(row.name.bucket, row.name.prefix)

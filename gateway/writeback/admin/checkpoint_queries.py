"""Queries about checkpoints for operators and metrics, a page at a time.

A durable checkpoint without open uploads is remembered, and read again only when its objects change.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gateway.api import documents as to
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.admin.checkpoint_parts import OBJECTS_TOLD_MAX, Part, part_of
from gateway.writeback.admin.queries import PendingQueries, looked
from gateway.writeback.checkpoints.layouts import CheckpointName, rank_of
from gateway.writeback.checkpoints.state import CheckpointState, ObjectFacts, UploadFacts, checkpoint_document
from gateway.writeback.journal.buckets import as_last_own_write
from gateway.writeback.journal.rows import (
    BEHIND_ALL,
    OPEN,
    PENDING,
    Value,
    decoded,
    directories,
    keys_under,
    marks,
    text,
)

UPLOADS_MAX = 1000
"""The most open uploads of one checkpoint that a query reads: it reads their rows whole."""

UNGROUPED_MAX = 1000
"""Objects that belong to no checkpoint are counted up to this."""

_REMEMBERED_MAX = 2000


class CheckpointRow(NamedTuple):
    """A checkpoint of a run. `id` is the journal's, which may reuse it once the checkpoint is gone.

    `ordinal` is its place among those that were begun, from 1. `save_order` is higher than that of every save that
    began before; a checkpoint that is saved again gets a new one.
    """

    id: int
    ordinal: int
    save_order: int
    document: to.Checkpoint

    @property
    def key(self) -> ObjectKey:
        """Return the checkpoint's bucket and prefix as a key, for tokens and messages."""
        return ObjectKey(self.document.bucket, self.document.prefix)


class RunRow(NamedTuple):
    """A run's checkpoints in a slot, the newest first. `unsent` names those with objects that are still to go out."""

    slot: str
    rows: Sequence[CheckpointRow]
    unsent: frozenset[int] = frozenset()


_COLUMNS = "id, bucket, prefix, run, slot, step, layout, began_at, ordinal, save_order"


class CheckpointQueries(PendingQueries):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._settled = OrderedDict[int, tuple[tuple[Any, ...], CheckpointRow]]()

    @looked
    def checkpoints(
        self, prefix: Prefix, after: tuple[str, str], count: int, now: float, states: frozenset[str]
    ) -> tuple[Sequence[CheckpointRow], tuple[str, str] | None]:
        """Return checkpoints behind `after`, by bucket and prefix, in any of `states`, and the next page's place."""
        # No states: all. A page looks at `count` checkpoints, so with `states` it may hold fewer, or none.
        within, values = _within(prefix)
        condition = f"WHERE {within} AND (bucket, prefix) > (?, ?) ORDER BY bucket, prefix LIMIT ?"
        found = self._all(f"SELECT {_COLUMNS} FROM checkpoints {condition}", *values, after[0], text(after[1]), count)
        following = (found[-1][1], decoded(found[-1][2])) if len(found) == count else None
        return [one for one in self._made(found, now) if not states or one.document.state in states], following

    @looked
    def parts(
        self, prefix: Prefix, after: tuple[str, str], count: int
    ) -> tuple[Sequence[tuple[int, Part]], tuple[str, str] | None]:
        """Return this node's parts of checkpoints behind `after`, with their ids, and the next page's place."""
        within, values = _within(prefix)
        condition = f"WHERE {within} AND (bucket, prefix) > (?, ?) ORDER BY bucket, prefix LIMIT ?"
        rows = self._all(f"SELECT {_COLUMNS} FROM checkpoints {condition}", *values, after[0], text(after[1]), count)
        found, told = list[tuple[int, Part]](), 0
        for row in rows:
            checkpoint_id, bucket, name, run, slot, step, layout, began_at, _, save_order = row
            objects, uploads = self._object_facts(checkpoint_id), self._uploads_of(bucket, name)
            if found and told + len(objects) > OBJECTS_TOLD_MAX:
                return found, found[-1][1].place
            told += len(objects)
            if objects or uploads:
                before = self._ranks_before(bucket, run, save_order)
                made = CheckpointName(bucket, decoded(name), step, layout)
                found.append((checkpoint_id, part_of(made, slot, began_at, objects, uploads, before)))
        return found, (rows[-1][1], decoded(rows[-1][2])) if len(rows) == count else None

    @looked
    def ungrouped(self, prefix: Prefix) -> to.UngroupedObjects | None:
        """Return at most UNGROUPED_MAX objects of no checkpoint, pending or flushed in the last minutes, or None."""
        within, values = "1", tuple[Value, ...]()
        if prefix.bucket:
            within = "f.bucket = ? AND f.key >= ? AND f.key < ?"
            values = (prefix.bucket, *keys_under(prefix.key_prefix))
        alone = "NOT EXISTS (SELECT 1 FROM checkpoint_objects o WHERE o.bucket = f.bucket AND o.key = f.key) LIMIT ?"
        pending = f"SELECT f.id FROM writes f WHERE {PENDING} AND {within} AND {alone}"
        found, deleted = dict[ObjectKey, str | None](), set[ObjectKey]()
        for write in self._tx.writes.readable(self._column(pending, *values, UNGROUPED_MAX)):
            if write.deleted:
                deleted.add(write.key)
            else:
                found[write.key] = write.spec.slot
        flushed = f"SELECT f.bucket, f.key, f.record FROM origin f WHERE {within} AND {alone}"
        for bucket, name, record in self._all(flushed, *values, UNGROUPED_MAX):
            key = ObjectKey(bucket, decoded(name))
            if key not in found and key not in deleted and as_last_own_write(key, 0.0, record).etag is not None:
                found[key] = None
        first = next(iter(found), None)
        if first is None:
            return None
        return to.UngroupedObjects(objects=min(len(found), UNGROUPED_MAX), first=str(first), slot=found[first])

    @looked
    def states(self, now: float) -> Mapping[str, Mapping[str, int]]:
        """Return slot → state → number of checkpoints."""
        counts: dict[str, Counter[str]] = {}
        for row in self._checkpoints("", now):
            counts.setdefault(row.document.slot, Counter())[row.document.state] += 1
        return counts

    @looked
    def unfinished(self, now: float) -> Sequence[CheckpointRow]:
        left = "SELECT DISTINCT checkpoint_id FROM checkpoint_objects WHERE durable_at IS NULL"
        return list(self._checkpoints(f"WHERE id IN ({left})", now))

    @looked
    def runs(self, slots: Collection[str], now: float) -> Sequence[RunRow]:
        query = f"SELECT DISTINCT slot, bucket, run FROM checkpoints WHERE slot IN ({marks(slots)})"
        return [self._run(one, now) for one in self._all(query, *slots)]

    @looked
    def unsent_runs(self, slots: Collection[str], now: float) -> Sequence[RunRow]:
        """Return the runs in which a checkpoint has objects that `keep_here` may leave out."""
        query = (
            "SELECT DISTINCT c.id, c.slot, c.bucket, c.run FROM checkpoint_objects o "
            "JOIN checkpoints c ON c.id = o.checkpoint_id JOIN writes w ON w.id = o.write_id "
            "WHERE o.durable_at IS NULL AND w.state = 1 AND w.damaged = 0 AND w.priority <> 0 "
            f"AND c.slot IN ({marks(slots)})"
        )
        unsent: dict[tuple[Any, ...], set[int]] = {}
        for checkpoint_id, *run in self._all(query, *slots):
            unsent.setdefault(tuple(run), set()).add(checkpoint_id)
        return [self._run(run, now)._replace(unsent=frozenset(ids)) for run, ids in unsent.items()]

    @looked
    def local(self, slots: Collection[str]) -> Sequence[tuple[str, int | None, Sequence[Any]]]:
        """Return slot, id and run of checkpoints with local objects; the id is None for objects of no checkpoint."""
        found = self._all(
            "SELECT DISTINCT w.slot, c.id, c.slot, c.bucket, c.run FROM writes w LEFT JOIN checkpoint_objects o "
            "ON o.bucket = w.bucket AND o.key = w.key AND o.write_id = w.id "
            f"LEFT JOIN checkpoints c ON c.id = o.checkpoint_id WHERE w.state = -1 AND w.slot IN ({marks(slots)})",
            *slots,
        )
        return [(slot, checkpoint_id, run) for slot, checkpoint_id, *run in found]

    @looked
    def run_of(self, run: Sequence[Any], now: float) -> RunRow:
        """Return one run, as `local` names it."""
        return self._run(run, now)

    @looked
    def durable_objects(self, checkpoint_id: int) -> Sequence[tuple[ObjectKey, int]]:
        """Return the keys, and sizes in bytes, of a checkpoint's objects that the origin has."""
        durable = "FROM checkpoint_objects WHERE checkpoint_id = ? AND durable_at IS NOT NULL"
        found = self._all(f"SELECT bucket, key, size_bytes {durable}", checkpoint_id)
        return [(ObjectKey(bucket, decoded(key)), size_bytes) for bucket, key, size_bytes in found]

    @looked
    def objects(self, checkpoint_id: int) -> Sequence[ObjectFacts]:
        """Return a checkpoint's objects that are durable or still pending."""
        return self._object_facts(checkpoint_id)

    def _run(self, run: Sequence[Any], now: float) -> RunRow:
        condition = "WHERE slot = ? AND bucket = ? AND run = ? ORDER BY save_order DESC"
        return RunRow(run[0], list(self._checkpoints(condition, now, *run)))

    def _checkpoints(self, condition: str, now: float, *values: Value) -> Iterator[CheckpointRow]:
        return self._made(self._all(f"SELECT {_COLUMNS} FROM checkpoints {condition}", *values), now)

    def _made(self, found: Sequence[Sequence[Any]], now: float) -> Iterator[CheckpointRow]:
        return (row for columns in found if (row := self._checkpoint_row(columns, now)) is not None)

    def _checkpoint_row(self, columns: Sequence[Any], now: float) -> CheckpointRow | None:
        checkpoint_id, bucket, prefix, run, slot, step, layout, began_at, ordinal, save_order = columns
        uploads = self._uploads_of(bucket, prefix)
        mark = self._mark(columns) if not uploads else None
        if mark is not None and self._settled.get(checkpoint_id, (None,))[0] == mark:
            self._settled.move_to_end(checkpoint_id)
            return self._settled[checkpoint_id][1]
        objects = self._object_facts(checkpoint_id)
        if not objects and not uploads:
            return None
        name, ranks_before = (
            CheckpointName(bucket, decoded(prefix), step, layout),
            self._ranks_before(bucket, run, save_order),
        )
        document = checkpoint_document(name, slot, objects, uploads, began_at, ranks_before, now)
        row = CheckpointRow(checkpoint_id, ordinal, save_order, document)
        if mark is not None and document.state == CheckpointState.DURABLE:
            self._settled[checkpoint_id] = mark, row
            while len(self._settled) > _REMEMBERED_MAX:
                self._settled.popitem(last=False)
        return row

    def _mark(self, columns: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return a value that changes with each change to a durable checkpoint; None while it is not durable."""
        summed = "count(*), max(acknowledged_at), max(durable_at), sum(durable_at IS NULL)"
        [row] = self._all(f"SELECT {summed} FROM checkpoint_objects WHERE checkpoint_id = ?", columns[0])
        return None if row[-1] or not row[0] else (*columns, *row[:-1])

    def _object_facts(self, checkpoint_id: int) -> list[ObjectFacts]:
        found = self._all(
            "SELECT o.key, o.size_bytes, o.began_at, o.acknowledged_at, o.rank, o.durable_at IS NOT NULL, "
            "w.state IS -1, w.state IS 3, w.failing_since IS NOT NULL OR w.damaged IS 1, "
            "coalesce(w.attempts, 0) > 0 AND w.failing_since IS NULL, w.state IS 2, "
            "(SELECT coalesce(sum(size_bytes), 0) FROM parts WHERE write_id = w.id AND sent = 1), w.last_error "
            "FROM checkpoint_objects o LEFT JOIN writes w ON w.id = o.write_id AND pending = 1 AND durable_at IS NULL "
            "WHERE checkpoint_id = ? AND (durable_at IS NOT NULL OR w.id IS NOT NULL)",
            checkpoint_id,
        )
        return [ObjectFacts(decoded(key), *facts) for key, *facts in found]

    def _uploads_of(self, bucket: str, prefix: bytes) -> list[UploadFacts]:
        stop = prefix + BEHIND_ALL if prefix.endswith(b"/") else prefix + b"\0"
        found = self._column(
            f"SELECT id FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND {OPEN} LIMIT ?",
            *(bucket, prefix, stop, UPLOADS_MAX),
        )
        uploads = list[UploadFacts]()
        for one in self._tx.writes.readable(found):
            if one.member is None or text(one.member.checkpoint.prefix) == prefix:
                rank = rank_of(one.key) if one.member is None else one.member.rank
                uploads.append(UploadFacts(one.key.key, one.began_at, one.touched_then.at, rank))
        return uploads

    def _ranks_before(self, bucket: str, run: bytes, save_order: int) -> set[int]:
        earlier = "FROM checkpoints WHERE bucket = ? AND run = ? AND save_order < ? ORDER BY save_order DESC LIMIT 1"
        ranks = f"WHERE checkpoint_id = (SELECT id {earlier}) AND rank IS NOT NULL"
        return set(self._column(f"SELECT DISTINCT rank FROM checkpoint_objects {ranks}", bucket, run, save_order))


def _within(prefix: Prefix) -> tuple[str, Sequence[Value]]:
    """Return the condition for checkpoints under a prefix, and for those in whose directories the prefix lies."""
    if not prefix.bucket:
        return "1", ()
    under = keys_under(prefix.key_prefix)
    above = [one for one in directories(prefix.key_prefix) if one not in (b"", under[0])]
    condition = f"bucket = ? AND ((prefix >= ? AND prefix < ?) OR prefix IN ({marks(above)}))"
    return condition, (prefix.bucket, *under, *above)

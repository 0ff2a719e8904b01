"""Queries about pending writes for operators, on a thread and a connection of their own.

S3 requests never use them. Figures read each row that they count, so callers ask rarely; pages read what they show.
"""

from __future__ import annotations

import base64
import binascii
import os
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import orjson

from gateway.api import documents as to
from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferDamaged, BufferUnavailable
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.writeback.checkpoints.state import CheckpointState
from gateway.writeback.journal.files import Usage
from gateway.writeback.journal.records import State, Write, unpack_write
from gateway.writeback.journal.rows import OPEN, PENDING, Table, Value, at, keys_under, marks, text
from gateway.writeback.journal.schema import connect_reading
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.turns import TURN_COLUMNS, turn_of
from gateway.writeback.staged_file import BufferThreads

P = ParamSpec("P")
R = TypeVar("R")
Q = TypeVar("Q", bound="PendingQueries")

LOOK_SHARE = 50.0
"""The pause after a look is at least this many times as long as the look."""

TOUCHED_MAX = 10_000
"""The most open uploads whose last activity is read; a thousand rows take some 20 ms."""

_HERE = f"{PENDING} AND sequence IS NOT NULL"
_PENDING = f"{_HERE} AND state >= 0"
"""Writes to send; `_HERE` includes local ones."""

_THROUGH = "since_sequence <= ?"
"""The origin has neither the write nor what it has replaced."""

# The indexes of schema.py hold only these: few of the pending writes.
_CONFLICTS = "SELECT id FROM writes WHERE state = 3"
_FAILED = "SELECT id FROM writes WHERE (attempts > 0 OR damaged = 1)"
_STUCK = f"id IN ({_CONFLICTS} UNION ALL {_FAILED} AND damaged = 1)"
_HELD_UP = f"id IN ({_CONFLICTS} UNION ALL {_FAILED})"
_PROBLEM = f"id IN ({_CONFLICTS} UNION ALL {_FAILED} AND (failing_since IS NOT NULL OR damaged = 1))"
"""Writes that need a person; the rest of the held-up ones wait for the bucket."""

_FAILING = "attempts > 0 AND state <> 3 AND damaged = 0 AND failing_since IS"

_PROBLEMS = {
    "conflicts": "sum(state = 3)",
    "damaged": "sum(damaged)",
    "failing": f"sum({_FAILING} NOT NULL)",
    "waiting_for_bucket": f"sum({_FAILING} NULL)",
}
_STATS = {"objects": "count(*)", "bytes": "sum(size_bytes)", **_PROBLEMS}
_STATS_COLUMNS = ", ".join(f"coalesce({one}, 0)" for one in _STATS.values())


@dataclass(frozen=True, slots=True)
class Name(Prefix):
    """The object of a name, and all that lies under it as under a directory; no other key that begins so."""

    def covers(self, bucket: str, key_prefix: str) -> bool:
        """Return whether `key_prefix` is the name itself, taken as a key, or lies under it."""
        is_within = key_prefix == self.key_prefix or key_prefix.startswith(f"{self.key_prefix}/")
        return bucket == self.bucket and is_within


def may_be_name(prefix: Prefix) -> bool:
    """Return whether the prefix may name an object or a directory; one with a final slash is unambiguous."""
    return bool(prefix.bucket) and bool(prefix.key_prefix) and not prefix.key_prefix.endswith("/")


def name_of(prefix: Prefix) -> Name:
    return Name(prefix.bucket, prefix.key_prefix)


class Pending(NamedTuple):
    """A pending write; `write` is None if its row in the journal is damaged."""

    id: int
    write: Write | None
    is_conflict: bool
    document: to.PendingObject

    @property
    def key(self) -> ObjectKey:
        return ObjectKey(self.document.bucket, self.document.key)


class UploadStats(NamedTuple):
    """Open uploads, whose parts take `size_bytes` here.

    `touched` is the last activity of the longest idle client, among the `TOUCHED_MAX` oldest uploads.
    """

    uploads: int = 0
    size_bytes: int = 0
    touched: Moment | None = None


class _Where(NamedTuple):
    """A condition on bucket and key."""

    condition: str
    values: Sequence[Value] = ()


async def look_repeatedly(look: Callable[[], Awaitable[None]], clock: Clock, pause_seconds: float) -> None:
    """Look again and again, less often if looks take long: S3 requests need the time too."""
    while True:
        began = clock.monotonic()
        with suppress(BufferUnavailable):  # the journal's writers report it
            await look()
        await clock.sleep(max(pause_seconds, LOOK_SHARE * (clock.monotonic() - began)))


def looked(query: Callable[Concatenate[Q, P], R]) -> Callable[Concatenate[Q, P], Coroutine[Any, Any, R]]:
    """Run a query in a read transaction, on the thread of the queries. BufferUnavailable."""

    async def look(self: Q, /, *arguments: P.args, **keywords: P.kwargs) -> R:
        return await self.thread.run(self.in_transaction, lambda: query(self, *arguments, **keywords))

    return look


class PendingQueries(Table):
    """Queries on one buffer. They raise BufferUnavailable when the journal cannot be read."""

    def __init__(self, directory: Path) -> None:
        self._path = str(directory / "journal")
        self.thread = BufferThreads(1)
        self._tx: JournalTransaction
        self._is_open = False

    def close(self) -> None:
        self.thread.shut_down()
        if self._is_open:
            self._rows.close()

    def in_transaction(self, query: Callable[[], R]) -> R:
        """Return what a query of this connection returns. On the thread of the queries."""
        try:
            if not self._is_open:
                self._rows = connect_reading(self._path)
                self._tx, self._is_open = JournalTransaction(self._rows), True
            self._rows.execute("BEGIN")
            try:
                return query()
            finally:
                self._rows.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise BufferUnavailable(f"the write-back journal cannot be read: {error}") from error

    # Figures

    @looked
    def flush(self, prefix: Prefix, through: int) -> to.FlushSums:
        """Return the figures of the writes under a prefix that are, or have replaced, one of `through` or before."""
        where = _where(prefix)
        here = f"{where.condition} AND {_THROUGH} AND {_HERE}"
        these, values = f"{here} AND state >= 0", (*where.values, through)
        sent = "parts CROSS JOIN writes ON write_id = id"  # few of the pending parts are sent: look at those first
        sent_bytes = f"SELECT coalesce(sum(parts.size_bytes), 0) FROM {sent} WHERE sent = 1 AND {these}"
        behind = (
            f"WITH RECURSIVE held_up (at) AS (SELECT sequence FROM writes WHERE {_PENDING} AND {{roots}} "
            "UNION SELECT sequence FROM writes JOIN held_up ON after_sequence = at) "
            f"SELECT count(*) FROM writes WHERE {these} AND sequence IN held_up"
        )
        uploads = self._row(
            "SELECT count(DISTINCT id), coalesce(sum(parts.size_bytes), 0) FROM writes "
            f"LEFT JOIN parts ON write_id = id AND file <> '' WHERE {where.condition} AND {OPEN}",
            *where.values,
        )
        return to.FlushSums(
            **self._sums(self._row(f"SELECT {_STATS_COLUMNS}, min(sequence) FROM writes WHERE {these}", *values)),
            **_open(UploadStats(*(uploads or ()))),
            local_objects=self._value(f"SELECT count(*) FROM writes WHERE {here} AND state = -1", *values),
            bytes_sent=self._value(sent_bytes, *values),
            stuck=self._value(behind.format(roots=_STUCK), *values),
            held_up=self._value(behind.format(roots=_HELD_UP), *values),
        )

    @looked
    def slots(self, buffers: Mapping[str, int]) -> list[to.PendingSlot]:
        """Return the slots that write back, by their buffer sizes in bytes, and all others that hold something here."""
        counted = f"SELECT {_STATS_COLUMNS}, min(sequence), slot FROM writes WHERE {_PENDING} GROUP BY slot"
        pending = {slot: self._sums(stats) for *stats, slot in self._all(counted)}
        last_at = "max(due_at + 1e12 * (failing_since IS NOT NULL))"  # failing ones before those that wait
        last = f"SELECT slot, last_error, {last_at} FROM writes WHERE {_PENDING} AND attempts > 0 GROUP BY slot"
        reasons = {slot: reason for slot, reason, _ in self._all(last)}
        uploads, usages = self._uploads_by_slot(), self._tx.files.usages()
        slots = []
        for slot in sorted({*buffers, *uploads, *usages, *pending}):
            used, opened = usages.get(slot, Usage()), uploads.get(slot, UploadStats())
            made = to.PendingSlot(
                slot=slot,
                buffer_bytes=buffers.get(slot),
                **(pending.get(slot) or self._sums([0] * len(_STATS) + [None])),
                **_open(opened),
                oldest_upload_touched_at=opened.touched.at if opened.touched is not None else None,
                staged_bytes=used.staged_bytes,
                local_objects=used.local_objects,
                local_bytes=used.local_bytes,
                reason=reasons.get(slot),
            )
            if slot in buffers or made.objects or made.open_uploads or made.staged_bytes or made.local_objects:
                slots.append(made)
        return slots

    @looked
    def problems_by_slot(self) -> Mapping[str, Sequence[int]]:
        """Return the numbers of conflicts and of damaged, failing and waiting writes, for each slot that has any."""
        columns = ", ".join(_PROBLEMS.values())
        found = self._all(f"SELECT {columns}, slot FROM writes WHERE {_PENDING} AND {_HELD_UP} GROUP BY slot")
        return {slot: counts for *counts, slot in found}

    @looked
    def oldest_conflicts_by_slot(self) -> Mapping[str, Moment]:
        """Return when the first of the conflicting writes was acknowledged, for each slot that has any."""
        firsts = f"SELECT min(sequence) FROM writes WHERE {_PENDING} AND id IN ({_CONFLICTS}) GROUP BY slot"
        found = self._column(f"SELECT id FROM writes WHERE sequence IN ({firsts})")
        return {one.spec.slot: one.acknowledged_then for one in self._tx.writes.readable(found)}

    @looked
    def uploads_by_slot(self) -> Mapping[str, UploadStats]:
        return self._uploads_by_slot()

    def _uploads_by_slot(self) -> Mapping[str, UploadStats]:
        sizes = dict(
            self._all(
                "SELECT slot, sum(parts.size_bytes) FROM writes JOIN parts ON write_id = id "
                f"WHERE {OPEN} AND file <> '' GROUP BY slot"
            )
        )
        touched: dict[str, Moment] = {}
        oldest = self._column(f"SELECT id FROM writes WHERE {OPEN} ORDER BY id LIMIT ?", TOUCHED_MAX)
        for one in self._tx.writes.readable(oldest):
            then = one.touched_then
            touched[one.spec.slot] = min(then, touched.get(one.spec.slot, then), key=lambda moment: moment.at)
        counts = self._all(f"SELECT slot, count(*) FROM writes WHERE {OPEN} GROUP BY slot")
        return {slot: UploadStats(count, sizes.get(slot, 0), touched.get(slot)) for slot, count in counts}

    @looked
    def journal(self) -> tuple[int, int, int]:
        """Return the numbers of ended uploads and of own writes on record, and the bytes of the journal's files."""
        size_bytes = 0
        for path in (self._path, f"{self._path}-wal"):
            with suppress(FileNotFoundError):  # the log goes with the last process that has the journal open
                size_bytes += os.stat(path).st_size
        return self._tx.ended_count(), self._tx.buckets.own_writes_count(), size_bytes

    def _sums(self, row: Sequence[Any] | None) -> dict[str, Any]:
        """Return fields of `Sums`; the time is None if nothing is pending, or its row is damaged."""
        *counts, first = row or ()
        found = self._column("SELECT id FROM writes WHERE sequence = ?", first)
        oldest_at = next((one.acknowledged_at for one in self._tx.writes.readable(found)), None)
        return {**dict(zip(_STATS, counts, strict=True)), "oldest_acknowledged_at": oldest_at}

    # Pages

    @looked
    def page(self, prefix: Prefix, after: tuple[str, str, int], count: int) -> list[to.PendingObject]:
        """Return pending writes under a prefix in the order of bucket, key and sequence, behind `after`."""
        where = _where_behind(prefix, "sequence", after, -1)
        return self._objects(where, f"{_HERE} ORDER BY bucket, key, sequence", count)

    @looked
    def problems(self, prefix: Prefix, after: int, count: int) -> list[to.PendingObject]:
        """Return writes under a prefix that need a person, behind a sequence."""
        condition = f"{_PENDING} AND {_PROBLEM} AND sequence > ? ORDER BY sequence"
        return self._objects(_where(prefix), condition, count, after)

    @looked
    def worst(self, prefix: Prefix, through: int, count: int) -> list[to.PendingObject]:
        """Return held-up writes of `flush`: conflicts first, then damaged, failing and waiting ones."""
        order = "ORDER BY state = 3 DESC, damaged DESC, failing_since IS NULL, sequence"
        return self._objects(_where(prefix), f"{_PENDING} AND {_HELD_UP} AND {_THROUGH} {order}", count, through)

    @looked
    def first_of(self, key: ObjectKey) -> Pending | None:
        found = self._rows_of(_Where("bucket = ? AND key = ?", at(key)), f"{_HERE} ORDER BY sequence", 1)
        return next((self._pending(one) for one in found), None)

    @looked
    def uploads(self, prefix: Prefix, after: tuple[str, str, str], count: int) -> list[to.OpenUploadDocument]:
        """Return open uploads under a prefix in the order of bucket, key and id, behind `after`."""
        where = _where_behind(prefix, "upload_id", after, "")
        found = self._rows_of(where, f"{OPEN} ORDER BY bucket, key, upload_id", count)
        return [self._open_upload(one)[-1] for one in found]

    @looked
    def open_uploads(self, upload_ids: Sequence[str]) -> Sequence[tuple[int, Write | None, to.OpenUploadDocument]]:
        """Return the open ones of these uploads; without the write if its row is damaged."""
        where = _Where(f"upload_id IN ({marks(upload_ids)})", upload_ids)
        return [self._open_upload(one) for one in self._rows_of(where, OPEN, len(upload_ids))]

    def _objects(self, where: _Where, condition: str, count: int, *values: int) -> list[to.PendingObject]:
        return [self._pending(one).document for one in self._rows_of(where, condition, count, *values)]

    def _rows_of(self, where: _Where, condition: str, count: int, *values: int) -> Sequence[Sequence[Any]]:
        """`condition` may end with an order; `values` are its own."""
        columns = f"id, bucket, key, slot, record, upload_id, coalesce(sequence, 0), size_bytes, state, {TURN_COLUMNS}"
        asked = f"SELECT {columns} FROM writes WHERE {where.condition} AND {condition} LIMIT ?"
        return self._all(asked, *where.values, *values, count)

    def _pending(self, columns: Sequence[Any]) -> Pending:
        write_id, bucket, key, slot, record, _, sequence, size_bytes, state_number, *turn_columns = columns
        write, problem = _unpacked(write_id, record)
        parts, sent_parts, sent_bytes, _ = self._parts(write_id)
        state, turn = State(state_number), turn_of(turn_columns)
        if state is State.LOCAL:
            shown = "local"
        elif write is None or turn.damaged:
            shown = "damaged"
        elif state is State.CONFLICT:
            shown = "conflict"
        elif turn.attempts:
            shown = (CheckpointState.WAITING if turn.failing_since is None else CheckpointState.FAILED).value
        else:
            shown = "sending" if sent_parts or state is State.PUBLISHING else "waiting"
        document = to.PendingObject(
            bucket=bucket,
            key=key.decode(errors="replace"),
            sequence=sequence,
            slot=slot,
            state=shown,
            bytes=size_bytes,
            etag=write.etag if write is not None and not write.deleted else None,
            deleted=write.deleted if write is not None else None,
            acknowledged_at=write.acknowledged_at if write is not None else None,
            parts=parts,
            parts_sent=sent_parts,
            bytes_sent=sent_bytes,
            failures=turn.attempts,
            failing_since=turn.failing_since,
            waits_for=turn.after_sequence,
            reason=problem or turn.last_error,
        )
        return Pending(write_id, write, state is State.CONFLICT, document)

    def _open_upload(self, columns: Sequence[Any]) -> tuple[int, Write | None, to.OpenUploadDocument]:
        write_id, bucket, key, slot, record, upload_id, _, _, _, *turn_columns = columns
        upload, _ = _unpacked(write_id, record)
        parts, sent_parts, _, here_bytes = self._parts(write_id)
        document = to.OpenUploadDocument(
            bucket=bucket,
            key=key.decode(errors="replace"),
            upload_id=upload_id,
            slot=slot,
            initiated_at=upload.began_at if upload is not None else None,
            touched_at=upload.touched_then.at if upload is not None else None,
            parts=parts,
            parts_sent=sent_parts,
            bytes=here_bytes,
            reason=turn_of(turn_columns).last_error,
        )
        return write_id, upload, document

    def _parts(self, write_id: int) -> Sequence[int]:
        """Return the number of a write's parts, the number and bytes of those sent, and the bytes of those here."""
        counted = "count(*), coalesce(sum(sent), 0), coalesce(sum(sent * size_bytes), 0)"
        here = "coalesce(sum((file <> '') * size_bytes), 0)"
        return self._row(f"SELECT {counted}, {here} FROM parts WHERE write_id = ?", write_id) or (0, 0, 0, 0)


def _unpacked(write_id: int, record: bytes) -> tuple[Write | None, str | None]:
    """Return the write, or how its row is damaged."""
    try:
        return unpack_write(write_id, record), None
    except BufferDamaged as error:
        return None, str(error)


def _open(uploads: UploadStats) -> dict[str, int]:
    return {"open_uploads": uploads.uploads, "open_upload_bytes": uploads.size_bytes}


def _where(prefix: Prefix) -> _Where:
    if not prefix.bucket:
        return _Where("1")
    start = text(prefix.key_prefix)
    if isinstance(prefix, Name):
        condition = "bucket = ? AND key >= ? AND key < ? AND (key = ? OR key >= ?)"
        return _Where(condition, (prefix.bucket, start, start + b"0", start, start + b"/"))
    return _Where("bucket = ? AND key >= ? AND key < ?", (prefix.bucket, *keys_under(prefix.key_prefix)))


def _where_behind(prefix: Prefix, last: str, after: tuple[str, str, str | int], least: str | int) -> _Where:
    """Return a condition for rows behind `after` by bucket, key and column `last`; `least` sorts before values."""
    bucket, key, value = after
    if not prefix.bucket:
        return _Where(f"(bucket, key, {last}) > (?, ?, ?)", (bucket, text(key), value))
    start, stop = keys_under(prefix.key_prefix)
    place = (text(key), value) if bucket == prefix.bucket and text(key) >= start else (start, least)
    return _Where(f"bucket = ? AND (key, {last}) > (?, ?) AND key < ?", (prefix.bucket, *place, stop))


# Tokens of pages


def to_token(*place: str | int) -> str:
    """Return the token of a place in a listing, for the request for the next page."""
    return base64.urlsafe_b64encode(orjson.dumps(place)).decode()


def from_token(token: str, *kinds: type) -> Sequence[Any]:
    """Return the place of a token; ValueError if no listing with places of these kinds gave it."""
    try:
        place = orjson.loads(base64.b64decode(token, altchars=b"-_", validate=True))
    except (binascii.Error, orjson.JSONDecodeError):
        place = None
    if not isinstance(place, list) or [type(one) for one in place] != list(kinds):
        raise ValueError("the token is none that this listing has given")
    return place

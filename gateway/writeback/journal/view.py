"""The journal as one transaction sees it, read-only."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged
from gateway.core.model import ObjectKey
from gateway.s3.requests import PARTS_COUNT_MAX
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal import codec
from gateway.writeback.journal.records import (
    BucketCapabilities,
    LastOwnWrite,
    Part,
    Priority,
    State,
    Turn,
    UploadOutcome,
    Write,
)

PENDING = "pending = 1 AND state < 5"
OPEN = "upload_id IS NOT NULL AND pending = 0 AND state < 3"
"""Conditions for acknowledged writes and for open uploads, as the indices have them."""

LOCAL_OF_CHECKPOINTS = (
    "SELECT w.id, w.slot, o.checkpoint_id FROM writes w LEFT JOIN checkpoint_objects o ON o.bucket = w.bucket "
    "AND o.key = w.key AND o.write_id = w.id"
)
"""With `w.state = -1`: local objects with their checkpoints."""

_USAGES = (
    "SELECT usage.slot, staged_bytes, usage.objects, coalesce(local_usage.size_bytes, 0), "
    "coalesce(local_usage.objects, 0) FROM usage LEFT JOIN local_usage USING (slot)"
)

TURN_COLUMNS = "due_at, attempts, failing_since, last_error, priority, after_sequence, damaged"

BEHIND_ALL = b"\xff"
"""No byte of UTF-8 is as great."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of referenced staged files, a shared file once, and the number of pending objects and tombstones. The local
    ones (`State.LOCAL`) among both, a shared file once per object."""

    staged_bytes: int = 0
    objects: int = 0
    local_bytes: int = 0
    local_objects: int = 0

    @property
    def unsent_bytes(self) -> int:
        return max(0, self.staged_bytes - self.local_bytes)


class Due(NamedTuple):
    """A write that is due."""

    id: int
    key: ObjectKey
    due_at: float
    attempts: int


class JournalView:
    """One transaction's view of the journal. BufferDamaged for a damaged row."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._rows = connection

    # Writes

    def write(self, write_id: int, *, with_parts: bool = True) -> Write | None:
        row = self._row("SELECT record FROM writes WHERE id = ? AND state < 5", write_id)
        if row is None:
            return None
        found = codec.unpack_write(write_id, row[0])
        return replace(found, parts=tuple(self.parts(write_id))) if with_parts else found

    def turn(self, write_id: int) -> Turn | None:
        row = self._row(f"SELECT {TURN_COLUMNS} FROM writes WHERE id = ? AND state < 5", write_id)
        return turn_of(row) if row else None

    def parts(
        self, write_id: int, after: int = 0, until: int = PARTS_COUNT_MAX, count_max: int = PARTS_COUNT_MAX
    ) -> Iterator[Part]:
        """Yield at most `count_max` parts of a write with numbers after `after`, up to `until`, in order."""
        found = self._rows.execute(
            "SELECT number, parts.record, name, files.record FROM parts LEFT JOIN files ON file = name "
            "WHERE write_id = ? AND number > ? AND number <= ? ORDER BY number LIMIT ?",
            (write_id, after, until, count_max),
        )
        for number, record, name, file in found:
            staged = codec.unpack_file(name, file) if name is not None else None
            yield codec.unpack_part(write_id, number, record, staged)

    def part(self, write_id: int, number: int) -> Part | None:
        return next(self.parts(write_id, number - 1, number), None)

    def _one_of(self, key: ObjectKey, condition: str) -> Write | None:
        row = self._row(
            f"SELECT id, record FROM writes WHERE bucket = ? AND key = ? AND {condition} LIMIT 1",
            key.bucket,
            encoded(key),
        )
        return codec.unpack_write(*row) if row else None

    def _of_key(self, key: ObjectKey, condition: str) -> list[Write]:
        found = self._rows.execute(
            f"SELECT id, record FROM writes WHERE bucket = ? AND key = ? AND state < 5 AND {condition} "
            "ORDER BY sequence",
            (key.bucket, encoded(key)),
        )
        return [codec.unpack_write(write_id, record) for write_id, record in found.fetchall()]

    # What is pending

    def latest(self, key: ObjectKey) -> Write | None:
        """Return the object or tombstone of a key that was acknowledged last and is pending; without its parts."""
        return self._one_of(key, f"{PENDING} ORDER BY sequence DESC")

    def earliest(self, key: ObjectKey) -> Write | None:
        """Return the first write in a key's order, without its parts."""
        return self._one_of(key, "state < 5 AND sequence IS NOT NULL ORDER BY sequence")

    def waiting(self, after: int, count_max: int) -> Sequence[Write]:
        """Return pending writes in the order of acknowledgement, without parts, behind a sequence."""
        found = self._rows.execute(
            "SELECT id, record FROM writes WHERE sequence > ? AND pending = 1 ORDER BY sequence LIMIT ?",
            (after, count_max),
        )
        return [codec.unpack_write(write_id, record) for write_id, record in found]

    def newest(self) -> int:
        """Return the sequence of the pending write that was acknowledged last; 0 if nothing is pending."""
        row = self._row("SELECT max(sequence) FROM writes WHERE pending = 1 AND sequence IS NOT NULL")
        return (row[0] or 0) if row else 0

    def listing(self, bucket: str, start: bytes, stop: bytes | None, count_max: int) -> Sequence[Write]:
        """Return the last pending write of each key from `start` to before `stop`, in order, without parts.

        Reads nothing outside of the range.
        """
        found = self._rows.execute(
            f"SELECT id, record, max(sequence) FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND {PENDING} "
            "GROUP BY key ORDER BY key LIMIT ?",
            (bucket, start, BEHIND_ALL if stop is None else stop, count_max),
        )
        return [codec.unpack_write(write_id, record) for write_id, record, _ in found]

    def has_any(self, bucket: str, name: str) -> bool:
        """Return whether a key, or one under it as a directory, is pending or was flushed in the last minutes."""
        key = text(name)
        for table, condition in (("writes", f"{PENDING} AND "), ("origin", "")):
            found = f"SELECT 1 FROM {table} WHERE {condition}bucket = ?"
            if self._row(f"{found} AND key = ? LIMIT 1", bucket, key) is not None:
                return True
            if self._row(f"{found} AND key >= ? AND key < ? LIMIT 1", bucket, key + b"/", key + b"0") is not None:
                return True
        return False

    def hash_slots(self) -> set[int]:
        """Return the hash slots of pending_key_filter.py in which something is pending."""
        return {hash_slot for (hash_slot,) in self._rows.execute("SELECT DISTINCT place FROM writes WHERE pending = 1")}

    def counts(self) -> tuple[int, int]:
        row = self._row(
            f"SELECT (SELECT count(*) FROM writes WHERE pending = 1), (SELECT count(*) FROM writes WHERE {OPEN})"
        )
        return (row[0], row[1]) if row else (0, 0)

    def buckets(self) -> frozenset[str]:
        """Return the buckets of everything that is not over: acknowledged, open, or still to abort at the origin."""
        return frozenset(
            bucket for (bucket,) in self._rows.execute("SELECT DISTINCT bucket FROM writes WHERE state < 5")
        )

    def oldest(self, slot: str) -> Moment | None:
        """Return when the oldest write was acknowledged that is still on its way to the origin.

        Conflicts are not on their way, and parts of open uploads are no object yet. None without such a write.
        """
        row = self._row(
            "SELECT id, record FROM writes WHERE slot = ? AND sequence IS NOT NULL AND pending = 1 AND state <> 3 "
            "AND state >= 0 AND damaged = 0 ORDER BY sequence LIMIT 1",
            slot,
        )
        return codec.unpack_write(*row).acknowledged_then if row else None

    def oldest_local(self, slot: str) -> Moment | None:
        """Return when a slot's oldest local object was acknowledged. None without one, or if its row is damaged."""
        row = self._row("SELECT id, record FROM writes WHERE slot = ? AND state = -1 ORDER BY sequence LIMIT 1", slot)
        with suppress(BufferDamaged):
            return codec.unpack_write(*row).acknowledged_then if row else None
        return None

    def is_rest_pending(self, key: ObjectKey) -> bool:
        """Return whether the origin lacks an object of the checkpoint that this one belongs to."""
        left = (
            "SELECT 1 FROM checkpoint_objects WHERE durable_at IS NULL AND checkpoint_id = "
            "(SELECT checkpoint_id FROM checkpoint_objects WHERE bucket = ? AND key = ?) LIMIT 1"
        )
        return self._row(left, key.bucket, text(key.key)) is not None

    # Open uploads

    def upload(self, upload_id: str) -> Write | None:
        """Return an open upload, without its parts."""
        row = self._row(f"SELECT id, record FROM writes WHERE upload_id = ? AND {OPEN}", upload_id)
        return codec.unpack_write(*row) if row else None

    def uploads(self, bucket: str, prefix: str = "", after: tuple[str, str] = ("", "")) -> Iterator[Write]:
        """Yield the open uploads of a bucket under a prefix in the order of key and id, behind `after`."""
        start = max(text(prefix), text(after[0]))
        found = self._rows.execute(
            f"SELECT id, upload_id, key, record FROM writes WHERE bucket = ? AND key >= ? AND {OPEN} "
            "ORDER BY key, upload_id",
            (bucket, start),
        )
        for write_id, upload_id, key, record in found:
            if not key.startswith(text(prefix)):
                return
            if (key, upload_id) > (text(after[0]), after[1]):
                yield codec.unpack_write(write_id, record)

    def unsent_parts(self, write_id: int, count_max: int) -> Sequence[Part]:
        """Return the first parts of an upload that the origin lacks."""
        found = self._rows.execute(
            "SELECT number FROM parts WHERE write_id = ? AND sent = 0 ORDER BY number LIMIT ?", (write_id, count_max)
        )
        return [part for (number,) in found.fetchall() if (part := self.part(write_id, number)) is not None]

    def is_being_completed(self, upload: Write) -> bool:
        """Return whether the origin may be carrying out a Complete of the upload whose client has no answer yet."""
        turn = self.turn(upload.id)
        return upload.is_completed_at_origin and upload.answer is None and turn is not None and turn.due_at is not None

    def ended(self, upload_id: str) -> UploadOutcome | None:
        """Return the outcome of an upload, for repetitions of its last request."""
        row = self._row("SELECT id, state, pending, record FROM writes WHERE upload_id = ?", upload_id)
        if row is None:
            return None
        write_id, state, pending, record = row
        if state == State.DONE:
            return codec.unpack_ended(write_id, record)
        return as_outcome(codec.unpack_write(write_id, record)) if pending else None

    # What the origin is to abort

    def origin_upload_ids(self, key: ObjectKey) -> set[str | None]:
        """Return the ids of the origin's uploads that belong to the key's writes, those to abort included."""
        return {one.origin_upload_id for one in self._of_key(key, "1")}

    def asked(self, key: ObjectKey) -> Sequence[Write]:
        """Return the uploads of a key that the origin was asked for, without an outcome yet."""
        return [one for one in self._of_key(key, "state = 4") if one.asked is not None and not one.origin_upload_id]

    def are_any_aborting(self) -> bool:
        """Return whether the origin may have uploads that nothing here needs."""
        return self._row("SELECT 1 FROM writes WHERE state = 4 LIMIT 1") is not None

    def aborting_count(self) -> int:
        """Return the number of these uploads, even unreadable ones, without those that may be another writer's."""
        count = 0
        for write_id, record in self._rows.execute("SELECT id, record FROM writes WHERE state = 4"):
            with suppress(BufferDamaged):
                found = codec.unpack_write(write_id, record)
                count -= found.asked is not None and found.origin_upload_id is not None
            count += 1
        return count

    def aborting(self) -> Sequence[Write]:
        found = self._rows.execute("SELECT id, record FROM writes WHERE state = 4 ORDER BY id")
        return [codec.unpack_write(write_id, record) for write_id, record in found]

    # What is due

    def lanes(self) -> Mapping[tuple[str, str], Mapping[Priority, float]]:
        """Return the slots and buckets in which something is or will be due: by priority, the time of the first."""
        found: dict[tuple[str, str], dict[Priority, float]] = {}
        due = "SELECT slot, bucket, priority, due_at FROM writes WHERE due_at IS NOT NULL AND state < 5 AND"
        # Not by (slot, bucket, priority) > (?, ?, ?): that reads the whole lane.
        within = f"{due} slot = ? AND bucket = ? AND priority > ? ORDER BY priority, due_at LIMIT 1"
        beside = f"{due} slot = ? AND bucket > ? ORDER BY bucket, priority, due_at LIMIT 1"
        behind = f"{due} slot > ? ORDER BY slot, bucket, priority, due_at LIMIT 1"
        row = self._row(behind, "")
        while row is not None:
            slot, bucket, priority, due_at = row
            found.setdefault((slot, bucket), {})[Priority(priority)] = due_at
            row = self._row(within, *row[:3]) or self._row(beside, slot, bucket) or self._row(behind, slot)
        return found

    def due(
        self, lane: tuple[str, str], priority: Priority, now: float, count_max: int, *, newest: bool = False
    ) -> Sequence[Due]:
        """Return the due writes of a lane that have waited longest, or, with `newest`, least."""
        found = self._rows.execute(
            "SELECT id, bucket, key, due_at, attempts FROM writes WHERE slot = ? AND bucket = ? AND priority = ? "
            f"AND due_at <= ? AND state < 5 ORDER BY due_at {'DESC' if newest else 'ASC'} LIMIT ?",
            (*lane, priority, now, count_max),
        )
        return [Due(write_id, ObjectKey(bucket, decoded(key)), *turn) for write_id, bucket, key, *turn in found]

    def living(self, write_ids: Sequence[int]) -> set[int]:
        marks = ",".join("?" * len(write_ids))
        query = f"SELECT id FROM writes WHERE id IN ({marks}) AND state BETWEEN 0 AND 4"
        return {one for (one,) in self._rows.execute(query, write_ids)}

    def urgent(self, write_ids: Sequence[int]) -> set[int]:
        marks = ",".join("?" * len(write_ids))
        query = f"SELECT id FROM writes WHERE id IN ({marks}) AND priority = ?"
        return {one for (one,) in self._rows.execute(query, (*write_ids, Priority.URGENT))}

    # Staged files, and what each slot has (counted by schema.py's triggers)

    def knows_file(self, name: str) -> bool:
        """Return whether anything refers to a staged file: its own row, or, if that is damaged, a part's."""
        return self._row("SELECT 1 FROM files WHERE name = ?", name) is not None or self._is_referred_to(name)

    def unknown_files(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names to which nothing refers (`knows_file`), in one query: callers ask about all files."""
        asked = f"WITH asked (name) AS (VALUES {', '.join(['(?)'] * len(names))}) SELECT name FROM asked"
        found = self._rows.execute(
            f"{asked} WHERE NOT EXISTS (SELECT 1 FROM files WHERE files.name = asked.name) "
            "AND NOT EXISTS (SELECT 1 FROM parts WHERE parts.file = asked.name)",
            names,
        )
        return [name for (name,) in found]

    def file(self, name: str) -> StagedFile | None:
        row = self._row("SELECT record FROM files WHERE name = ?", name)
        return codec.unpack_file(name, row[0]) if row else None

    def left_behind(self) -> Sequence[str]:
        """Return unreferenced files that may not be removed yet."""
        found = self._rows.execute("SELECT name FROM freed WHERE name NOT IN (SELECT name FROM files)")
        return [name for (name,) in found]

    def _is_referred_to(self, name: str) -> bool:
        return self._row("SELECT 1 FROM parts WHERE file = ?", name) is not None

    def usage(self, slot: str) -> Usage:
        row = self._row(f"{_USAGES} WHERE usage.slot = ?", slot)
        return Usage(*row[1:]) if row else Usage()

    def usages(self) -> Mapping[str, Usage]:
        return {slot: Usage(*counted) for slot, *counted in self._rows.execute(_USAGES)}

    def counted(self) -> Mapping[str, Usage]:
        """Return `usages` by counting all rows, without slots that have nothing."""
        sums = dict(self._rows.execute("SELECT slot, sum(size_bytes) FROM files GROUP BY slot").fetchall())
        pending = "SELECT slot, count(*) FROM writes WHERE pending = 1 GROUP BY slot"
        counts = dict(self._rows.execute(pending).fetchall())
        local = {
            slot: sizes
            for slot, *sizes in self._rows.execute(
                "SELECT slot, sum(size_bytes), count(*) FROM writes WHERE state = -1 GROUP BY slot"
            )
        }
        return {
            slot: Usage(sums.get(slot, 0), counts.get(slot, 0), *local.get(slot, (0, 0)))
            for slot in sums.keys() | counts.keys()
        }

    # Buckets, and what this gateway has done to their keys

    def capabilities(self, bucket: str) -> BucketCapabilities | None:
        """Return the facts learned of a bucket. An unreadable row counts as unknown: the next write learns it anew."""
        row = self._row("SELECT record FROM profiles WHERE bucket = ?", bucket)
        return _capabilities(bucket, row[0]) if row else None

    def all_capabilities(self) -> Sequence[tuple[str, BucketCapabilities]]:
        found = self._rows.execute("SELECT bucket, record FROM profiles ORDER BY bucket")
        return [
            (bucket, capabilities)
            for bucket, record in found
            if (capabilities := _capabilities(bucket, record)) is not None
        ]

    def last_own_write(self, key: ObjectKey) -> LastOwnWrite | None:
        """Return the last own write of a key, as far as remembered; for a damaged row, one that is not `known`."""
        row = self._row("SELECT record FROM origin WHERE bucket = ? AND key = ?", key.bucket, encoded(key))
        return as_last_own_write(key, math.inf, row[0]) if row else None

    def last_own_writes(self) -> int:
        row = self._row("SELECT count(*) FROM origin")
        return row[0] if row else 0

    # This node

    def node(self) -> tuple[str, int]:
        """Return this node's id, and its epoch: with a write's `id`, they name it among all nodes."""
        found = dict(self._rows.execute("SELECT name, value FROM node").fetchall())
        return found["id"], found["epoch"]

    def _row(self, query: str, *values: str | int | bytes | float) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._rows.execute(query, values).fetchone()
        return row


def as_outcome(write: Write) -> UploadOutcome | None:
    """Return the outcome of a completed upload; None for a write that was no upload."""
    if write.upload_id is None:
        return None
    at = write.acknowledged_at
    return UploadOutcome(write.upload_id, write.key, at, write.etag, write.completed_of, write.checksums)


def _capabilities(bucket: str, record: bytes) -> BucketCapabilities | None:
    try:
        return codec.unpack_capabilities(bucket, record)
    except BufferDamaged:
        return None


def as_last_own_write(key: ObjectKey, at: float, record: bytes) -> LastOwnWrite:
    try:
        return codec.unpack_last_own_write(key, record)
    except BufferDamaged:
        return LastOwnWrite(at, None, known=False)


def encoded(key: ObjectKey) -> bytes:
    """Return an object's key as the tables have it: in S3's order."""
    return text(key.key)


def decoded(key: bytes) -> str:
    return key.decode("utf-8", "surrogatepass")


def text(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def turn_of(columns: Sequence[Any]) -> Turn:
    due_at, attempts, failing_since, last_error, priority, after_sequence, damaged = columns
    return Turn(due_at, attempts, failing_since, last_error, Priority(priority), after_sequence, bool(damaged))

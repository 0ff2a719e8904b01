"""The lowest layer of the journal's rows: staged files and who refers to them, what slots have, buckets, own doings."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.clock import Moment
from gateway.errors import BufferDamaged
from gateway.objects import ObjectKey
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal import codec
from gateway.writeback.journal.records import (
    LAST_OWN_WRITE_KEPT_SECONDS,
    BucketCapabilities,
    Conditions,
    LastOwnWrite,
    Priority,
    Turn,
)

LAST_OWN_WRITES_MAX = 50_000
"""Some 300 bytes each. With more, the oldest are forgotten sooner: then a write may be taken for somebody else's, which
loses nothing."""


PENDING = "pending = 1 AND state < 5"
OPEN = "upload_id IS NOT NULL AND pending = 0 AND state < 3"
"""What is acknowledged, and open uploads, as the indices have it."""

TURN_COLUMNS = "due_at, attempts, failing_since, last_error, priority, after_sequence, damaged"

BEHIND_ALL = b"\xff"
"""No byte of UTF-8 is as great."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of staged files that something refers to, a file that copies share once; objects and tombstones that are
    pending."""

    staged_bytes: int = 0
    objects: int = 0


class Rows:
    """One transaction's view. `freed` are the names of the files that nothing refers to any more.

    `has_due`: there is more for the reconciler to look at.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._rows = connection
        self.freed: list[str] = []
        self.has_due = False

    # Staged files

    def knows_file(self, name: str) -> bool:
        """Whether anything refers to a staged file: its own row, or, where that is damaged, a part's."""
        return self._row("SELECT 1 FROM files WHERE name = ?", name) is not None or self._is_referred_to(name)

    def unknown_files(self, names: Sequence[str]) -> Sequence[str]:
        """Those of some names to which nothing refers (`knows_file`), in one query: it is asked about all there are."""
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
        """Files that nothing refers to any more, and that are perhaps not removed yet."""
        found = self._rows.execute("SELECT name FROM freed WHERE name NOT IN (SELECT name FROM files)")
        return [name for (name,) in found]

    def removed(self, names: Iterable[str]) -> None:
        """They are gone: whoever comes need not remove them."""
        self._rows.executemany("DELETE FROM freed WHERE name = ?", [(name,) for name in names])

    def _put_file(self, file: StagedFile, slot: str) -> None:
        """On a slot's account, where it is not on another's already; what only the origin has is on nobody's."""
        if file.is_here:
            row = (file.name, slot, file.size_bytes, codec.pack_file(file))
            self._rows.execute("INSERT INTO files VALUES (?, ?, ?, ?) ON CONFLICT (name) DO NOTHING", row)

    def _free(self, names: Iterable[str]) -> None:
        for name in filter(None, names):
            if self._is_referred_to(name):
                continue
            self._rows.execute("DELETE FROM files WHERE name = ?", (name,))
            self._rows.execute("INSERT OR IGNORE INTO freed VALUES (?)", (name,))
            self.freed.append(name)

    def _is_referred_to(self, name: str) -> bool:
        return self._row("SELECT 1 FROM parts WHERE file = ?", name) is not None

    # What each slot has, counted in the transactions that change it (schema.py's triggers)

    def usage(self, slot: str) -> Usage:
        """Of one slot: a look-up, however much is pending."""
        row = self._row("SELECT staged_bytes, objects FROM usage WHERE slot = ?", slot)
        return Usage(*row) if row else Usage()

    def usages(self) -> Mapping[str, Usage]:
        """Of every slot that ever had something here."""
        found = self._rows.execute("SELECT slot, staged_bytes, objects FROM usage")
        return {slot: Usage(staged_bytes, objects) for slot, staged_bytes, objects in found}

    def counted(self) -> Mapping[str, Usage]:
        """The same as `usages`, by counting all of it, without slots that have nothing."""
        sums = dict(self._rows.execute("SELECT slot, sum(size_bytes) FROM files GROUP BY slot").fetchall())
        pending = "SELECT slot, count(*) FROM writes WHERE pending = 1 GROUP BY slot"
        counts = dict(self._rows.execute(pending).fetchall())
        return {slot: Usage(sums.get(slot, 0), counts.get(slot, 0)) for slot in sums.keys() | counts.keys()}

    def recount(self) -> None:
        """Have the counters say what there is, whatever they said."""
        counted = self.counted()
        self._rows.execute("DELETE FROM usage")
        rows = [(slot, usage.staged_bytes, usage.objects) for slot, usage in counted.items()]
        self._rows.executemany("INSERT INTO usage VALUES (?, ?, ?)", rows)

    # Buckets

    def capabilities(self, bucket: str) -> BucketCapabilities | None:
        """What was learned of a bucket. What cannot be read any more is not known: the next write learns it anew."""
        row = self._row("SELECT record FROM profiles WHERE bucket = ?", bucket)
        return _capabilities(bucket, row[0]) if row else None

    def all_capabilities(self) -> Sequence[tuple[str, BucketCapabilities]]:
        """The same of all, in order."""
        found = self._rows.execute("SELECT bucket, record FROM profiles ORDER BY bucket")
        return [
            (bucket, capabilities)
            for bucket, record in found
            if (capabilities := _capabilities(bucket, record)) is not None
        ]

    def learn(self, bucket: str, capabilities: BucketCapabilities) -> None:
        """What one of its answers has just told. What is known of its conditions stays, where this says nothing."""
        before = self.capabilities(bucket)
        if before is not None and not capabilities.conditions.learned_at:
            capabilities = replace(capabilities, conditions=before.conditions)
        packed = codec.pack_capabilities(bucket, capabilities)
        self._rows.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?)", (bucket, packed))

    def learn_conditions(self, bucket: str, conditions: Conditions) -> None:
        """Which conditions it honours, whatever else was learned meanwhile."""
        capabilities = self.capabilities(bucket)
        if capabilities is not None:
            self.learn(bucket, replace(capabilities, conditions=conditions))

    # What this gateway has done

    def record_own_write(self, key: ObjectKey, own: LastOwnWrite) -> None:
        """This gateway has changed what the origin has under a key. Where who knows how: perhaps not at all."""
        before = self.last_own_write(key) if not own.known else None
        if before is not None:
            own = replace(own, etag=before.etag)
        looked_at = own.at + own.kept_seconds - LAST_OWN_WRITE_KEPT_SECONDS
        row = (key.bucket, encoded(key), looked_at, codec.pack_last_own_write(key, own))
        self._rows.execute("INSERT OR REPLACE INTO origin VALUES (?, ?, ?, ?)", row)

    def last_own_write(self, key: ObjectKey) -> LastOwnWrite | None:
        """What it has last done to it, as far as is remembered; what is damaged: who knows what."""
        row = self._row("SELECT record FROM origin WHERE bucket = ? AND key = ?", key.bucket, encoded(key))
        return _last_own_write(key, math.inf, row[0]) if row else None

    def last_own_writes(self) -> int:
        """How many are remembered."""
        row = self._row("SELECT count(*) FROM origin")
        return row[0] if row else 0

    def _forget_last_own_writes(self, moment: Moment, count_max: int) -> int:
        """Those that nobody can ask for any more; those of keys with an open upload stay, as far as there is room."""
        open_upload = f"SELECT 1 FROM writes WHERE bucket = origin.bucket AND key = origin.key AND {OPEN}"
        old = f"SELECT bucket, key, record FROM origin WHERE at < ? AND NOT EXISTS ({open_upload}) LIMIT ?"
        found = self._rows.execute(old, (moment.at - LAST_OWN_WRITE_KEPT_SECONDS, count_max)).fetchall()
        for bucket, key, record in found:
            own = _last_own_write(ObjectKey(bucket, decoded(key)), 0.0, record)
            if moment.since(own.moment or Moment(own.at))[0] >= own.kept_seconds:
                self._rows.execute("DELETE FROM origin WHERE bucket = ? AND key = ?", (bucket, key))
            else:  # the clock was set since
                self._rows.execute("UPDATE origin SET at = ? WHERE bucket = ? AND key = ?", (moment.at, bucket, key))
        too_many = min(count_max, self.last_own_writes() - LAST_OWN_WRITES_MAX)
        if too_many > 0:
            oldest = "SELECT bucket, key FROM origin ORDER BY at LIMIT ?"
            self._rows.execute(f"DELETE FROM origin WHERE (bucket, key) IN ({oldest})", (too_many,))
        return max(len(found), too_many)

    def _row(self, query: str, *values: str | int | bytes | float) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._rows.execute(query, values).fetchone()
        return row


def _capabilities(bucket: str, record: bytes) -> BucketCapabilities | None:
    try:
        return codec.unpack_capabilities(bucket, record)
    except BufferDamaged:
        return None


def _last_own_write(key: ObjectKey, at: float, record: bytes) -> LastOwnWrite:
    try:
        return codec.unpack_last_own_write(key, record)
    except BufferDamaged:
        return LastOwnWrite(at, None, known=False)


def encoded(key: ObjectKey) -> bytes:
    """An object's key as the tables have it: in S3's order."""
    return text(key.key)


def decoded(key: bytes) -> str:
    """And back."""
    return key.decode("utf-8", "surrogatepass")


def text(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


def turn_of(columns: Sequence[Any]) -> Turn:
    """What `TURN_COLUMNS` say."""
    due_at, attempts, failing_since, last_error, priority, after_sequence, damaged = columns
    return Turn(due_at, attempts, failing_since, last_error, Priority(priority), after_sequence, bool(damaged))

"""What lies below the writes of the journal, and is changed with them: staged files, buckets, what this gateway did."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import replace

from gateway.clock import Moment
from gateway.objects import ObjectKey
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal import codec
from gateway.writeback.journal.records import (
    LAST_OWN_WRITE_KEPT_SECONDS,
    BucketCapabilities,
    Conditions,
    LastOwnWrite,
)
from gateway.writeback.journal.view import OPEN, JournalView, as_last_own_write, decoded, encoded

LAST_OWN_WRITES_MAX = 50_000
"""Some 300 bytes each. With more, the oldest are forgotten sooner: then a write may be taken for somebody else's, which
loses nothing."""


class Rows(JournalView):
    """One transaction's view. `freed` are the names of the files that nothing refers to any more.

    `has_due`: there is more for the reconciler to look at.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.freed: list[str] = []
        self.has_due = False

    # Staged files

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

    # What each slot has, counted in the transactions that change it (schema.py's triggers)

    def recount(self) -> None:
        """Have the counters say what there is, whatever they said."""
        counted = self.counted()
        self._rows.execute("DELETE FROM usage")
        rows = [(slot, usage.staged_bytes, usage.objects) for slot, usage in counted.items()]
        self._rows.executemany("INSERT INTO usage VALUES (?, ?, ?)", rows)

    # Buckets

    def learn(self, bucket: str, capabilities: BucketCapabilities) -> None:
        """What one of its answers has just told. What is known of its conditions stays, where this says nothing, and so
        do the storage classes that it has taken."""
        before = self.capabilities(bucket)
        if before is not None:
            classes = before.storage_classes | capabilities.storage_classes
            capabilities = replace(capabilities, storage_classes=classes)
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

    def _forget_last_own_writes(self, moment: Moment, count_max: int) -> int:
        """Those that nobody can ask for any more; those of keys with an open upload stay, as far as there is room."""
        open_upload = f"SELECT 1 FROM writes WHERE bucket = origin.bucket AND key = origin.key AND {OPEN}"
        old = f"SELECT bucket, key, record FROM origin WHERE at < ? AND NOT EXISTS ({open_upload}) LIMIT ?"
        found = self._rows.execute(old, (moment.at - LAST_OWN_WRITE_KEPT_SECONDS, count_max)).fetchall()
        for bucket, key, record in found:
            own = as_last_own_write(ObjectKey(bucket, decoded(key)), 0.0, record)
            if moment.passed_since(own.moment or Moment(own.at)) >= own.kept_seconds:
                self._rows.execute("DELETE FROM origin WHERE bucket = ? AND key = ?", (bucket, key))
            else:  # the clock was set since
                self._rows.execute("UPDATE origin SET at = ? WHERE bucket = ? AND key = ?", (moment.at, bucket, key))
        too_many = min(count_max, self.last_own_writes() - LAST_OWN_WRITES_MAX)
        if too_many > 0:
            oldest = "SELECT bucket, key FROM origin ORDER BY at LIMIT ?"
            self._rows.execute(f"DELETE FROM origin WHERE (bucket, key) IN ({oldest})", (too_many,))
        return max(len(found), too_many)

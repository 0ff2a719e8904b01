"""The journal inside one transaction, a repository for each of its tables, or for the writes of one kind.

Related rows change in one transaction, so that a kill at any moment leaves the state before or after.
"""

from __future__ import annotations

import sqlite3

from gateway.core.clock import Moment
from gateway.writeback.journal.buckets import Buckets
from gateway.writeback.journal.checkpoints import Checkpoints
from gateway.writeback.journal.files import Files, Parts
from gateway.writeback.journal.local import LocalWrites
from gateway.writeback.journal.rows import OPEN, Table
from gateway.writeback.journal.turns import Turns
from gateway.writeback.journal.uploads import Uploads
from gateway.writeback.journal.writes import HashSlots, Writes

ENDED_MAX = 50_000
"""The most ended uploads that are remembered: the latest."""

FORGOTTEN_AT_ONCE = 1000
"""Rows per step: writers wait meanwhile."""


class _ReadOnly:
    """The hash slots of a transaction that only reads."""

    def set(self, hash_slot: int) -> None:
        raise AssertionError(f"the hash slot {hash_slot} is set by a transaction that only reads")


class JournalTransaction(Table):
    """One transaction's view of the journal, and its changes. BufferDamaged for a damaged row.

    Without `pending_keys` it only reads.
    """

    def __init__(self, connection: sqlite3.Connection, pending_keys: HashSlots | None = None) -> None:
        super().__init__(connection)
        self.files = Files(connection)
        self.parts = Parts(self.files)
        self.turns = Turns(connection)
        self.buckets = Buckets(connection)
        self.checkpoints = Checkpoints(connection)
        self.writes = Writes(self.parts, self.turns, self.buckets, self.checkpoints, pending_keys or _ReadOnly())
        self.uploads = Uploads(self.writes)
        self.local = LocalWrites(self.writes)

    def counts(self) -> tuple[int, int]:
        """Return the numbers of pending writes and of open uploads."""
        pending = self._value("SELECT count(*) FROM writes WHERE pending = 1")
        return pending, self._value(f"SELECT count(*) FROM writes WHERE {OPEN}")

    def node(self) -> tuple[str, int]:
        """Return this node's id, and its epoch: with a write's `id`, they name it among all nodes."""
        found = dict(self._all("SELECT name, value FROM node"))
        return found["id"], found["epoch"]

    def begin_epoch(self, now: float) -> None:
        """Begin the epoch of a new flushing process: damaged writes are tried again, as they may have been repaired."""
        self._change("UPDATE node SET value = value + 1 WHERE name = 'epoch'")
        self._change("UPDATE writes SET damaged = 0, due_at = ? WHERE damaged = 1 AND state <> 3 AND state >= 0", now)

    def count_reopening(self) -> None:
        """Write something, so that the commit reaches the disk."""
        counted = "ON CONFLICT (name) DO UPDATE SET value = value + 1"
        self._change(f"INSERT INTO node VALUES ('reopenings', 1) {counted}")

    def set_right(self, now: Moment) -> None:
        """Correct the times that were written before the clock went back, and doubt old requests to the origin."""
        self.uploads.doubt_old(now)
        self.turns.set_right(now.at)

    def forget_ended(self, now: Moment, count_max: int = FORGOTTEN_AT_ONCE) -> bool:
        """Forget old or surplus ended uploads, checkpoints and own writes; return whether more may be left."""
        old = "SELECT id FROM writes WHERE state = 5 AND due_at < ? LIMIT ?"
        forgotten = self._change(f"DELETE FROM writes WHERE id IN ({old})", now.at, count_max)
        too_many = min(count_max, self.ended_count() - ENDED_MAX)
        if too_many > 0:
            oldest = "SELECT id FROM writes WHERE state = 5 ORDER BY due_at LIMIT ?"
            self._change(f"DELETE FROM writes WHERE id IN ({oldest})", too_many)
        is_more = self.checkpoints.forget(count_max)
        return is_more or max(forgotten, too_many, self.buckets.forget_old(now, count_max)) >= count_max

    def ended_count(self) -> int:
        count: int = self._value("SELECT count(*) FROM writes WHERE state = 5")
        return count

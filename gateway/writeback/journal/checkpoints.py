"""Checkpoints in the journal, changed in the transactions that change their writes.

    checkpoints          bucket and prefix → a checkpoint, once an object of it was begun here
    checkpoint_objects   bucket and key → an object of a checkpoint, as it was acknowledged last

An object's `write_id` is its write; `durable_at` is set once the origin has it (seconds since 1970). If the write is
gone, and the origin was never seen to have it, the write was given up, or overwritten under other rules: the object
does not count, and is removed in time. `ordinal` is the checkpoint's place among those of its run, from 1, in the order
in which they began. `save_order` orders all checkpoints by the beginning of their last saves, even when the clock goes
back: the newest save must not pass for an older one. A checkpoint's state follows from its objects and their writes
(checkpoints/state.py): no column holds it.

An acknowledged write of a checkpoint costs a look-up and an insertion, a settled one an update, one of no checkpoint a
look-up: other rules may have counted its key before.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.model import ObjectKey
from gateway.writeback.checkpoints.layouts import CheckpointName, Member
from gateway.writeback.journal.records import Write
from gateway.writeback.journal.rows import BEHIND_ALL, OPEN, Table, Value, at, text

DURABLE_MAX = 200
"""The durable checkpoints that are remembered for each slot: the newest."""

OBJECTS_MAX = 100_000
"""The most objects of all checkpoints, some 150 bytes each. With more, the oldest durable ones are forgotten."""

AGAIN_SECONDS = 60.0
"""An object that comes again this long after the last of its checkpoint begins another save; sooner, it is a repeat."""

_LEFT = "EXISTS (SELECT 1 FROM checkpoint_objects WHERE checkpoint_id = checkpoints.id AND durable_at IS NULL)"

_NEXT_ORDER = "(SELECT coalesce(max(save_order), 0) + 1 FROM checkpoints)"


class Checkpoints(Table):
    def is_rest_pending(self, key: ObjectKey) -> bool:
        """Return whether the origin lacks an object of the checkpoint that this one belongs to."""
        left = (
            "SELECT 1 FROM checkpoint_objects WHERE durable_at IS NULL AND checkpoint_id = "
            "(SELECT checkpoint_id FROM checkpoint_objects WHERE bucket = ? AND key = ?) LIMIT 1"
        )
        return self._row(left, *at(key)) is not None

    def is_left(self, bucket: str, prefix: str) -> bool:
        """Return whether the origin lacks an object of the checkpoint of this prefix."""
        left = f"SELECT 1 FROM checkpoints WHERE bucket = ? AND prefix = ? AND {_LEFT}"
        return self._row(left, bucket, text(prefix)) is not None

    def begun(self, write: Write) -> None:
        """Enter the checkpoint of a write whose first byte is about to come."""
        if write.member is not None:
            self._checkpoint(write.member.checkpoint, write.spec.slot, write.began_at)

    def acknowledged(self, write: Write) -> None:
        """Make an object (a tombstone: nothing) count for its key, and not what other rules had counted before."""
        if write.member is None or write.deleted:
            self.removed(write.key)
        else:
            row = (write.id, write.size_bytes, write.began_at, write.acknowledged_at, None)
            self._enter(write.key, write.member, write.spec.slot, row)

    def written_past(self, key: ObjectKey, member: Member, slot: str, size_bytes: int, now: float) -> None:
        """Count an object that was written to the origin directly."""
        self._enter(key, member, slot, (0, size_bytes, now, now, now))

    def completed(self, write: Write, now: float) -> None:
        if write.member is None:
            self.removed(write.key)
        else:
            self._enter(write.key, write.member, write.spec.slot, (0, write.size_bytes, write.began_at, now, now))

    def settled(self, write: Write, now: float) -> None:
        """Mark an object that has reached the origin as durable."""
        if write.member is not None and not write.deleted:
            of_write = "WHERE bucket = ? AND key = ? AND write_id = ?"
            self._change(f"UPDATE checkpoint_objects SET durable_at = ? {of_write}", now, *at(write.key), write.id)

    def given_up(self, write: Write) -> None:
        if write.member is not None:
            self._remove(write.key, "AND write_id = ?", write.id)

    def removed(self, key: ObjectKey) -> None:
        """Remove a deleted object, and its checkpoint with the last one."""
        self._remove(key, "")

    def _remove(self, key: ObjectKey, condition: str, *values: Value) -> None:
        gone = f"DELETE FROM checkpoint_objects WHERE bucket = ? AND key = ? {condition} RETURNING checkpoint_id"
        for checkpoint_id in self._column(gone, *at(key), *values):
            self._drop_empty("id = ?", checkpoint_id)

    def _enter(
        self, key: ObjectKey, member: Member, slot: str, row: tuple[int, int, float, float, float | None]
    ) -> None:
        _, _, began_at, acknowledged_at, _ = row
        checkpoint_id, save_began_at = self._checkpoint(member.checkpoint, slot, began_at)
        same = "SELECT began_at FROM checkpoint_objects WHERE bucket = ? AND key = ? AND checkpoint_id = ?"
        before = self._value(same, *at(key), checkpoint_id)
        if before is not None and before >= save_began_at:
            last_at = self._value(
                "SELECT max(acknowledged_at) FROM checkpoint_objects WHERE checkpoint_id = ?", checkpoint_id
            )
            # the clock was set: a long upload, too, began earlier
            went_back = acknowledged_at < last_at - AGAIN_SECONDS
            if went_back or began_at - last_at > AGAIN_SECONDS:
                again = f"UPDATE checkpoints SET began_at = ?, save_order = {_NEXT_ORDER} WHERE id = ?"
                self._change(again, began_at, checkpoint_id)
        elif began_at < save_began_at:
            self._change("UPDATE checkpoints SET began_at = ? WHERE id = ?", began_at, checkpoint_id)
        self._put("checkpoint_objects", *at(key), checkpoint_id, member.rank, *row)

    def _checkpoint(self, name: CheckpointName, slot: str, began_at: float) -> tuple[int, float]:
        """Return its id, and when its save began; enter a new one."""
        named = (name.bucket, text(name.prefix))
        row = self._row("SELECT id, began_at, slot, layout FROM checkpoints WHERE bucket = ? AND prefix = ?", *named)
        if row is None:
            checkpoint_id = self._insert(
                "INSERT INTO checkpoints (bucket, prefix, run, slot, step, layout, began_at, ordinal, save_order) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, "
                f"(SELECT coalesce(max(ordinal), 0) + 1 FROM checkpoints WHERE bucket = ? AND run = ?), {_NEXT_ORDER})",
                *(*named, text(name.run), slot, name.step, name.layout, began_at, name.bucket, text(name.run)),
            )
            return checkpoint_id, began_at
        checkpoint_id, save_began_at, slot_before, layout = row
        told = name.layout if layout == "step" else layout  # the first object's name had only a number
        if (slot, told) != (slot_before, layout):
            self._change("UPDATE checkpoints SET slot = ?, layout = ? WHERE id = ?", slot, told, checkpoint_id)
        return checkpoint_id, save_began_at

    # So that nothing grows for ever

    def forget(self, count_max: int) -> bool:
        """Remove what no longer counts, and the oldest; return whether more may be left."""
        given_up = (
            "SELECT o.bucket, o.key FROM checkpoint_objects o "
            "LEFT JOIN writes w ON w.id = o.write_id AND w.pending = 1 "
            "WHERE o.durable_at IS NULL AND w.id IS NULL LIMIT ?"
        )
        counts = [self._forget_these(given_up, count_max), self._drop_empty("1 LIMIT ?", count_max)]
        slots = self._column("SELECT DISTINCT slot FROM checkpoints")
        counts += [self._forget_old(slot, count_max) for slot in slots]
        counts.append(self._forget_too_many(count_max))
        return max(counts) >= count_max

    def _drop_empty(self, condition: str, *values: Value) -> int:
        empty = (
            "SELECT id FROM checkpoints WHERE NOT EXISTS "
            "(SELECT 1 FROM checkpoint_objects WHERE checkpoint_id = checkpoints.id) AND NOT EXISTS "
            "(SELECT 1 FROM writes WHERE bucket = checkpoints.bucket AND key >= checkpoints.prefix "
            f"AND key < CAST(checkpoints.prefix || x'{BEHIND_ALL.hex()}' AS BLOB) AND {OPEN}) AND {condition}"
        )
        return self._change(f"DELETE FROM checkpoints WHERE id IN ({empty})", *values)

    def _forget_old(self, slot: str, count_max: int) -> int:
        """Forget whole checkpoints of a slot, older than the newest DURABLE_MAX durable ones."""
        old = f"SELECT id FROM checkpoints WHERE slot = ? AND NOT {_LEFT} ORDER BY save_order DESC LIMIT -1 OFFSET ?"
        return self._forget_objects(self._column(old, slot, DURABLE_MAX), count_max)

    def _forget_too_many(self, count_max: int) -> int:
        wanted = min(count_max, self._value("SELECT count(*) FROM checkpoint_objects") - OBJECTS_MAX)
        if wanted <= 0:
            return 0
        return self._forget_objects(self._column("SELECT id FROM checkpoints ORDER BY save_order"), wanted)

    def _forget_objects(self, checkpoint_ids: Sequence[int], count_max: int) -> int:
        """Forget durable objects of checkpoints, and the checkpoints with their last ones; return how many."""
        these = "SELECT bucket, key FROM checkpoint_objects WHERE checkpoint_id = ? AND durable_at IS NOT NULL LIMIT ?"
        count = 0
        for checkpoint_id in checkpoint_ids:
            count += self._forget_these(these, checkpoint_id, count_max - count)
            self._drop_empty("id = ?", checkpoint_id)
            if count >= count_max:
                break
        return count

    def _forget_these(self, query: str, *values: Value) -> int:
        return self._change(f"DELETE FROM checkpoint_objects WHERE (bucket, key) IN ({query})", *values)

"""Acknowledged objects that are kept only here (`State.LOCAL`): not sent, and removed by age, or for room."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged
from gateway.writeback.journal.records import Priority, State, Turn, Write
from gateway.writeback.journal.rows import AWAITED_SINCE, Table, directories, keys_under, marks
from gateway.writeback.journal.turns import RAISED_MAX
from gateway.writeback.journal.writes import Writes, priority_of

TAKEN_AT_ONCE = 1000
"""Objects per step: writers wait meanwhile."""


class LocalWrites(Table):
    def __init__(self, writes: Writes) -> None:
        super().__init__(writes._rows)
        self._writes = writes

    def oldest(self, slot: str) -> Moment | None:
        """Return when a slot's oldest local object was acknowledged. None without one, or if its row is damaged."""
        oldest = self._column("SELECT id FROM writes WHERE slot = ? AND state = -1 ORDER BY sequence LIMIT 1", slot)
        return next((one.acknowledged_then for one in self._writes.readable(oldest)), None)

    def keep_here(self, checkpoint_id: int, now: float, newer_since: float = 0.0) -> int:
        """Make a checkpoint's unsent objects local, at most TAKEN_AT_ONCE, waiting ones first; return how many.

        Those stay in the flush that are becoming visible at the origin, that a request waits for, that are in conflict
        or damaged, or have parts that only the origin has. Markers above it that came after it, and before
        `newer_since` when the newer checkpoint was whole, become local too: they may name it. Does nothing while a
        manifest of the checkpoint must still be sent: it would arrive without its files.
        """
        unsent = (
            "FROM checkpoint_objects o JOIN writes w ON w.id = o.write_id WHERE o.checkpoint_id = ? "
            "AND o.durable_at IS NULL AND w.pending = 1"
        )
        goes_on = f"{unsent} AND w.behind IS NOT NULL AND (w.state = ? AND w.priority = ? OR w.state = ?) LIMIT 1"
        sent = (checkpoint_id, State.COMMITTED, Priority.URGENT)
        if self._row(f"SELECT 1 {goes_on}", *sent, State.CONFLICT) is not None:
            return 0
        found = self._column(
            f"SELECT w.id {unsent} AND w.state = ? AND w.damaged = 0 AND w.priority <> ? "
            "AND NOT EXISTS (SELECT 1 FROM parts WHERE write_id = w.id AND file = '') "
            "ORDER BY w.behind IS NULL LIMIT ?",
            *(*sent, TAKEN_AT_ONCE),
        )
        kept = {one.id: one for one in self._writes.readable(found)}
        if kept:
            first = min(kept.values(), key=lambda one: self._writes.since(one.id))
            kept |= {one.id: one for one in self._markers_above(first, newer_since)}
        for one in kept.values():
            self._writes.drop_origin_upload(one, now)
            self._writes.parts.send_again(one.id)
            local = replace(one, state=State.LOCAL, origin_upload_id=None)
            self._writes.update(local, Turn(None, priority=Priority.LARGE))
        for one in kept.values():
            self._writes.release(one.sequence, now)
        self._writes.turns.has_due |= bool(kept)  # transfers under way are cut off
        return len(kept)

    def _markers_above(self, write: Write, until: float) -> list[Write]:
        """Return markers still to send that waited for a write and were acknowledged before a time."""
        above = directories(write.key.key)
        found = self._column(
            f"SELECT id FROM writes WHERE bucket = ? AND behind IN ({marks(above)}) AND sequence > ? AND state < 5 "
            "AND state = 1 AND pending = 1 AND damaged = 0 AND behind IS NOT NULL",
            write.key.bucket,
            *above,
            self._writes.since(write.id),
        )
        return [one for one in self._writes.readable(found) if one.member is None and one.acknowledged_at < until]

    def send_after_all(self, write_id: int, now: float, *, is_urgent: bool = True) -> bool:
        """Send a local object after all, if urgent before other writes. False when it is not local any more."""
        write = self._writes.get(write_id)
        if write is None or write.state is not State.LOCAL:
            return False
        self._writes.send(write, now, Priority.URGENT if is_urgent else priority_of(write))
        return True

    def send_all_after_all(
        self, bucket: str, start: bytes, stop: bytes, now: float, besides: Collection[str] = ()
    ) -> None:
        """Send the local objects in a range of keys, except those of some slots; at most RAISED_MAX, the oldest."""
        query = (
            "SELECT id, slot FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND state < 5 AND state = -1 "
            "ORDER BY sequence LIMIT ?"
        )
        for write_id, slot in self._all(query, bucket, start, stop, RAISED_MAX):
            if slot not in besides:
                with suppress(BufferDamaged):  # its reader reports it
                    self.send_after_all(write_id, now)

    def send_checkpoint_after_all(self, slot: str, checkpoint_id: int | None, now: float) -> int:
        """Send at most TAKEN_AT_ONCE local objects of a checkpoint (None: of none) in their turn; return how many."""
        found = self._column(
            "SELECT w.id FROM writes w LEFT JOIN checkpoint_objects o ON o.bucket = w.bucket AND o.key = w.key "
            "AND o.write_id = w.id WHERE w.state = -1 AND w.slot = ? AND o.checkpoint_id IS ? "
            "ORDER BY w.sequence LIMIT ?",
            *(slot, checkpoint_id, TAKEN_AT_ONCE),
        )
        sent = 0
        for write_id in found:
            with suppress(BufferDamaged):  # its reader reports it
                if not self._may_name_what_is_kept_here(write_id):
                    sent += self.send_after_all(write_id, now, is_urgent=False)
        return sent

    def _may_name_what_is_kept_here(self, write_id: int) -> bool:
        write = self._writes.get(write_id)
        if write is None or write.behind is None or write.member is not None:
            return False
        before = (
            "SELECT 1 FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND state < 5 AND state = -1 "
            f"AND {AWAITED_SINCE} < ? LIMIT 1"
        )
        return self._row(before, write.key.bucket, *keys_under(write.behind), write.sequence) is not None

    def remove(
        self, slot: str, now: Moment, size_bytes: int | None = None, idle_seconds: float = 0.0
    ) -> tuple[int, int]:
        """Remove a slot's local objects, the oldest first, until `size_bytes` are free; return objects and bytes."""
        # Checkpoints go as a whole, none to which something came in the last `idle_seconds`. Without a size, all go.
        objects = removed_bytes = 0
        oldest = "SELECT id FROM writes WHERE slot = ? AND state = -1 ORDER BY sequence LIMIT ?"
        seen = set[int]()
        for write_id in self._column(oldest, slot, TAKEN_AT_ONCE):
            if size_bytes is not None and removed_bytes >= size_bytes:
                break
            if write_id in seen:
                continue
            together = self._together_with(write_id)
            seen |= {one.id for one in together}
            if any(now.passed_since(one.acknowledged_then) < idle_seconds for one in together):
                continue
            for one in together:
                self._writes.give_up(one, now.at)
                objects, removed_bytes = objects + 1, removed_bytes + one.size_bytes
        return objects, removed_bytes

    def _together_with(self, write_id: int) -> list[Write]:
        """Return a local object, with the other local ones of its checkpoint."""
        checkpoint = self._value("SELECT checkpoint_id FROM checkpoint_objects WHERE write_id = ?", write_id)
        local = (
            "SELECT w.id FROM checkpoint_objects o JOIN writes w ON w.id = o.write_id "
            "WHERE o.checkpoint_id = ? AND w.state = -1"
        )
        return self._writes.readable([write_id] if checkpoint is None else self._column(local, checkpoint))

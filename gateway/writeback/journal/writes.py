"""Acknowledged writes on their way to the origin: the table `writes`, and the order in which it lets them go.

    writes of a key with a place in the order (`sequence`) form a chain: each waits for the one before it
    a marker waits for what was acknowledged before it under its directory (order.py)

One column serves both: `after_sequence` names a write to wait for. When that write goes, the next one is looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged, InConflict
from gateway.core.model import CLAIMS_MAX, ObjectKey
from gateway.writeback.checkpoints.layouts import Member
from gateway.writeback.journal.buckets import Buckets, LastOwnWrite
from gateway.writeback.journal.checkpoints import Checkpoints
from gateway.writeback.journal.files import Parts
from gateway.writeback.journal.records import (
    CreateAttempt,
    ExpectedVersion,
    Priority,
    State,
    Turn,
    UploadOutcome,
    Write,
    WriteSpec,
    pack_ended,
    pack_write,
    runs_of,
    unpack_write,
)
from gateway.writeback.journal.rows import (
    AWAITED_SINCE,
    BEHIND_ALL,
    PENDING,
    Table,
    Value,
    at,
    decoded,
    directories,
    keys_under,
    marks,
    text,
)
from gateway.writeback.journal.turns import Turns
from gateway.writeback.pending_key_filter import hash_slot_of

ENDED_KEPT_SECONDS = 24 * 3600.0
"""Seconds for which a repeated Complete gets the answer of the first."""

SMALL_BYTES_MAX = 8 * 1024**2
"""Objects up to this size are not kept waiting by larger ones."""


SEQUENCE_MAX = 2**63 - 1
"""The largest integer of SQLite."""


class HashSlots(Protocol):
    """Hash slots of pending_key_filter.py, set before something is pending."""

    def set(self, hash_slot: int) -> None: ...


class Writes(Table):
    def __init__(
        self, parts: Parts, turns: Turns, buckets: Buckets, checkpoints: Checkpoints, pending_keys: HashSlots
    ) -> None:
        super().__init__(parts._rows)
        self.parts = parts
        self.turns = turns
        self.buckets = buckets
        self.checkpoints = checkpoints
        self.pending_keys = pending_keys

    # Rows. BufferDamaged for a damaged one

    def get(self, write_id: int) -> Write | None:
        """Return a write that is not over, without its parts."""
        return self.first("id = ? AND state < 5", write_id)

    def whole(self, write_id: int) -> Write | None:
        found = self.get(write_id)
        return None if found is None else replace(found, parts=tuple(self.parts.of(write_id)))

    def readable(self, write_ids: Iterable[int]) -> list[Write]:
        """Return these writes, without the damaged ones: their reader reports them."""
        found = list[Write]()
        for one in write_ids:
            with suppress(BufferDamaged):
                found += filter(None, [self.get(one)])
        return found

    def of_key(self, key: ObjectKey, condition: str) -> list[Write]:
        return self.found(f"bucket = ? AND key = ? AND state < 5 AND {condition} ORDER BY sequence", *at(key))

    def first(self, condition: str, *values: Value) -> Write | None:
        """Return the first write that a condition finds, in its order."""
        row = self._row(f"SELECT id, record FROM writes WHERE {condition} LIMIT 1", *values)
        return None if row is None else unpack_write(*row)

    def found(self, condition: str, *values: Value) -> list[Write]:
        found = self._all(f"SELECT id, record FROM writes WHERE {condition}", *values)
        return [unpack_write(write_id, record) for write_id, record in found]

    def insert(self, write: Write, turn: Turn) -> Write:
        return self.update(self._insert_row(write, turn))

    def _insert_row(self, write: Write, turn: Turn) -> Write:
        """Insert a write whose record must follow within the transaction."""
        key = write.key
        row_id = self._insert(
            "INSERT INTO writes (upload_id, bucket, key, place, slot, state, pending, due_at, attempts, priority, "
            "damaged, size_bytes, record) VALUES (?, ?, ?, ?, ?, ?, 0, ?, 0, ?, 0, ?, x'')",
            *(write.upload_id, *at(key), hash_slot_of(key), write.spec.slot, write.state),
            *(turn.due_at, turn.priority, write.size_bytes),
        )
        return replace(write, id=row_id)

    def update(self, write: Write, turn: Turn | None = None) -> Write:
        """Rewrite a row; with `turn`, also its due time and failures."""
        behind = None if write.behind is None else text(write.behind)
        self._change(
            "UPDATE writes SET state = ?, sequence = ?, behind = ?, record = ? WHERE id = ?",
            *(write.state, write.sequence or None, behind, pack_write(write), write.id),
        )
        if turn is not None:
            self.turns.put(write.id, turn)
        return write

    def change(self, write: Write, expected: State) -> bool:
        """Write a row if the write is still in the expected state; otherwise return False."""
        if self._value("SELECT state FROM writes WHERE id = ?", write.id) != expected:
            return False
        self.update(write)
        return True

    # What is pending

    def latest(self, key: ObjectKey) -> Write | None:
        """Return the object or tombstone of a key that was acknowledged last and is pending; without its parts."""
        return self.first(f"bucket = ? AND key = ? AND {PENDING} ORDER BY sequence DESC", *at(key))

    def earliest(self, key: ObjectKey, through: int = SEQUENCE_MAX) -> Write | None:
        """Return the first write in a key's order that is, or has replaced, one of sequence `through` or before.

        None: the origin has what was acknowledged until then, or a person gave it up. Without its parts.
        """
        in_order = "bucket = ? AND key = ? AND state < 5 AND coalesce(since_sequence, sequence) <= ? ORDER BY sequence"
        return self.first(in_order, *at(key), through)

    def waiting(self, after: int, count_max: int) -> Sequence[Write]:
        """Return pending writes in the order of acknowledgement, without parts, behind a sequence."""
        return self.found("sequence > ? AND pending = 1 ORDER BY sequence LIMIT ?", after, count_max)

    def pending_after(self, after: int, count_max: int) -> Sequence[tuple[int, ObjectKey]]:
        """Return sequence and key of pending writes in the order of acknowledgement, behind a sequence."""
        rows = self._all(
            f"SELECT sequence, bucket, key FROM writes WHERE sequence > ? AND {PENDING} ORDER BY sequence LIMIT ?",
            *(after, count_max),
        )
        return [(row[0], ObjectKey(row[1], decoded(row[2]))) for row in rows]

    def is_pending(self, key: ObjectKey) -> bool:
        found = f"SELECT 1 FROM writes WHERE bucket = ? AND key = ? AND {PENDING} LIMIT 1"
        return self._row(found, *at(key)) is not None

    def newest(self) -> int:
        """Return the sequence of the pending write that was acknowledged last; 0 if nothing is pending."""
        return self._value("SELECT max(sequence) FROM writes WHERE pending = 1 AND sequence IS NOT NULL") or 0

    def listing(self, bucket: str, start: bytes, stop: bytes | None, count_max: int) -> Sequence[Write]:
        """Return the last pending write of each key from `start` to before `stop`, in order, without parts.

        Reads nothing outside of the range.
        """
        found = self._all(
            f"SELECT id, record, max(sequence) FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND {PENDING} "
            "GROUP BY key ORDER BY key LIMIT ?",
            *(bucket, start, BEHIND_ALL if stop is None else stop, count_max),
        )
        return [unpack_write(write_id, record) for write_id, record, _ in found]

    def has_any(self, bucket: str, name: str) -> bool:
        """Return whether a key, or one under it as a directory, is pending or was flushed in the last minutes."""
        key = text(name)
        for table in (f"writes WHERE {PENDING} AND", "origin WHERE"):
            found = f"SELECT 1 FROM {table} bucket = ?"
            if self._row(f"{found} AND key = ? LIMIT 1", bucket, key) is not None:
                return True
            if self._row(f"{found} AND key >= ? AND key < ? LIMIT 1", bucket, key + b"/", key + b"0") is not None:
                return True
        return False

    def hash_slots(self) -> set[int]:
        """Return the hash slots of pending_key_filter.py in which something is pending."""
        return set(self._column("SELECT DISTINCT place FROM writes WHERE pending = 1"))

    def buckets_in_use(self) -> frozenset[str]:
        """Return the buckets of everything that is not over: acknowledged, open, or still to abort at the origin."""
        return frozenset(self._column("SELECT DISTINCT bucket FROM writes WHERE state < 5"))

    def oldest(self, slot: str) -> Moment | None:
        """Return when the oldest write was acknowledged that is still on its way to the origin.

        Conflicts are not on their way, and parts of open uploads are no object yet. None without such a write.
        """
        on_its_way = (
            "slot = ? AND sequence IS NOT NULL AND pending = 1 AND state <> 3 AND state >= 0 AND damaged = 0 "
            "ORDER BY sequence"
        )
        first = self.first(on_its_way, slot)
        return None if first is None else first.acknowledged_then

    # What is acknowledged

    def acknowledge(self, write: Write) -> Write:
        """Make an object, or a tombstone, the key's last state, and give it its sequence."""
        self.pending_keys.set(hash_slot_of(write.key))
        replaced, _ = self.before(write)
        expected = replaced[0].expected if replaced else self.expected_now(write)
        state = State.LOCAL if write.state is State.LOCAL else State.COMMITTED
        made = replace(write, state=state, expected=expected, runs=runs_of(write.parts))
        stored = self._insert_row(made, Turn(None))
        for part in stored.parts:
            self.parts.put(stored.id, part, stored.spec.slot)
        return self.enter(stored, replaced)

    def write_tombstone(self, tombstone: Write) -> Write | None:
        """Delete what is pending under a key, or was a moment ago; return the tombstone.

        None when the origin has nothing of it, so that no client need wait: others' writes there are looked at later.
        Raises InConflict when a person must decide first.
        """
        replaced, stays = self.before(tombstone)
        if any(one.state is State.CONFLICT for one in [*replaced, *stays]):
            raise InConflict(f"{tombstone.key} is in conflict")
        stored = self.acknowledge(tombstone)
        is_sure = bool(replaced) and (replaced[0].expected.is_nothing or replaced[0].state is State.LOCAL)
        return None if is_sure and not stays else stored

    def settle(self, write_id: int, etag: str | None, now: Moment, *, upload_may_be_open: bool = False) -> None:
        """Enter that the origin has this version under the key (None: no object), by our doing: the write is done.

        Later writes of the key expect to find that version.
        """
        done = self.get(write_id)
        if done is None:
            return
        if upload_may_be_open:
            self.drop_origin_upload(done, now.at)
        self.expect(done, ExpectedVersion.exactly(etag))
        self.buckets.record_own_write(done.key, LastOwnWrite.now(now, etag, answered=done.etag))
        self.checkpoints.settled(done, now.at)
        self.end(done, now.at, as_outcome(done))

    def start_over(self, write_id: int, now: float) -> None:
        """Drop a write's useless upload at the origin: abort it, and send the parts again."""
        write = self.get(write_id)
        if write is not None:
            self.drop_origin_upload(write, now)
            self.update(replace(write, origin_upload_id=None, restarts=write.restarts + 1))
            self.parts.send_again(write_id)

    def keep(self, write_id: int, reason: str) -> bool:
        """Enter a conflict: others have changed the key at the origin, or it has other bytes than were sent."""
        write = self.get(write_id)
        if write is None or not write.is_acknowledged or write.state is State.LOCAL:
            return False
        self.update(replace(write, state=State.CONFLICT), Turn(None, last_error=reason))
        return True

    def overwrite(self, write_id: int, expected: ExpectedVersion, now: float) -> bool:
        """Carry out a person's decision that the origin's version gives way. False when the conflict is over."""
        write = self.get(write_id)
        if write is None or write.state is not State.CONFLICT:
            return False
        self.send(replace(write, expected=expected), now, Priority.URGENT)
        return True

    def send(self, write: Write, now: float, priority: Priority) -> None:
        """Let the flush take a write that it has left alone."""
        self.wait_or_start(self.update(replace(write, state=State.COMMITTED), Turn(now, priority=priority)), now)

    def changed_past(
        self, key: ObjectKey, own: LastOwnWrite, slot: str = "", member: Member | None = None, size_bytes: int = 0
    ) -> None:
        """Note a change by this gateway at the origin, past pending writes. `member` is the key's checkpoint."""
        self.buckets.record_own_write(key, own)
        if not own.known:
            return
        if own.etag is None or member is None:
            self.leave_checkpoint(key)
        elif self.latest(key) is None:
            self.checkpoints.written_past(key, member, slot, size_bytes, own.at)
        for one in self.of_key(key, "state = 1 AND sequence IS NOT NULL"):
            absent = one.expected.absent or own.etag is None
            self.update(replace(one, expected=replace(one.expected.and_also(own.etag), absent=absent)))

    def leave_checkpoint(self, key: ObjectKey) -> None:
        """Take an object that the origin was asked to delete, and may have, out of its checkpoint."""
        if self.latest(key) is None:
            self.checkpoints.removed(key)

    def discard(self, write_id: int, now: Moment, *, only_conflict: bool) -> bool:
        """Give up a write, even a damaged one. False if it is not pending or, with `only_conflict`, not in conflict."""
        # A person has decided so.
        try:
            given_up = self.get(write_id)
        except BufferDamaged:
            sequence = self._value("SELECT sequence FROM writes WHERE id = ?", write_id)
            self._remove(write_id, sequence, now.at)
            return True
        if given_up is None or (only_conflict and given_up.state is not State.CONFLICT):
            return False
        expected = given_up.expected
        if given_up.state is State.PUBLISHING:  # it may have arrived, or still do
            expected = expected.and_also(given_up.etag)
            self.buckets.record_own_write(given_up.key, LastOwnWrite.now(now, known=False))
        self.expect(given_up, expected)
        self.give_up(given_up, now.at)
        return True

    # The chain of a key, and markers

    def before(self, write: Write) -> tuple[list[Write], list[Write]]:
        """Return the writes of a key that a new one replaces, and those that stay before it."""
        chain = [one for one in self.of_key(write.key, "sequence IS NOT NULL") if one.id != write.id]
        stays = [
            one
            for one in chain
            if one.state is State.PUBLISHING
            or (one.state is not State.LOCAL and (write.in_order or self._stays(one, write)))
        ]
        return [one for one in chain if one not in stays], stays

    def _stays(self, before: Write, marker: Write) -> bool:
        """Return True if another marker waits for a write this one would replace: it must wait too, or come first.

        A marker of another node may wait for each write with an order.
        """
        if marker.behind is None or before.order:
            return marker.behind is not None
        above = directories(marker.key.key)
        waiting = f"SELECT 1 FROM writes WHERE bucket = ? AND behind IN ({marks(above)}) AND sequence > ?"
        other = f"{waiting} AND state < 5 AND key <> ? LIMIT 1"
        return self._row(other, marker.key.bucket, *above, before.sequence, text(marker.key.key)) is not None

    def enter(self, stored: Write, replaced: Sequence[Write]) -> Write:
        """Give a write its place in the order."""
        sequence = self.next_sequence()
        since = min([sequence, *(self.since(one.id) for one in replaced)])
        order = self._raised_order(stored.order)
        since_order = min([order, *(one.since_order for one in replaced)])
        tokens = tuple(one.token for write in replaced for one in write.claims)[-CLAIMS_MAX:]
        entered = replace(stored, sequence=sequence, order=order, since_order=since_order, replaced=tokens)
        priority = priority_of(stored)
        self._change(
            "UPDATE writes SET pending = 1, sequence = ?, since_sequence = ?, priority = ?, attempts = 0, "
            "failing_since = NULL, last_error = NULL, size_bytes = ? WHERE id = ?",
            *(sequence, since, priority, stored.size_bytes, stored.id),
        )
        self.update(entered)
        self.checkpoints.acknowledged(entered)
        conflicts = [turn for one in replaced if one.state is State.CONFLICT and (turn := self.turns.of(one.id))]
        for one in replaced:
            self.give_way(one, stored.acknowledged_at)
        if entered.state is State.LOCAL and not conflicts:
            self._change("UPDATE writes SET due_at = NULL, after_sequence = NULL WHERE id = ?", entered.id)
            return entered
        if not conflicts or entered.state is State.PUBLISHING:
            self.wait_or_start(entered, stored.acknowledged_at)
            return entered
        reason = conflicts[0].last_error  # a later write ends no conflict
        return self.update(replace(entered, state=State.CONFLICT), Turn(None, last_error=reason, priority=priority))

    def wait_or_start(self, write: Write, now: float) -> None:
        """Make a write wait for the one before it in the order; without one, it is due."""
        after = self._blocker(write)
        due_at = now if after is None else None
        self._change("UPDATE writes SET after_sequence = ?, due_at = ? WHERE id = ?", after, due_at, write.id)
        if after is None:
            self.turns.has_due = True
        elif self._value("SELECT priority FROM writes WHERE id = ?", write.id) == Priority.URGENT:
            self.turns.hurry(self.turns.unhurried_before(write.id), now)

    def _blocker(self, write: Write) -> int | None:
        """Return the sequence of a write that must end before: the one that will probably be the last."""
        last = "SELECT max(sequence) FROM writes WHERE"
        of_key = f"{last} bucket = ? AND key = ? AND sequence < ? AND state < 5 AND state >= 0"
        found = [self._value(of_key, *at(write.key), write.sequence)]
        if write.in_order:
            of_slot = f"{last} slot = ? AND bucket = ? AND sequence < ? AND state >= 0"
            found.append(self._value(of_slot, write.spec.slot, write.key.bucket, write.sequence))
        if write.behind is not None:
            under = f"{last} bucket = ? AND key >= ? AND key < ? AND {AWAITED_SINCE} < ? AND sequence <> ?"
            values = (write.key.bucket, *keys_under(write.behind), write.sequence, write.sequence)
            found.append(self._value(f"{under} AND {PENDING} AND state >= 0", *values))
        return max((one for one in found if one is not None), default=None)

    def release(self, sequence: int, now: float) -> None:
        """Let the writes that waited for one that has left the order wait for another, or start."""
        for write_id, record in self._all("SELECT id, record FROM writes WHERE after_sequence = ?", sequence):
            try:
                self.wait_or_start(unpack_write(write_id, record), now)
            except BufferDamaged:  # its reader reports it
                self._change("UPDATE writes SET after_sequence = NULL, due_at = ? WHERE id = ?", now, write_id)

    def since(self, write_id: int) -> int:
        """Return the sequence of the first write that this one has replaced, or its own."""
        return self._value("SELECT coalesce(since_sequence, sequence) FROM writes WHERE id = ?", write_id) or 0

    def next_sequence(self) -> int:
        self._change("UPDATE node SET value = value + 1 WHERE name = 'sequence'")
        return self._value("SELECT value FROM node WHERE name = 'sequence'") or 0

    def highest_order(self) -> int:
        """Return the highest `order` that a write of this node has had."""
        return self._value("SELECT value FROM node WHERE name = 'order'") or 0

    def _raised_order(self, order: int) -> int:
        """Return the order of the next write: of two on their way at once, the first in the registry may be later."""
        highest = self.highest_order()
        if order > highest:
            self._put("node", "order", order)
        return max(order, highest)

    def earlier(self, bucket: str, prefix: str, order: int, count_max: int) -> Sequence[ObjectKey]:
        """Return keys of pending writes under a prefix that another node's marker of this order waits for."""
        rows = self._all(
            "SELECT id, key, record FROM writes WHERE bucket = ? AND key >= ? AND key < ? "
            f"AND {PENDING} AND state >= 0 ORDER BY {AWAITED_SINCE} LIMIT ?",
            *(bucket, *keys_under(prefix), count_max),
        )
        found = list[ObjectKey]()
        for write_id, key, record in rows:
            with suppress(BufferDamaged):  # it is waited for: a person must decide
                write = unpack_write(write_id, record)
                if (write.since_order if write.behind is None else write.order) >= order:
                    continue
            found.append(ObjectKey(bucket, decoded(key)))
        return found

    def is_behind(self, key: ObjectKey, marker: ObjectKey, order: int) -> bool:
        """Return whether a key's pending write waits for another node's marker of this order."""
        pending = self.latest(key)
        is_marker = pending is not None and pending.behind is not None and marker.key.startswith(pending.behind)
        return pending is not None and is_marker and pending.order > order

    def expected_now(self, write: Write) -> ExpectedVersion:
        """Return the versions present when the request began, or the one that this gateway has put there since."""
        own, expected = self.buckets.last_own_write(write.key), write.expected
        if own is None or (expected.known and not own.known):
            return expected
        if own.known and own.seconds_after(expected.asked_then) >= 0:
            return ExpectedVersion.exactly(own.etag)
        return expected if expected.known else expected.and_also(own.etag)

    def expect(self, done: Write, expected: ExpectedVersion) -> None:
        """Set the version that later writes of a key expect: of the next, and of uploads before it that may fail."""
        for one in self.of_key(done.key, "sequence IS NOT NULL"):
            if one.sequence > done.sequence:
                self.update(replace(one, expected=expected))
                if one.is_acknowledged:
                    return

    # Ends

    def give_up(self, write: Write, now: float) -> None:
        """End an acknowledged write without the origin."""
        self.checkpoints.given_up(write)
        self.give_way(write, now)

    def give_way(self, write: Write, now: float) -> None:
        """End a write that a later one replaces, or that was given up: the origin gets nothing of it."""
        self.drop_origin_upload(write, now)
        self.end(write, now, as_outcome(write))

    def end(self, write: Write, now: float, ended: UploadOutcome | None) -> None:
        """End a write; keep its outcome for repetitions of its last request."""
        if ended is None or write.upload_id is None:
            self._remove(write.id, write.sequence, now)
            return
        self.parts.drop(write.id)
        self._change(
            "UPDATE writes SET state = 5, pending = 0, sequence = NULL, since_sequence = NULL, "
            "after_sequence = NULL, due_at = ?, attempts = 0, last_error = NULL, failing_since = NULL, record = ? "
            "WHERE id = ?",
            *(ended.ended_at + ENDED_KEPT_SECONDS, pack_ended(write.id, ended), write.id),
        )
        if write.sequence:
            self.release(write.sequence, now)

    def _remove(self, write_id: int, sequence: int | None, now: float) -> None:
        self.parts.drop(write_id)
        self._change("DELETE FROM writes WHERE id = ?", write_id)
        if sequence:
            self.release(sequence, now)

    def drop_origin_upload(self, write: Write, now: float) -> None:
        if write.origin_upload_id is not None:
            self.abort_at_origin(write.key, write.spec.slot, write.origin_upload_id, now)

    def abort_at_origin(
        self, key: ObjectKey, slot: str, origin_upload_id: str, now: float, asked: CreateAttempt | None = None
    ) -> None:
        """Enter an upload at the origin that nothing will complete. `asked`: the request that may have begun it."""
        spec, expected = WriteSpec(key, {}, slot), ExpectedVersion()
        write = Write(spec, expected, now, State.ABORTING, origin_upload_id=origin_upload_id, asked=asked)
        self.insert(write, Turn(now, priority=Priority.ABORT))
        self.turns.has_due = True


def as_outcome(write: Write) -> UploadOutcome | None:
    """Return the outcome of a completed upload; None for a write that was no upload."""
    if write.upload_id is None:
        return None
    at = write.acknowledged_at
    return UploadOutcome(write.upload_id, write.key, at, write.etag, write.completed_of, write.checksums)


def priority_of(write: Write) -> Priority:
    if write.deleted:  # the deleting client waits for the origin
        return Priority.URGENT
    return Priority.SMALL if write.size_bytes <= SMALL_BYTES_MAX else Priority.LARGE

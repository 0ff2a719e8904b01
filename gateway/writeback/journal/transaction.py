"""The journal inside one transaction: writes, changed as S3, the reconciler and people change them.

Related rows change in one transaction, so that a kill at any moment leaves the state before or after. Methods that drop
staged files add them to `freed`: they are unlinked once the transaction is durable, or else by the next process that
opens the buffer.

    writes of a key with a place in the order (`sequence`) form a chain: each waits for the one before it
    a marker waits for what was acknowledged before it under its directory (order.py)

One column serves both: `after_sequence` names a write to wait for. When that write goes, the next one is looked up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged, InConflict, PartInUse
from gateway.core.model import ObjectKey
from gateway.writeback.checkpoints.layouts import Member
from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal import codec
from gateway.writeback.journal.checkpoints import CheckpointRows
from gateway.writeback.journal.records import (
    IDLE_SECONDS_MIN,
    LAST_OWN_WRITE_KEPT_SECONDS,
    UPLOAD_LOOK_SECONDS,
    BucketCapabilities,
    Conditions,
    CreateAttempt,
    ExpectedVersion,
    LastOwnWrite,
    Part,
    Priority,
    State,
    Turn,
    UploadOutcome,
    Write,
    WriteSpec,
    runs_of,
)
from gateway.writeback.journal.view import (
    BEHIND_ALL,
    LOCAL_OF_CHECKPOINTS,
    OPEN,
    PENDING,
    JournalView,
    as_last_own_write,
    as_outcome,
    decoded,
    encoded,
    text,
)
from gateway.writeback.key_forms import bounded, forms_of, refused_forms
from gateway.writeback.pending_key_filter import hash_slot_of

ENDED_KEPT_SECONDS = 24 * 3600.0
"""Seconds for which a repeated Complete gets the answer of the first."""

ENDED_MAX = 50_000
"""The most ended uploads that are remembered: the latest."""

FORGOTTEN_AT_ONCE = 1000
"""Rows per step: writers wait meanwhile."""

SMALL_BYTES_MAX = 8 * 1024**2
"""Objects up to this size are not kept waiting by larger ones."""

ASKED_SECONDS_MAX = 300.0
"""No answer from the origin takes longer."""

CARRIED_OUT_SECONDS = 60.0
"""After this time, a request whose sender died has reached the origin, or never will."""

RETRY_SECONDS_MAX, UPLOAD_SECONDS_MAX = 90.0, 700.0
"""The longest times to the next turn; the second is for open uploads and permanent refusals. A later due time was
written before the clock went back."""

_LOOKED_AT_MAX = 64

_RAISED_MAX = 10_000
"""The most objects raised at once: writers wait meanwhile."""

LAST_OWN_WRITES_MAX = 50_000
"""The most own writes, some 300 bytes each. With more, the oldest are forgotten early: then a write may pass for
another writer's, which loses nothing."""


def _priority_of(write: Write) -> Priority:
    if write.deleted:  # the deleting client waits for the origin
        return Priority.URGENT
    return Priority.SMALL if write.size_bytes <= SMALL_BYTES_MAX else Priority.LARGE


class HashSlots(Protocol):
    """Hash slots of pending_key_filter.py, set before something is pending."""

    def set(self, hash_slot: int) -> None: ...


class JournalTransaction(JournalView):
    """One transaction's view of the journal, and its changes. `freed` names the files without references. `has_due`:
    the reconciler has more to look at."""

    def __init__(self, connection: sqlite3.Connection, pending_keys: HashSlots) -> None:
        super().__init__(connection)
        self._pending_keys = pending_keys
        self.freed: list[str] = []
        self.has_due = False

    @property
    def _checkpoints(self) -> CheckpointRows:
        """Return the checkpoints' rows. Made on demand: most transactions store parts, which need none."""
        return CheckpointRows(self._rows)

    # How uploads begin

    def ask(self, key: ObjectKey, slot: str, asked: CreateAttempt) -> int:
        """Enter that the origin will be asked for an upload. Until its purpose is known, it counts as one to abort."""
        write = Write(WriteSpec(key, {}, slot), ExpectedVersion(), asked.begun.at, State.ABORTING, asked=asked)
        return self._insert(write, Turn(None, priority=Priority.ABORT)).id

    def mark_in_doubt(self, write_id: int, now: Moment) -> None:
        write = self.write(write_id, with_parts=False)
        if write is not None and write.asked is not None and write.asked.in_doubt_since is None:
            asked, turn = (
                replace(write.asked, in_doubt_since=now),
                Turn(now.at + CARRIED_OUT_SECONDS, priority=Priority.ABORT),
            )
            self._update(replace(write, asked=asked), turn)
            self.has_due = True

    def mark_all_in_doubt(self, now: Moment, worker: int | None = None) -> None:
        """Mark as in doubt all requests of a worker slot (None: of all) whose process is dead."""
        for one in self._asked_and_living():
            if one.asked is not None and worker in (None, one.asked.worker):
                self.mark_in_doubt(one.id, now)

    def _asked_and_living(self) -> list[Write]:
        """Return requests for uploads without an outcome yet. Damaged rows become due: the reconciler reports them."""
        rows = self._rows.execute("SELECT id, record FROM writes WHERE state = 4 AND due_at IS NULL AND damaged = 0")
        found: list[Write] = []
        for write_id, record in rows.fetchall():
            try:
                found.append(codec.unpack_write(write_id, record))
            except BufferDamaged:
                self._rows.execute("UPDATE writes SET due_at = 0 WHERE id = ?", (write_id,))
        return found

    def open_upload(self, upload: Write, asked_as: int | None = None) -> Write:
        """Enter an open upload, which the origin has begun, or will; `asked_as`, the entry of `ask`, is done."""
        if asked_as is not None:
            self.forget(asked_as)
        opened = replace(upload, state=State.OPEN, multipart=True)
        self.has_due = True
        self._checkpoints.begun(opened)
        return self._insert(opened, Turn(opened.began_at, priority=Priority.UPLOAD))

    def begun(self, write_id: int, origin_upload_id: str, asked_as: int) -> Write | None:
        """Note the origin's upload for a write, announced by `ask`; return the write as it is, None if it has ended.

        Of two uploads asked for at once the first counts; the other is aborted.
        """
        write = self.write(write_id, with_parts=False)
        is_sent = write is not None and write.state not in (State.CONFLICT, State.LOCAL)
        if write is None or not is_sent or write.origin_upload_id is not None:
            asked = self.write(asked_as, with_parts=False)
            if asked is not None:
                aborted = replace(asked, origin_upload_id=origin_upload_id, asked=None)
                self._update(aborted, Turn(asked.began_at, priority=Priority.ABORT))
            return write
        self.forget(asked_as)
        return self._update(replace(write, origin_upload_id=origin_upload_id))

    def forget(self, write_id: int) -> None:
        """Forget an upload that is gone at the origin, or is no concern of this node."""
        self._rows.execute("DELETE FROM writes WHERE id = ? AND state = 4", (write_id,))

    def abort_at_origin(
        self, key: ObjectKey, slot: str, origin_upload_id: str, now: float, asked: CreateAttempt | None = None
    ) -> None:
        """Enter an upload at the origin that nothing will complete. `asked`: the request that may have begun it."""
        write = Write(
            WriteSpec(key, {}, slot),
            ExpectedVersion(),
            now,
            State.ABORTING,
            origin_upload_id=origin_upload_id,
            asked=asked,
        )
        self._insert(write, Turn(now, priority=Priority.ABORT))
        self.has_due = True

    def look_at_uploads(self, slot: str, now: float) -> None:
        """Look at the uploads that clients have left alone, as a write finds no room: the origin may have ended some.
        Takes at most _LOOKED_AT_MAX, those looked at longest ago."""
        resting = (
            f"SELECT id FROM writes WHERE slot = ? AND {OPEN} AND state = 0 AND priority = ? AND attempts = 0 "
            "AND due_at > ? AND due_at <= ? ORDER BY due_at LIMIT ?"
        )
        values = (slot, Priority.UPLOAD, now, now + UPLOAD_LOOK_SECONDS - IDLE_SECONDS_MIN, _LOOKED_AT_MAX)
        looked_at = self._rows.execute(
            f"UPDATE writes SET due_at = ?, priority = ? WHERE id IN ({resting})", (now, Priority.URGENT, *values)
        ).rowcount
        self.has_due = self.has_due or looked_at > 0

    # Parts

    def put_part(self, upload_id: str, part: Part, now: Moment) -> bool:
        """Store a part, replacing one of the same number; False when the upload does not exist, or has ended.

        PartInUse when the origin is asked to complete the upload with the present part.
        """
        upload = self.upload(upload_id)
        if upload is None:
            return False
        if upload.is_completed_of(part.number):
            raise PartInUse(f"{upload.key} is just being completed of its part {part.number}")
        replaced = self._row("SELECT file FROM parts WHERE write_id = ? AND number = ?", upload.id, part.number)
        self._put_file(part.file, upload.spec.slot)
        self._put_part_row(upload.id, part)
        self._free([replaced[0]] if replaced else [])
        if not upload.is_completed_at_origin:
            self._update(replace(upload, touched=now))
        if upload.state is State.OPEN and part.origin_etag is None:
            self._rows.execute("UPDATE writes SET due_at = ? WHERE id = ? AND attempts = 0", (now.at, upload.id))
            self.has_due = True
        return True

    def part_sent(self, write_id: int, part: Part) -> Write | None:
        """Note that the origin has a part, unless the client has replaced it; return the write, without parts."""
        now, write = self.part(write_id, part.number), self.write(write_id, with_parts=False)
        is_kept_here = write is not None and write.state is State.LOCAL
        if now is not None and now.file.name == part.file.name and not is_kept_here:
            self._put_part_row(write_id, replace(now, origin_etag=part.origin_etag))
        return write

    def _put_part_row(self, write_id: int, part: Part) -> None:
        is_sent = part.origin_etag is not None
        row = (write_id, part.number, part.file.name, is_sent, part.file.size_bytes, codec.pack_part(write_id, part))
        self._rows.execute("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?)", row)

    # What is acknowledged

    def acknowledge(self, write: Write) -> Write:
        """Make an object, or a tombstone, the key's last state, and give it its sequence."""
        self._pending_keys.set(hash_slot_of(write.key))
        replaced, _ = self._before(write)
        expected = replaced[0].expected if replaced else self._expected_now(write)
        state = State.LOCAL if write.state is State.LOCAL else State.COMMITTED
        stored = self._insert(replace(write, state=state, expected=expected, runs=runs_of(write.parts)), Turn(None))
        for part in stored.parts:
            self._put_file(part.file, stored.spec.slot)
            self._put_part_row(stored.id, part)
        return self._enter(stored, replaced)

    def complete(self, made: Write) -> Write | None:
        """CompleteMultipartUpload: make an upload's chosen parts an acknowledged object; other parts go.

        `made` is the upload with the fields that Complete sets. None when a part was replaced, or the upload has ended:
        the older object would overwrite what was acknowledged since.
        """
        upload = self._with_chosen(made)
        if upload is None:
            return None
        self._pending_keys.set(hash_slot_of(made.key))
        replaced, _ = self._before(replace(upload, in_order=made.in_order, behind=made.behind))
        expected = replaced[0].expected if replaced else self._expected_now(made)
        self._keep_parts(upload.id, {part.number for part in made.parts})
        state = State.COMMITTED if upload.state is State.OPEN else State.PUBLISHING  # it may be there
        if made.state is State.LOCAL and upload.state is State.OPEN:
            state = State.LOCAL
            upload, made = self._without_origin(upload, made.acknowledged_at), self._unsent(made)
        stored = replace(
            upload,
            state=state,
            expected=expected,
            etag=made.etag,
            size_bytes=made.size_bytes,
            checksums=made.checksums,
            acknowledged_at=made.acknowledged_at,
            acknowledged=made.acknowledged,
            completed_of=made.completed_of,
            behind=made.behind,
            in_order=made.in_order,
            member=made.member,
            is_etag_local=made.is_etag_local,
            runs=runs_of(made.parts),
            parts=made.parts,
        )
        entered = self._enter(stored, replaced)
        if upload.sequence:  # its place while the origin was asked to complete it
            self._release(upload.sequence, made.acknowledged_at)
        return entered

    def complete_at_origin(self, made: Write) -> bool:
        """Let the origin complete an upload while the client waits, under `made.conditions`; `made.asked_as` identifies
        the request. Nothing is acknowledged, and the upload stays open if the request fails.

        False when a part was replaced, or the upload has ended, or is just being completed of other parts or under
        other conditions, whose outcome would answer the wrong request.
        """
        upload = self._with_chosen(made)
        if upload is None:
            return False
        is_other = (upload.completed_of, upload.conditions) != (made.completed_of, made.conditions)
        if upload.is_completed_at_origin and upload.answer is None and is_other:
            return False
        asked = replace(
            upload,
            state=State.PUBLISHING,
            etag=made.etag,
            size_bytes=made.size_bytes,
            checksums=made.checksums,
            completed_of=made.completed_of,
            conditions=made.conditions,
            asked_as=made.asked_as,
            answer=None,
            runs=runs_of(made.parts),
            behind=made.behind,
            in_order=made.in_order,
            member=made.member,
            is_etag_local=made.is_etag_local,
            sequence=upload.sequence or self._next_sequence(),
            touched=made.touched,
        )
        self._rows.execute("UPDATE writes SET priority = ? WHERE id = ?", (Priority.URGENT, asked.id))
        self._update(asked)
        self._wait_or_start(asked, made.touched_then.at)
        return True

    def answer(self, write_id: int, code: str, *, is_over: bool) -> None:
        """Note the origin's error for a Complete whose client waits. Unless `is_over`, it may have been carried out,
        and the reconciler looks for the object."""
        write = self.write(write_id, with_parts=False)
        if write is None or not write.is_completed_at_origin:
            return
        if not is_over:
            self._update(replace(write, answer=code))
            return
        sequence = write.sequence
        opened = replace(write, state=State.OPEN, answer=code, sequence=0, conditions={})
        self._update(opened, Turn(write.touched_then.at, priority=Priority.UPLOAD))
        self._release(sequence, write.touched_then.at)

    def completed(self, write_id: int, etag: str, now: Moment) -> None:
        """Enter that the origin has completed an upload whose client waits, or waited."""
        write = self.write(write_id, with_parts=False)
        if write is None or write.is_acknowledged:
            return
        if write.sequence:
            self._expect(write, ExpectedVersion.exactly(etag))
        else:  # it has left the order: later writes may find its object
            for one in self._of_key(write.key, "sequence IS NOT NULL"):
                self._update(replace(one, expected=replace(one.expected, etags=(*one.expected.etags, etag))))
        self._checkpoints.completed(write, now.at)
        is_left = write.answer is not None  # its client may have gone on, and sent more parts
        if is_left and any(part.stored_at > write.touched_then.at for part in self.parts(write_id)):
            self._go_on(write)
        else:
            ended = UploadOutcome(write.upload_id or "", write.key, now.at, etag, write.completed_of, write.checksums)
            self._end(write, now.at, ended)
        own, later = LastOwnWrite.now(now, etag), self.last_own_write(write.key)
        if later is None or later.seconds_after(now) <= 0:
            self.record_own_write(write.key, own)

    def _go_on(self, write: Write) -> None:
        """Reopen an upload that the origin has completed, as its client has added parts meanwhile."""
        opened = replace(write, state=State.OPEN, sequence=0, origin_upload_id=None, answer=None, conditions={})
        self._update(opened, Turn(write.touched_then.at, priority=Priority.UPLOAD))
        self._send_again(write.id)
        if write.sequence:
            self._release(write.sequence, write.touched_then.at)

    def leave_order(self, write_id: int, now: float) -> None:
        """Take a Complete with an unknown outcome out of the order after some time: nothing waits for it any more."""
        write = self.write(write_id, with_parts=False)
        if write is not None and write.is_completed_at_origin and write.sequence:
            self._update(replace(write, sequence=0))
            self._rows.execute(
                "UPDATE writes SET after_sequence = NULL, due_at = coalesce(due_at, ?) WHERE id = ?", (now, write_id)
            )
            self._release(write.sequence, now)

    def abort(self, upload_id: str, now: Moment) -> bool:
        """End an upload without an object: its parts go, here and at the origin. False when it has ended, or the origin
        is just completing it: an abort would tell the client that there is no object, though there is one."""
        upload = self.upload(upload_id)
        if upload is None or self.is_being_completed(upload):
            return False
        if upload.is_completed_at_origin:  # unknown whether it was completed
            self.record_own_write(upload.key, LastOwnWrite.now(now, known=False))
        self._drop_origin_upload(upload, now.at)
        self._end(upload, now.at, UploadOutcome(upload_id, upload.key, now.at, None))
        return True

    # What is kept here only

    def keep_here(self, checkpoint_id: int, now: float, newer_since: float = 0.0) -> int:
        """Make a checkpoint's unsent objects local; return how many. Those stay in the flush that are becoming visible
        at the origin, that a request waits for, that are in conflict or damaged, or have parts that only the origin
        has.

        Markers above it that came after it, and before `newer_since` when the newer checkpoint was whole, become local
        too: they may name it. Takes at most FORGOTTEN_AT_ONCE objects, waiting ones first. Does nothing while a
        manifest of the checkpoint must still be sent: it would arrive without its files.
        """
        goes_on = (
            "SELECT 1 FROM checkpoint_objects o JOIN writes w ON w.id = o.write_id WHERE o.checkpoint_id = ? "
            "AND o.durable_at IS NULL AND w.pending = 1 AND w.behind IS NOT NULL "
            "AND (w.state = ? AND w.priority = ? OR w.state = ?) LIMIT 1"
        )
        if self._row(goes_on, checkpoint_id, State.COMMITTED, Priority.URGENT, State.CONFLICT) is not None:
            return 0
        found = self._rows.execute(
            "SELECT w.id FROM checkpoint_objects o JOIN writes w ON w.id = o.write_id WHERE o.checkpoint_id = ? "
            "AND o.durable_at IS NULL AND w.pending = 1 AND w.state = ? AND w.damaged = 0 AND w.priority <> ? "
            "AND NOT EXISTS (SELECT 1 FROM parts WHERE write_id = w.id AND file = '') "
            "ORDER BY w.behind IS NULL LIMIT ?",
            (checkpoint_id, State.COMMITTED, Priority.URGENT, FORGOTTEN_AT_ONCE),
        ).fetchall()
        kept = dict[int, Write]()
        for (write_id,) in found:
            with suppress(BufferDamaged):  # its reader reports it
                write = self.write(write_id, with_parts=False)
                if write is not None:
                    kept[write_id] = write
        if kept:
            first = min(kept.values(), key=lambda one: one.sequence)
            kept |= {one.id: one for one in self._markers_above(first, newer_since)}
        for one in kept.values():
            local = replace(self._without_origin(one, now), state=State.LOCAL)
            self._update(local, Turn(None, priority=Priority.LARGE))
        for one in kept.values():
            self._release(one.sequence, now)
        self.has_due = self.has_due or bool(kept)  # transfers under way are cut off
        return len(kept)

    def _markers_above(self, write: Write, until: float) -> list[Write]:
        """Return markers still to send that waited for a write and were acknowledged before a time."""
        key = text(write.key.key)
        above = [b"", *(key[: stop + 1] for stop, byte in enumerate(key) if byte == ord("/"))]
        marks = ",".join("?" * len(above))
        found = self._rows.execute(
            f"SELECT id FROM writes WHERE bucket = ? AND behind IN ({marks}) AND sequence > ? AND state < 5 "
            "AND state = 1 AND pending = 1 AND damaged = 0 AND behind IS NOT NULL",
            (write.key.bucket, *above, write.sequence),
        ).fetchall()
        markers = list[Write]()
        for (write_id,) in found:
            with suppress(BufferDamaged):  # its reader reports it
                marker = self.write(write_id, with_parts=False)
                if marker is not None and marker.member is None and marker.acknowledged_at < until:
                    markers.append(marker)
        return markers

    def send_after_all(self, write_id: int, now: float, *, is_urgent: bool = True) -> bool:
        """Send a local object after all, if urgent before other writes. False when it is not local any more."""
        write = self.write(write_id, with_parts=False)
        if write is None or write.state is not State.LOCAL:
            return False
        priority = Priority.URGENT if is_urgent else _priority_of(write)
        sent = self._update(replace(write, state=State.COMMITTED), Turn(now, priority=priority))
        self._wait_or_start(sent, now)
        return True

    def send_all_after_all(
        self, bucket: str, start: bytes, stop: bytes, now: float, besides: Collection[str] = ()
    ) -> None:
        """Send the local objects in a range of keys, except those of some slots; at most _RAISED_MAX, the oldest."""
        query = (
            "SELECT id, slot FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND state < 5 AND state = -1 "
            "ORDER BY sequence LIMIT ?"
        )
        for write_id, slot in self._rows.execute(query, (bucket, start, stop, _RAISED_MAX)).fetchall():
            if slot in besides:
                continue
            with suppress(BufferDamaged):  # its reader reports it
                self.send_after_all(write_id, now)

    def send_checkpoint_after_all(self, slot: str, checkpoint_id: int | None, now: float) -> int:
        """Send a slot's local objects of a checkpoint, or of none, in their turn; return how many, at most
        FORGOTTEN_AT_ONCE."""
        member = "o.checkpoint_id IS NULL" if checkpoint_id is None else "o.checkpoint_id = ?"
        found = self._rows.execute(
            f"{LOCAL_OF_CHECKPOINTS} WHERE w.state = -1 AND w.slot = ? AND {member} ORDER BY w.sequence LIMIT ?",
            (slot, *(() if checkpoint_id is None else (checkpoint_id,)), FORGOTTEN_AT_ONCE),
        ).fetchall()
        sent = 0
        for write_id, _, _ in found:
            with suppress(BufferDamaged):  # its reader reports it
                if not self._may_name_what_is_kept_here(write_id):
                    sent += self.send_after_all(write_id, now, is_urgent=False)
        return sent

    def _may_name_what_is_kept_here(self, write_id: int) -> bool:
        write = self.write(write_id, with_parts=False)
        if write is None or write.behind is None or write.member is not None:
            return False
        start = text(write.behind)
        before = (
            "SELECT 1 FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND state < 5 AND state = -1 "
            "AND sequence < ? LIMIT 1"
        )
        return self._row(before, write.key.bucket, start, start + BEHIND_ALL, write.sequence) is not None

    def remove_local(
        self, slot: str, now: Moment, size_bytes: int | None = None, idle_seconds: float = 0.0
    ) -> tuple[int, int]:
        """Remove a slot's local objects, the oldest first, checkpoints as a whole, until `size_bytes` are free (None:
        all); none to which something came in the last `idle_seconds`. Return the numbers of objects and bytes."""
        objects = removed_bytes = 0
        found = self._rows.execute(
            "SELECT id FROM writes WHERE slot = ? AND state = -1 ORDER BY sequence LIMIT ?", (slot, FORGOTTEN_AT_ONCE)
        ).fetchall()
        seen = set[int]()
        for (write_id,) in found:
            if size_bytes is not None and removed_bytes >= size_bytes:
                break
            if write_id in seen:
                continue
            together = self._together_with(write_id)
            seen |= {one.id for one in together}
            if any(now.passed_since(one.acknowledged_then) < idle_seconds for one in together):
                continue
            for one in together:
                self._checkpoints.given_up(one)
                self._give_way(one, now.at)
                objects, removed_bytes = objects + 1, removed_bytes + one.size_bytes
        return objects, removed_bytes

    def _together_with(self, write_id: int) -> list[Write]:
        """Return a local object, with the other local ones of its checkpoint."""
        ids = [write_id]
        row = self._row("SELECT checkpoint_id FROM checkpoint_objects WHERE write_id = ?", write_id)
        if row is not None:
            of_checkpoint = (
                "SELECT w.id FROM checkpoint_objects o JOIN writes w ON w.id = o.write_id "
                "WHERE o.checkpoint_id = ? AND w.state = -1"
            )
            ids = [one for (one,) in self._rows.execute(of_checkpoint, row).fetchall()]
        found = list[Write]()
        for one in ids:
            try:
                write = self.write(one, with_parts=False)
            except BufferDamaged:  # its reader reports it
                continue
            if write is not None:
                found.append(write)
        return found

    def _without_origin(self, write: Write, now: float) -> Write:
        self._drop_origin_upload(write, now)
        self._send_again(write.id)
        return replace(write, origin_upload_id=None, parts=self._unsent(write).parts)

    @staticmethod
    def _unsent(write: Write) -> Write:
        return replace(write, parts=tuple(replace(part, origin_etag=None) for part in write.parts))

    def write_tombstone(self, tombstone: Write) -> Write | None:
        """Delete what is pending under a key, or was a moment ago. Return the tombstone; None when the origin has
        nothing of it, so that no client need wait: others' writes there are looked at later.

        InConflict when a person must decide first.
        """
        replaced, stays = self._before(tombstone)
        if any(one.state is State.CONFLICT for one in [*replaced, *stays]):
            raise InConflict(f"{tombstone.key} is in conflict")
        buried = self.acknowledge(tombstone)
        is_sure = bool(replaced) and (replaced[0].expected.is_nothing or replaced[0].state is State.LOCAL)
        return None if is_sure and not stays else buried

    # How they fare

    def change(self, write: Write, expected: State) -> bool:
        """Write a row if the write is still in the expected state; otherwise return False."""
        now = self._row("SELECT state FROM writes WHERE id = ?", write.id)
        if now is None or now[0] != expected:
            return False
        self._update(write)
        return True

    def wait(self, write_id: int, seen: Turn, turn: Turn) -> None:
        """Set the next turn of a write, and why. If it has become due anew since its turn was `seen`, and it has not
        failed, it stays due."""
        self._rows.execute(
            "UPDATE writes SET due_at = CASE WHEN due_at = ? OR ? > 0 THEN ? ELSE due_at END, attempts = ?, "
            "failing_since = ?, last_error = ?, priority = CASE WHEN priority = ? THEN ? ELSE priority END "
            "WHERE id = ? AND due_at IS NOT NULL",
            (
                seen.due_at,
                turn.attempts,
                turn.due_at,
                turn.attempts,
                turn.failing_since,
                turn.last_error,
                seen.priority,
                turn.priority,
                write_id,
            ),
        )

    def rest(self, write_id: int, seen: Turn, turn: Turn) -> None:
        """Set the next turn of a write with nothing to do now. An open upload with an unsent part stays due."""
        unsent = "SELECT 1 FROM parts JOIN writes ON write_id = id WHERE id = ? AND state = 0 AND sent = 0 LIMIT 1"
        if self._row(unsent, write_id) is None:
            self.wait(write_id, seen, turn)

    def quarantine(self, write_id: int, reason: str) -> None:
        """Set a damaged write aside until the next start."""
        self._rows.execute(
            "UPDATE writes SET due_at = NULL, damaged = 1, last_error = ? WHERE id = ?", (reason, write_id)
        )

    def prioritise(self, key: ObjectKey, now: float) -> None:
        """Put the pending writes of a key, and those that they wait for, before others: a request waits for them."""
        found = self._rows.execute(
            f"SELECT id FROM writes WHERE bucket = ? AND key = ? AND {PENDING}", (key.bucket, encoded(key))
        ).fetchall()
        self._hurry([write_id for (write_id,) in found], now)
        self.has_due = True

    def raise_priority(self, bucket: str, start: bytes, stop: bytes, now: float) -> None:
        """Put the pending writes in a range of keys, and those that they wait for, before others: a request or a person
        waits for them. Failed ones keep their place. Takes at most _RAISED_MAX, the oldest."""
        found = self._rows.execute(
            f"SELECT id FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND {PENDING} AND attempts = 0 "
            "AND sequence IS NOT NULL ORDER BY sequence LIMIT ?",
            (bucket, start, stop, _RAISED_MAX),
        ).fetchall()
        self._hurry([write_id for (write_id,) in found], now)
        self.has_due = True

    def _hurry(self, write_ids: Sequence[int], now: float) -> None:
        """Put writes before others, and those that they wait for before them, at most _RAISED_MAX of these. Writes that
        they come to wait for later follow in `_wait_or_start`."""
        left = _RAISED_MAX
        while write_ids:
            self._rows.executemany(
                "UPDATE writes SET priority = ?, due_at = min(due_at, ?) WHERE id = ?",
                [(Priority.URGENT, now, write_id) for write_id in write_ids],
            )
            before = dict.fromkeys(one for write_id in write_ids for one in self._unhurried_before(write_id, left))
            write_ids = list(before)[:left]
            left -= len(write_ids)

    def _unhurried_before(self, write_id: int, count_max: int) -> Sequence[int]:
        row = self._row(
            "SELECT bucket, sequence, after_sequence, behind FROM writes WHERE id = ? AND after_sequence IS NOT NULL",
            write_id,
        )
        if row is None:
            return []
        bucket, sequence, after, behind = row
        found = self._rows.execute(
            "SELECT id FROM writes WHERE sequence = ? AND priority <> ?", (after, Priority.URGENT)
        ).fetchall()
        if behind is not None:
            found += self._rows.execute(
                "SELECT id FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND since_sequence < ? "
                f"AND {PENDING} AND state >= 0 AND priority <> ? LIMIT ?",
                (bucket, behind, behind + BEHIND_ALL, sequence, Priority.URGENT, count_max),
            ).fetchall()
        return [one for (one,) in found if one != write_id]

    def try_now(self, bucket: str, prefix: str, now: float, besides: Iterable[int] = ()) -> None:
        """Make failed writes under a prefix (no bucket: everywhere) due now, and those with the ids `besides`."""
        hurried = "UPDATE writes SET due_at = ? WHERE id = ? AND state < 5 AND due_at > ?"
        self._rows.executemany(hurried, [(now, one, now) for one in besides])
        where, values = "1", list[str | bytes]()
        if bucket:
            start = text(prefix)
            where, values = "bucket = ? AND key >= ? AND key < ?", [bucket, start, start + BEHIND_ALL]
        self._rows.execute(
            f"UPDATE writes SET due_at = ? WHERE {where} AND state < 5 AND attempts > 0 AND due_at > ?",
            (now, *values, now),
        )
        self.has_due = True

    def start_over(self, write_id: int, now: float) -> None:
        """Drop a write's useless upload at the origin: abort it, and send the parts again."""
        write = self.write(write_id, with_parts=False)
        if write is None:
            return
        self._drop_origin_upload(write, now)
        self._update(replace(write, origin_upload_id=None, restarts=write.restarts + 1))
        self._send_again(write_id)

    def _send_again(self, write_id: int) -> None:
        for part in list(self.parts(write_id)):
            if part.file.is_here and part.origin_etag is not None:
                self._put_part_row(write_id, replace(part, origin_etag=None))

    def settle(self, write_id: int, etag: str | None, now: Moment, *, upload_may_be_open: bool = False) -> None:
        """Enter that the origin has this version under the key (None: no object), by our doing: the write is done.

        Later writes of the key expect to find that version.
        """
        done = self.write(write_id, with_parts=False)
        if done is None:
            return
        if upload_may_be_open:
            self._drop_origin_upload(done, now.at)
        self._expect(done, ExpectedVersion.exactly(etag))
        self.record_own_write(done.key, LastOwnWrite.now(now, etag, answered=done.etag))
        self._checkpoints.settled(done, now.at)
        self._end(done, now.at, as_outcome(done))

    def keep(self, write_id: int, reason: str) -> bool:
        """Enter a conflict: others have changed the key at the origin, or it has other bytes than were sent."""
        write = self.write(write_id, with_parts=False)
        if write is None or not write.is_acknowledged or write.state is State.LOCAL:
            return False
        self._update(replace(write, state=State.CONFLICT), Turn(None, last_error=reason))
        return True

    def overwrite(self, write_id: int, expected: ExpectedVersion, now: float) -> bool:
        """Carry out a person's decision that the origin's version gives way. False when the conflict is over."""
        write = self.write(write_id, with_parts=False)
        if write is None or write.state is not State.CONFLICT:
            return False
        decided = self._update(
            replace(write, state=State.COMMITTED, expected=expected), Turn(now, priority=Priority.URGENT)
        )
        self._wait_or_start(decided, now)
        return True

    def changed_past(
        self, key: ObjectKey, own: LastOwnWrite, slot: str = "", member: Member | None = None, size_bytes: int = 0
    ) -> None:
        """Note a change by this gateway at the origin, past pending writes. `member` is the key's checkpoint."""
        self.record_own_write(key, own)
        if own.known and self.latest(key) is None:
            if own.etag is None or member is None:
                self._checkpoints.removed(key)
            else:
                self._checkpoints.written_past(key, member, slot, size_bytes, own.at)
        if own.known:
            for one in self._of_key(key, "state = 1 AND sequence IS NOT NULL"):
                expected = one.expected
                etags = expected.etags if own.etag is None else (*expected.etags, own.etag)
                self._update(
                    replace(one, expected=replace(expected, etags=etags, absent=expected.absent or own.etag is None))
                )

    def discard(self, write_id: int, now: Moment, *, only_conflict: bool) -> bool:
        """Give up a write, even with a damaged row, as a person has decided. False when it is not pending any more, or,
        with `only_conflict`, not in conflict."""
        try:
            given_up = self.write(write_id, with_parts=False)
        except BufferDamaged:
            self._remove_row(write_id, now.at)
            return True
        if given_up is None or (only_conflict and given_up.state is not State.CONFLICT):
            return False
        expected = given_up.expected
        if given_up.state is State.PUBLISHING:  # it may have arrived, or still do
            expected = replace(expected, etags=(*expected.etags, given_up.etag))
            self.record_own_write(given_up.key, LastOwnWrite.now(now, known=False))
        self._expect(given_up, expected)
        self._checkpoints.given_up(given_up)
        self._give_way(given_up, now.at)
        return True

    # What is due

    def set_right(self, now: Moment) -> None:
        """Correct due times later than any can be: they were written before the clock went back. Writes that were not
        tried yet become due at once. Requests for uploads older than ASKED_SECONDS_MAX are in doubt: their outcome
        could not be recorded."""
        for one in self._asked_and_living():
            asked_seconds, _ = now.since(one.asked.begun) if one.asked is not None else (0.0, True)
            if asked_seconds > ASKED_SECONDS_MAX:
                self.mark_in_doubt(one.id, now)
        late = {"now": now.at, "retry": now.at + RETRY_SECONDS_MAX, "upload": now.at + UPLOAD_SECONDS_MAX}
        for (slot, bucket), priorities in self.lanes().items():
            for priority in priorities:  # by the index, which skips what is due soon
                from_at = late["retry"] if priority > Priority.LARGE else now.at
                self._rows.execute(
                    "UPDATE writes SET due_at = :now WHERE slot = :slot AND bucket = :bucket AND priority = :priority "
                    "AND due_at > :from AND state < 5 AND CASE WHEN pending = 1 AND attempts = 0 THEN 1 "
                    "WHEN priority = 6 OR (sequence IS NULL AND state < 3) THEN due_at > :upload "
                    "ELSE due_at > :retry END",
                    {**late, "slot": slot, "bucket": bucket, "priority": priority, "from": from_at},
                )

    def begin_epoch(self, now: float) -> None:
        """Begin the epoch of a new flushing process: damaged writes are tried again, as they may have been repaired."""
        self._rows.execute("UPDATE node SET value = value + 1 WHERE name = 'epoch'")
        self._rows.execute(
            "UPDATE writes SET damaged = 0, due_at = ? WHERE damaged = 1 AND state <> 3 AND state >= 0", (now,)
        )

    def count_reopening(self) -> None:
        """Write something, so that the commit reaches the disk."""
        counted = "ON CONFLICT (name) DO UPDATE SET value = value + 1"
        self._rows.execute(f"INSERT INTO node VALUES ('reopenings', 1) {counted}")

    def leave_checkpoint(self, key: ObjectKey) -> None:
        """Take an object that the origin was asked to delete, and may have, out of its checkpoint."""
        if self.latest(key) is None:
            self._checkpoints.removed(key)

    def forget_ended(self, now: Moment, count_max: int = FORGOTTEN_AT_ONCE) -> bool:
        """Forget old or surplus ended uploads, checkpoints and own writes; return whether more may be left."""
        old = "SELECT id FROM writes WHERE state = 5 AND due_at < ? LIMIT ?"
        forgotten = self._rows.execute(f"DELETE FROM writes WHERE id IN ({old})", (now.at, count_max)).rowcount
        ended = self._row("SELECT count(*) FROM writes WHERE state = 5")
        too_many = min(count_max, (ended[0] if ended else 0) - ENDED_MAX)
        if too_many > 0:
            oldest = "SELECT id FROM writes WHERE state = 5 ORDER BY due_at LIMIT ?"
            self._rows.execute(f"DELETE FROM writes WHERE id IN ({oldest})", (too_many,))
        is_more = self._checkpoints.forget(count_max)
        return is_more or max(forgotten, too_many, self._forget_last_own_writes(now, count_max)) >= count_max

    # The chain of a key, and markers

    def _before(self, write: Write) -> tuple[list[Write], list[Write]]:
        chain = [one for one in self._of_key(write.key, "sequence IS NOT NULL") if one.id != write.id]
        stays = [
            one
            for one in chain
            if one.state is State.PUBLISHING
            or (one.state is not State.LOCAL and (write.in_order or self._stays(one, write)))
        ]
        return [one for one in chain if one not in stays], stays

    def _stays(self, before: Write, marker: Write) -> bool:
        """Return whether another marker waits for a write that this marker would replace: it must wait for it too, or
        it would come first."""
        if marker.behind is None:
            return False
        key = text(marker.key.key)
        directories = [key[: stop + 1] for stop, byte in enumerate(key) if byte == ord("/")]
        marks = ",".join("?" * (len(directories) + 1))
        waiting = f"SELECT 1 FROM writes WHERE bucket = ? AND behind IN ({marks}) AND sequence > ? AND state < 5"
        values: list[str | bytes | int] = [marker.key.bucket, b"", *directories, before.sequence, key]
        return self._row(f"{waiting} AND key <> ? LIMIT 1", *values) is not None

    def _enter(self, stored: Write, replaced: Sequence[Write]) -> Write:
        """Give a write its place in the order."""
        sequence = self._next_sequence()
        entered = replace(stored, sequence=sequence)
        since = sequence
        if stored.behind is None:
            since = min([sequence, *(self._since(one.id) for one in replaced)])
        priority = _priority_of(stored)
        self._rows.execute(
            "UPDATE writes SET pending = 1, sequence = ?, since_sequence = ?, priority = ?, attempts = 0, "
            "failing_since = NULL, last_error = NULL, size_bytes = ? WHERE id = ?",
            (sequence, since, priority, stored.size_bytes, stored.id),
        )
        self._update(entered)
        self._checkpoints.acknowledged(entered)
        conflicts = [turn for one in replaced if one.state is State.CONFLICT and (turn := self.turn(one.id))]
        for one in replaced:
            self._give_way(one, stored.acknowledged_at)
        if entered.state is State.LOCAL and not conflicts:
            self._rows.execute("UPDATE writes SET due_at = NULL, after_sequence = NULL WHERE id = ?", (entered.id,))
            return entered
        if not conflicts or entered.state is State.PUBLISHING:
            self._wait_or_start(entered, stored.acknowledged_at)
            return entered
        reason = conflicts[0].last_error  # a later write ends no conflict
        return self._update(replace(entered, state=State.CONFLICT), Turn(None, last_error=reason, priority=priority))

    def _wait_or_start(self, write: Write, now: float) -> None:
        """Make a write wait for the one before it in the order; without one, it is due."""
        after = self._blocker(write)
        self._rows.execute(
            "UPDATE writes SET after_sequence = ?, due_at = ? WHERE id = ?",
            (after, now if after is None else None, write.id),
        )
        if after is None:
            self.has_due = True
        elif self._row("SELECT 1 FROM writes WHERE id = ? AND priority = ?", write.id, Priority.URGENT) is not None:
            self._hurry(self._unhurried_before(write.id, _RAISED_MAX), now)

    def _blocker(self, write: Write) -> int | None:
        """Return the sequence of a write that must end before: the one that will probably be the last."""
        key = (write.key.bucket, encoded(write.key))
        found = [
            self._row(
                "SELECT max(sequence) FROM writes WHERE bucket = ? AND key = ? AND sequence < ? AND state < 5 "
                "AND state >= 0",
                *key,
                write.sequence,
            )
        ]
        if write.in_order:
            of_slot = "SELECT max(sequence) FROM writes WHERE slot = ? AND bucket = ? AND sequence < ? AND state >= 0"
            found.append(self._row(of_slot, write.spec.slot, write.key.bucket, write.sequence))
        if write.behind is not None:
            start = text(write.behind)
            found.append(
                self._row(
                    "SELECT max(sequence) FROM writes WHERE bucket = ? AND key >= ? AND key < ? AND since_sequence < ? "
                    f"AND sequence <> ? AND {PENDING} AND state >= 0",
                    write.key.bucket,
                    start,
                    start + BEHIND_ALL,
                    write.sequence,
                    write.sequence,
                )
            )
        return max((row[0] for row in found if row is not None and row[0] is not None), default=None)

    def _release(self, sequence: int, now: float) -> None:
        """Let the writes that waited for one that has left the order wait for another, or start."""
        waiting = self._rows.execute("SELECT id, record FROM writes WHERE after_sequence = ?", (sequence,)).fetchall()
        for write_id, record in waiting:
            try:
                self._wait_or_start(codec.unpack_write(write_id, record), now)
            except BufferDamaged:  # its reader reports it
                self._rows.execute("UPDATE writes SET after_sequence = NULL, due_at = ? WHERE id = ?", (now, write_id))

    def _since(self, write_id: int) -> int:
        row = self._row("SELECT coalesce(since_sequence, sequence) FROM writes WHERE id = ?", write_id)
        return row[0] if row else 0

    def _next_sequence(self) -> int:
        self._rows.execute("UPDATE node SET value = value + 1 WHERE name = 'sequence'")
        row = self._row("SELECT value FROM node WHERE name = 'sequence'")
        return row[0] if row else 0

    def _expected_now(self, write: Write) -> ExpectedVersion:
        """Return the versions present when the request began, or the one that this gateway has put there since."""
        own, expected = self.last_own_write(write.key), write.expected
        if own is None or (expected.known and not own.known):
            return expected
        if own.known and own.seconds_after(expected.asked_then) >= 0:
            return ExpectedVersion.exactly(own.etag)
        return expected if expected.known or own.etag is None else replace(expected, etags=(*expected.etags, own.etag))

    def _expect(self, done: Write, expected: ExpectedVersion) -> None:
        """Set the version that later writes of a key expect: of the next, and of uploads before it that may fail."""
        for one in self._of_key(done.key, "sequence IS NOT NULL"):
            if one.sequence > done.sequence:
                self._update(replace(one, expected=expected))
                if one.is_acknowledged:
                    return

    # Rows

    def _give_way(self, write: Write, now: float) -> None:
        """End a write that a later one replaces, or that was given up: the origin gets nothing of it."""
        self._drop_origin_upload(write, now)
        self._end(write, now, as_outcome(write))

    def _end(self, write: Write, now: float, ended: UploadOutcome | None) -> None:
        """End a write; keep its outcome for repetitions of its last request."""
        self._drop_parts(write.id)
        if ended is None or write.upload_id is None:
            self._rows.execute("DELETE FROM writes WHERE id = ?", (write.id,))
        else:
            self._rows.execute(
                "UPDATE writes SET state = 5, pending = 0, sequence = NULL, since_sequence = NULL, "
                "after_sequence = NULL, due_at = ?, attempts = 0, last_error = NULL, failing_since = NULL, record = ? "
                "WHERE id = ?",
                (ended.ended_at + ENDED_KEPT_SECONDS, codec.pack_ended(write.id, ended), write.id),
            )
        if write.sequence:
            self._release(write.sequence, now)

    def _remove_row(self, write_id: int, now: float) -> None:
        """Remove a damaged row."""
        row = self._row("SELECT sequence FROM writes WHERE id = ?", write_id)
        self._drop_parts(write_id)
        self._rows.execute("DELETE FROM writes WHERE id = ?", (write_id,))
        if row is not None and row[0] is not None:
            self._release(row[0], now)

    def _drop_origin_upload(self, write: Write, now: float) -> None:
        if write.origin_upload_id is not None:
            self.abort_at_origin(write.key, write.spec.slot, write.origin_upload_id, now)

    def _with_chosen(self, made: Write) -> Write | None:
        """Return the upload as it is now; None when a chosen part is gone."""
        upload = self.upload(made.upload_id or "")
        if upload is None:
            return None
        rows = self._rows.execute("SELECT number, file FROM parts WHERE write_id = ?", (upload.id,))
        files: Mapping[int, str] = dict(rows.fetchall())
        return upload if all(files.get(part.number) == part.file.name for part in made.parts) else None

    def _keep_parts(self, write_id: int, numbers: set[int]) -> None:
        rows = self._rows.execute("SELECT number, file FROM parts WHERE write_id = ?", (write_id,)).fetchall()
        dropped = [(number, file) for number, file in rows if number not in numbers]
        doomed = [(write_id, number) for number, _ in dropped]
        self._rows.executemany("DELETE FROM parts WHERE write_id = ? AND number = ?", doomed)
        self._free([file for _, file in dropped])

    def _drop_parts(self, write_id: int) -> None:
        files = self._rows.execute("SELECT DISTINCT file FROM parts WHERE write_id = ?", (write_id,)).fetchall()
        self._rows.execute("DELETE FROM parts WHERE write_id = ?", (write_id,))
        self._free([name for (name,) in files])

    def _insert(self, write: Write, turn: Turn) -> Write:
        key = write.key
        inserted = self._rows.execute(
            "INSERT INTO writes (upload_id, bucket, key, place, slot, state, pending, due_at, attempts, priority, "
            "damaged, size_bytes, record) VALUES (?, ?, ?, ?, ?, ?, 0, ?, 0, ?, 0, ?, x'')",
            (
                write.upload_id,
                key.bucket,
                encoded(key),
                hash_slot_of(key),
                write.spec.slot,
                write.state,
                turn.due_at,
                turn.priority,
                write.size_bytes,
            ),
        )
        return self._update(replace(write, id=int(inserted.lastrowid or 0)))

    def _update(self, write: Write, turn: Turn | None = None) -> Write:
        """Rewrite a row; with `turn`, also its due time and failures."""
        self._rows.execute(
            "UPDATE writes SET state = ?, sequence = ?, behind = ?, record = ? WHERE id = ?",
            (
                write.state,
                write.sequence or None,
                None if write.behind is None else text(write.behind),
                codec.pack_write(write),
                write.id,
            ),
        )
        if turn is not None:
            self._rows.execute(
                "UPDATE writes SET due_at = ?, attempts = ?, failing_since = ?, last_error = ?, priority = ?, "
                "after_sequence = ?, damaged = ? WHERE id = ?",
                (
                    turn.due_at,
                    turn.attempts,
                    turn.failing_since,
                    turn.last_error,
                    turn.priority,
                    turn.after_sequence,
                    turn.damaged,
                    write.id,
                ),
            )
        return write

    # Staged files

    def removed(self, names: Iterable[str]) -> None:
        self._rows.executemany("DELETE FROM freed WHERE name = ?", [(name,) for name in names])

    def _put_file(self, file: StagedFile, slot: str) -> None:
        """Enter a file on a slot's account, unless it is on another's already, or only the origin has it."""
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
        counted = self.counted()
        self._rows.execute("DELETE FROM usage")
        rows = [(slot, usage.staged_bytes, usage.objects) for slot, usage in counted.items()]
        self._rows.executemany("INSERT INTO usage VALUES (?, ?, ?)", rows)
        self._rows.execute("DELETE FROM local_usage")
        local = [(slot, one.local_bytes, one.local_objects) for slot, one in counted.items() if one.local_objects]
        self._rows.executemany("INSERT INTO local_usage VALUES (?, ?, ?)", local)

    # Buckets

    def learn(self, bucket: str, capabilities: BucketCapabilities) -> None:
        """Record the facts of a bucket's latest answer. Known conditions stay if it has none; the storage classes that
        it took, and the forms of keys that it refused, stay."""
        before = self.capabilities(bucket)
        if before is not None:
            classes = before.storage_classes | capabilities.storage_classes
            capabilities = replace(capabilities, storage_classes=classes, refused_forms=before.refused_forms)
        if before is not None and not capabilities.conditions.learned_at:
            capabilities = replace(capabilities, conditions=before.conditions)
        self._put_capabilities(bucket, capabilities)

    def _put_capabilities(self, bucket: str, capabilities: BucketCapabilities) -> None:
        packed = codec.pack_capabilities(bucket, capabilities)
        self._rows.execute("INSERT OR REPLACE INTO profiles VALUES (?, ?)", (bucket, packed))

    def refused_for_good(self, key: ObjectKey, code: str) -> None:
        """Note that a bucket refuses a key for good: it is asked before the next such write is acknowledged."""
        known = self.capabilities(key.bucket)
        if known is not None:
            forms = bounded(known.refused_forms | refused_forms(key.key, code))
            self._put_capabilities(key.bucket, replace(known, refused_forms=forms))

    def _has_taken(self, key: ObjectKey) -> None:
        """Clear the refusals of forms that a key has: the bucket has taken it."""
        known = self.capabilities(key.bucket)
        if known is not None and known.refuses(key.key):
            self._put_capabilities(key.bucket, replace(known, refused_forms=known.refused_forms - forms_of(key.key)))

    def learn_conditions(self, bucket: str, conditions: Conditions) -> None:
        """Record which conditions a bucket honours, whatever else was learned meanwhile."""
        capabilities = self.capabilities(bucket)
        if capabilities is not None:
            self.learn(bucket, replace(capabilities, conditions=conditions))

    def forget_buckets(self, buckets: Callable[[str], bool]) -> None:
        """Forget all that was learned of these buckets, and own writes there."""
        for table in ("profiles", "origin"):
            known = self._rows.execute(f"SELECT DISTINCT bucket FROM {table}").fetchall()
            self._rows.executemany(f"DELETE FROM {table} WHERE bucket = ?", [one for one in known if buckets(one[0])])

    # What this gateway has done

    def record_own_write(self, key: ObjectKey, own: LastOwnWrite) -> None:
        """Record that this gateway has changed a key at the origin, or, if `own` is not `known`, may have."""
        before = self.last_own_write(key) if not own.known else None
        if before is not None:
            own = replace(own, etag=before.etag)
        if own.known and own.etag is not None:
            self._has_taken(key)
        looked_at = own.at + own.kept_seconds - LAST_OWN_WRITE_KEPT_SECONDS
        row = (key.bucket, encoded(key), looked_at, codec.pack_last_own_write(key, own))
        self._rows.execute("INSERT OR REPLACE INTO origin VALUES (?, ?, ?, ?)", row)

    def _forget_last_own_writes(self, moment: Moment, count_max: int) -> int:
        """Forget own writes that no request can need; those of keys with an open upload stay while there is room."""
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

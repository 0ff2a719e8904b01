"""Clients' uploads, from CreateMultipartUpload to Complete or Abort, and the origin's uploads that must go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged, PartInUse
from gateway.core.model import ObjectKey
from gateway.writeback.journal.buckets import LastOwnWrite
from gateway.writeback.journal.records import (
    CreateAttempt,
    ExpectedVersion,
    Part,
    Priority,
    State,
    Turn,
    UploadOutcome,
    Write,
    WriteSpec,
    unpack_ended,
    unpack_write,
)
from gateway.writeback.journal.rows import OPEN, Table, text
from gateway.writeback.journal.writes import Writes, as_outcome
from gateway.writeback.pending_key_filter import hash_slot_of

ASKED_SECONDS_MAX = 300.0
"""No answer from the origin takes longer."""

CARRIED_OUT_SECONDS = 60.0
"""After this time, a request whose sender died has reached the origin, or never will."""


class Uploads(Table):
    def __init__(self, writes: Writes) -> None:
        super().__init__(writes._rows)
        self._writes = writes
        self._parts = writes.parts

    # Open uploads

    def upload(self, upload_id: str) -> Write | None:
        """Return an open upload, without its parts."""
        return self._writes.first(f"upload_id = ? AND {OPEN}", upload_id)

    def under(self, bucket: str, prefix: str = "", after: tuple[str, str] = ("", "")) -> Iterator[Write]:
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
                yield unpack_write(write_id, record)

    def is_being_completed(self, upload: Write) -> bool:
        """Return whether the origin may be carrying out a Complete of the upload whose client has no answer yet."""
        turn = self._writes.turns.of(upload.id)
        return upload.is_completed_at_origin and upload.answer is None and turn is not None and turn.due_at is not None

    def ended(self, upload_id: str) -> UploadOutcome | None:
        """Return the outcome of an upload, for repetitions of its last request."""
        row = self._row("SELECT id, state, pending, record FROM writes WHERE upload_id = ?", upload_id)
        if row is None:
            return None
        write_id, state, pending, record = row
        if state == State.DONE:
            return unpack_ended(write_id, record)
        return as_outcome(unpack_write(write_id, record)) if pending else None

    def begin(self, upload: Write, asked_as: int | None = None) -> Write:
        """Enter an open upload, which the origin has begun, or will; `asked_as`, the entry of `ask`, is done."""
        if asked_as is not None:
            self.forget(asked_as)
        opened = replace(upload, state=State.OPEN, multipart=True)
        self._writes.turns.has_due = True
        self._writes.checkpoints.begun(opened)
        return self._writes.insert(opened, Turn(opened.began_at, priority=Priority.UPLOAD))

    def put_part(self, upload_id: str, part: Part, now: Moment) -> bool:
        """Store a part, replacing one of the same number; False when the upload does not exist, or has ended.

        PartInUse when the origin is asked to complete the upload with the present part.
        """
        upload = self.upload(upload_id)
        if upload is None:
            return False
        if upload.is_completed_of(part.number):
            raise PartInUse(f"{upload.key} is just being completed of its part {part.number}")
        self._parts.put(upload.id, part, upload.spec.slot)
        if not upload.is_completed_at_origin:
            self._writes.update(replace(upload, touched=now))
        if upload.state is State.OPEN and part.origin_etag is None:
            self._change("UPDATE writes SET due_at = ? WHERE id = ? AND attempts = 0", now.at, upload.id)
            self._writes.turns.has_due = True
        return True

    def part_sent(self, write_id: int, part: Part) -> Write | None:
        """Note that the origin has a part, unless the client has replaced it; return the write, without parts."""
        now, write = self._parts.part(write_id, part.number), self._writes.get(write_id)
        is_kept_here = write is not None and write.state is State.LOCAL
        if now is not None and now.file.name == part.file.name and not is_kept_here:
            self._parts.put_row(write_id, replace(now, origin_etag=part.origin_etag))
        return write

    # Their ends

    def complete(self, made: Write) -> Write | None:
        """CompleteMultipartUpload: make an upload's chosen parts an acknowledged object; other parts go.

        `made` is the upload with the fields that Complete sets. None when a part was replaced, or the upload has ended:
        the older object would overwrite what was acknowledged since.
        """
        upload, writes = self._with_chosen(made), self._writes
        if upload is None:
            return None
        writes.pending_keys.set(hash_slot_of(made.key))
        replaced, _ = writes.before(replace(upload, in_order=made.in_order, behind=made.behind))
        expected = replaced[0].expected if replaced else writes.expected_now(made)
        self._parts.keep(upload.id, {part.number for part in made.parts})
        state, parts = State.PUBLISHING, made.parts  # it may be there
        if upload.state is State.OPEN:
            state = State.LOCAL if made.state is State.LOCAL else State.COMMITTED
        if state is State.LOCAL:
            writes.drop_origin_upload(upload, made.acknowledged_at)
            self._parts.send_again(upload.id)
            upload = replace(upload, origin_upload_id=None)
            parts = tuple(replace(part, origin_etag=None) for part in made.parts)
        stored = replace(
            upload.completed_as(made),
            state=state,
            expected=expected,
            acknowledged_at=made.acknowledged_at,
            acknowledged=made.acknowledged,
            order=made.order,
            parts=parts,
        )
        entered = writes.enter(stored, replaced)
        if upload.sequence:  # its place while the origin was asked to complete it
            writes.release(upload.sequence, made.acknowledged_at)
        return entered

    def complete_at_origin(self, made: Write) -> bool:
        """Let the origin complete an upload while its client waits, under `made.conditions`; see `made.asked_as`.

        Nothing is acknowledged, and the upload stays open if the request fails. False when a part was replaced, or the
        upload has ended, or is just being completed of other parts or under other conditions, whose outcome would
        answer the wrong request.
        """
        upload = self._with_chosen(made)
        if upload is None:
            return False
        is_other = (upload.completed_of, upload.conditions) != (made.completed_of, made.conditions)
        if upload.is_completed_at_origin and upload.answer is None and is_other:
            return False
        asked = replace(
            upload.completed_as(made),
            state=State.PUBLISHING,
            conditions=made.conditions,
            asked_as=made.asked_as,
            answer=None,
            sequence=upload.sequence or self._writes.next_sequence(),
            touched=made.touched,
        )
        self._change("UPDATE writes SET priority = ? WHERE id = ?", Priority.URGENT, asked.id)
        self._writes.update(asked)
        self._writes.wait_or_start(asked, made.touched_then.at)
        return True

    def _with_chosen(self, made: Write) -> Write | None:
        """Return the upload as it is now; None when a chosen part is gone."""
        upload = self.upload(made.upload_id or "")
        if upload is None:
            return None
        files = self._parts.files_of(upload.id)
        return upload if all(files.get(part.number) == part.file.name for part in made.parts) else None

    def answer(self, write_id: int, code: str, *, is_over: bool) -> None:
        """Note a waiting Complete's error. Unless `is_over`, it may be done: the reconciler looks for the object."""
        write = self._writes.get(write_id)
        if write is None or not write.is_completed_at_origin:
            return
        if is_over:
            self._reopen(replace(write, answer=code))
        else:
            self._writes.update(replace(write, answer=code))

    def completed(self, write_id: int, etag: str, now: Moment) -> None:
        """Enter that the origin has completed an upload whose client waits, or waited."""
        write, writes = self._writes.get(write_id), self._writes
        if write is None or write.is_acknowledged:
            return
        if write.sequence:
            writes.expect(write, ExpectedVersion.exactly(etag))
        else:  # it has left the order: later writes may find its object
            for one in writes.of_key(write.key, "sequence IS NOT NULL"):
                writes.update(replace(one, expected=one.expected.and_also(etag)))
        writes.checkpoints.completed(write, now.at)
        is_left = write.answer is not None  # its client may have gone on, and sent more parts
        if is_left and any(part.stored_at > write.touched_then.at for part in self._parts.of(write_id)):
            self._reopen(replace(write, origin_upload_id=None, answer=None), is_sent_again=True)
        else:
            ended = UploadOutcome(write.upload_id or "", write.key, now.at, etag, write.completed_of, write.checksums)
            writes.end(write, now.at, ended)
        own, later = LastOwnWrite.now(now, etag), writes.buckets.last_own_write(write.key)
        if later is None or later.seconds_after(now) <= 0:
            writes.buckets.record_own_write(write.key, own)

    def _reopen(self, write: Write, *, is_sent_again: bool = False) -> None:
        """Open an upload again, out of the order. `is_sent_again`: the origin has none of its parts any more."""
        opened = replace(write, state=State.OPEN, sequence=0, conditions={})
        self._writes.update(opened, Turn(write.touched_then.at, priority=Priority.UPLOAD))
        if is_sent_again:
            self._parts.send_again(write.id)
        if write.sequence:
            self._writes.release(write.sequence, write.touched_then.at)

    def leave_order(self, write_id: int, now: float) -> None:
        """Take a Complete with an unknown outcome out of the order after some time: nothing waits for it any more."""
        write = self._writes.get(write_id)
        if write is not None and write.is_completed_at_origin and write.sequence:
            self._writes.update(replace(write, sequence=0))
            alone = "UPDATE writes SET after_sequence = NULL, due_at = coalesce(due_at, ?) WHERE id = ?"
            self._change(alone, now, write_id)
            self._writes.release(write.sequence, now)

    def abort(self, upload_id: str, now: Moment) -> bool:
        """End an upload and its parts, here and at the origin. False if it has ended, or the origin completes it."""
        # An abort would then tell the client that there is no object, though there is one.
        upload = self.upload(upload_id)
        if upload is None or self.is_being_completed(upload):
            return False
        if upload.is_completed_at_origin:  # unknown whether it was completed
            self._writes.buckets.record_own_write(upload.key, LastOwnWrite.now(now, known=False))
        self._writes.drop_origin_upload(upload, now.at)
        self._writes.end(upload, now.at, UploadOutcome(upload_id, upload.key, now.at, None))
        return True

    # Requests to the origin to begin an upload, and uploads that it is to abort

    def ask(self, key: ObjectKey, slot: str, asked: CreateAttempt) -> int:
        """Enter that the origin will be asked for an upload. Until its purpose is known, it counts as one to abort."""
        write = Write(WriteSpec(key, {}, slot), ExpectedVersion(), asked.begun.at, State.ABORTING, asked=asked)
        return self._writes.insert(write, Turn(None, priority=Priority.ABORT)).id

    def mark_in_doubt(self, write_id: int, now: Moment) -> None:
        write = self._writes.get(write_id)
        if write is not None and write.asked is not None and write.asked.in_doubt_since is None:
            asked = replace(write.asked, in_doubt_since=now)
            turn = Turn(now.at + CARRIED_OUT_SECONDS, priority=Priority.ABORT)
            self._writes.update(replace(write, asked=asked), turn)
            self._writes.turns.has_due = True

    def mark_all_in_doubt(self, now: Moment, worker: int | None = None) -> None:
        """Mark as in doubt all requests of a worker slot (None: of all) whose process is dead."""
        for write_id, asked in self._asked_and_living():
            if worker in (None, asked.worker):
                self.mark_in_doubt(write_id, now)

    def doubt_old(self, now: Moment) -> None:
        """Mark as in doubt the requests older than ASKED_SECONDS_MAX: their outcome could not be recorded."""
        for write_id, asked in self._asked_and_living():
            if now.since(asked.begun)[0] > ASKED_SECONDS_MAX:
                self.mark_in_doubt(write_id, now)

    def _asked_and_living(self) -> list[tuple[int, CreateAttempt]]:
        """Return requests for uploads without an outcome yet. Damaged rows become due: the reconciler reports them."""
        found = list[tuple[int, CreateAttempt]]()
        asked = "SELECT id, record FROM writes WHERE state = 4 AND due_at IS NULL AND damaged = 0"
        for write_id, record in self._all(asked):
            try:
                write = unpack_write(write_id, record)
            except BufferDamaged:
                self._change("UPDATE writes SET due_at = 0 WHERE id = ?", write_id)
            else:
                found += [(write_id, write.asked)] if write.asked is not None else []
        return found

    def begun(self, write_id: int, origin_upload_id: str, asked_as: int) -> Write | None:
        """Note the origin's upload for a write, announced by `ask`; return the write as it is, None if it has ended.

        Of two uploads asked for at once the first counts; the other is aborted.
        """
        write = self._writes.get(write_id)
        is_sent = write is not None and write.state not in (State.CONFLICT, State.LOCAL)
        if write is None or not is_sent or write.origin_upload_id is not None:
            asked = self._writes.get(asked_as)
            if asked is not None:
                aborted = replace(asked, origin_upload_id=origin_upload_id, asked=None)
                self._writes.update(aborted, Turn(asked.began_at, priority=Priority.ABORT))
            return write
        self.forget(asked_as)
        return self._writes.update(replace(write, origin_upload_id=origin_upload_id))

    def forget(self, write_id: int) -> None:
        """Forget an upload that is gone at the origin, or is no concern of this node."""
        self._change("DELETE FROM writes WHERE id = ? AND state = 4", write_id)

    def origin_upload_ids(self, key: ObjectKey) -> set[str | None]:
        """Return the ids of the origin's uploads that belong to the key's writes, those to abort included."""
        return {one.origin_upload_id for one in self._writes.of_key(key, "1")}

    def asked(self, key: ObjectKey) -> Sequence[Write]:
        """Return the uploads of a key that the origin was asked for, without an outcome yet."""
        aborting = self._writes.of_key(key, "state = 4")
        return [one for one in aborting if one.asked is not None and not one.origin_upload_id]

    def aborting(self) -> Sequence[Write]:
        return self._writes.found("state = 4 ORDER BY id")

    def are_any_aborting(self) -> bool:
        """Return whether the origin may have uploads that nothing here needs."""
        return self._row("SELECT 1 FROM writes WHERE state = 4 LIMIT 1") is not None

    def aborting_count(self) -> int:
        """Return the number of these uploads, even unreadable ones, without those that may be another writer's."""
        count = 0
        for write_id, record in self._rows.execute("SELECT id, record FROM writes WHERE state = 4"):
            with suppress(BufferDamaged):
                found = unpack_write(write_id, record)
                count -= found.asked is not None and found.origin_upload_id is not None
            count += 1
        return count

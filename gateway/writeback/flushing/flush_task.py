"""Carries one write on: does what state.py says, at the origin and in the journal, as far as possible for now."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferDamaged
from gateway.core.model import Claim
from gateway.policy.slots import Slot
from gateway.s3.headers import unquote
from gateway.writeback.flushing.condition_probe import LEARNED_AGAIN_SECONDS, UNKNOWN_AGAIN_SECONDS, ConditionProbes
from gateway.writeback.flushing.flush_logger import FlushLogger
from gateway.writeback.flushing.in_doubt import in_doubt, settle_in_doubt
from gateway.writeback.flushing.lanes import Lane
from gateway.writeback.flushing.manifest_files import AWAITED_PAUSE_SECONDS, ManifestFiles
from gateway.writeback.flushing.requests import Requests
from gateway.writeback.flushing.state import (
    Ask,
    AwaitFiles,
    Begun,
    Compare,
    Completed,
    Delete,
    End,
    Event,
    Expire,
    Finish,
    Forget,
    Instruction,
    JournalNote,
    LookedFor,
    Lost,
    MarkConflict,
    OriginReply,
    PartSent,
    Progress,
    Request,
    Rest,
    SendPart,
    Settle,
    Wait,
    WriteRefused,
    kind_of,
)
from gateway.writeback.journal.buckets import Honoured
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Part, Priority, State, Turn, Write
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.uploads import CARRIED_OUT_SECONDS
from gateway.writeback.pending_key_filter import ChangeNotifier

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0

REFUSED_AGAIN_SECONDS = 600.0
"""Seconds between attempts after a permanent refusal, unless a person asks for one. A bucket may be made again."""

NO_BUCKET_AGAIN_SECONDS = 60.0

UNSENT_AT_ONCE = 32
"""Parts of an open upload that a task takes at once."""

_OWN_PRIORITY = (Priority.URGENT, Priority.UPLOAD, Priority.ABORT)

_log = structlog.get_logger("forebay.writeback")


class Publication(Protocol):
    """Learns of an object before its write stops being pending."""

    async def publish(self, write: Write, etag: str | None) -> None:
        """Publish the origin's version (None: the key is deleted); the write's files are still there.

        Called at least once: after a kill, the next process publishes again.
        """


class Superseded(Exception):
    """The write has ended or changed: the process that changed it has made it due again."""


@dataclass(frozen=True, slots=True)
class FlushDependencies:
    """The dependencies of all writes. `slots` are the known ones, by name."""

    journal: Journal
    requests: Requests
    publication: Publication
    log: FlushLogger
    clock: Clock
    slots: dict[str, Slot] = field(default_factory=dict)
    manifests: ManifestFiles = field(default_factory=ManifestFiles)
    settled: Callable[[Sequence[Claim]], None] = lambda _claims: None
    """Told of the claims of each write that the origin has, or was given up, once the journal has noted it."""


class FlushTask:
    """Carries one write on, from its due time until nothing can be done about it for now."""

    def __init__(
        self,
        dependencies: FlushDependencies,
        probes: ConditionProbes,
        lane: Lane,
        rng: random.Random,
        progress: Progress,
        turn: Turn,
        notifier: ChangeNotifier,
    ) -> None:
        self._dependencies = dependencies
        self._journal = dependencies.journal
        self._requests = dependencies.requests
        self._clock = dependencies.clock
        self._probes = probes
        self._lane = lane
        self._rng = rng
        self._progress = progress
        self._id = progress.write.id
        self.began = dependencies.clock.monotonic()
        self._turn = turn
        self._notifier = notifier
        self._events: asyncio.Queue[asyncio.Task[Event]] = asyncio.Queue()
        self._under_way: set[asyncio.Task[Event]] = set()
        self._is_marked = progress.write.state is State.PUBLISHING
        self.is_ending = False
        """It may have recorded the end of the write itself, and is about to report it."""
        self.is_awaited = False
        """A person waits: after a failure, retry after the shortest pause."""
        self.is_urgent = turn.priority is Priority.URGENT
        """A request waits for it, by the journal: it takes bandwidth before other writes."""

    @property
    def write(self) -> Write:
        return self._progress.write

    @property
    def is_hurried(self) -> bool:
        return self.is_awaited or self.is_urgent

    def prioritise_parts(self) -> None:
        self._lane.prioritise_parts()

    async def run(self) -> End | None:
        """Carry the write on; return the last instruction. BufferDamaged, BufferUnavailable, Superseded."""
        try:
            end = await self._start(self._progress.begin())
            while self._under_way or not self._events.empty():
                event = (await self._events.get()).result()
                if end is None:  # else it is an event of a part, and recorded
                    end = await self._start(self._progress.after(event))
            if end is not None:
                self.is_ending = True
                await self._carry_out_end(end)
            return end
        finally:
            await self._stop()

    async def _start(self, instructions: Sequence[Instruction]) -> End | None:
        end: End | None = None
        for one in instructions:
            if isinstance(one, JournalNote):
                await self._note(one)
            elif isinstance(one, End):
                end = one
            else:
                task = asyncio.create_task(self._request(self._progress.write, one))
                self._under_way.add(task)
                task.add_done_callback(self._done)
        return end

    def _done(self, task: asyncio.Task[Event]) -> None:
        self._under_way.discard(task)
        self._events.put_nowait(task)
        if not task.cancelled():
            task.exception()  # retrieved: of several failures the first is raised, and asyncio would report the others

    async def _stop(self) -> None:
        left = list(self._under_way)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    # Requests

    async def _request(self, write: Write, request: Request) -> Event:
        match request:
            case Ask.HEAD:
                return await self._requests.head(write)
            case Ask.BEGIN:
                return await self._begin(write)
            case SendPart():
                return await self._send_part(write, request)
            case Finish():
                await self._mark(write)
                return await self._requests.finish(write, request)
            case Ask.COMPLETE:
                return await self._requests.complete(write)
            case Delete():
                await self._mark(write)
                return await self._requests.delete(write, request)
            case Compare():
                return await self._requests.compare(write, request.etag)
            case Ask.FIND:
                return await self._requests.find(write)
            case Ask.LOOK_FOR_FILES:
                return await self._look_for_files(write)
            case Ask.SEEK:
                return await self._seek(write)
            case Ask.ABORT:
                return await self._requests.abort(write)

    async def _look_for_files(self, write: Write) -> Event:
        manifests = self._dependencies.manifests
        if self._progress.awaits_others:
            earlier = await manifests.earlier(write, self._journal, hurries=self.is_hurried)
            if earlier is not None:
                return earlier
        if not self._progress.names_files:
            return LookedFor()
        return await manifests.look(write, self._requests, self._journal, self._clock, self._dependencies.log)

    async def _begin(self, write: Write) -> Event:
        async with in_doubt(self._journal, write.key, write.spec.slot, self._clock) as question:
            found = await self._requests.begin(write)
            if not isinstance(found, str):
                question.is_refused = isinstance(found, WriteRefused)
                return found
            begun = await self._journal.change(lambda tx: tx.uploads.begun(write.id, found, question.id))
            question.is_over = True
        if begun is None or begun.origin_upload_id is None:
            raise Superseded
        return Begun(begun)

    async def _send_part(self, write: Write, send: SendPart) -> Event:
        async with self._lane.part(lambda: self.is_hurried, has_failed=self._turn.attempts > 0):
            try:
                event = await self._requests.send_part(write, send)
            except BufferDamaged as error:
                now_there = self._journal.read(lambda tx: tx.parts.part(write.id, send.part.number))
                if now_there is None or now_there.file.name != send.part.file.name:
                    raise Superseded from error  # its client has replaced it, or left it out: no damage
                raise
        if not isinstance(event, PartSent):
            return event
        part: Part = replace(send.part, origin_etag=event.etag)
        now = await self._journal.change(lambda tx: tx.uploads.part_sent(write.id, part))
        if now is None or now.origin_upload_id != send.origin_upload_id:
            raise Superseded
        if self._turn.attempts and not write.restarts:  # else it is not the first time that the part gets there
            self._turn = replace(self._turn, attempts=0, failing_since=None)
            self._dependencies.log.goes_on(write)
        return replace(event, state=now.state)

    async def _mark(self, write: Write) -> None:
        """Mark the write as publishing: the origin may have it from here on, so later writes must wait."""
        if not self._is_marked:
            marked = replace(write, state=State.PUBLISHING)
            if not await self._journal.change(lambda tx: tx.writes.change(marked, State.COMMITTED)):
                raise Superseded
            self._is_marked = True

    async def _seek(self, write: Write) -> Event:
        cleared = await self._probes.clear(write)
        if cleared is not None:
            return cleared
        listed = await self._requests.open_uploads(write.key)
        if isinstance(listed, WriteRefused | Lost):
            return listed
        now = Moment.of(self._clock)
        self.is_ending = True  # nobody cancels it for the row that it forgets itself: what is unclear must be told
        unclear = await self._journal.change(lambda tx: settle_in_doubt(tx, write.key, listed, now))
        if unclear:
            _log.warning(
                "uploads at the origin may belong to this gateway or to another writer: they stay open for half a day",
                bucket=write.key.bucket,
                key=write.key.key,
                upload_ids=[one.upload_id for one in unclear],
            )
        if self._journal.read(lambda tx: tx.writes.get(write.id)) is not None:
            self.is_ending = False
            return Lost("an upload of the key is just being begun")
        raise Superseded

    # Notes

    async def _note(self, note: JournalNote) -> None:
        write, now = self._progress.write, self._clock.now()
        match note:
            case JournalNote.LEARN:
                await self._journal.change(lambda tx: _learn(tx, write, now))
            case JournalNote.PROBE_AGAIN:
                await self._journal.change(lambda tx: _probe_again(tx, write.key.bucket, now))
            case JournalNote.UNMARK:
                unmarked = replace(write, state=State.COMMITTED)
                self._progress.write = unmarked
                self._is_marked = False
                await self._journal.change(lambda tx: tx.writes.change(unmarked, State.PUBLISHING))
            case JournalNote.START_OVER:
                await self._stop()
                self._events = asyncio.Queue()  # what has become of its other parts is of no use
                await self._journal.change(lambda tx: tx.writes.start_over(write.id, now))

    # The end, for now

    async def _carry_out_end(self, end: End) -> None:
        write, now = self._progress.write, Moment.of(self._clock)
        match end:
            case Settle():
                await self._settle(write, end)
            case MarkConflict():
                if await self._journal.change(lambda tx: tx.writes.keep(self._id, end.reason)):
                    self._dependencies.log.conflict(write, end.reason)
            case Completed():
                await self._dependencies.publication.publish(write, end.etag)
                await self._journal.change(lambda tx: _completed(tx, write, end, Moment.of(self._clock)))
            case OriginReply():
                await self._journal.change(lambda tx: _answer(tx, write, end))
                if not end.is_over:
                    await self._rest(5.0)
            case Expire():
                if await self._journal.change(lambda tx: tx.uploads.abort(write.upload_id or "", now)):
                    self._dependencies.log.expired(write, end.reason)
            case Forget():
                if end.reason is not None:
                    _log.warning("an upload may be left at the origin", object=str(write.key), reason=end.reason)
                await self._journal.change(lambda tx: tx.uploads.forget(self._id))
            case Rest():
                await self._rest(end.seconds)
            case Wait():
                await self._wait(write, end)
            case AwaitFiles():
                await self._await_files(write, end)

    async def _settle(self, write: Write, settle: Settle) -> None:
        self._dependencies.manifests.settled(write.id)
        await self._dependencies.publication.publish(write, settle.etag)
        now = Moment.of(self._clock)
        await self._journal.change(lambda tx: _settle(tx, write, settle, now))
        self._dependencies.settled(write.claims)
        self._dependencies.log.settled(write, settle.etag, self._clock.monotonic() - self.began)

    async def _rest(self, seconds: float) -> None:
        write, now = self._progress.write, self._clock.now()
        asked_seconds, _ = Moment.of(self._clock).since(write.touched_then)
        if write.is_completed_at_origin and write.sequence and not 0 <= asked_seconds < CARRIED_OUT_SECONDS:
            await self._journal.change(lambda tx: tx.uploads.leave_order(self._id, now))
        turn = Turn(now + seconds, priority=Priority.UPLOAD if write.state is State.OPEN else self._turn.priority)
        is_idle = self._progress.is_scratch and write.state is State.OPEN
        await self._journal.change(lambda tx: (tx.turns.wait if is_idle else tx.turns.rest)(self._id, self._turn, turn))
        self._notifier.notify_at(self._clock.monotonic() + seconds)

    async def _await_files(self, write: Write, wait: AwaitFiles) -> None:
        """Wait without a failure: `attempts` stays 0, so that operators see no alarm."""
        longest = AWAITED_PAUSE_SECONDS if self.is_hurried else math.inf
        pause_seconds = self._dependencies.manifests.awaits(write, wait.reason, self._dependencies.log)
        pause_seconds = min(longest, pause_seconds) * self._rng.uniform(0.5, 1.0)
        priority = self._turn.priority if self._turn.priority in _OWN_PRIORITY else Priority.RETRY
        turn = Turn(self._clock.now() + pause_seconds, last_error=wait.reason, priority=priority)
        await self._journal.change(lambda tx: tx.turns.wait(self._id, self._turn, turn))
        self._notifier.notify_at(self._clock.monotonic() + pause_seconds)

    async def _wait(self, write: Write, wait: Wait) -> None:
        failures = self._turn.attempts + 1
        doublings = 0 if self.is_awaited else min(failures, 10)
        longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**doublings)
        pause_seconds, now = longest * self._rng.uniform(0.5, 1.0), self._clock.now()
        since = None if wait.waits_for_bucket else self._turn.failing_since or now
        priority = self._turn.priority if self._turn.priority in _OWN_PRIORITY else Priority.RETRY
        if wait.refused_with is not None:
            longest = NO_BUCKET_AGAIN_SECONDS if wait.refused_with == "NoSuchBucket" else REFUSED_AGAIN_SECONDS
            pause_seconds, priority = longest * self._rng.uniform(0.5, 1.0), Priority.REFUSED
        turn = Turn(now + pause_seconds, failures, since, wait.reason, priority)
        await self._journal.change(lambda tx: _failed(tx, write, wait, self._turn, turn))
        self._notifier.notify_at(self._clock.monotonic() + pause_seconds)
        self._dependencies.log.failing(write, failures, wait.reason, wait.kind)


async def taken_up(journal: Journal, write_id: int) -> tuple[Write, Turn] | None:
    """Return a write with the parts that matter: of an open upload, the next that the origin lacks.

    BufferDamaged when parts are missing: the write has ended, or is damaged.
    """

    def look(tx: JournalTransaction) -> tuple[Write, Turn] | None:
        write, turn = tx.writes.get(write_id), tx.turns.of(write_id)
        if write is None or turn is None or turn.due_at is None:
            return None
        is_open = write.state is State.OPEN
        return replace(write, parts=tx.parts.unsent(write_id, UNSENT_AT_ONCE)) if is_open else write, turn

    found = journal.read(look)
    if found is None or not found[0].runs or found[0].state is State.OPEN:
        return found
    write, turn = found
    parts = await journal.parts(write_id)
    if not write.is_acknowledged:  # its client may have sent other parts
        numbers = {number for run in write.runs for number in range(run.first, run.first + run.length)}
        parts = [part for part in parts if part.number in numbers]
    if len(parts) != write.parts_count:
        raise BufferDamaged(f"the journal has {len(parts)} parts of {write.parts_count} of {write.key}")
    return replace(write, parts=parts), turn


def _completed(tx: JournalTransaction, write: Write, completed: Completed, now: Moment) -> None:
    if _is_asked_for(tx, write):
        tx.uploads.completed(write.id, completed.etag, now)


def _answer(tx: JournalTransaction, write: Write, answer: OriginReply) -> None:
    if _is_asked_for(tx, write):
        tx.uploads.answer(write.id, answer.code, is_over=answer.is_over)


def _is_asked_for(tx: JournalTransaction, write: Write) -> bool:
    """Return whether the client has not yet completed the upload with other parts, which this answer is not about."""
    now = tx.writes.get(write.id)
    return now is not None and now.completed_of == write.completed_of


def _failed(tx: JournalTransaction, write: Write, wait: Wait, seen: Turn, turn: Turn) -> None:
    tx.turns.wait(write.id, seen, turn)
    if wait.refused_with is not None or wait.kind == "refused":  # perhaps because of them: the next such write asks
        tx.buckets.forget_accepted(write.key.bucket, write.spec.headers)
    if wait.refused_with is not None and not write.deleted:
        tx.buckets.refused_for_good(write.key, write.spec.headers, wait.refused_with)


def _learn(tx: JournalTransaction, write: Write, now: float) -> None:
    capabilities = tx.buckets.capabilities(write.key.bucket)
    if capabilities is not None:
        refused = replace(capabilities.conditions, **{kind_of(write): Honoured.REFUSED}, learned_at=now)
        tx.buckets.amend(write.key.bucket, conditions=refused)


def _probe_again(tx: JournalTransaction, bucket: str, now: float) -> None:
    """Make a probe due, but not each time: others may quickly change a key, and change it back."""
    capabilities = tx.buckets.capabilities(bucket)
    if capabilities is not None and now - capabilities.conditions.learned_at >= UNKNOWN_AGAIN_SECONDS:
        due = replace(capabilities.conditions, learned_at=now - LEARNED_AGAIN_SECONDS)
        tx.buckets.amend(bucket, conditions=due)


def _settle(tx: JournalTransaction, write: Write, settle: Settle, now: Moment) -> None:
    tx.writes.settle(write.id, settle.etag, now, upload_may_be_open=settle.upload_may_be_open)
    capabilities = tx.buckets.capabilities(write.key.bucket)
    is_surprise = settle.etag is not None and unquote(settle.etag) != unquote(write.etag) and not write.is_etag_local
    if is_surprise and capabilities is not None:
        # Writes go through from now on. A PutObject tells nothing about ETags of objects of parts.
        multipart_etags = capabilities.multipart_etags and not write.multipart
        told = replace(capabilities, md5_etags=False, learned_at=now.at, multipart_etags=multipart_etags)
        tx.buckets.learn(write.key.bucket, told)

"""Takes every write to its end: looks at what is due, asks state.py what to do, and does it.

Only one process of a gateway does this. When a write is due (`due_at`), a task of its own looks at it, and ends when
nothing can be done for now: writes that failed, or wait, take no place. No failure makes it give a write up.

lanes.py decides how many are under way at once, and how often an origin that is not working is tried.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import structlog

from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferDamaged, BufferUnavailable, OriginBodyError, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.origin.client import IS_AWAITED
from gateway.policy.slots import Prefix, Slot
from gateway.s3.headers import unquote
from gateway.writeback.checkpoints.manifests import may_be_understood
from gateway.writeback.flushing.condition_probe import (
    LEARNED_AGAIN_SECONDS,
    UNKNOWN_AGAIN_SECONDS,
    Probe,
    is_due,
    is_probe_key,
    probe_key,
)
from gateway.writeback.flushing.failures import kind_of_error
from gateway.writeback.flushing.flush_logger import FlushLogger
from gateway.writeback.flushing.in_doubt import in_doubt, settle_in_doubt
from gateway.writeback.flushing.lanes import BESIDE_ANSWERS_SECONDS, SLOW_SECONDS, Lane
from gateway.writeback.flushing.manifest_files import AWAITED_PAUSE_SECONDS, ManifestFiles
from gateway.writeback.flushing.requests import Requests
from gateway.writeback.flushing.state import (
    Abort,
    Aborted,
    AwaitFiles,
    Begin,
    Begun,
    Compare,
    Complete,
    Completed,
    Delete,
    End,
    Event,
    Expire,
    Find,
    Finish,
    Forget,
    Head,
    Instruction,
    Learn,
    LookForFiles,
    Lost,
    MarkConflict,
    Note,
    OriginReply,
    PartSent,
    ProbeAgain,
    Progress,
    Request,
    Rest,
    Seek,
    SendPart,
    Settle,
    StartOver,
    Unmark,
    Wait,
    WriteRefused,
)
from gateway.writeback.journal.buckets import BucketCapabilities, Conditions, Honoured
from gateway.writeback.journal.journal import Journal, JournalGC
from gateway.writeback.journal.records import CreateAttempt, Part, Priority, State, Turn, Write
from gateway.writeback.journal.transaction import JournalTransaction
from gateway.writeback.journal.turns import RETRY_SECONDS_MAX, UPLOAD_SECONDS_MAX, Due
from gateway.writeback.journal.uploads import CARRIED_OUT_SECONDS
from gateway.writeback.order import is_marker
from gateway.writeback.pending_key_filter import ChangeNotifier

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 60.0

AGAIN_SECONDS = 60.0
"""Seconds between two corrections of due times. The reconciler also corrects them when the clock is set."""

AHEAD_AGAIN_SECONDS = 1.0
"""The pause while a due time is later than any can be: other processes write times that they read before the clock was
set, and between two looks it may be set and set back."""

REFUSED_AGAIN_SECONDS = 600.0
"""Seconds between attempts after a permanent refusal, unless a person asks for one. A bucket may be made again."""

NO_BUCKET_AGAIN_SECONDS = 60.0

UNSENT_AT_ONCE = 32
"""Parts of an open upload that a task takes at once."""

_NEIGHBOURS = 128
"""Writes due at about the same time, more than fail in a row (`AWAY_AFTER_AMONG_OTHERS`). A write that has failed only
once was due lately, as those that failed often sleep long: so it is soon found among many that the origin does not
serve."""

_OWN_PRIORITY = (Priority.URGENT, Priority.UPLOAD, Priority.ABORT)
_UNEXPECTED_PAUSE_SECONDS = 5.0

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
class SlotOrder:
    """A slot's rules for its writes. Manifests that match `manifests` wait for the files that they name."""

    key_prefix: str = ""
    upload_expiry_seconds: float = 86_400.0
    manifests: tuple[str, ...] = ()
    is_scratch: bool = False
    """Writes to the slot stay here."""


def order_of(slot: Slot) -> SlotOrder:
    manifests = slot.markers if slot.manifests == "checked" else ()
    return SlotOrder(slot.prefix.key_prefix, slot.upload_expiry_seconds, manifests, slot.write == "scratch")


@dataclass(frozen=True, slots=True)
class FlushDependencies:
    """The dependencies of all writes. `slots` are the known ones, by name."""

    journal: Journal
    requests: Requests
    publication: Publication
    log: FlushLogger
    clock: Clock
    slots: dict[str, SlotOrder] = field(default_factory=dict)
    probed: set[ObjectKey] = field(default_factory=set)
    """Keys of probes, or of their remains, that a task is working on."""
    manifests: ManifestFiles = field(default_factory=ManifestFiles)

    def slot(self, name: str) -> SlotOrder:
        return self.slots.get(name, SlotOrder())


@dataclass(frozen=True, slots=True)
class Attempts:
    """Requests under way to the origin now. `is_away`: an origin has failed several requests in a row.

    `longest_seconds` counts from the start of the first, None: there is none.
    """

    longest_seconds: float | None = None
    is_away: bool = False


class Reconciler:
    """The reconciler of one buffer."""

    def __init__(self, dependencies: FlushDependencies, rng: random.Random | None = None) -> None:
        self._dependencies = dependencies
        self._journal = dependencies.journal
        self._clock = dependencies.clock
        self._dice = rng or random.Random()
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._runs: dict[int, _Run] = {}
        self._notifier = ChangeNotifier(dependencies.journal.pending_keys.version, dependencies.clock)
        self._gc = JournalGC(dependencies.journal, dependencies.clock)
        self._probes: dict[str, asyncio.Task[Conditions]] = {}
        self._again_at = 0.0
        self._is_ahead = False
        self._wall_ahead_seconds = 0.0

    def prioritise(self, prefix: Prefix) -> None:
        """Ask origins that were away again. Failed writes under a prefix are due (`Turns.try_now`).

        Those that fail at this moment will be soon.
        """
        for (_, bucket), lane in self._lanes.items():
            if not prefix.bucket or prefix.bucket == bucket:
                lane.prioritise()
        for run in self._runs.values():
            if prefix.covers(*run.write.key):
                run.is_awaited = True
                run.prioritise_parts()
        self._notifier.notify()

    def scratch_slots(self) -> frozenset[str]:
        return frozenset(name for name, one in self._dependencies.slots.items() if one.is_scratch)

    @property
    def requests(self) -> Requests:
        return self._dependencies.requests

    def attempts(self, prefix: Prefix) -> Attempts:
        now = self._clock.monotonic()
        writes = [(run.write, run.began) for run in self._runs.values()]
        began = [at for one, at in writes if one.is_acknowledged and prefix.covers(one.key.bucket, one.key.key)]
        is_away = any(lane.is_away for (_, bucket), lane in self._lanes.items() if prefix.bucket in ("", bucket))
        return Attempts(now - min(began) if began else None, is_away)

    def awaiting_files(self, covers: Callable[[ObjectKey], bool]) -> Mapping[int, int]:
        """Return the covered manifests that wait for files: ids of their writes → numbers of missing files."""
        found = self._dependencies.manifests.waiting(covers)
        living = self._journal.read(lambda tx: tx.turns.living(list(found))) if found else set()
        self._dependencies.manifests.forget(found.keys() - living)
        return {one: missing for one, missing in found.items() if one in living}

    async def run(self) -> None:
        """Reconcile until cancelled. While the journal cannot be used, try again."""
        tidying = asyncio.create_task(self._gc.run())
        try:
            with suppress(BufferUnavailable):
                await self._journal.change(lambda tx: tx.begin_epoch(self._clock.now()))
            async with self._notifier.watching():
                while True:
                    with suppress(BufferUnavailable):  # the journal's writers report it
                        await self._set_right()
                        if not self._journal.has_failed:  # else results could not be recorded
                            self._journal.read(self.look)
                    await self._notifier.wait()
        finally:
            await self._stop(tidying)

    def look(self, tx: JournalTransaction) -> None:
        """Start tasks for what is due, and cancel those of writes that have ended."""
        now, monotonic = self._clock.now(), self._clock.monotonic()
        if self._tasks:
            self._cut_off(tx)
            for write_id in tx.turns.urgent(list(self._runs)):
                self._runs[write_id].is_urgent = True
                self._runs[write_id].prioritise_parts()
        lanes = tx.turns.lanes()
        self._is_ahead = any(_is_ahead(first_due_at, now) for first_due_at in lanes.values())
        for name, first_due_at in lanes.items():
            due = {priority for priority, at in first_due_at.items() if at <= now}
            if not due:
                continue
            lane = self._lanes.get(name) or self._lanes.setdefault(name, Lane())
            for priority in lane.priorities():
                room = lane.room(priority, monotonic) if priority in due else 0
                if room > 0:
                    self._start_due(tx, name, lane, priority, now, room)

    async def drain(self) -> None:
        """Finish the running tasks, and start no others."""
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start_due(
        self, tx: JournalTransaction, name: tuple[str, str], lane: Lane, priority: Priority, now: float, room: int
    ) -> None:
        began = self._clock.monotonic()
        for due in self._chosen(tx, name, lane, priority, now, room):
            lane.begin(priority, due.id, began)
            self._tasks[due.id] = asyncio.create_task(self._take_up(name[0], lane, priority, due))
            self._notifier.notify_at(began + SLOW_SECONDS)

    def _chosen(
        self, tx: JournalTransaction, name: tuple[str, str], lane: Lane, priority: Priority, now: float, room: int
    ) -> Sequence[Due]:
        """Choose what has waited longest. If that may fail, also take, or take instead, a later write.

        Of some neighbours that is the one with the fewest failures.
        """
        count_max = room + len(self._tasks) + 1
        found = [one for one in tx.turns.due(name, priority, now, count_max) if one.id not in self._tasks]
        if len(found) <= room or not lane.is_mixed(priority, self._clock.monotonic()):
            return found[:room]
        first, last = found[0].due_at, tx.turns.due(name, priority, now, 1, newest=True)[0].due_at
        until = self._dice.choice((first, last, *(self._dice.uniform(first, last) for _ in range(2))))
        behind = tx.turns.due(name, priority, until, count_max + _NEIGHBOURS, newest=True)
        chosen = sorted((one for one in behind if one.id not in self._tasks), key=lambda one: one.attempts)[:1]
        return [*chosen, *(one for one in found if one not in chosen)][:room]

    def _cut_off(self, tx: JournalTransaction) -> None:
        living = tx.turns.living(list(self._tasks))
        for write_id, task in self._tasks.items():
            run = self._runs.get(write_id)
            if write_id not in living and (run is None or not run.is_ending):
                task.cancel()

    async def _set_right(self) -> None:
        now, monotonic = self._clock.now(), self._clock.monotonic()
        was_set = abs(now - monotonic - self._wall_ahead_seconds) > 1.0
        since_seconds = monotonic - self._again_at + AGAIN_SECONDS
        if was_set or since_seconds >= (AHEAD_AGAIN_SECONDS if self._is_ahead else AGAIN_SECONDS):
            self._again_at, self._wall_ahead_seconds = monotonic + AGAIN_SECONDS, now - monotonic
            moment = Moment.of(self._clock)
            await self._journal.change(lambda tx: tx.set_right(moment))

    async def _take_up(self, slot: str, lane: Lane, priority: Priority, due: Due) -> None:
        try:
            outcome = await self._run(slot, lane, due)
            if isinstance(outcome, Wait) and outcome.is_away:
                lane.unanswered(priority, due.id, self._clock.monotonic(), self._dice)
                self._notifier.notify_at(self._clock.monotonic() + BESIDE_ANSWERS_SECONDS)
            else:
                lane.answered(priority, self._clock.monotonic(), is_done=isinstance(outcome, Settle))
        except Superseded:
            pass
        except BufferDamaged as error:
            await self._quarantine(slot, due, str(error))
        except Exception as error:  # noqa: BLE001 - it is told, and tried again: nothing may stop a write for good
            self._dependencies.log.not_looked_after(str(due.key), slot, repr(error))
            await self._clock.sleep(_UNEXPECTED_PAUSE_SECONDS)
        finally:
            lane.end(priority, due.id)
            self._tasks.pop(due.id, None)
            self._runs.pop(due.id, None)
            self._gc.needed = True
            self._notifier.notify()

    async def _run(self, slot: str, lane: Lane, due: Due) -> End | None:
        found = await _taken_up(self._journal, due.id)
        if found is None:
            return None
        write, turn = found
        conditions = await self._conditions(write)
        order = self._dependencies.slot(slot)
        names_files = is_marker(write.key.key, order.manifests) and may_be_understood(write.key)
        now, expiry_seconds = Moment.of(self._clock), order.upload_expiry_seconds
        is_room_wanted = write.state is State.OPEN and turn.priority is Priority.URGENT
        progress = Progress(write, conditions, now, expiry_seconds, names_files, order.is_scratch, is_room_wanted)
        run = self._runs[due.id] = _Run(self._dependencies, lane, self._dice, progress, turn, self._notifier)
        IS_AWAITED.set(lambda: run.is_hurried)  # this task's own
        return await run.run()

    async def _quarantine(self, slot: str, due: Due, reason: str) -> None:
        with suppress(BufferUnavailable):
            if due.id in self._journal.read(lambda tx: tx.turns.living([due.id])):  # else its files went with the write
                await self._journal.change(lambda tx: tx.turns.quarantine(due.id, reason))
                self._dependencies.log.damaged(due.id, str(due.key), slot, reason)

    # Which conditions a bucket honours

    async def _conditions(self, write: Write) -> Conditions:
        """Return the known conditions of a bucket; probe it before its first write, and again while others go on."""
        bucket = write.key.bucket
        capabilities = self._journal.read(lambda tx: tx.buckets.capabilities(bucket))
        if capabilities is None or not write.is_acknowledged:
            return Conditions()
        if not is_due(capabilities.conditions, self._clock.now()):
            return capabilities.conditions
        probing = self._probes.get(bucket)
        if probing is None:
            probing = self._probes[bucket] = asyncio.create_task(self._probe(write, capabilities))
            probing.add_done_callback(partial(self._probe_ended, bucket))
        return capabilities.conditions if capabilities.conditions.learned_at else await asyncio.shield(probing)

    def _probe_ended(self, bucket: str, probing: asyncio.Task[Conditions]) -> None:
        del self._probes[bucket]
        if not probing.cancelled() and (error := probing.exception()) is not None:
            _log.warning(
                "Forebay could not find out which conditions a bucket honours", bucket=bucket, reason=repr(error)
            )

    async def _probe(self, write: Write, capabilities: BucketCapabilities) -> Conditions:
        slot, bucket = write.spec.slot, write.key.bucket
        node, _ = self._journal.read(lambda tx: tx.node())
        key = probe_key(bucket, self._dependencies.slot(slot).key_prefix, node)
        if key in self._dependencies.probed:
            return capabilities.conditions  # the remains of a probe are just being removed
        self._dependencies.probed.add(key)
        try:
            found = await self._probed(key, slot)
        finally:
            self._dependencies.probed.discard(key)
        if found is None:
            return capabilities.conditions
        found = replace(found, learned_at=self._clock.now())  # the clock may have been set meanwhile
        await self._journal.change(lambda tx: tx.buckets.amend(bucket, conditions=found))
        _log.info(
            "Forebay has found out which conditions a bucket honours",
            bucket=bucket,
            put=found.put.name.lower(),
            complete=found.complete.name.lower(),
            delete=found.delete.name.lower(),
        )
        return found

    async def _probed(self, key: ObjectKey, slot: str) -> Conditions | None:
        """Enter the probe first, so that the remains of a killed one are removed. All failed ones share a row."""
        rows = self._journal.read(lambda tx: tx.uploads.asked(key))
        asked = CreateAttempt(self._journal.worker, Moment.of(self._clock))
        row_id = rows[0].id if rows else await self._journal.change(lambda tx: tx.uploads.ask(key, slot, asked))
        found, probe = None, Probe(self._dependencies.requests.origin, key, slot)
        try:
            found = await probe.run(self._clock.now())
        finally:
            with suppress(BufferUnavailable):  # the next start marks it instead
                if probe.has_left or (found is None and probe.has_asked):
                    await self._journal.change(lambda tx: tx.uploads.mark_in_doubt(row_id, Moment.of(self._clock)))
                elif not rows:  # else an earlier probe may have left something
                    await self._journal.change(lambda tx: tx.uploads.forget(row_id))
        return found

    async def _stop(self, tidying: asyncio.Task[None]) -> None:
        running = [*self._tasks.values(), *self._probes.values(), tidying]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class _Run:
    """One write, from its due time until nothing can be done about it for now."""

    def __init__(
        self,
        dependencies: FlushDependencies,
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
        self._lane = lane
        self._dice = rng
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
            match one:
                case Learn() | ProbeAgain() | Unmark() | StartOver():
                    await self._note(one)
                case Settle() | MarkConflict() | Completed() | OriginReply() | Expire() | Forget() | Rest() | Wait():
                    end = one
                case AwaitFiles():
                    end = one
                case _:
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
            case Head():
                return await self._requests.head(write)
            case Begin():
                return await self._begin(write)
            case SendPart():
                return await self._send_part(write, request)
            case Finish():
                return await self._when_marked(write, lambda: self._requests.finish(write, request))
            case Complete():
                return await self._requests.complete(write)
            case Delete():
                return await self._when_marked(write, lambda: self._requests.delete(write, request))
            case Compare():
                return await self._requests.compare(write, request.etag)
            case Find():
                return await self._requests.find(write)
            case LookForFiles():
                manifests = self._dependencies.manifests
                return await manifests.look(write, self._requests, self._journal, self._clock, self._dependencies.log)
            case Seek():
                return await self._seek(write)
            case Abort():
                return await self._requests.abort(write)

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

    async def _when_marked(self, write: Write, send: Callable[[], Awaitable[Event]]) -> Event:
        """Mark the write as publishing, then send: the origin may have it from here on, so later writes must wait."""
        if not self._is_marked:
            marked = replace(write, state=State.PUBLISHING)
            if not await self._journal.change(lambda tx: tx.writes.change(marked, State.COMMITTED)):
                raise Superseded
            self._is_marked = True
        return await send()

    async def _seek(self, write: Write) -> Event:
        node, _ = self._journal.read(lambda tx: tx.node())
        if is_probe_key(write.key, node):
            return await self._clear(write)
        listed = await self._requests.open_uploads(write.key)
        if isinstance(listed, WriteRefused | Lost):
            return listed
        now = Moment.of(self._clock)
        unclear = await self._journal.change(lambda tx: settle_in_doubt(tx, write.key, listed, now))
        if unclear:
            _log.warning(
                "uploads at the origin may belong to this gateway or to another writer: they stay open for half a day",
                bucket=write.key.bucket,
                key=write.key.key,
                upload_ids=[one.upload_id for one in unclear],
            )
        if self._journal.read(lambda tx: tx.writes.get(write.id)) is not None:
            return Lost("an upload of the key is just being begun")
        raise Superseded

    async def _clear(self, write: Write) -> Event:
        if write.key in self._dependencies.probed:
            return Lost("the bucket is just being probed")
        self._dependencies.probed.add(write.key)
        try:
            await Probe(self._requests.origin, write.key, write.spec.slot).clear()
            listed = await self._requests.open_uploads(write.key)
            if isinstance(listed, WriteRefused | Lost):
                return listed
            for one in listed.uploads:
                aborted = await self._requests.abort(replace(write, origin_upload_id=one.upload_id))
                if not isinstance(aborted, Aborted):
                    return aborted
        except (OriginUnreachable, OriginBodyError) as error:
            return Lost(str(error), kind_of_error(error))
        finally:
            self._dependencies.probed.discard(write.key)
        return Aborted()

    # Notes

    async def _note(self, note: Note) -> None:
        write, now = self._progress.write, self._clock.now()
        match note:
            case Learn():
                await self._journal.change(lambda tx: _learn(tx, write.key.bucket, note, now))
            case ProbeAgain():
                await self._journal.change(lambda tx: _probe_again(tx, write.key.bucket, now))
            case Unmark():
                unmarked = replace(write, state=State.COMMITTED)
                self._progress.write = unmarked
                self._is_marked = False
                await self._journal.change(lambda tx: tx.writes.change(unmarked, State.PUBLISHING))
            case StartOver():
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
        pause_seconds = min(longest, pause_seconds) * self._dice.uniform(0.5, 1.0)
        priority = self._turn.priority if self._turn.priority in _OWN_PRIORITY else Priority.RETRY
        turn = Turn(self._clock.now() + pause_seconds, last_error=wait.reason, priority=priority)
        await self._journal.change(lambda tx: tx.turns.wait(self._id, self._turn, turn))
        self._notifier.notify_at(self._clock.monotonic() + pause_seconds)

    async def _wait(self, write: Write, wait: Wait) -> None:
        failures = self._turn.attempts + 1
        doublings = 0 if self.is_awaited else min(failures, 10)
        longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**doublings)
        pause_seconds, now = longest * self._dice.uniform(0.5, 1.0), self._clock.now()
        since = None if wait.waits_for_bucket else self._turn.failing_since or now
        priority = self._turn.priority if self._turn.priority in _OWN_PRIORITY else Priority.RETRY
        if wait.refused_with is not None:
            longest = NO_BUCKET_AGAIN_SECONDS if wait.refused_with == "NoSuchBucket" else REFUSED_AGAIN_SECONDS
            pause_seconds, priority = longest * self._dice.uniform(0.5, 1.0), Priority.REFUSED
        turn = Turn(now + pause_seconds, failures, since, wait.reason, priority)
        await self._journal.change(lambda tx: _failed(tx, write, wait, self._turn, turn))
        self._notifier.notify_at(self._clock.monotonic() + pause_seconds)
        self._dependencies.log.failing(write, failures, wait.reason, wait.kind)


def _is_ahead(first_due_at: Mapping[Priority, float], now: float) -> bool:
    latest = {
        Priority.SMALL: 1.0,
        Priority.LARGE: 1.0,
        Priority.URGENT: RETRY_SECONDS_MAX,
        Priority.RETRY: RETRY_SECONDS_MAX,
    }
    return any(at > now + latest.get(priority, UPLOAD_SECONDS_MAX) for priority, at in first_due_at.items())


async def _taken_up(journal: Journal, write_id: int) -> tuple[Write, Turn] | None:
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
    if wait.refused_with is not None and not write.deleted:
        tx.buckets.refused_for_good(write.key, wait.refused_with)


def _learn(tx: JournalTransaction, bucket: str, learn: Learn, now: float) -> None:
    capabilities = tx.buckets.capabilities(bucket)
    if capabilities is not None:
        refused = replace(capabilities.conditions, **{learn.kind: Honoured.REFUSED}, learned_at=now)
        tx.buckets.amend(bucket, conditions=refused)


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

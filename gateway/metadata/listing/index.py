"""The listing index as the rest of the gateway has it: it is asked for pages, and told of pages and of own writes."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, cast

import lmdb

from gateway.core import cancellation
from gateway.core.clock import Clock
from gateway.core.errors import store_errors
from gateway.core.model import ObjectKey
from gateway.metadata.entries import InvalidationEpochs, ObservedAt
from gateway.metadata.listing.dirty_keys import DirtyKeys, Overlaid, OwnWrite, Written
from gateway.metadata.listing.pages import END, ListRequest, Page, Record, SortedKeys, key_successor, take
from gateway.metadata.listing.ranges import (
    Batch,
    Interval,
    KeyBound,
    QueryStamp,
    answerable,
    covered_ranges,
    known_until,
)
from gateway.metadata.listing.records import (
    OWN_TEMPLATE,
    numbered,
    numbered_here,
    pack,
    template_of,
    templates_of,
    unpack,
)
from gateway.metadata.listing.store import ListingStore, View
from gateway.metadata.opening import OpenCatalog
from gateway.metadata.store import DiskThread, in_time
from gateway.origin.client import ACCOUNT
from gateway.policy.slots import Slots
from gateway.s3.list_result import EntryTemplate, ListedEntry, ListedPage
from gateway.telemetry import metrics

P = ParamSpec("P")
R = TypeVar("R")

WAITING_MAX = 64
"""Pages that wait at most, a thousand keys each: about 20 MiB."""


SWEEPS_MAX = 1024
"""Limit of waiting sweeps."""

SWEEPS_BEHIND_MAX = 16
"""With more, own writes wait."""

LAND_SECONDS_MAX = 10.0
"""A transaction that takes longer is not waited for: another process was stopped in the midst of one."""


class IndexWriter:
    """One process's queue. Callers do not wait for it: until a page has landed, its keys are asked for again."""

    def __init__(self, store: ListingStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._thread = DiskThread("listing")
        self._sweeping: asyncio.Task[None] | None = None
        self._sweeps = 0
        self._waiting: deque[tuple[Sequence[Batch], bool]] = deque()
        self._writing: asyncio.Task[None] | None = None

    def add(self, batches: Sequence[Batch], *, is_truth: bool = False) -> None:
        """Write the batches soon; `is_truth`: each describes a single key whose range may be known already."""
        if len(self._waiting) >= WAITING_MAX:
            metrics.LISTING_KEYS_NOT_KEPT.add(_keys(batches))
            return
        self._waiting.append((batches, is_truth))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="listing landing")

    async def land(self, batches: Sequence[Batch]) -> list[bytes]:
        """Write them now, in transactions of a millisecond; gives the keys that the index knew otherwise.

        Raises lmdb.Error when the disk does not take it, or not in time; then part of it may be kept.
        """
        changed: list[bytes] = []
        while batches:
            batches, found = await self._in_thread(self._store.land, batches)
            changed += found
        return changed

    def sweep(self) -> None:
        self._sweeps = min(self._sweeps + 1, SWEEPS_MAX)
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="dirty keys sweep")

    async def keep_up(self, seconds_max: float) -> None:
        """Wait until few sweeps wait, `seconds_max` at most: this slows callers that write faster than sweeps."""
        if self._sweeping is not None and self._sweeps > SWEEPS_BEHIND_MAX and not self._thread.is_stuck(seconds_max):
            await asyncio.wait((self._sweeping,), timeout=seconds_max)

    async def settle(self) -> None:
        """Wait until everything added so far is written, or given up."""
        while (going_on := self._writing or self._sweeping) is not None:
            await going_on

    async def close(self) -> bool:
        """Write the remaining batches. Return False when that takes too long; the thread is left behind then."""
        if not self._thread.is_stuck(LAND_SECONDS_MAX):
            await self.settle()
        return await self._thread.close(LAND_SECONDS_MAX)

    async def _write(self) -> None:
        try:
            while self._waiting:
                batches, is_truth = self._waiting.popleft()
                try:
                    await (self._in_thread(self._store.put_truths, batches) if is_truth else self.land(batches))
                except lmdb.Error:
                    metrics.LISTING_KEYS_NOT_KEPT.add(_keys(batches))
        finally:
            self._writing = None

    async def _sweep(self) -> None:
        try:
            while self._sweeps:
                self._sweeps -= 1
                with suppress(lmdb.Error):  # the disk is in trouble: own writes void more than their key meanwhile
                    await self._in_time(self._store.sweep, self._clock.monotonic())
        finally:
            self._sweeping = None

    async def _in_thread(self, write: Callable[[Sequence[Batch], float], R], batches: Sequence[Batch]) -> R:
        return await self._in_time(write, batches, self._clock.monotonic())

    async def _in_time(self, write: Callable[P, R], *arguments: P.args, **keywords: P.kwargs) -> R:
        """Call `write`; lmdb.Error when it is not done in time, though it may be done later."""
        try:
            return await self._thread.run(LAND_SECONDS_MAX, write, *arguments, **keywords)
        except TimeoutError:
            raise lmdb.LockError("another process does not finish its transaction") from None


def _keys(batches: Sequence[Batch]) -> int:
    return sum(len(batch.listed) for batch in batches)


T = TypeVar("T")


class SharedQuestions(Generic[T]):
    def __init__(self) -> None:
        self._running: dict[Hashable, tuple[QueryStamp, asyncio.Task[T]]] = {}
        self._waiters: Counter[asyncio.Task[T]] = Counter()

    async def ask(
        self, question: Hashable, asked: QueryStamp, bound: KeyBound, send: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Return another caller's answer to `question` if recent enough, else that of `send`; raise as `send`.

        `asked` is the present moment. The answer is learned even if all callers leave. Each account has questions of
        its own, so that one account's denied access fails no other.
        """
        question = ACCOUNT.get(), question
        running = self._running.get(question)
        if running is not None:
            earlier, task = running
            no_write_since = earlier.number == asked.number >= 0
            if no_write_since and bound.allows(earlier.observed_at, asked.observed_at):
                return await self._outcome(question, task)
        task = asyncio.create_task(self._send(question, send), name="listing question")
        self._running[question] = asked, task
        task.add_done_callback(lambda done: self._done(question, done))
        return await self._outcome(question, task)

    async def _send(self, question: Hashable, send: Callable[[], Coroutine[Any, Any, T]]) -> T:
        task = cast("asyncio.Task[T]", asyncio.current_task())
        cancellation.register_shared(lambda: self._waiters[task] == 0, lambda: self._forget(question, task))
        return await send()

    async def _outcome(self, question: Hashable, task: asyncio.Task[T]) -> T:
        """Wait for the answer. When the last caller leaves before the origin was asked, the question is not sent."""
        self._waiters[task] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiters[task] -= 1
            if not self._waiters[task]:
                del self._waiters[task]
                cancellation.abandon(task)

    def _forget(self, question: Hashable, task: asyncio.Task[T]) -> None:
        if self._running.get(question, (None, None))[1] is task:
            del self._running[question]

    async def close(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, question: Hashable, done: asyncio.Task[T]) -> None:
        self._forget(question, done)
        if not done.cancelled():
            done.exception()  # looked at: those who waited have it, if any are left


NOTE_SECONDS_MAX = 2.0
"""An own write waits no longer to be noted. Another process's transaction takes far less than a millisecond."""

_SWEEP_EVERY = 64
"""Written keys after which eight times as many are looked at."""


@dataclass(frozen=True, slots=True)
class AuthoritativeEntry:
    """The origin's answer about a written key; None means that there is no such object."""

    entry: ListedEntry | None


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page. Records number `templates`."""

    page: Page
    templates: Sequence[EntryTemplate]


def found_of(page: ListedPage) -> FoundPage:
    listed, templates = numbered(page.entries)
    last_key = listed[-1][0] if listed else b""
    last_prefix = page.prefixes[-1] if page.prefixes else b""
    last, is_truncated = max(last_key, last_prefix), page.next_token is not None
    return FoundPage(Page(listed, page.prefixes, is_truncated, last, last == last_prefix != b""), templates)


@dataclass(frozen=True, slots=True)
class NeedsLookup:
    """A page that lacks only these written keys: the caller must ask the origin for their truth."""

    keys: list[bytes] = field(default_factory=list)


class ListingIndex:
    """One process's view of the index that all workers share; made by the catalog, which closes it too.

    Without `opened` it is switched off: it knows nothing, learns nothing and shares no question, as writes since then
    are unknown.
    """

    def __init__(self, opened: OpenCatalog | None, epochs: InvalidationEpochs, clock: Clock) -> None:
        self._opened = opened
        self._epochs = epochs
        self._clock = clock
        self._boot = opened.boot if opened is not None else 0
        self._writer = IndexWriter(opened.listing, clock) if opened is not None else None
        self._noting = DiskThread("own writes")
        self._noted = 0
        self.questions: SharedQuestions[FoundPage] = SharedQuestions()

    # --- asking -----------------------------------------------------------------------------------------------------

    def find(
        self,
        bucket: str,
        wanted: ListRequest,
        bound: KeyBound,
        *,
        with_owner: bool,
        stale: bool = False,
        truths: Mapping[bytes, AuthoritativeEntry] | None = None,
    ) -> FoundPage | NeedsLookup | None:
        """Return a page, where all of it is known and fresh or `stale` enough; None: the origin must be asked.

        `truths` are those that a NeedsLookup has asked for. Never raises: what the disk does not give is not known.
        """
        if self._opened is None:
            return None
        dirty, store = self._opened.dirty, self._opened.listing
        found: FoundPage | NeedsLookup | None
        try:
            # The dirty keys of an earlier moment than the index: what is clean since then is in it already.
            with dirty.written(bucket) as written, store.view(bucket) as view:
                if view is None:
                    return None
                until = self._known_until(view, bucket, wanted.start, bound, stale=stale)
                if until <= wanted.start:
                    return None
                if not written(wanted.start, wanted.stop, 1):
                    page = take(view, wanted, until)
                    found = None if page is None else FoundPage(page, ())
                else:
                    found = _merged(store, view, wanted, until, written, truths or {})
            if isinstance(found, FoundPage):
                return _with_templates(store, found, with_owner=with_owner)
            return found
        except (lmdb.Error, IndexError, ValueError):
            return None

    def entry(self, bucket: str, key: str, bound: KeyBound) -> AuthoritativeEntry | None:
        """Return what a listing within the bound says of a key; None: nothing is known.

        No listing says that there is no such object if one was shown since the origin was asked for the listing.
        """
        if self._opened is None:
            return None
        dirty, store = self._opened.dirty, self._opened.listing
        try:
            encoded = key.encode()
            with dirty.written(bucket) as written, store.view(bucket) as view:
                if view is None or written(encoded, key_successor(encoded), 1):
                    return None
                within = next(view.touching(encoded, key_successor(encoded), overlapping=True), None)
                if within is None or not bound.allows(within.observed_at, self.moment(bucket)):
                    return None
                found = view.read(encoded, key_successor(encoded), 1)
            if not found:
                is_shown = self._epochs.is_shown_since(within.observed_at, ObjectKey(bucket, key))
                return None if is_shown else AuthoritativeEntry(None)
            if template_of(found[0][1]) == OWN_TEMPLATE:
                found, templates = numbered_here(found, ())
            else:
                templates = store.templates((template_of(found[0][1]),))
            return AuthoritativeEntry(unpack(*found[0], templates))
        except (lmdb.Error, IndexError, ValueError):
            return None

    def asked(self, bucket: str) -> QueryStamp:
        """Return the present moment, to be taken before the origin is asked for what `learn` or `learn_truth` keeps."""
        observed = self.moment(bucket)
        try:
            if self._opened is not None:
                return QueryStamp(observed, self._opened.dirty.now())
        except lmdb.Error:
            pass
        return QueryStamp(observed, -1)  # before every write there ever was

    # --- being told -------------------------------------------------------------------------------------------------

    def learn(
        self, bucket: str, wanted: ListRequest, found: FoundPage, asked: QueryStamp, *, merge_seconds: float
    ) -> None:
        """Keep the origin's answer to `wanted`, in the background."""
        if self._writer is not None:
            self._writer.add(self._batches(bucket, wanted, found, asked, merge_seconds))

    async def learn_now(
        self, bucket: str, wanted: ListRequest, found: FoundPage, asked: QueryStamp, *, merge_seconds: float
    ) -> None:
        """Keep the origin's answer to `wanted` before a client has it: what was known of these keys may be fresh."""
        if self._writer is None:
            return
        try:
            await self._writer.land(self._batches(bucket, wanted, found, asked, merge_seconds))
        except lmdb.Error:
            self._epochs.change_bucket(bucket)

    def _batches(
        self, bucket: str, wanted: ListRequest, found: FoundPage, asked: QueryStamp, merge_seconds: float
    ) -> list[Batch]:
        page, listed = found.page, found.page.keys
        keys = SortedKeys(listed)
        told = covered_ranges(wanted, [key for key, _ in listed], page.prefixes, is_last=not page.is_truncated)
        return [
            Batch(bucket, start, stop, keys.read(start, stop, len(listed)), found.templates, asked, merge_seconds)
            for start, stop in told
        ]

    def learn_truth(self, bucket: str, key: bytes, truth: AuthoritativeEntry, asked: QueryStamp) -> None:
        if self._writer is None:
            return
        listed, templates = numbered([] if truth.entry is None else [truth.entry])
        self._writer.add([Batch(bucket, key, key_successor(key), listed, templates, asked, 0.0)], is_truth=True)

    async def land(self, batch: Batch) -> list[bytes]:
        """Keep all that the origin has in a range, now; gives the keys that the index knew otherwise, or not at all.

        For crawls: in transactions of a millisecond, between which other processes come in. Raises lmdb.Error.
        """
        if self._writer is None:
            raise lmdb.Error("the listing index is switched off")
        return await self._writer.land([batch])

    def known(self, bucket: str, start: bytes, stop: bytes) -> list[Interval]:
        """Return the valid intervals of [start, stop), of any age, in order. Blocks; raises lmdb.Error."""
        if self._opened is None:
            return []
        epoch = self._epochs.of_bucket(bucket)
        with self._opened.listing.view(bucket) as view:
            around = [] if view is None else list(view.touching(start, stop, overlapping=True))
        return [one for one in around if one.observed_at.epoch == epoch]

    def count(self, bucket: str, start: bytes, stop: bytes, keys_max: int) -> tuple[int, bytes | None]:
        """Count keys in [start, stop), up to `keys_max`; return also where to go on after these. Blocks; lmdb.Error."""
        if self._opened is None:
            return 0, None
        with self._opened.listing.view(bucket) as view:
            keys = [] if view is None else view.keys(start, stop, keys_max)
        return len(keys), key_successor(keys[-1]) if len(keys) == keys_max else None

    def moment(self, bucket: str) -> ObservedAt:
        """Return the present moment of the bucket itself: of its listings, and of answers about it."""
        return ObservedAt(self._epochs.of_bucket(bucket), self._clock.monotonic(), self._boot)

    # --- own writes -------------------------------------------------------------------------------------------------

    async def begin_write(self, bucket: str, keys: Sequence[str]) -> OwnWrite:
        """Note that these keys are about to be written: from now on the index's word on them does not count.

        Where that cannot be noted, or not in time, all that is known of the bucket is void, now and at the end.
        """
        write = OwnWrite(bucket, [key.encode() for key in keys])
        if self._opened is None or self._writer is None or self._noting.is_stuck(NOTE_SECONDS_MAX):
            self.void_if_not_noted(write)
            return write
        await self._writer.keep_up(NOTE_SECONDS_MAX)
        noting = self._noting.submit(_begin, self._opened.dirty, write, self._clock)
        try:
            await in_time(noting, NOTE_SECONDS_MAX)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self._noting.submit(_end, self._opened.dirty, write, self._clock)
            raise
        self.void_if_not_noted(write)
        self._noted += len(keys)
        for _ in range(self._noted // _SWEEP_EVERY):
            self._writer.sweep()
        self._noted %= _SWEEP_EVERY
        return write

    def void_if_not_noted(self, write: OwnWrite) -> None:
        """Void the bucket of a write that is not noted. Call this before the client gets its answer. Never waits."""
        if not write.is_noted:
            self._epochs.change_bucket(write.bucket)

    async def end_write(self, write: OwnWrite) -> None:
        """Note that a write was answered, or never will be. Otherwise its keys are asked about for longer."""
        self.void_if_not_noted(write)
        if self._opened is not None and (write.is_noted or self._noting.waiting):
            ending = self._noting.submit(
                _end, self._opened.dirty, write, self._clock
            )  # behind its beginning, which may be waiting still
            if not self._noting.is_stuck(NOTE_SECONDS_MAX):
                with suppress(TimeoutError):
                    await in_time(ending, NOTE_SECONDS_MAX)

    # --- the end ----------------------------------------------------------------------------------------------------

    async def trim(self, slots: Slots) -> None:
        """Forget what lies where these slots are strict: `trim`, while the index is in use. StoreUnavailable."""
        if self._opened is None:
            return
        with store_errors("the listing index cannot be trimmed", lmdb.Error):
            await asyncio.to_thread(trim, self._opened.listing, slots)

    async def settle(self) -> None:
        """Wait until what was learned so far is kept."""
        if self._writer is not None:
            await self._writer.settle()

    async def close(self) -> bool:
        """End the threads; the environments are closed with the catalog's directory, unless a thread hangs: False."""
        await self.questions.close()
        has_landed = self._writer is None or await self._writer.close()
        return await self._noting.close(NOTE_SECONDS_MAX) and has_landed

    def _known_until(self, view: View, bucket: str, start: bytes, bound: KeyBound, *, stale: bool) -> bytes:
        now = self.moment(bucket)
        return known_until(view.intervals(start), start, lambda observed: bound.allows(observed, now, stale=stale))


def _merged(
    store: ListingStore,
    view: View,
    wanted: ListRequest,
    until: bytes,
    written: Written,
    truths: Mapping[bytes, AuthoritativeEntry],
) -> FoundPage | NeedsLookup | None:
    """With the truth of keys that were written in the place of the index's word."""
    templates = store.all_templates() if truths else []
    known: dict[bytes, Record | None] = {}
    for key, truth in truths.items():
        known[key] = None
        if truth.entry is not None:
            known[key] = pack(truth.entry, len(templates))
            templates.append(truth.entry.template)
    keys = Overlaid(view, written, known)
    page = take(keys, wanted, until)
    if page is None or keys.is_unknown:
        return None
    needed = keys.needed(wanted, page)
    return NeedsLookup(needed) if needed else FoundPage(page, templates)


def _with_templates(store: ListingStore, found: FoundPage, *, with_owner: bool) -> FoundPage | None:
    """With the templates of all records; None where owners are wanted and not known."""
    numbers = templates_of(found.page.keys)
    templates = found.templates or store.templates(numbers - {OWN_TEMPLATE})
    if OWN_TEMPLATE in numbers:
        found.page.keys, templates = numbered_here(found.page.keys, templates)
        numbers = templates_of(found.page.keys)
    if with_owner and any(templates[number].owner is None for number in numbers):
        return None
    return FoundPage(found.page, templates)


def _begin(dirty: DirtyKeys, write: OwnWrite, clock: Clock) -> None:
    with suppress(lmdb.Error):  # then it is not noted
        dirty.begin(write, clock.monotonic())


def _end(dirty: DirtyKeys, write: OwnWrite, clock: Clock) -> None:
    with suppress(lmdb.Error):  # then it stays in flight
        dirty.end(write, clock.monotonic())


def trim(store: ListingStore, slots: Slots) -> None:
    """Forget what lies in strict slots, where own writes leave no dirty keys. Blocks; raises lmdb.Error."""
    for bucket in store.buckets():
        for start, stop in _between(answerable(slots, bucket)):
            store.forget(bucket, start, stop)


def _between(parts: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    gaps, reached = [], b""
    for start, stop in parts:
        if reached < start:
            gaps.append((reached, start))
        reached = stop
    return [*gaps, (reached, END)] if reached < END else gaps

"""The listing index as the rest of the gateway has it: it is asked for pages, and told of pages and of own writes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import lmdb

from gateway.clock import Clock
from gateway.metadata.disk_thread import DiskThread, in_time
from gateway.metadata.epochs import InvalidationEpochs
from gateway.metadata.listing.batches import Asked, Batch
from gateway.metadata.listing.bounds import Bound, answerable
from gateway.metadata.listing.dirty_keys import DirtyKeys, Overlaid, OwnWrite, Written
from gateway.metadata.listing.intervals import Interval, known_until
from gateway.metadata.listing.landing import ListingLanding
from gateway.metadata.listing.learning import told_by
from gateway.metadata.listing.pages import Page, Record, SortedKeys, Wanted, take
from gateway.metadata.listing.places import END, behind
from gateway.metadata.listing.records import (
    OWN_FORM,
    form_of,
    forms_of,
    numbered,
    numbered_here,
    pack,
    unpack,
)
from gateway.metadata.listing.sharing import SharedQuestions
from gateway.metadata.listing.store import ListingStore
from gateway.metadata.listing.view import View, touching
from gateway.metadata.observer import CatalogObserver
from gateway.metadata.records import Learned
from gateway.policy.slots import Slots
from gateway.s3.list_result import EntryForm, ListedEntry, ListedPage

NOTE_SECONDS_MAX = 2.0
"""An own write waits no longer to be noted. Another process's transaction takes far less than a millisecond."""

_SWEEP_EVERY = 64
"""Written keys after which eight times as many are looked at."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What the origin says of a key that was written: None is no such object."""

    entry: ListedEntry | None


@dataclass(frozen=True, slots=True)
class Found:
    """A page. Records give their forms by places in `forms`."""

    page: Page
    forms: Sequence[EntryForm]


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The page is known but for these keys, which were written: their truth must be asked for."""

    keys: list[bytes] = field(default_factory=list)


class ListingIndex:
    """One process's view of the index that all workers share; made by the catalog, which closes it too."""

    def __init__(
        self,
        store: ListingStore,
        dirty: DirtyKeys,
        epochs: InvalidationEpochs,
        clock: Clock,
        boot: int,
        observer: CatalogObserver,
    ) -> None:
        self._store = store
        self._dirty = dirty
        self._epochs = epochs
        self._clock = clock
        self._boot = boot
        self._landing = ListingLanding(store, clock, observer.keys_not_kept)
        self._noting = DiskThread("own writes")
        self._noted = 0
        self.observer = observer
        self.questions: SharedQuestions[ListedPage] = SharedQuestions()

    # --- asking -----------------------------------------------------------------------------------------------------

    def find(
        self,
        bucket: str,
        wanted: Wanted,
        bound: Bound,
        *,
        with_owner: bool,
        stale: bool = False,
        truths: Mapping[bytes, Truth] | None = None,
    ) -> Found | Unsettled | None:
        """A page, where all of it is known and fresh enough, or `stale` enough; None: the origin must be asked.

        `truths` are those that an Unsettled has asked for. Never raises: what the disk does not give is not known.
        """
        found: Found | Unsettled | None
        try:
            # The dirty keys of an earlier moment than the index: what is clean since then is in it already.
            with self._dirty.written(bucket) as written, self._store.view(bucket) as view:
                if view is None:
                    return None
                until = self._known_until(view, bucket, wanted.start, bound, stale=stale)
                if until <= wanted.start:
                    return None
                if not written(wanted.start, wanted.stop, 1):
                    page = take(view, wanted, until)
                    found = None if page is None else Found(page, ())
                else:
                    found = self._merged(view, wanted, until, written, truths or {})
            if isinstance(found, Found):
                return self._with_forms(found, with_owner=with_owner)
            return found
        except (lmdb.Error, IndexError, ValueError):
            return None

    def entry(self, bucket: str, key: str, bound: Bound) -> ListedEntry | None:
        """What was listed of a key within the bound; None where that is not known, and where there is no such key."""
        try:
            place = key.encode()
            with self._dirty.written(bucket) as written, self._store.view(bucket) as view:
                if view is None or written(place, behind(place), 1):
                    return None
                if self._known_until(view, bucket, place, bound, stale=False) <= place:
                    return None
                found = view.read(place, behind(place), 1)
            if not found:
                return None
            number = form_of(found[0][1])
            forms = [] if number == OWN_FORM else self._store.forms([number])
            (record,), forms = numbered_here(found, forms)
            return unpack(*record, forms)
        except (lmdb.Error, IndexError, ValueError):
            return None

    def asked(self, bucket: str) -> Asked:
        """To be taken before the origin is asked for what `learn` or `learn_truth` is to be told."""
        learned = self.moment(bucket)
        try:
            return Asked(learned, self._dirty.now())
        except lmdb.Error:
            return Asked(learned, -1)  # before every write there ever was

    # --- being told -------------------------------------------------------------------------------------------------

    def learn(self, bucket: str, wanted: Wanted, page: ListedPage, asked: Asked, *, merge_seconds: float) -> None:
        """The origin has answered this to `wanted`; it is kept in the background."""
        listed, forms = numbered(page.entries)
        keys = SortedKeys(listed)
        told = told_by(wanted, [key for key, _ in listed], page.prefixes, is_last=page.next_token is None)
        self._landing.add(
            [
                Batch(bucket, start, stop, keys.read(start, stop, len(listed)), forms, asked, merge_seconds)
                for start, stop in told
            ]
        )

    def learn_truth(self, bucket: str, key: bytes, truth: Truth, asked: Asked) -> None:
        """The same of a single key."""
        listed, forms = numbered([] if truth.entry is None else [truth.entry])
        self._landing.add([Batch(bucket, key, behind(key), listed, forms, asked, 0.0)], is_truth=True)

    async def land(self, batch: Batch) -> list[bytes]:
        """Keep all that the origin has in a range, now; gives the keys that the index knew otherwise, or not at all.

        For crawls: in transactions of a millisecond, between which other processes come in. Raises lmdb.Error.
        """
        return await self._landing.land([batch])

    def known(self, bucket: str, start: bytes, stop: bytes) -> list[Interval]:
        """What of [start, stop) is known at any age and not void, in order. Blocks; raises lmdb.Error."""
        generation = self._epochs.of_bucket(bucket)
        with self._store.view(bucket) as view:
            around = [] if view is None else list(touching(view, start, stop, overlapping=True))
        return [one for one in around if one.learned.generation == generation]

    def moment(self, bucket: str) -> Learned:
        """Now, as intervals have it."""
        return Learned(self._epochs.of_bucket(bucket), self._clock.monotonic(), self._boot)

    # --- own writes -------------------------------------------------------------------------------------------------

    async def begin_write(self, bucket: str, keys: Sequence[str]) -> OwnWrite:
        """These keys are about to be written: from now on the index's word on them does not count.

        Where that cannot be noted, or not in time, all that is known of the bucket is void, now and at the end.
        """
        write = OwnWrite(bucket, [key.encode() for key in keys])
        if self._noting.is_stuck(NOTE_SECONDS_MAX):
            self.void_if_not_noted(write)
            return write
        await self._landing.keep_up(NOTE_SECONDS_MAX)
        noting = self._noting.submit(self._begin, write)
        try:
            await in_time(noting, NOTE_SECONDS_MAX)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            self._noting.submit(self._end, write)
            raise
        self.void_if_not_noted(write)
        self._sweep_after(len(keys))
        return write

    def void_if_not_noted(self, write: OwnWrite) -> None:
        """To be called before anybody is told that the write has been carried out. Waits for nothing."""
        if not write.is_noted:
            self._epochs.change_bucket(write.bucket)

    async def end_write(self, write: OwnWrite) -> None:
        """It has been answered, or never will be. One that is not noted as ended is asked about for longer."""
        self.void_if_not_noted(write)
        if write.is_noted or self._noting.waiting:
            ending = self._noting.submit(self._end, write)  # behind its beginning, which may be waiting still
            if not self._noting.is_stuck(NOTE_SECONDS_MAX):
                with suppress(TimeoutError):
                    await in_time(ending, NOTE_SECONDS_MAX)

    # --- the end ----------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until what was learned so far is kept."""
        await self._landing.settle()

    async def close(self) -> bool:
        """End the threads; the environments are closed with the catalog's directory, unless a thread hangs: False."""
        await self.questions.close()
        ended = await asyncio.gather(self._landing.close(), self._noting.close(NOTE_SECONDS_MAX))
        return all(ended)

    def _known_until(self, view: View, bucket: str, start: bytes, bound: Bound, *, stale: bool) -> bytes:
        now = self.moment(bucket)
        return known_until(view.intervals(start), start, lambda learned: bound.allows(learned, now, stale=stale))

    def _merged(
        self, view: View, wanted: Wanted, until: bytes, written: Written, truths: Mapping[bytes, Truth]
    ) -> Found | Unsettled | None:
        """With the truth of keys that were written in the place of the index's word."""
        forms = self._store.all_forms() if truths else []
        known: dict[bytes, Record | None] = {}
        for key, truth in truths.items():
            known[key] = None
            if truth.entry is not None:
                known[key] = pack(truth.entry, len(forms))
                forms.append(truth.entry.form)
        keys = Overlaid(view, written, known)
        page = take(keys, wanted, until)
        if page is None or keys.is_unknown:
            return None
        needed = keys.needed(wanted, page)
        return Unsettled(needed) if needed else Found(page, forms)

    def _with_forms(self, found: Found, *, with_owner: bool) -> Found | None:
        """With the forms of all records; None where owners are wanted and not known."""
        numbers = forms_of(found.page.keys)
        forms = found.forms or self._store.forms(numbers - {OWN_FORM})
        if OWN_FORM in numbers:
            found.page.keys, forms = numbered_here(found.page.keys, forms)
            numbers = forms_of(found.page.keys)
        if with_owner and any(forms[number].owner is None for number in numbers):
            return None
        return Found(found.page, forms)

    def _begin(self, write: OwnWrite) -> None:
        with suppress(lmdb.Error):
            self._dirty.begin(write, self._clock.monotonic())

    def _end(self, write: OwnWrite) -> None:
        with suppress(lmdb.Error):
            self._dirty.end(write, self._clock.monotonic())

    def _sweep_after(self, keys: int) -> None:
        self._noted += keys
        for _ in range(self._noted // _SWEEP_EVERY):
            self._landing.sweep()
        self._noted %= _SWEEP_EVERY


def trim(store: ListingStore, slots: Slots) -> None:
    """Forget what lies in strict slots, where own writes leave no marks. Blocks; raises lmdb.Error."""
    for bucket in store.buckets():
        for start, stop in _between(answerable(slots, bucket)):
            store.forget(bucket, start, stop)


def _between(parts: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """What lies between them, and before and behind."""
    gaps, place = [], b""
    for start, stop in parts:
        if place < start:
            gaps.append((place, start))
        place = stop
    return [*gaps, (place, END)] if place < END else gaps

"""Doing one job: its list is written ahead of the work, and the work goes on in order, many objects at a time.

    listing or manifest ─▶ list on disk ─▶ pieces of at most a block ─▶ blocks.fetch, up to PIECES_AT_ONCE

A job yields to readers: while workers fetch blocks for them, it fetches only PIECES_WHILE_BUSY at once. A block that a
reader fetches at the same time is fetched once for both (blocks/single_flight.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from gateway.core.errors import (
    OriginAnswered,
    OriginBodyError,
    OriginError,
    OwnersAway,
    PinRefused,
    SnapshotError,
    StoreUnavailable,
)
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.jobs.job import Job, JobDependencies, JobKind
from gateway.jobs.listing import failure_text, list_pages, with_retries
from gateway.jobs.worklist import RecoveredWork, WorkItem, Worklist
from gateway.metadata.catalog import CHECKSUM_MODE, is_remembered
from gateway.metadata.entries import ObjectHead
from gateway.metadata.listing.records import etag_and_size
from gateway.metadata.snapshots.registry import check_covers
from gateway.origin.client import Purpose
from gateway.policy.slots import Prefix, Slot
from gateway.s3.headers import is_same_version, strong_etag
from gateway.s3.origin_habits import is_refusal

PIECES_AT_ONCE = 32
PIECES_WHILE_BUSY = 2
_BUSY_LOOK_SECONDS = 0.05

_HEADERS = {CHECKSUM_MODE: "ENABLED"}
"""As most clients ask; what is learned so answers those that ask without it as well."""


class ObjectJob:
    """One run of a job, to its end or until it is cancelled. `job` is how it stands."""

    def __init__(self, dependencies: JobDependencies, job: Job, worklist: Worklist) -> None:
        self.job = job
        self._dependencies = dependencies
        self._worklist = worklist
        self._pieces = asyncio.Semaphore(PIECES_AT_ONCE)
        self._running = 0
        self._held: dict[str, int] = {}
        self._pin = 0
        self._lacks_room = False
        self._has_idle_room = True
        self.coming_bytes = 0
        """Bytes that have arrived for unfinished pieces."""

        self._started: deque[tuple[WorkItem, asyncio.Task[None]]] = deque()

    async def run(self) -> None:
        """Do the remaining work. Raise ForebayError when the listing or the disk fails, or a pin is refused."""
        if self.job.kind is JobKind.PIN:
            self._pin = await self._dependencies.blocks.pin(self.job.prefix, cluster=self.job.cluster)
        recovered = await asyncio.to_thread(self._worklist.recover, self.job.place)
        self.job = _as_recovered(self.job, recovered)
        start_after = recovered.last.key.key if recovered.last is not None else ""
        listing = asyncio.create_task(self._list(start_after), name="job listing")
        try:
            if self._pin:
                await listing
                self._check_pin()
            await self._do_all()
            await listing
            self.job = replace(self.job, full=self._lacks_room)
            if self._pin and self.job.full:
                raise PinRefused(
                    f"the cache has no room for more: it has {self.job.bytes_done} bytes of {self.job.prefix}"
                )
        finally:
            listing.cancel()
            for _, task in self._started:
                task.cancel()
            await asyncio.gather(listing, *(task for _, task in self._started), return_exceptions=True)

    def _check_pin(self) -> None:
        """PinRefused when there is no object, or more bytes than the slot may pin: said before the first is fetched."""
        if not self.job.objects_found and not self.job.allow_empty:
            raise PinRefused(f"{self.job.prefix} holds no object: check the name, or allow it to be empty")
        if self.job.cluster:
            return  # other nodes pin most of it, and say themselves what they have room for
        prefix = Prefix.parse(self.job.prefix)
        slot = self._dependencies.slots.find(prefix.bucket, prefix.key_prefix).name
        pinnable_bytes = self._dependencies.blocks.pinnable_bytes(slot)
        if self.job.bytes_found > pinnable_bytes:
            raise PinRefused(
                f"{self.job.prefix} holds {self.job.bytes_found} bytes, and slot {slot} can pin {pinnable_bytes}"
            )

    # The list.

    async def _list(self, start_after: str) -> None:
        try:
            if not self.job.manifest and not self.job.found_all:
                await self._list_pages(start_after)
            self.job = replace(self.job, found_all=True)
        finally:
            self._worklist.finish()

    async def _list_pages(self, start_after: str) -> None:
        prefix = Prefix.parse(self.job.prefix)
        pages = list_pages(self._dependencies, prefix, start_after=start_after)
        async with aclosing(pages) as listed:
            async for page in listed:
                entries = [(prefix.bucket, one.key.decode(), one.etag, one.size_bytes) for one in page]
                await asyncio.to_thread(self._worklist.add, entries)
                self.job = replace(
                    self.job,
                    objects_found=self.job.objects_found + len(page),
                    bytes_found=self.job.bytes_found + sum(one.size_bytes for one in page),
                )
                self._worklist.grown()

    # The objects.

    async def _do_all(self) -> None:
        async with aclosing(self._worklist.entries(self.job.place)) as entries:
            async for entry in entries:
                if self.job.full:
                    self._lacks_room = True
                    break
                self._started.append((entry, asyncio.create_task(self._do(entry), name="job object")))
                await self._settle(at_most=PIECES_AT_ONCE)
        await self._settle(at_most=0)

    async def _settle(self, at_most: int) -> None:
        """Go on behind what is done, in order; wait while more than `at_most` objects are begun."""
        while self._started and (self._started[0][1].done() or len(self._started) > at_most):
            entry, task = self._started[0]
            await asyncio.wait({task})
            self._started.popleft()
            task.result()
            self.job = replace(self.job, place=entry.next_offset)

    async def _do(self, entry: WorkItem) -> None:
        try:
            if self.job.kind is JobKind.EVICT:
                dropped_bytes = await self._dependencies.blocks.evict(entry.key)
                self.job = replace(self.job, bytes_done=self.job.bytes_done + dropped_bytes)
            else:
                await self._warm(entry)
        except (OriginError, SnapshotError) as error:
            self.job = self.job.failed_with(f"{entry.key}: {failure_text(error)}")
        else:
            self.job = replace(self.job, objects_done=self.job.objects_done + 1)

    async def _warm(self, entry: WorkItem) -> None:
        slot = self._dependencies.slots.find(entry.key.bucket, entry.key.key)
        if slot.consistency == "snapshot":
            await self._warm_snapshot(entry.key, slot)
            return
        version = await self._version(entry, slot)
        try:
            await self._fetch(version, slot)
        except (OriginAnswered, OriginBodyError) as error:
            if not is_refusal(error):
                raise
            self._dependencies.catalog.refused(version)  # it has changed since, or the origin withholds it
            again = await self._ask(entry, slot)
            if not again.of_peer:
                self._dependencies.catalog.named(again.version)
            await self._fetch(again.version, slot)

    async def _warm_snapshot(self, key: ObjectKey, slot: Slot) -> None:
        """Warm the frozen version, and its head; an object outside the slot's snapshot needs no warming."""
        version = await asyncio.to_thread(_snapshot_version, self._dependencies, key, slot)
        if version is not None:
            await self._fetch(await _learn_version(self._dependencies, version, slot), slot)

    async def _version(self, entry: WorkItem, slot: Slot) -> ObjectVersion:
        """Return the listed one, if its ETag is as in HEAD; if the slot remembers, its metadata is learned, too."""
        if entry.etag and entry.etag == strong_etag(entry.etag) and not is_remembered(slot, {}):
            return ObjectVersion(entry.key, entry.etag, entry.size_bytes)
        return (await self._ask(entry, slot)).version

    async def _ask(self, entry: WorkItem, slot: Slot) -> ObjectHead:
        current = self._dependencies.catalog.current
        ask = partial(current, entry.key, slot, headers=_HEADERS, purpose=Purpose.WARM)
        return await with_retries(self._dependencies.clock, ask)

    async def _fetch(self, version: ObjectVersion, slot: Slot) -> None:
        """Fetch a version's blocks while there is room; none if too large for the slot, or kept out by the origin."""
        if self._dependencies.catalog.habits(version.key.bucket).reasons(version):
            return
        if slot.kept_object_bytes_max is not None and version.size_bytes > slot.kept_object_bytes_max:
            return
        arrived, away = list[int](), list[OwnersAway]()
        try:
            async with asyncio.TaskGroup() as group:
                for piece in self._dependencies.blocks.pieces(version, slot.name):
                    await self._wait_for_turn()
                    group.create_task(self._fetch_piece(version, slot, piece, arrived, away))
        except asyncio.CancelledError:
            if sum(arrived) == version.size_bytes:
                self.job = replace(self.job, objects_done=self.job.objects_done + 1)
            raise
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if away:
            raise away[0]

    async def _wait_for_turn(self) -> None:
        """Wait until one piece more may be fetched."""
        await self._pieces.acquire()
        try:
            while self._running >= PIECES_WHILE_BUSY and self._dependencies.blocks.others_fill():
                await self._dependencies.clock.sleep(_BUSY_LOOK_SECONDS)
        except BaseException:
            self._pieces.release()
            raise
        self._running += 1

    async def _fetch_piece(
        self, version: ObjectVersion, slot: Slot, piece: ByteRange, arrived: list[int], away: list[OwnersAway]
    ) -> None:
        """Bring a piece to its place. While its owners are `away`, a copy may lie here, where that takes no room."""
        come_bytes, is_copy = 0, False

        def come(so_far_bytes: int) -> None:
            nonlocal come_bytes
            self.coming_bytes += so_far_bytes - come_bytes
            come_bytes = so_far_bytes

        blocks = self._dependencies.blocks
        fetch = partial(blocks.fetch, version, piece, slot=slot.name, purpose=Purpose.WARM, come=come)
        try:
            if self.job.cluster and not self.job.full:
                pin = Prefix.parse(self.job.prefix) if self._pin else None
                at_owner = partial(blocks.fetch_at_owner, version, piece, slot=slot.name, purpose=Purpose.WARM, pin=pin)
                try:
                    elsewhere_bytes = await with_retries(self._dependencies.clock, at_owner)
                except OwnersAway as error:
                    away.append(error)
                    if self._pin or not self._has_idle_room:
                        return
                    is_copy, elsewhere_bytes = True, None
                if elsewhere_bytes is not None:
                    self._count(piece, elsewhere_bytes, arrived)
                    return
            fetch = partial(fetch, of_peer=self.job.cluster and not is_copy)
            fetched_bytes, kept = (0, False) if self.job.full else await with_retries(self._dependencies.clock, fetch)
        except asyncio.CancelledError:
            if come_bytes == piece.length:  # all of it is here, and about to be published
                self._count(piece, come_bytes, arrived)
            raise
        finally:
            self._running -= 1
            self._pieces.release()
            come(0)
        if is_copy:
            self._has_idle_room = kept
            if kept:
                self._count(piece, fetched_bytes, arrived)
            return
        if not kept:
            self._lacks_room = True
            self.job = replace(self.job, full=True)
            return
        if self._pin:
            await blocks.hold(version, piece, self._pin, slot=slot.name)
        self._held[slot.name] = self._held.get(slot.name, 0) + piece.length
        room_bytes = blocks.pinnable_bytes(slot.name) if self._pin else blocks.obtainable_bytes(slot.name)
        self._count(piece, fetched_bytes, arrived)
        if self._held[slot.name] + piece.length > room_bytes:  # going on would evict what this job has brought
            self._lacks_room = self._lacks_room or self.job.full
            self.job = replace(self.job, full=True)

    def _count(self, piece: ByteRange, fetched_bytes: int, arrived: list[int]) -> None:
        arrived.append(piece.length)
        self.job = replace(
            self.job,
            bytes_done=self.job.bytes_done + piece.length,
            bytes_fetched=self.job.bytes_fetched + fetched_bytes,
        )


def _as_recovered(job: Job, found: RecoveredWork) -> Job:
    """Return the job as a restart continues it: from `offset`, and with the listing if the list lost its end."""
    if job.manifest and found.objects < job.objects_found:
        raise StoreUnavailable(f"the list of the job has {found.objects} of {job.objects_found} objects left")
    if job.manifest:
        return replace(job, objects_done=max(0, found.objects_before - job.objects_failed))
    return replace(
        job,
        place=min(job.place, found.last.next_offset if found.last is not None else 0),
        objects_found=found.objects,
        bytes_found=found.size_bytes,
        found_all=job.found_all and found.objects >= job.objects_found,
        objects_done=max(0, found.objects_before - job.objects_failed),
        bytes_done=job.bytes_done if job.kind is JobKind.EVICT else found.bytes_before,
    )


def _snapshot_version(dependencies: JobDependencies, key: ObjectKey, slot: Slot) -> ObjectVersion | None:
    """Return the frozen version; None without such an object. SnapshotError, StoreUnavailable. Blocks."""
    with dependencies.snapshots.opened(slot.snapshot or "") as snapshot:
        check_covers(snapshot.manifest, slot, dependencies.homes)
        record = snapshot.data.record(key.key.encode())
        if record is None:
            return None
        return ObjectVersion(key, *etag_and_size(record))


async def _learn_version(dependencies: JobDependencies, version: ObjectVersion, slot: Slot) -> ObjectVersion:
    """Return the version as the origin names it, and learn its head on the way, where it is not known.

    SnapshotError when the origin has another version now.
    """
    known = dependencies.catalog.of_version(version, with_checksums=True)
    if known is not None:
        return known.version
    etag = strong_etag(version.etag)
    headers = {**_HEADERS, "if-match": etag}
    ask = partial(dependencies.catalog.ask, version.key, slot, headers=headers, purpose=Purpose.WARM)
    try:
        head = await with_retries(dependencies.clock, ask)
    except OriginAnswered as answer:
        if answer.status not in (404, 412):
            raise
        head = None
    if head is None or not is_same_version(head.version, version):
        raise SnapshotError(f"the origin does not have the version with ETag {etag} any more")
    dependencies.catalog.learned_version(head, with_checksums=True)
    return head.version

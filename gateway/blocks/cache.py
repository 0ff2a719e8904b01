"""The block cache: a range of an object's version, from blocks on disk, filled from the origin when missing.

`open_range` finds out where the first bytes come from and lets the origin's refusals out before a reply has begun; the
reader's `body` gives the bytes. Several processes may have one directory open, each as a worker slot of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Self

import lmdb
import structlog

from gateway.blocks import layout, plan
from gateway.blocks.complete_ranges import CompleteRanges
from gateway.blocks.dependencies import CacheDependencies
from gateway.blocks.directory import DiskThreads
from gateway.blocks.disk_health import CircuitBreaker
from gateway.blocks.eviction import capacity_of
from gateway.blocks.handed_out import MayRead, Place, drop_if_damaged, open_for_client
from gateway.blocks.index import TOUCHES_PER_TRANSACTION, Usage
from gateway.blocks.layout import BlockSettings, Extent
from gateway.blocks.opening import account_late, move_between_slots, open_directory, rebuild
from gateway.blocks.origin_gets import UnpinnedGet, UnpinnedResponse
from gateway.blocks.plan import Explanation, ReadPlan
from gateway.blocks.reader import RangeReader, bring
from gateway.blocks.scrubber import Scrubber, ScrubSettings
from gateway.blocks.small_block_fetch import whole_of
from gateway.blocks.spans import HeldObject, WarmSpan, span_of
from gateway.blocks.store import IngestedFile, describe
from gateway.core.clock import Clock
from gateway.core.errors import (
    BlockError,
    ForebayError,
    OriginAnswered,
    PinRefused,
    StoreUnavailable,
)
from gateway.core.model import ByteRange, MissReason, ObjectKey, ObjectVersion
from gateway.disk.file_lease import FileLease, SharedFile
from gateway.origin.client import Origin, OriginRequest, Purpose, from_peer
from gateway.origin.peer_protocol import COPY, PIN, Roles
from gateway.policy.slots import Prefix, Slots
from gateway.telemetry import metrics

_log = structlog.get_logger("forebay.cache")
_DONE = object()
_LATE_LOOKS, _LATE_SECONDS = 60, 0.5
"""Number of looks, and seconds between them, for files begun on the account of a slot that has changed since."""

UNLINKS_RETRIED_SECONDS = 60.0

GIVEN_BYTES_MAX = 128 * 1024
"""Limit of bytes that are copied if the client's socket does not take them, for every slow client."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class PassthroughCache:
    """Reads of a cache whose directory cannot be opened: its breaker is open for good, so the origin gives every byte.

    `BlockCache` is the cache with a directory.
    """

    def __init__(self, dependencies: CacheDependencies) -> None:
        self._dependencies = dependencies

    @classmethod
    def without_directory(cls, origin: Origin, clock: Clock) -> Self:
        return cls(CacheDependencies.without_directory(origin, clock))

    async def open_range(
        self,
        version: ObjectVersion,
        byte_range: ByteRange,
        *,
        slot: str = "default",
        headers: Mapping[str, str] = _NO_HEADERS,
        answer: UnpinnedResponse | None = None,
        of_peer: bool = False,
    ) -> RangeReader:
        """Begin to read a range, which must lie within the object.

        `slot` is the one that the object belongs to: its account pays for room on disk and requests to the origin,
        which carry `headers` (lower-case names). Raises OriginAnswered when the origin refuses the first missing bytes
        (412: the key has another version now, look again), OriginUnreachable, and OriginBodyError when it answers with
        something else. Trouble with the cache directory is never raised. The bytes of `answer`, which the origin has
        given already, are not requested again; the caller closes it. `of_peer`: another node reads: ask none.
        """
        if byte_range.stop > version.size_bytes:
            raise ValueError(f"{byte_range} lies outside of {version}")
        roles = None if of_peer else self._dependencies.roles
        of_read = ReadPlan(self._dependencies, version, byte_range, slot, headers, answer=answer, roles=roles)
        reader = RangeReader(of_read)
        await reader.start()
        return reader

    def warm_span(self, version: ObjectVersion, first: int, count: int, *, slot: str) -> WarmSpan | None:
        """Return bytes of a version, at least one, if that needs no wait; None: call `open_range`."""
        dependencies = self._dependencies
        size_bytes = dependencies.settings.block_size_of(slot)
        number = first // size_bytes
        if (first + count - 1) // size_bytes != number or not dependencies.isolation.readable:
            return None
        block_id = layout.block_id(version, number, size_bytes)
        if block_id in dependencies.ahead_marks:
            return None
        try:
            extent = dependencies.directory.index.lookup(block_id)
        except StoreUnavailable:
            return None
        if extent is None:
            return None
        return span_of(dependencies, extent, first - number * size_bytes, count, slot, cached=True)

    def inline_response(
        self,
        version: ObjectVersion,
        byte_range: ByteRange,
        *,
        slot: str,
        headers: Mapping[str, str],
        answer: UnpinnedResponse,
    ) -> memoryview | None:
        """Return a range of a small object if the first answer has brought all of it; None: call `open_range`.

        The caller counts its bytes as missed ones.
        """
        # The block's fill then lacks nothing but the disk.
        dependencies, size_bytes, settings = self._dependencies, version.size_bytes, self._dependencies.settings
        if answer.range.length != size_bytes or size_bytes > min(GIVEN_BYTES_MAX, settings.block_size_of(slot)):
            return None
        if not (settings.keeps(slot, size_bytes) and dependencies.isolation.readable):
            return None
        ids = layout.BlockIds(version, answer.get.object_id)
        block = layout.block_at(version, 0, size_bytes, ids)
        if dependencies.passes_on(slot, headers):
            content = whole_of(block, answer)
        else:
            content = dependencies.fetches.start_inline(block, slot, headers, answer)
        if content is None:
            return None
        return content[byte_range.first : byte_range.stop]

    def complete_ranges(self) -> CompleteRanges:
        """Return the reads that other nodes are answered from."""
        return CompleteRanges(self._dependencies)

    def holds(self, version: ObjectVersion, byte_range: ByteRange, *, slot: str) -> bool:
        dependencies = self._dependencies
        try:
            blocks = layout.blocks_of(version, byte_range, dependencies.settings.block_size_of(slot))
            return dependencies.isolation.readable and all(
                dependencies.directory.index.lookup(one.id) is not None for one in blocks
            )
        except StoreUnavailable:
            return False

    def why_missing(self, version: ObjectVersion, *, slot: str, before: ObjectVersion | None) -> MissReason | None:
        """As `RangeReader.why_missing`, of an object of one block, before it is fetched in another way."""
        dependencies = self._dependencies
        if not dependencies.isolation.writable or not dependencies.settings.keeps(slot, version.size_bytes):
            return "not-kept"
        size_bytes, ids = dependencies.settings.block_size_of(slot), layout.BlockIds(version)
        try:
            block = layout.block_at(version, 0, size_bytes, ids)
            state = plan.state_of(dependencies.directory.index, block, 0, size_bytes, ids)
        except StoreUnavailable:
            return "not-kept"
        return plan.why_block_missing(dependencies, size_bytes, before, block, state)

    @property
    def keeps_all_it_fetches(self) -> bool:
        """Return True if the disk has taken all small blocks that this process fetched lately."""
        return not self._dependencies.fetches.refused

    def first_fetched(self, first: int, last: int | None, slot: str) -> ByteRange:
        """Return the first range that a read of `first` to `last` (None: the end) of an unknown object fetches."""
        return plan.first_fetched(first, last, self._dependencies.settings.block_size_of(slot))

    def block_size_of(self, slot: str) -> int:
        return self._dependencies.settings.block_size_of(slot)

    @property
    def isolation(self) -> CircuitBreaker:
        return self._dependencies.isolation

    def begin_unpinned_get(self, key: ObjectKey, offset: int, headers: Mapping[str, str]) -> UnpinnedGet | None:
        """Return the right to ask the origin for version and bytes at once, to be entered (origin_gets.py).

        None if another caller has it, if blocks of the object are cached, or if there is no directory.
        """
        return None

    async def apply_settings(self, capacity_bytes: int) -> None:
        """Make this process follow the current slots of `BlockSettings` and this capacity, if there is a directory."""

    async def invalidate(self, key: ObjectKey) -> None:
        """Drop the blocks of every version of an object that was overwritten or deleted.

        This frees room and no more: a block is found by its ETag, so the blocks of an old version are never served for
        a new one. Fills in progress are left alone.
        """
        dependencies, object_id = self._dependencies, layout.object_id(key)
        try:
            if dependencies.isolation.writable and dependencies.directory.index.has_object(object_id):
                await dependencies.threads.index(dependencies.directory.drop_object, object_id)
        except StoreUnavailable:
            metrics.CACHE_STORE_UNAVAILABLE.add(1)

    async def close(self) -> None:
        """Let go of everything. Readers must be gone."""


class BlockCache(PassthroughCache):
    """One worker process's cache over the shared directory. Use `open`, and `close` at the end."""

    def __init__(self, dependencies: CacheDependencies) -> None:
        super().__init__(dependencies)
        self._directory, self._threads, opened = dependencies.directory, dependencies.threads, dependencies.opened
        self._rebuilding = asyncio.Lock()
        self._unlinks_tried_at = dependencies.clock.monotonic()
        self._rights_of_others: Callable[[], int] | None = None
        self._changes_seen = -1
        self._keeping_up = asyncio.create_task(self._keep_up(), name="block cache maintenance")
        self._beating = asyncio.create_task(opened.heartbeats.beat_on(opened.worker), name="heartbeat")

    @classmethod
    async def open(
        cls, settings: BlockSettings, origin: Origin, *, worker: int, clock: Clock, roles: Roles | None = None
    ) -> BlockCache:
        """Open the directory as worker slot `worker`: what the slot's last process left unfinished is cleared up.

        StartupError when the directory has another format, holds something else, is in the wrong place or of wrong
        rights, or when a living process has the slot; StoreUnavailable when the disk fails. After an unclean boot,
        blocks are misses until some process has rebuilt the index.
        """
        threads = DiskThreads(settings.disk_threads)
        try:
            opened = await threads.index_later(open_directory, settings, worker, clock.now)
        except BaseException:
            threads.shut_down()
            raise
        return cls(CacheDependencies.assemble(settings, opened, threads, origin, clock, roles))

    def held_object(self, version: ObjectVersion, slot: str) -> HeldObject:
        return HeldObject(self._dependencies, version, slot)

    async def open_for_client(
        self, wanted: Sequence[tuple[Extent, MayRead | None]]
    ) -> list[FileLease[SharedFile] | None]:
        """Return files of blocks for a client that reads them itself, each as `handed_out.open_for_client`."""

        def opened() -> list[FileLease[SharedFile] | None]:
            return [open_for_client(self._dependencies, *one) for one in wanted]

        return await self._threads.disk(opened)

    async def drop_if_damaged(self, places: Sequence[Place], slot: str) -> None:
        await drop_if_damaged(self._dependencies, places, slot)

    async def explain(self, key: ObjectKey, version: ObjectVersion | None, slot: str) -> Explanation:
        """Explain which parts of an object and one of its versions are cached, and why not. Raises StoreUnavailable."""
        dependencies = self._dependencies
        why_not = plan.why_not_kept(dependencies, version.size_bytes if version is not None else None, slot)
        here = await asyncio.to_thread(plan.presence, dependencies, version, slot) if version is not None else None
        owners = plan.owners(dependencies, version, slot) if version is not None else []
        return Explanation(here, await asyncio.to_thread(plan.holding, dependencies, key), why_not, owners)

    def begin_unpinned_get(self, key: ObjectKey, offset: int, headers: Mapping[str, str]) -> UnpinnedGet | None:
        object_id, last_commit = layout.object_id(key), self._directory.index.last_commit
        commit = last_commit.number()
        if self._has_blocks(object_id):
            return None
        get = self._dependencies.unpinned_gets.begin(object_id, offset, headers)
        # Whoever had the lock between these two steps has entered the block before giving it back.
        if get is not None and last_commit.number() != commit and self._has_blocks(object_id):
            get.on_end(get)
            return None
        return get

    def has_blocks_of(self, key: ObjectKey) -> bool:
        """Return True if blocks of any version of an object are cached, or if the index cannot be read."""
        return self._has_blocks(layout.object_id(key))

    def _has_blocks(self, object_id: bytes) -> bool:
        try:
            return self._directory.index.has_object(object_id)
        except StoreUnavailable:
            return True

    def pieces(self, version: ObjectVersion, slot: str) -> Iterator[ByteRange]:
        """Yield the ranges of an object of a slot that lie in one block each, as `fetch` wants them."""
        if version.size_bytes:
            whole = ByteRange(0, version.size_bytes - 1)
            for block in layout.blocks_of(version, whole, self._dependencies.settings.block_size_of(slot)):
                yield block.range

    async def fetch(
        self,
        version: ObjectVersion,
        piece: ByteRange,
        *,
        slot: str,
        purpose: Purpose,
        come: Callable[[int], None] = lambda _: None,
        of_peer: bool = False,
    ) -> tuple[int, bool]:
        """Bring one of the `pieces` to disk. Return the number of fetched bytes, and whether the piece is on disk.

        False: the directory could not take it. `come` gets the number of fetched bytes again and again. `of_peer`:
        another node wants it here. Raises as `open_range` and its reader do.
        """
        roles = None if of_peer else self._dependencies.roles
        return await bring(ReadPlan(self._dependencies, version, piece, slot, _NO_HEADERS, purpose, roles=roles), come)

    async def fetch_at_owner(
        self, version: ObjectVersion, piece: ByteRange, *, slot: str, purpose: Purpose, pin: Prefix | None = None
    ) -> int | None:
        """Ask the owner of one of the `pieces` to fetch it to its own disk. Return how many bytes the owner fetched.

        None: this node looks after it, perhaps instead of one that cannot be asked. With `pin`, the owner pins what it
        looks after under that prefix. Raises as `fetch`; OwnersAway; PinRefused if it cannot pin so much.
        """
        dependencies = self._dependencies
        of_read = ReadPlan(dependencies, version, piece, slot, _NO_HEADERS, purpose, roles=dependencies.roles)
        headers = of_read.headers_of(of_read.block(of_read.numbers.start))
        if COPY not in headers:
            return None
        asked = {**headers, "if-match": version.etag, "range": f"bytes={piece.first}-{piece.last}"}
        if pin is not None:
            asked[PIN] = str(len(pin.key_prefix))
        request = OriginRequest(
            "HEAD", *version.key, headers=asked, purpose=purpose, slot=slot, size_bytes=version.size_bytes
        )
        async with await dependencies.origin.send(request) as response:
            if response.status == 409:
                raise PinRefused(f"a node that looks after blocks of {pin} cannot pin them: no room, or other pins")
            if response.status not in (200, 201, 206):
                raise OriginAnswered(response.status, list(response.headers.items()), b"")
            if from_peer(response) is None:
                return None
            return piece.length if response.status == 201 else 0

    def others_fill(self) -> bool:
        """Return True if other processes fetch blocks now, which they do for readers."""
        return self._dependencies.opened.locks.others_fetch()

    def readers_wait(self) -> bool:
        """Return True if this process fills blocks for readers, or if other processes fill any."""
        own = self._dependencies
        return own.unpinned_gets.any_pending or own.fetches.fetches_for_readers() or self.others_fill()

    def obtainable_bytes(self, slot: str) -> int:
        """Return the most that a slot can have beside its pins when others need all of their guarantees."""
        used = self.usage().slots.get(slot)
        return self.pinnable_bytes(slot) - (used.pinned_bytes if used is not None else 0)

    # Pins.

    def pins(self) -> list[str]:
        """Return the prefixes whose blocks stay, of objects in any slot."""
        return list(self._directory.pins.all())

    async def pin(self, prefix: str, *, cluster: bool = False) -> int:
        """Keep what is filled under a prefix from now on, and what `hold` names; return the pin's number.

        `cluster`: only blocks that this node looks after are kept when they are filled. Raises PinRefused when another
        pin overlaps it.
        """
        return await self._threads.index(partial(self._directory.pins.add, prefix, cluster=cluster))

    def pin_of(self, key: ObjectKey) -> int:
        """Return the number of the pin that an object is under, or 0. Raises StoreUnavailable."""
        return self._directory.index.pins().number_of(key)

    async def hold(self, version: ObjectVersion, piece: ByteRange, number: int, *, slot: str) -> None:
        """Keep the cached blocks of a piece. Raises PinRefused when they exceed what may be pinned."""
        directory, size = self._directory, self._dependencies.settings.block_size_of(slot)
        ids = [block.id for block in layout.blocks_of(version, piece, size)]
        await self._threads.index(directory.pins.hold, ids, number, directory.capacity)

    async def unpin(self, prefix: str, *, cluster: bool = False) -> bool:
        """Let go of what lies under a prefix; False when it is not pinned (`cluster`: over the cluster)."""
        if not await self._threads.index(partial(self._directory.pins.remove, prefix, cluster=cluster)):
            return False
        await self._in_steps(self._directory.pins.let_go())
        return True

    async def keep_only(self, prefixes: Sequence[str]) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """Pin these prefixes for `keep_last`, unpin earlier ones. Return each one's pin number, or why it has none."""
        pins = self._directory.pins
        numbers, refused, is_any_gone = await self._threads.index(pins.apply_settings, prefixes)
        if is_any_gone:
            await self._in_steps(pins.let_go())
        return numbers, refused

    async def hold_object(self, key: ObjectKey, number: int) -> int:
        """Keep an object's cached blocks; return their bytes. Raises PinRefused if they exceed what may be pinned."""
        directory = self._directory
        return await self._threads.index(directory.pins.hold_object, layout.object_id(key), number, directory.capacity)

    def pinnable_bytes(self, slot: str) -> int:
        """Return the most that a slot may pin: its obtainable room without other slots' guarantees and pins."""
        usage, capacity = self.usage().slots, self._directory.capacity
        others = {name: used.pinned_bytes for name, used in usage.items() if name != slot}
        kept = (max(count, capacity.share(name).guaranteed_bytes) for name, count in others.items())
        room_bytes = capacity.total_bytes - sum(kept)
        limit_bytes = capacity.share(slot).limit_bytes
        return min(room_bytes, room_bytes if limit_bytes is None else limit_bytes)

    async def ingest(self, ingested: IngestedFile, *, slot: str = "default") -> int:
        """Make blocks of what lies wholly in a file that came another way; how many. No byte is copied.

        The file's own name can be removed when this has returned. StoreUnavailable when there is no room for it, and
        when it is not on the same file system; nothing is lost by that.
        """
        size_bytes = self._dependencies.settings.block_size_of(slot)
        ingest = await self._threads.disk(describe, ingested, slot, size_bytes)
        if ingest is None:
            return 0
        return await self._threads.index(self._directory.ingest, ingest)

    def keep_free(self, rights_of_others: Callable[[], int]) -> None:
        """Make fills leave this many bytes of the disk free; the event loop renews the number from time to time."""
        self._rights_of_others = rights_of_others
        self._look_at_rights()

    async def evict(self, key: ObjectKey) -> int:
        """Evict an object on a user's request; return the bytes dropped. Raises StoreUnavailable."""
        before = await asyncio.to_thread(plan.holding, self._dependencies, key)
        await self.invalidate(key)
        after = await asyncio.to_thread(plan.holding, self._dependencies, key)
        return max(0, before.size_bytes - after.size_bytes)

    def usage(self) -> Usage:
        return self._directory.index.usage()

    async def rebuild_index(self) -> None:
        """Find the blocks that the index does not know, where there may be any; one process does it for all."""
        await self._account()
        await self._in_steps(self._directory.pins.let_go())  # an unpinning may have been broken off

    async def apply_settings(self, capacity_bytes: int) -> None:
        settings = self._dependencies.settings
        settings.follow_slots()
        capacity = capacity_of(capacity_bytes, settings.slots, settings.daily_writes_bytes)
        self._directory.configured_capacity = capacity
        try:
            for writer in self._dependencies.writers if settings.has_local_readers else ():
                await self._threads.index_later(writer.seal)  # who has a segment may have fewer rights now
            await self._threads.index_later(self._directory.index.apply_settings, capacity)
        except StoreUnavailable as error:
            self.isolation.note(error)

    async def move_between_slots(self) -> None:
        """Move blocks to their slots' accounts, and evict a little at a time beyond limits."""
        # One process does it for all, once all have the current slots.
        await self._account()
        await self._in_steps(self._directory.shrinking())

    async def _in_steps(self, steps: Iterator[None]) -> None:
        while await self._threads.index_later(next, steps, _DONE) is not _DONE:
            pass

    async def _account(self) -> None:
        """Enter every file into the index, on the account of its key's current slot."""
        directory, threads = self._directory, self._threads
        async with self._rebuilding:
            slots = Slots(self._dependencies.settings.slots)  # these to the end, though they change meanwhile
            begun = await threads.index_later(move_between_slots, directory, slots)
            await self._in_steps(rebuild(directory, slots))
            for _ in range(_LATE_LOOKS):
                begun = await threads.index_later(account_late, directory, slots, begun)
                if not begun:
                    break
                await self._dependencies.clock.sleep(_LATE_SECONDS)

    def scrubber(self, settings: ScrubSettings) -> Scrubber:
        """Return a scrubber for blocks that are not read; one process runs it for all, and ends it before `close`."""
        return Scrubber(settings, self._directory, self._threads, self.isolation, self._dependencies.clock)

    async def settle(self) -> None:
        await self._dependencies.fetches.settle()

    async def close(self) -> None:
        """Break off the fills, write down what was used, and leave the directory in order. Readers must be gone."""
        dependencies = self._dependencies
        self._keeping_up.cancel()
        await asyncio.gather(self._keeping_up, return_exceptions=True)
        await dependencies.isolation.close()
        await dependencies.fetches.close()
        for writer in dependencies.writers:
            await writer.drain()
        dependencies.open_files.close()
        dependencies.watcher.close()
        await self.flush_accesses()
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        await asyncio.to_thread(self._threads.shut_down)
        try:
            await asyncio.to_thread(self._dependencies.opened.close)
        except (BlockError, OSError, lmdb.Error) as error:
            _log.warning(
                "the cache directory could not be closed properly; the next start repairs it", error=str(error)
            )
            self._dependencies.opened.let_go()

    # Regular work.

    async def _keep_up(self) -> None:
        while True:
            self._report_usage()
            self._look_at_rights()
            await self._dependencies.clock.sleep(self._dependencies.settings.access_flush_seconds)
            self._dependencies.locks.release_late()
            await self._drop_evicted()
            await self.flush_accesses()
            await self._retry_unlinks()
            await self._grow_again()

    async def _drop_evicted(self) -> None:
        """Close evicted files, as open ones take room; without changes in the index, none were evicted."""
        with suppress(StoreUnavailable):  # told to the isolation already
            if (changes := self._directory.index.changes()) != self._changes_seen:
                self._changes_seen = changes
                await self._dependencies.open_files.drop_unlinked(self._threads.disk)
                for writer in self._dependencies.writers if self._dependencies.settings.has_local_readers else ():
                    await self._threads.index_later(writer.let_go)

    async def flush_accesses(self) -> None:
        """Tell the index which files were used until now, a short transaction at a time."""
        index = self._directory.index
        # What is used meanwhile has its turn the next time: under load, this would never end.
        for _ in range(-(-len(index.accesses) // TOUCHES_PER_TRANSACTION)):
            if not self.isolation.writable:
                return
            try:
                await self._threads.index(index.touch)
            except StoreUnavailable:
                metrics.CACHE_STORE_UNAVAILABLE.add(1)
                return

    async def _retry_unlinks(self) -> None:
        now = self._dependencies.clock.monotonic()
        if not self.isolation.writable or now - self._unlinks_tried_at < UNLINKS_RETRIED_SECONDS:
            return
        self._unlinks_tried_at = now
        with suppress(StoreUnavailable):  # told to the isolation already
            await self._threads.index(self._directory.retry_unlinks)

    async def _grow_again(self) -> None:
        directory, step_bytes_min = self._directory, self._dependencies.settings.block_size_bytes
        with suppress(StoreUnavailable, OSError):  # told to the isolation already, or at the next write
            if self.isolation.writable and directory.capacity is not directory.configured_capacity:
                await self._threads.index(directory.grow_again, step_bytes_min)

    def _look_at_rights(self) -> None:
        if self._rights_of_others is not None:
            with suppress(ForebayError):  # the writer reports it; the last known values stay
                self._directory.reserve_of_others.size_bytes = self._rights_of_others()

    def _report_usage(self) -> None:
        if not self.isolation.readable:
            return
        try:
            usage, written_bytes = self._directory.index.usage(), self._directory.written_today_bytes()
        except StoreUnavailable as error:
            self.isolation.note(error)
        else:
            for slot, of_slot in usage.slots.items():
                metrics.CACHE_USAGE_BYTES.set(of_slot.used_bytes, slot)
                metrics.CACHE_RESERVED_BYTES.set(of_slot.reserved_bytes, slot)
                metrics.CACHE_PINNED_BYTES.set(of_slot.pinned_bytes, slot)
            metrics.CACHE_UNSURVEYED_BYTES.set(usage.unsurveyed_bytes)
            metrics.CACHE_WRITTEN_TODAY_BYTES.set(written_bytes)

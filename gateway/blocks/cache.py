"""The block cache: a range of an object's version, from blocks on disk, filled from the origin when missing.

`open_range` finds out where the first bytes come from and lets the origin's refusals out before a reply has begun; the
reader's `body` gives the bytes. Several processes may have one directory open, each as a worker slot of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import lmdb
import structlog

from gateway.blocks import explanation, layout
from gateway.blocks.assembly import Parts, assemble
from gateway.blocks.directory import DiskThreads
from gateway.blocks.explanation import Explanation
from gateway.blocks.filling.hard_link_ingest import OfferedFile, describe
from gateway.blocks.filling.origin_gets import UnpinnedGet, UnpinnedResponse
from gateway.blocks.index.eviction import capacity_of
from gateway.blocks.index.index import Usage
from gateway.blocks.layout import BlockSettings
from gateway.blocks.maintenance.disk_health import CircuitBreaker
from gateway.blocks.maintenance.index_rebuild import account_late, move_between_slots, rebuild
from gateway.blocks.maintenance.maintenance import Maintenance
from gateway.blocks.maintenance.opening import open_directory
from gateway.blocks.maintenance.scrubber import Scrubber, ScrubSettings
from gateway.blocks.reading import reader
from gateway.blocks.reading.reader import RangeReader
from gateway.blocks.reading.sources import HeldObject, WarmSpan, arrived, warm_span
from gateway.core.clock import Clock
from gateway.core.errors import BlockError, StoreUnavailable
from gateway.core.model import ByteRange, MissReason, ObjectKey, ObjectVersion
from gateway.origin.client import Origin, Purpose
from gateway.policy.slots import Slots
from gateway.telemetry import metrics

_log = structlog.get_logger("forebay.cache")
_DONE = object()
_LATE_LOOKS, _LATE_SECONDS = 60, 0.5
"""Number of looks, and seconds between them, for files begun on the account of a slot that has changed since."""

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


def _ignored(_come_bytes: int) -> None:
    """Ignore the progress."""


class BlockCache:
    """One worker process's cache over the shared directory. Use `open`, and `close` at the end."""

    def __init__(self, parts: Parts) -> None:
        self._tools = parts.tools
        self._writer = parts.writer
        self._watcher = parts.watcher
        self._opened = parts.opened
        self._rebuilding = asyncio.Lock()
        self._maintenance = Maintenance(parts.tools)
        self._keeping_up = asyncio.create_task(self._maintenance.resume(), name="block cache maintenance")
        self._beating = asyncio.create_task(parts.opened.heartbeats.beat_on(parts.opened.worker), name="heartbeat")

    @classmethod
    async def open(cls, settings: BlockSettings, origin: Origin, *, worker: int, clock: Clock) -> BlockCache:
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
        opened.evicted_at_open.tell()
        return cls(assemble(settings, opened, threads, origin, clock))

    async def open_range(
        self,
        version: ObjectVersion,
        byte_range: ByteRange,
        *,
        slot: str = "default",
        headers: Mapping[str, str] = _NO_HEADERS,
        answer: UnpinnedResponse | None = None,
    ) -> RangeReader:
        """Begin to read a range, which must lie within the object.

        `slot` is the one that the object belongs to: its account pays for room on disk and requests to the origin,
        which carry `headers` (lower-case names). Raises OriginAnswered when the origin refuses the first missing bytes
        (412: the key has another version now, look again), OriginUnreachable, and OriginBodyError when it answers with
        something else. Trouble with the cache directory is never raised. The bytes of `answer`, which the origin has
        given already, are not requested again; the caller closes it.
        """
        if byte_range.stop > version.size_bytes:
            raise ValueError(f"{byte_range} lies outside of {version}")
        reader = RangeReader(self._tools, version, byte_range, slot, headers, answer=answer)
        await reader.start()
        return reader

    def warm_span(self, version: ObjectVersion, byte_range: ByteRange, *, slot: str) -> WarmSpan | None:
        """Return the bytes of a range if that needs no wait; None: call `open_range`."""
        return warm_span(self._tools, version, byte_range, slot)

    def held_object(self, version: ObjectVersion, slot: str) -> HeldObject:
        return HeldObject(self._tools, version, slot)

    def arrived(
        self,
        version: ObjectVersion,
        byte_range: ByteRange,
        *,
        slot: str,
        headers: Mapping[str, str],
        answer: UnpinnedResponse,
    ) -> memoryview | None:
        """Return the bytes of a range of a small object if the first answer has brought all of it; None: call
        `open_range`."""
        return arrived(self._tools, version, byte_range, slot, headers, answer)

    def holds(self, version: ObjectVersion, byte_range: ByteRange, *, slot: str) -> bool:
        """Return True if the index has all blocks of a range."""
        tools = self._tools
        try:
            blocks = layout.blocks_of(version, byte_range, tools.settings.block_size_of(slot))
            return tools.isolation.readable and all(tools.directory.index.lookup(one.id) is not None for one in blocks)
        except StoreUnavailable:
            return False

    def why_missing(self, version: ObjectVersion, *, slot: str, before: ObjectVersion | None) -> MissReason | None:
        """As `RangeReader.why_missing`, of an object of one block, before it is fetched in another way."""
        return reader.why_missing(self._tools, version, slot, before)

    async def explain(self, key: ObjectKey, version: ObjectVersion | None, slot: str) -> Explanation:
        """Explain which parts of an object and one of its versions are cached, and why not. Raises StoreUnavailable."""
        tools = self._tools
        why_not = explanation.why_not_kept(tools, version.size_bytes if version is not None else None, slot)
        here = await asyncio.to_thread(explanation.presence, tools, version, slot) if version is not None else None
        return Explanation(here, await asyncio.to_thread(explanation.holding, tools, key), why_not)

    def first_fetched(self, first: int, last: int | None, slot: str) -> ByteRange:
        """Return the first range that a read of `first` to `last` (None: the end) of an unknown object fetches."""
        return reader.first_fetched(first, last, self._tools.settings.block_size_of(slot))

    def first_look(self, key: ObjectKey, offset: int, headers: Mapping[str, str]) -> UnpinnedGet | None:
        """Return the right to ask the origin for version and bytes at once, to be entered (filling/origin_gets.py).

        None if another caller has it, or if blocks of the object are cached.
        """
        if self.has_blocks_of(key):
            return None
        return self._tools.unpinned_gets.begin(layout.object_id(key), offset, headers)

    def has_blocks_of(self, key: ObjectKey) -> bool:
        """Return True if blocks of any version of an object are cached, or if the index cannot be read."""
        try:
            return self._tools.directory.index.has_object(layout.object_id(key))
        except StoreUnavailable:
            return True

    def pieces(self, version: ObjectVersion, slot: str) -> Iterator[ByteRange]:
        """The ranges of an object of a slot that lie in one block each: what `fetch` is best given."""
        if version.size_bytes:
            whole = ByteRange(0, version.size_bytes - 1)
            for block in layout.blocks_of(version, whole, self._tools.settings.block_size_of(slot)):
                yield block.range

    async def fetch(
        self,
        version: ObjectVersion,
        piece: ByteRange,
        *,
        slot: str,
        purpose: Purpose,
        come: Callable[[int], None] = _ignored,
    ) -> tuple[int, bool]:
        """Bring one of the `pieces` to disk. Return how many bytes were fetched, and whether the piece is on disk:
        False if the directory could not take it.

        `come` gets the number of fetched bytes again and again. Raises as `open_range` and its reader do.
        """
        return await reader.fetch(self._tools, version, piece, slot, purpose, come)

    def others_fill(self) -> bool:
        """Return True if other processes fetch blocks now, which they do for readers."""
        return self._opened.locks.others_fetch()

    def readers_wait(self) -> bool:
        """Return True if this process fills blocks for readers, or if other processes fill any."""
        tools = self._tools
        return tools.unpinned_gets.any_pending or tools.fetches.fetches_for_readers() or self.others_fill()

    def obtainable_bytes(self, slot: str) -> int:
        """Return the most that a slot can have beside its pins when others need all of their guarantees."""
        used = self.usage().slots.get(slot)
        return self.pinnable_bytes(slot) - (used.pinned_bytes if used is not None else 0)

    # Pins.

    def pins(self) -> list[str]:
        """The prefixes whose blocks stay, of objects in any slot."""
        return list(self._tools.directory.pins.all())

    async def pin(self, prefix: str) -> int:
        """Keep what is filled under a prefix from now on, and what `hold` names; return the pin's number.

        Raises PinRefused when another pin overlaps it.
        """
        return await self._tools.threads.index(self._tools.directory.pins.add, prefix)

    async def hold(self, version: ObjectVersion, piece: ByteRange, number: int, *, slot: str) -> None:
        """Keep the cached blocks of a piece. Raises PinRefused when they exceed what may be pinned."""
        directory, size = self._tools.directory, self._tools.settings.block_size_of(slot)
        ids = [block.id for block in layout.blocks_of(version, piece, size)]
        await self._tools.threads.index(directory.pins.hold, ids, number, directory.capacity)

    async def unpin(self, prefix: str) -> bool:
        """Let go of what lies under a prefix; False when it is not pinned."""
        if not await self._tools.threads.index(self._tools.directory.pins.remove, prefix):
            return False
        await self._in_steps(self._tools.directory.pins.let_go())
        return True

    async def keep_only(self, prefixes: Sequence[str]) -> tuple[Mapping[str, int], Mapping[str, str]]:
        """Pin these prefixes for `keep_last`, and unpin earlier ones; users' pins stay. Return the pin number of each
        prefix, and the reason for each that has none."""
        pins = self._tools.directory.pins
        numbers, refused, is_any_gone = await self._tools.threads.index(pins.apply_settings, prefixes)
        if is_any_gone:
            await self._in_steps(pins.let_go())
        return numbers, refused

    async def hold_object(self, key: ObjectKey, number: int) -> int:
        """Keep all cached blocks of an object and return their bytes. Raises PinRefused when they exceed what may be
        pinned."""
        directory, object_id = self._tools.directory, layout.object_id(key)
        return await self._tools.threads.index(directory.pins.hold_object, object_id, number, directory.capacity)

    def pinnable_bytes(self, slot: str) -> int:
        """Return the most that a slot may pin: its obtainable room without other slots' guarantees and pins."""
        usage, capacity = self.usage().slots, self._tools.directory.capacity
        others = {name: used.pinned_bytes for name, used in usage.items() if name != slot}
        kept = (max(count, capacity.share(name).guaranteed_bytes) for name, count in others.items())
        room_bytes = capacity.total_bytes - sum(kept)
        limit_bytes = capacity.share(slot).limit_bytes
        return min(room_bytes, room_bytes if limit_bytes is None else limit_bytes)

    async def adopt(self, offered: OfferedFile, *, slot: str = "default") -> int:
        """Make blocks of what lies wholly in a file that came another way; how many. No byte is copied.

        The file's own name can be removed when this has returned. StoreUnavailable when there is no room for it, and
        when it is not on the same file system; nothing is lost by that.
        """
        tools = self._tools
        adoption = await tools.threads.disk(describe, offered, slot, tools.settings.block_size_of(slot))
        if adoption is None:
            return 0
        blocks, evicted = await tools.threads.index(tools.directory.adopt, adoption)
        evicted.tell()
        return blocks

    def keep_free(self, rights_of_others: Callable[[], int]) -> None:
        """Make fills leave this many bytes of the disk free; the event loop renews the number from time to time."""
        self._maintenance.keep_free(rights_of_others)

    async def invalidate(self, key: ObjectKey) -> None:
        """Drop the blocks of every version of an object that was overwritten or deleted.

        This frees room and no more: a block is found by its ETag, so the blocks of an old version are never served for
        a new one. Fills in progress are left alone.
        """
        tools, object_id = self._tools, layout.object_id(key)
        try:
            if tools.isolation.writable and tools.directory.index.has_object(object_id):
                await tools.threads.index(tools.directory.drop_object, object_id)
        except StoreUnavailable:
            metrics.CACHE_STORE_UNAVAILABLE.add(1)

    async def evict(self, key: ObjectKey) -> int:
        """Evict an object on a user's request; return the bytes dropped. Raises StoreUnavailable."""
        before = await asyncio.to_thread(explanation.holding, self._tools, key)
        await self.invalidate(key)
        after = await asyncio.to_thread(explanation.holding, self._tools, key)
        return max(0, before.size_bytes - after.size_bytes)

    @property
    def isolation(self) -> CircuitBreaker:
        return self._tools.isolation

    def usage(self) -> Usage:
        return self._tools.directory.index.usage()

    async def rebuild_index(self) -> None:
        """Find the blocks that the index does not know, where there may be any; one process does it for all."""
        await self._account()
        await self._in_steps(self._tools.directory.pins.let_go())  # an unpinning may have been broken off

    async def apply_settings(self, capacity_bytes: int) -> None:
        """Make this process follow the current slots of `BlockSettings` and this capacity."""
        tools, settings = self._tools, self._tools.settings
        settings.follow_slots()
        capacity = capacity_of(capacity_bytes, settings.slots, settings.daily_writes_bytes)
        tools.directory.configured_capacity = capacity
        try:
            await tools.threads.index_later(tools.directory.index.apply_settings, capacity)
        except StoreUnavailable as error:
            tools.isolation.note(error)

    async def move_between_slots(self) -> None:
        """Move each block to the account of its current slot, and evict a little at a time beyond limits. One process
        does it for all, once all have the current slots."""
        tools = self._tools
        await self._account()
        await self._in_steps(tools.directory.shrinking())
        (await tools.threads.index_later(tools.directory.shrink)).tell()

    async def _in_steps(self, steps: Iterator[None]) -> None:
        while await self._tools.threads.index_later(next, steps, _DONE) is not _DONE:
            pass

    async def _account(self) -> None:
        """Enter every file into the index, on the account of its key's current slot."""
        tools = self._tools
        async with self._rebuilding:
            slots = Slots(tools.settings.slots)  # the present ones to the end, though they change meanwhile
            begun = await tools.threads.index_later(move_between_slots, tools.directory, slots)
            await self._in_steps(rebuild(tools.directory, slots))
            for _ in range(_LATE_LOOKS):
                begun = await tools.threads.index_later(account_late, tools.directory, slots, begun)
                if not begun:
                    break
                await tools.clock.sleep(_LATE_SECONDS)

    def scrubber(self, settings: ScrubSettings) -> Scrubber:
        """Return a scrubber for blocks that are not read; one process runs it for all, and ends it before `close`."""
        tools = self._tools
        return Scrubber(settings, tools.directory, tools.threads, tools.isolation, tools.clock)

    async def settle(self) -> None:
        """Wait until the fills now in progress have ended, well or badly."""
        await self._tools.fetches.settle()

    async def close(self) -> None:
        """Break off the fills, write down what was used, and leave the directory in order. Readers must be gone."""
        self._keeping_up.cancel()
        await asyncio.gather(self._keeping_up, return_exceptions=True)
        await self._tools.isolation.close()
        await self._tools.fetches.close()
        await self._writer.drain()
        self._tools.open_files.close()
        self._watcher.close()
        await self.flush_accesses()
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        await asyncio.to_thread(self._close_directory)

    async def flush_accesses(self) -> None:
        """Tell the index which files were used, a short transaction at a time."""
        await self._maintenance.flush_accesses()

    def _close_directory(self) -> None:
        self._tools.threads.shut_down()
        try:
            self._opened.close()
        except (BlockError, OSError, lmdb.Error) as error:
            _log.warning(
                "the cache directory could not be closed properly; the next start repairs it", error=str(error)
            )
            self._opened.let_go()

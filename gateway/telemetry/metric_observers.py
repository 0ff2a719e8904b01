"""What a process counts of the events of its parts (metrics.py). Called on the event loop; must not block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gateway.telemetry.metrics import (
    CACHE_COALESCED,
    CACHE_DAMAGED,
    CACHE_DISK_ERRORS,
    CACHE_DISK_STATE,
    CACHE_EVICTED_BLOCKS,
    CACHE_EVICTED_BYTES,
    CACHE_FILL_SECONDS,
    CACHE_FILLED_BYTES,
    CACHE_FILLS,
    CACHE_HIT_BYTES,
    CACHE_MISS_BYTES,
    CACHE_NOT_KEPT,
    CACHE_PINNED_BYTES,
    CACHE_RESERVED_BYTES,
    CACHE_STORE_UNAVAILABLE,
    CACHE_UNSURVEYED_BYTES,
    CACHE_USAGE_BYTES,
    CACHE_WRITTEN_TODAY_BYTES,
    DISK_STATES,
    SCRUB_BLOCKS,
    SCRUB_BYTES,
    SCRUB_PASSES,
)


class SlotBytes(Protocol):
    """What one slot has on disk and set aside (`blocks.shares.SlotUsage`)."""

    @property
    def used_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def pinned_bytes(self) -> int: ...


class CacheMetrics:
    """Events of one process's block cache. `slot` is the name of the one on whose account they go."""

    def hit_bytes(self, slot: str, count: int) -> None:
        """Bytes given to a reader from blocks that were complete when it came to them."""
        CACHE_HIT_BYTES.add(count, slot)

    def miss_bytes(self, slot: str, count: int) -> None:
        """Bytes given to a reader from a fetch in progress, or straight from the origin."""
        CACHE_MISS_BYTES.add(count, slot)

    def coalesced(self, slot: str) -> None:
        """A reader joined a fetch that another reader had started."""
        CACHE_COALESCED.add(1, slot)

    def evicted(self, slot: str, blocks: int, size_bytes: int) -> None:
        """Blocks made room for others; `size_bytes` is what they took on disk."""
        CACHE_EVICTED_BLOCKS.add(blocks, slot)
        CACHE_EVICTED_BYTES.add(size_bytes, slot)

    def damaged(self, slot: str) -> None:
        """A block was not what had been written, or could not be read; it was dropped and is a miss now."""
        CACHE_DAMAGED.add(1, slot)

    def fill_finished(self, slot: str, seconds: float, size_bytes: int) -> None:
        """A block was fetched and published."""
        CACHE_FILLS.add(1, slot, "filled")
        CACHE_FILL_SECONDS.observe(seconds)
        CACHE_FILLED_BYTES.add(size_bytes, slot)

    def fill_failed(self, slot: str) -> None:
        """A fetch ended without a block: the origin failed or refused, or the store could not take the bytes."""
        CACHE_FILLS.add(1, slot, "failed")

    def not_kept(self, slot: str, reason: str, blocks: int) -> None:
        """Blocks went to their readers and not to the disk. `reason`: of `errors.NotKept`, or "disk": it failed."""
        CACHE_NOT_KEPT.add(blocks, slot, reason)

    def store_unavailable(self) -> None:
        """The cache directory could not take or give bytes, and a range was served straight from the origin."""
        CACHE_STORE_UNAVAILABLE.add(1)

    def scrubbed(self, size_bytes: int) -> None:
        """The scrubber has looked at a block; so much of it had to be read from the disk."""
        SCRUB_BLOCKS.add(1)
        SCRUB_BYTES.add(size_bytes)

    def scrubbed_all(self) -> None:
        """The scrubber has looked at every block."""
        SCRUB_PASSES.add(1)

    def disk_error(self, trouble: str) -> None:
        """The disk refused something: full, read-only or failing."""
        CACHE_DISK_ERRORS.add(1, trouble)

    def disk_state(self, state: str) -> None:
        """What this process may use the directory for has changed: well, full, read-only, failing or closed."""
        for one in DISK_STATES:
            CACHE_DISK_STATE.set(int(one == state), one)

    def usage(self, slots: Mapping[str, SlotBytes], unsurveyed_bytes: int, written_today_bytes: int) -> None:
        """What all processes together have on disk and set aside, by slot; told every second or so.

        `unsurveyed_bytes` lie on disk without being in the index yet; `written_today_bytes` fetches were given room for
        since midnight UTC.
        """
        for slot, usage in slots.items():
            CACHE_USAGE_BYTES.set(usage.used_bytes, slot)
            CACHE_RESERVED_BYTES.set(usage.reserved_bytes, slot)
            CACHE_PINNED_BYTES.set(usage.pinned_bytes, slot)
        CACHE_UNSURVEYED_BYTES.set(unsurveyed_bytes)
        CACHE_WRITTEN_TODAY_BYTES.set(written_today_bytes)

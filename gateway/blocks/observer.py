"""What the block cache tells whoever counts: every method is called on the event loop and must not block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gateway.blocks.index.capacity import SlotUsage


class CacheObserver(Protocol):
    """Events of one process's cache. `slot` is the name of the one on whose account they go."""

    def hit_bytes(self, slot: str, count: int) -> None:
        """Bytes given to a reader from blocks that were complete when it came to them."""

    def miss_bytes(self, slot: str, count: int) -> None:
        """Bytes given to a reader from a fill in progress, or straight from the origin."""

    def coalesced(self, slot: str) -> None:
        """A reader joined a fill that another reader had started."""

    def evicted(self, slot: str, blocks: int, size_bytes: int) -> None:
        """Blocks made room for others; `size_bytes` is what they took on disk."""

    def damaged(self, slot: str) -> None:
        """A block was not what had been written, or could not be read; it was dropped and is a miss now."""

    def fill_finished(self, slot: str, seconds: float, size_bytes: int) -> None:
        """A block was filled and published."""

    def fill_failed(self, slot: str) -> None:
        """A fill ended without a block: the origin failed or refused, or the store could not take the bytes."""

    def not_kept(self, slot: str, reason: str, blocks: int) -> None:
        """Blocks went to their readers and not to the disk. `reason`: of `errors.NotKept`, or "disk": it failed."""

    def store_unavailable(self) -> None:
        """The cache directory could not take or give bytes, and a range was served straight from the origin."""

    def usage(self, slots: Mapping[str, SlotUsage], unsurveyed_bytes: int, written_today_bytes: int) -> None:
        """What all processes together have on disk and set aside, by slot; told every second or so.

        `unsurveyed_bytes` lie on disk without being in the index yet; `written_today_bytes` fills were given room for
        since midnight UTC.
        """

    def scrubbed(self, size_bytes: int) -> None:
        """A block was looked at while nobody asked for it; so much of it had to be read from the disk."""

    def scrubbed_all(self) -> None:
        """Every block has been looked at."""

    def disk_error(self, trouble: str) -> None:
        """The disk refused something: full, read-only or failing."""

    def disk_state(self, state: str) -> None:
        """What this process may use the directory for has changed: well, full, read-only, failing or closed."""


class SilentObserver:
    """Counts nothing."""

    def hit_bytes(self, slot: str, count: int) -> None:
        pass

    def miss_bytes(self, slot: str, count: int) -> None:
        pass

    def coalesced(self, slot: str) -> None:
        pass

    def evicted(self, slot: str, blocks: int, size_bytes: int) -> None:
        pass

    def damaged(self, slot: str) -> None:
        pass

    def fill_finished(self, slot: str, seconds: float, size_bytes: int) -> None:
        pass

    def fill_failed(self, slot: str) -> None:
        pass

    def not_kept(self, slot: str, reason: str, blocks: int) -> None:
        pass

    def store_unavailable(self) -> None:
        pass

    def usage(self, slots: Mapping[str, SlotUsage], unsurveyed_bytes: int, written_today_bytes: int) -> None:
        pass

    def scrubbed(self, size_bytes: int) -> None:
        pass

    def scrubbed_all(self) -> None:
        pass

    def disk_error(self, trouble: str) -> None:
        pass

    def disk_state(self, state: str) -> None:
        pass

"""What the block cache tells whoever counts: every method is called on the event loop and must not block."""

from __future__ import annotations

from typing import Protocol


class CacheObserver(Protocol):
    """Events of one process's cache."""

    def hit_bytes(self, count: int) -> None:
        """Bytes given to a reader from blocks that were complete when it came to them."""

    def miss_bytes(self, count: int) -> None:
        """Bytes given to a reader from a fill in progress, or straight from the origin."""

    def coalesced(self) -> None:
        """A reader joined a fill that another reader had started."""

    def evicted(self, blocks: int, size_bytes: int) -> None:
        """Blocks made room for others; `size_bytes` is what they took on disk."""

    def damaged(self) -> None:
        """A block was not what had been written, or could not be read; it was dropped and is a miss now."""

    def fill_finished(self, seconds: float, size_bytes: int) -> None:
        """A block was filled and published."""

    def fill_failed(self) -> None:
        """A fill ended without a block: the origin failed or refused, or the store could not take the bytes."""

    def store_unavailable(self) -> None:
        """The cache directory could not take or give bytes, and a range was served straight from the origin."""

    def usage(self, used_bytes: int, reserved_bytes: int) -> None:
        """What all processes together have on disk and set aside; told every second or so."""


class SilentObserver:
    """Counts nothing."""

    def hit_bytes(self, count: int) -> None:
        pass

    def miss_bytes(self, count: int) -> None:
        pass

    def coalesced(self) -> None:
        pass

    def evicted(self, blocks: int, size_bytes: int) -> None:
        pass

    def damaged(self) -> None:
        pass

    def fill_finished(self, seconds: float, size_bytes: int) -> None:
        pass

    def fill_failed(self) -> None:
        pass

    def store_unavailable(self) -> None:
        pass

    def usage(self, used_bytes: int, reserved_bytes: int) -> None:
        pass

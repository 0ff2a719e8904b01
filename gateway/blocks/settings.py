"""The settings of a block cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gateway.blocks.layout import CHUNK_BYTES
from gateway.core.errors import ConfigError
from gateway.core.model import Homes
from gateway.policy.slots import Slots

BLOCK_SIZE_BYTES_MAX = 256 * 1024 * 1024

PACKED_BYTES_MAX = 1024 * 1024
"""A small block lies in memory as a whole until it is written: not more than a reader may hold (sources.READ_BYTES)."""


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """Every worker process that shares `directory` is given the same settings.

    `capacity_bytes` bounds the block files on disk, headers included, fills in progress included; `slots` have
    shares of it, and block sizes other than `block_size_bytes`. `fills_max` bounds the fills
    of one process that run at the same time; readahead takes at most two of three, so that a reader that waits for its
    first byte never queues behind bytes without a reader. Blocks of at most `small_object_bytes_max`, short last
    ones and whole small objects among them, are packed together in segments; the others have a file of their own.
    Fills write at most `daily_writes_bytes` a day (UTC), all processes together, with the index's
    own writes; None: no limit. The index takes `index_bytes_max` at most; None: as much as its map holds.
    Files that all processes have in memory lie in `shared_directory`; None: in `directory`. `homes` are the places of
    buckets: all parts of a process share one.
    """

    directory: Path
    capacity_bytes: int
    block_size_bytes: int = 8 * 1024 * 1024
    readahead_bytes: int = 256 * 1024 * 1024
    fills_max: int = 48
    fill_retries: int = 3
    disk_threads: int = 8
    access_flush_seconds: float = 1.0
    slots: Slots = field(default_factory=Slots)
    small_object_bytes_max: int = PACKED_BYTES_MAX
    daily_writes_bytes: int | None = None
    index_bytes_max: int | None = None
    shared_directory: Path | None = None
    homes: Homes = field(default_factory=lambda: Homes(""))
    _block_sizes: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    _kept_object_bytes_max: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def block_size_of(self, slot: str) -> int:
        """The size of the blocks of a slot's objects."""
        return self._block_sizes.get(slot, self.block_size_bytes)

    def keeps(self, slot: str, size_bytes: int) -> bool:
        size_max = self._kept_object_bytes_max.get(slot)
        return size_max is None or size_bytes <= size_max

    def follow_slots(self) -> None:
        """Follow a change of slots. Reads under way in a removed slot keep its size of blocks."""
        for slot in self.slots:
            self._kept_object_bytes_max.pop(slot.name, None)
            if slot.kept_object_bytes_max is not None:
                self._kept_object_bytes_max[slot.name] = slot.kept_object_bytes_max
            self._block_sizes[slot.name] = slot.block_size_bytes or self.block_size_bytes

    def __post_init__(self) -> None:
        self.follow_slots()
        for size in (self.block_size_bytes, *self._block_sizes.values()):
            if size % CHUNK_BYTES or not CHUNK_BYTES <= size <= BLOCK_SIZE_BYTES_MAX:
                raise ConfigError("cache.block_size", size, "a multiple of 64 KiB, 64 KiB to 256 MiB")
        if not 0 <= self.small_object_bytes_max <= PACKED_BYTES_MAX:
            raise ConfigError("cache.small_object_max", self.small_object_bytes_max, "0 to 1 MiB")
        if self.capacity_bytes < 0:
            raise ConfigError("cache.capacity", self.capacity_bytes, "0 or more bytes")
        if self.readahead_bytes < 0:
            raise ConfigError("cache.readahead", self.readahead_bytes, "0 or more bytes")
        if self.fills_max < 1 or self.disk_threads < 1:
            raise ConfigError("cache.fills_max", self.fills_max, "1 or more fills and 1 or more disk threads")

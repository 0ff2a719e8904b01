"""What a block cache may use: where, how much, how many at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gateway.blocks.layout import CHUNK_BYTES
from gateway.errors import ConfigError
from gateway.policy.slots import Slots

BLOCK_SIZE_BYTES_MAX = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """Every worker process that shares `directory` is given the same settings.

    `capacity_bytes` bounds the block files on disk, headers included, fills in progress included; `slots` says who may
    take how much of it. `fills_max` bounds
    the fills of one process that run at the same time; readahead takes at most half of them, so that a reader that
    waits for its first byte never queues behind bytes that nobody has asked for yet.
    """

    directory: Path
    capacity_bytes: int
    block_size_bytes: int = 8 * 1024 * 1024
    readahead_blocks: int = 3
    fills_max: int = 32
    fill_retries: int = 3
    disk_threads: int = 8
    access_flush_seconds: float = 1.0
    slots: Slots = field(default_factory=Slots)

    def __post_init__(self) -> None:
        size = self.block_size_bytes
        if size % CHUNK_BYTES or not CHUNK_BYTES <= size <= BLOCK_SIZE_BYTES_MAX:
            raise ConfigError("cache.block_size", size, "a multiple of 64 KiB, 64 KiB to 256 MiB")
        if self.capacity_bytes < 0:
            raise ConfigError("cache.capacity", self.capacity_bytes, "0 or more bytes")
        if self.readahead_blocks < 0:
            raise ConfigError("cache.readahead_blocks", self.readahead_blocks, "0 or more blocks")
        if self.fills_max < 1 or self.disk_threads < 1:
            raise ConfigError("cache.fills_max", self.fills_max, "1 or more fills and 1 or more disk threads")

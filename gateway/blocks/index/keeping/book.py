"""A slot's book, as policies see and change it: its files in queues, blocks that have left, a little state. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, Self

from gateway.blocks.index.keeping.returns import RETURNS_BYTES, Returns
from gateway.blocks.index.records import FileRecord

_STATE = struct.Struct("<BQQ3Q")


class Queue(IntEnum):
    """Where a file stands. Policies never look at PINNED."""

    MAIN = 0
    SMALL = 1
    PINNED = 2


class Eviction(IntEnum):
    """The policies, by their numbers in the index."""

    LRU = 0
    S3_FIFO = 1
    EPOCH = 2


@dataclass(slots=True)
class SlotState:
    """What is known of a slot besides its files.

    `position` is the policy's time, in bytes: those read in the slot (epoch), or those that left the small queue unread
    (s3-fifo). `blocks` lie in its files; `queue_bytes` is what the files of each queue take on disk.
    """

    eviction: Eviction = Eviction.EPOCH
    position: int = 0
    blocks: int = 0
    queue_bytes: list[int] = field(default_factory=lambda: [0] * len(Queue))
    returns: Returns = field(default_factory=Returns)

    @property
    def used_bytes(self) -> int:
        return sum(self.queue_bytes)

    @property
    def evictable_bytes(self) -> int:
        return self.queue_bytes[Queue.MAIN] + self.queue_bytes[Queue.SMALL]

    def follow(self, eviction: Eviction) -> None:
        """From now on another policy decides; what the one before had learned is forgotten."""
        if eviction is not self.eviction:
            self.eviction, self.returns = eviction, Returns()

    def pack(self) -> bytes:
        return _STATE.pack(self.eviction, self.position, self.blocks, *self.queue_bytes) + self.returns.pack()

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        eviction, position, blocks, *queue_bytes = _STATE.unpack_from(packed)
        returns = Returns.unpack(packed[_STATE.size : _STATE.size + RETURNS_BYTES])
        return cls(Eviction(eviction), position, blocks, list(queue_bytes), returns)


class Book(Protocol):
    """One slot's part of the index."""

    @property
    def state(self) -> SlotState: ...

    def head(self, queue: Queue) -> FileRecord | None:
        """The file of a queue that stands first."""

    def next_tick(self) -> int:
        """A place behind all others."""

    def change(self, file: FileRecord) -> None:
        """Put a file where it says that it stands: known by its name, changed in queue, tick, frequency or used_at."""

    def recall(self, block_id: bytes) -> int | None:
        """What was remembered of a block."""

    def remember(self, block_id: bytes, mark: int) -> None: ...

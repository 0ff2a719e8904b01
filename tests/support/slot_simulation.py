"""One slot in memory, with the policies that serve: what a sequence of reads hits, without a byte on disk."""

from __future__ import annotations

import hashlib
import random
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gateway.blocks.layout import FileRecord
from gateway.blocks.policies import POLICIES, Eviction, Queue, SlotAccount
from gateway.blocks.transaction import REMEMBERED_TIMES

BLOCK_BYTES = 8 * 1024 * 1024


class MemoryView:
    """A slot's files in dictionaries, and as many of the blocks that have left as the index remembers."""

    def __init__(self, eviction: Eviction) -> None:
        self.state = SlotAccount(eviction)
        self.files: dict[str, FileRecord] = {}
        self._queues: dict[int, list[tuple[int, str]]] = {queue: [] for queue in Queue}
        self._remembered: OrderedDict[bytes, int] = OrderedDict()
        self._sequence = 0

    def account(self, _slot: int) -> SlotAccount:
        return self.state

    def head(self, _slot: int, queue: Queue) -> FileRecord | None:
        places = self._queues[queue]
        return self.files[places[0][1]] if places else None

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def change(self, file: FileRecord) -> None:
        self.remove(self.files[file.file])
        self.insert(file)

    def recall(self, _slot: int, block_id: bytes) -> int | None:
        return self._remembered.get(block_id)

    def remember(self, blocks: Sequence[bytes], used_at: int) -> None:
        for block in blocks:
            self._remembered.pop(block, None)
            self._remembered[block] = used_at
        while len(self._remembered) > REMEMBERED_TIMES * (len(self.files) + 1):
            self._remembered.popitem(last=False)

    def insert(self, file: FileRecord) -> None:
        self.files[file.file] = file
        insort(self._queues[file.queue], (file.sequence, file.file))
        self.state.queue_bytes[file.queue] += file.disk_bytes

    def remove(self, file: FileRecord) -> None:
        del self.files[file.file]
        self._queues[file.queue].remove((file.sequence, file.file))
        self.state.queue_bytes[file.queue] -= file.disk_bytes


def block_id(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=32).digest()


@dataclass
class SlotSimulation:
    """Blocks of equal size, `blocks_per_file` of them in a file, read one after the other by `workers` processes.

    A worker tells of its hits when it has a miss, or after `told_after` of them, each file once.
    """

    eviction: Eviction
    capacity_blocks: int
    blocks_per_file: int = 1
    workers: int = 1
    told_after: int = 64
    written: int = 0
    reads: int = 0
    book: MemoryView = field(init=False)
    _where: dict[bytes, str] = field(default_factory=dict)
    _blocks: dict[str, list[bytes]] = field(default_factory=dict)
    _growing: str = ""
    _untold: list[OrderedDict[str, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.book = MemoryView(self.eviction)
        self._untold = [OrderedDict() for _ in range(self.workers)]

    def read_all(self, names: Iterable[str]) -> float:
        """The part of the reads that hit."""
        outcomes = [self.read(name) for name in names]
        return sum(outcomes) / len(outcomes)

    def read(self, name: str) -> bool:
        wanted, worker = block_id(name), self.reads % self.workers
        self.reads += 1
        file = self._where.get(wanted)
        if file is None:
            self._tell(worker)
            self._fill(wanted)
            return False
        untold = self._untold[worker]
        untold[file] = untold.pop(file, 0) + 1
        if len(untold) >= self.told_after:
            self._tell(worker)
        return True

    def _tell(self, worker: int) -> None:
        untold, self._untold[worker] = self._untold[worker], OrderedDict()
        for name, times in untold.items():
            file = self.book.files.get(name)
            if file is not None:
                blocks = min(times, len(self._blocks[name]))
                POLICIES[self.eviction].used(self.book, file, blocks * BLOCK_BYTES)

    def _fill(self, wanted: bytes) -> None:
        policy, book = POLICIES[self.eviction], self.book
        while len(self._where) >= self.capacity_blocks:
            victim = policy.victim(book, 0)
            assert victim is not None
            self._evict(victim)
        self.written += 1
        known = book.files.get(self._growing)
        if known is None or len(self._blocks[self._growing]) == self.blocks_per_file:
            self._growing = wanted.hex()
            self._blocks[self._growing] = [wanted]
            new = FileRecord(self._growing, 0, BLOCK_BYTES, book.next_sequence())
            book.insert(policy.entering(book, new, [wanted], BLOCK_BYTES))
        else:
            self._blocks[self._growing].append(wanted)
            grown = replace(
                policy.growing(book, known, [wanted], BLOCK_BYTES), disk_bytes=known.disk_bytes + BLOCK_BYTES
            )
            book.change(grown)
        self._where[wanted] = self._growing

    def _evict(self, victim: FileRecord) -> None:
        blocks = self._blocks.pop(victim.file)
        self.book.remove(victim)
        if POLICIES[self.eviction].remembers:
            self.book.remember(blocks, victim.used_at)
        for one in blocks:
            del self._where[one]


def data_set(name: str, blocks: int) -> list[str]:
    return [f"{name}/{number}" for number in range(blocks)]


def shuffled_epochs(blocks: Sequence[str], count: int, seed: int) -> Iterator[list[str]]:
    generator = random.Random(seed)
    for _ in range(count):
        yield generator.sample(blocks, len(blocks))

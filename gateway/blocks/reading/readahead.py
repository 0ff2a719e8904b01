"""How far ahead of a reader blocks are fetched, all of them at once.

Inside its range a reader is known to go on: its window begins small and grows with every byte that it reads. Behind the
range the window is as long as the run before it: the blocks in a row that are in the index or being filled, whoever
read them, over which connection and worker. So clients that read an object in parts, one after another or many at once,
have the next ones on their way, and random reads, which have no run before them, cause none. Nor do readers that find
what they want, unless it was fetched ahead. A window is never more than a quarter of what the object's slot can have on
disk, and nothing is begun ahead while others need the room (single_flight.py).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from gateway.blocks.filling.single_flight import SingleFlight
from gateway.blocks.filling.unpinned_get import UnpinnedGets
from gateway.blocks.index.index import BlockIndex
from gateway.blocks.reading.wanted import Wanted

FIRST_WINDOW_BYTES = 32 * 1024 * 1024
"""What whoever asks for a large object and goes away at once has cost at most."""

GROWTH = 32
"""By how many bytes the window grows for each byte read."""

RUN_MIN_BLOCKS = 2
"""One neighbour may be chance, and a range that is long is no sign of one that follows."""

_SHARE_OF_SLOT = 4
_MARKS_MAX = 4096


@dataclass(slots=True)
class AheadMarks:
    """Blocks that this process fetched ahead and nobody has come to yet: reading one shows that the reader goes on.

    Event loop only.
    """

    _blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def __contains__(self, block_id: bytes) -> bool:
        return block_id in self._blocks

    def add(self, block_id: bytes) -> None:
        self._blocks[block_id] = None
        if len(self._blocks) > _MARKS_MAX:
            self._blocks.popitem(last=False)

    def take(self, block_id: bytes) -> bool:
        """Whether the block was marked; it is no longer."""
        return self._blocks.pop(block_id, self) is None


def window_blocks_max(readahead_bytes: int, block_size_bytes: int, obtainable_bytes: int) -> int:
    """The longest window; at least one block, unless `readahead_bytes` is 0."""
    if readahead_bytes == 0:
        return 0
    return max(1, min(readahead_bytes, obtainable_bytes // _SHARE_OF_SLOT) // block_size_bytes)


@dataclass(slots=True)
class Readahead:
    """Of one reader. With `beyond` it goes on behind the range where there is a run.

    What it fetches of the range goes to `fetched`, what it fetches behind it to `marks`.
    """

    index: BlockIndex
    fetches: SingleFlight
    unpinned_gets: UnpinnedGets
    marks: AheadMarks
    wanted: Wanted
    window_max: int
    fetched: set[bytes]
    beyond: bool = False
    _done: int = -1
    _refused: int = -1
    _run_before: int | None = None

    def at(self, number: int, read_bytes: int) -> None:
        """The reader, that has read so much by now, is in a block: keep the next ones on their way.

        StoreUnavailable as the index raises it.
        """
        if number == self._refused:
            return
        self._done = max(self._done, number)
        stop = self._stop_after(number, read_bytes)
        while self._done + 1 < stop:
            if not self._begin(self._done + 1):
                self._refused = number
                return
            self._done += 1

    def _begin(self, number: int) -> bool:
        wanted, block = self.wanted, self.wanted.block(number)
        if self.index.lookup(block.id) is not None:
            return True
        if self.unpinned_gets.pending(block.version.key, block.offset, wanted.headers):
            return True
        if not self.fetches.start_ahead(block, wanted.slot, wanted.headers, wanted):
            return False
        if number < wanted.numbers.stop:
            self.fetched.add(block.id)
        else:
            self.marks.add(block.id)
        return True

    def _stop_after(self, number: int, read_bytes: int) -> int:
        window = (FIRST_WINDOW_BYTES + GROWTH * read_bytes) // self.wanted.block_size_bytes
        stop, end = number + 1 + min(max(1, window), self.window_max), self.wanted.numbers.stop
        if stop <= end:
            return stop
        return max(end, min(self.wanted.blocks_of_object, number + 1 + self._window_beyond(number)))

    def _window_beyond(self, number: int) -> int:
        wanted = self.wanted
        if not self.beyond or wanted.numbers.stop == wanted.blocks_of_object:
            return 0
        before = self._run_before_range()
        return min(before + number - wanted.numbers.start, self.window_max) if before >= RUN_MIN_BLOCKS else 0

    def _run_before_range(self) -> int:
        """How many blocks in a row before the range are there or on their way, as far as that matters."""
        if self._run_before is None:
            first, length = self.wanted.numbers.start, 0
            while length < min(first, self.window_max) and self._is_coming(first - length - 1):
                length += 1
            self._run_before = length
        return self._run_before

    def _is_coming(self, number: int) -> bool:
        block, headers = self.wanted.block(number), self.wanted.headers
        return self.index.lookup(block.id) is not None or self.fetches.is_anywhere(block, headers)

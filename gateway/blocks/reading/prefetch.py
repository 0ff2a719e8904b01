"""How far ahead of a reader blocks are fetched, all of them at once.

Inside its range a reader is known to go on: its window begins small and grows with every byte that it reads. Behind the
range the window is as long as the run before it: the blocks in a row that are in the index or being filled, whoever
read them, over which connection and worker. So clients that read an object in parts, one after another or many at once,
have the next ones on their way, and random reads, which have no run before them, cause none. Nor do readers that find
what they want, unless it was fetched ahead. A window is never more than a quarter of what the object's slot can have on
disk, and nothing is begun ahead while others need the room (single_flight.py).

All of it is begun when there is reason to: most reads end in the block that they begin in.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from gateway.blocks.filling.origin_gets import UnpinnedGets
from gateway.blocks.filling.single_flight import SingleFlight
from gateway.blocks.index.index import BlockIndex
from gateway.blocks.reading.sources import AheadMarks, ReadDependencies, ReadRequest, hint_beginning
from gateway.errors import StoreUnavailable
from gateway.origin.client import Purpose

FIRST_WINDOW_BYTES = 32 * 1024 * 1024
"""What whoever asks for a large object and goes away at once has cost at most."""

GROWTH = 32
"""By how many bytes the window grows for each byte read."""

RUN_MIN_BLOCKS = 2
"""One neighbour may be chance, and a range that is long is no sign of one that follows."""

_SHARE_OF_SLOT = 4


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
    request: ReadRequest
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
        request, block = self.request, self.request.block(number)
        if self.index.lookup(block.id) is not None:
            return True
        if self.unpinned_gets.pending(block.version.key, block.offset, request.headers):
            return True
        if not self.fetches.start_ahead(block, request.slot, request.headers, request):
            return False
        if number < request.numbers.stop:
            self.fetched.add(block.id)
        else:
            self.marks.add(block.id)
        return True

    def _stop_after(self, number: int, read_bytes: int) -> int:
        window = (FIRST_WINDOW_BYTES + GROWTH * read_bytes) // self.request.block_size_bytes
        stop, end = number + 1 + min(max(1, window), self.window_max), self.request.numbers.stop
        if stop <= end:
            return stop
        return max(end, min(self.request.blocks_of_object, number + 1 + self._window_beyond(number)))

    def _window_beyond(self, number: int) -> int:
        request = self.request
        if not self.beyond or request.numbers.stop == request.blocks_of_object:
            return 0
        before = self._run_before_range()
        return min(before + number - request.numbers.start, self.window_max) if before >= RUN_MIN_BLOCKS else 0

    def _run_before_range(self) -> int:
        """How many blocks in a row before the range are there or on their way, as far as that matters."""
        if self._run_before is None:
            first, length = self.request.numbers.start, 0
            while length < min(first, self.window_max) and self._is_coming(first - length - 1):
                length += 1
            self._run_before = length
        return self._run_before

    def _is_coming(self, number: int) -> bool:
        block, headers = self.request.block(number), self.request.headers
        return self.index.lookup(block.id) is not None or self.fetches.is_anywhere(block, headers)


class Prefetcher:
    """Of one reader; what it fetches of the range goes to `fetched`."""

    def __init__(self, tools: ReadDependencies, request: ReadRequest, fetched: set[bytes]) -> None:
        self._tools = tools
        self._request = request
        self._fetched = fetched
        self._readahead: Readahead | None = None
        self._hinted_stop = 0

    def go_on(self) -> None:
        """The reader begins in a block that was fetched ahead: so shall be what follows it."""
        with suppress(StoreUnavailable):
            self.prefetch(self._request.range.first, beyond=True)

    def prefetch(self, position: int, *, beyond: bool) -> None:
        """Keep the next blocks on their way while the one at a position is read; from now on those `beyond` the range.

        StoreUnavailable as the index raises it.
        """
        request = self._request
        if request.too_large or not self._tools.isolation.writable:
            return
        if self._readahead is None:
            self._readahead = self._begin()
        if beyond and request.purpose is Purpose.LIVE:
            self._readahead.beyond = True
        self._readahead.at(position // request.block_size_bytes, position - request.range.first)

    def hint_next_block(self, stop: int) -> None:
        """The block that ends at `stop` is read from the device: have it go on with the next one, if that is here."""
        tools, request = self._tools, self._request
        if self._hinted_stop == stop or stop >= request.range.stop:
            return
        self._hinted_stop = stop
        extent = tools.directory.index.lookup(request.block(stop // request.block_size_bytes).id)
        if extent is not None:
            tools.threads.hint(hint_beginning, tools.directory.store, extent)

    def _begin(self) -> Readahead:
        tools, request = self._tools, self._request
        obtainable_bytes = tools.directory.capacity.obtainable_bytes(request.slot)
        window_max = window_blocks_max(tools.settings.readahead_bytes, request.block_size_bytes, obtainable_bytes)
        index, fills = tools.directory.index, tools.fetches
        return Readahead(index, fills, tools.unpinned_gets, tools.ahead_marks, request, window_max, self._fetched)

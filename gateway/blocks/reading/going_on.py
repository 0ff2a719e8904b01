"""A reader that goes on: what is fetched, and read from the device, before he comes to it.

All of it is begun when there is reason to: most reads end in the block that they begin in.
"""

from __future__ import annotations

from contextlib import suppress

from gateway.blocks.layout import Block
from gateway.blocks.reading.ahead_verification import hint_beginning
from gateway.blocks.reading.readahead import Readahead, window_blocks_max
from gateway.blocks.reading.reading_tools import ReadingTools
from gateway.blocks.reading.wanted import Wanted
from gateway.errors import StoreUnavailable
from gateway.origin.client import Purpose


class GoingOn:
    """Of one reader; what it fetches of the range goes to `fetched`."""

    def __init__(self, tools: ReadingTools, wanted: Wanted, fetched: set[bytes]) -> None:
        self._tools = tools
        self._wanted = wanted
        self._fetched = fetched
        self._readahead: Readahead | None = None
        self._hinted_stop = 0

    def came_to(self, block: Block) -> None:
        """The reader begins in a block that is here: if it was fetched ahead, so shall be what follows it."""
        if self._tools.ahead_marks and self._tools.ahead_marks.take(block.id):
            with suppress(StoreUnavailable):
                self.keep_on(self._wanted.range.first, beyond=True)

    def keep_on(self, position: int, *, beyond: bool) -> None:
        """Keep the next blocks on their way while the one at a position is read; from now on those `beyond` the range.

        StoreUnavailable as the index raises it.
        """
        wanted = self._wanted
        if wanted.too_large or not self._tools.isolation.writable:
            return
        if self._readahead is None:
            self._readahead = self._begin()
        if beyond and wanted.purpose is Purpose.LIVE:
            self._readahead.beyond = True
        self._readahead.at(position // wanted.block_size_bytes, position - wanted.range.first)

    def comes_from_device(self, stop: int) -> None:
        """The block that ends at `stop` is read from the device: have it go on with the next one, if that is here."""
        tools, wanted = self._tools, self._wanted
        if self._hinted_stop == stop or stop >= wanted.range.stop:
            return
        self._hinted_stop = stop
        extent = tools.directory.index.lookup(wanted.block(stop // wanted.block_size_bytes).id)
        if extent is not None:
            tools.threads.hint(hint_beginning, tools.directory.store, extent)

    def _begin(self) -> Readahead:
        tools, wanted = self._tools, self._wanted
        obtainable_bytes = tools.directory.capacity.obtainable_bytes(wanted.slot)
        window_max = window_blocks_max(tools.settings.readahead_bytes, wanted.block_size_bytes, obtainable_bytes)
        index, fills = tools.directory.index, tools.fetches
        return Readahead(index, fills, tools.unpinned_gets, tools.ahead_marks, wanted, window_max, self._fetched)

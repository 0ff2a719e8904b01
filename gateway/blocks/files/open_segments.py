"""Segments that this process keeps open: thousands of small objects lie in few files, so most reads open nothing.

A segment that is evicted keeps its room while somebody has it open, so what nobody has a name for any more is let go of
every second.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict

from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.segments import is_segment
from gateway.blocks.files.store import BlockStore
from gateway.blocks.layout import Extent

SEGMENTS_OPEN_MAX = 512
"""8 GiB of small objects."""


class OpenSegments:
    """At most `segments_max` of them, those used last. Event loop only."""

    def __init__(self, segments_max: int | None = None) -> None:
        self._segments_max = _affordable() if segments_max is None else segments_max
        self._files: OrderedDict[str, BlockLease] = OrderedDict()

    def get(self, file: str) -> BlockLease | None:
        """A segment that is open, with one more user."""
        opened = self._files.get(file)
        if opened is not None:
            self._files.move_to_end(file)
            return opened.share()
        return None

    def opened(self, extent: Extent, store: BlockStore) -> BlockLease:
        """The file of an extent, with one more user. Raises, and where it opens it blocks, as `open_published`."""
        opened = self.get(extent.file)
        if opened is None:
            opened = store.open_published(extent)
            self.keep(extent.file, opened)
        return opened

    def keep(self, file: str, opened: BlockLease) -> None:
        """Remember a file for later if it is a segment; the caller stays a user of it."""
        if not is_segment(file) or file in self._files:
            return
        self._files[file] = opened.share()
        if len(self._files) > self._segments_max:
            self._files.popitem(last=False)[1].close()

    def drop(self, file: str) -> None:
        """Let go of a file that does not hold what it should."""
        opened = self._files.pop(file, None)
        if opened is not None:
            opened.close()

    def drop_unlinked(self) -> None:
        """Let go of those that have been evicted."""
        for file in [name for name, opened in self._files.items() if _is_unlinked(opened)]:
            self._files.pop(file).close()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def _is_unlinked(opened: BlockLease) -> bool:
    """Or cannot be looked at: then it is of no use either."""
    try:
        return os.fstat(opened.descriptor).st_nlink == 0
    except OSError:
        return True


def _affordable() -> int:
    """An eighth of the descriptors that the process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return SEGMENTS_OPEN_MAX if soft == resource.RLIM_INFINITY else min(SEGMENTS_OPEN_MAX, soft // 8)

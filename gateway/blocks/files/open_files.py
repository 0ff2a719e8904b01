"""The files that this process keeps open, with what it has checked of them: most reads open and check nothing.

A file that is evicted keeps its room on disk while somebody has it open, so what has no name any more is let go of
every second.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gateway.blocks.files.block_file import BlockLease
from gateway.blocks.files.store import BlockStore
from gateway.blocks.files.threads import DiskThreads
from gateway.blocks.layout import Extent
from gateway.file_lease import LeaseEnded

FILES_OPEN_MAX = 32_768
"""A descriptor, a mapping and about a KiB each; 256 GiB in blocks of 8 MiB, or as many small objects in segments."""

LOOKED_AT_ONCE = 512

_MAPPINGS_MAX = 65_530
"""What a process may have unless `vm.max_map_count` says otherwise."""


class OpenFiles:
    """At most `files_max` of them, those used last. Event loop only, but for `keep` and `drop`."""

    def __init__(self, files_max: int | None = None) -> None:
        self._files_max = _affordable() if files_max is None else files_max
        self._leases: OrderedDict[str, BlockLease] = OrderedDict()

    def get(self, file: str) -> BlockLease | None:
        """A lease on a file, if it is open."""
        kept = self._leases.get(file)
        if kept is None:
            return None
        try:
            self._leases.move_to_end(file)
            return kept.share()
        except (KeyError, LeaseEnded):  # dropped by another thread since
            return None

    def opened(self, extent: Extent, store: BlockStore) -> BlockLease:
        """A lease on the file of an extent. Raises, and where it opens it blocks, as `open_published`."""
        lease = self.get(extent.file)
        if lease is None:
            lease = store.open_published(extent)
            self.keep(extent.file, lease)
        return lease

    def keep(self, file: str, opened: BlockLease) -> None:
        """Keep a file open by a lease of its own."""
        if file in self._leases:
            return
        self._leases[file] = opened.share()
        if len(self._leases) > self._files_max:
            self._leases.popitem(last=False)[1].close()

    def drop(self, *files: str) -> None:
        """Let go of files that are gone, or do not hold what they should. Any thread."""
        for file in files:
            lease = self._leases.pop(file, None)
            if lease is not None:
                lease.close()

    async def drop_unlinked(self, threads: DiskThreads) -> None:
        """Let go of those that have been evicted."""
        names = list(self._leases)
        for start in range(0, len(names), LOOKED_AT_ONCE):
            some = names[start : start + LOOKED_AT_ONCE]
            leases = [(name, lease) for name in some if (lease := self._shared(name)) is not None]
            self.drop(*await threads.disk(_unlinked, leases))

    def _shared(self, file: str) -> BlockLease | None:
        try:
            return self._leases[file].share()
        except (KeyError, LeaseEnded):
            return None

    def close(self) -> None:
        while self._leases:
            self._leases.popitem()[1].close()


def _unlinked(leases: Sequence[tuple[str, BlockLease]]) -> list[str]:
    """Those of some open files that have no name any more, or cannot be looked at; ends the leases. Blocks."""
    found = []
    for file, lease in leases:
        with lease:
            if not _has_name(lease.descriptor):
                found.append(file)
    return found


def _has_name(descriptor: int) -> bool:
    try:
        return os.fstat(descriptor).st_nlink > 0
    except OSError:
        return False


def _affordable() -> int:
    """Half of the descriptors and mappings that the process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    mappings = _MAPPINGS_MAX
    with suppress(OSError, ValueError):  # where it cannot be read, it has its usual value
        mappings = int(Path("/proc/sys/vm/max_map_count").read_text())
    descriptors = FILES_OPEN_MAX if soft == resource.RLIM_INFINITY else soft // 2
    return max(1, min(FILES_OPEN_MAX, descriptors, mappings // 2))

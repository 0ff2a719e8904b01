"""Where the processes of one gateway keep what they share in memory: metrics, heartbeats, locks of blocks.

The files are mapped into memory and changed by every request. On a disk under checkpoint load, changing a mapped page
may wait for the file system's journal, for as long as a flush takes; in memory (/dev/shm) it never waits. So they lie
in memory where there is room, in the cache directory otherwise, and among temporary files where both cannot be used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  checked for owner and mode below
ROOM_BYTES_PER_PROCESS = 2**20


def make_metrics_directory(cache_directory: Path, processes: int, shared_memory: Path = SHARED_MEMORY) -> Path:
    """An empty directory for `processes` processes; what an earlier run left in it is gone."""
    in_memory = in_memory_directory(cache_directory, shared_memory)
    on_disk = cache_directory / "run" / "metrics"
    with suppress(OSError):  # the disk fails: nobody reads them there either
        remove_metrics_directory(on_disk)
    if _usable(in_memory, processes * ROOM_BYTES_PER_PROCESS):
        return in_memory
    try:
        on_disk.mkdir(mode=0o700, parents=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="forebay-metrics-"))
    return on_disk


def remove_metrics_directory(directory: Path) -> None:
    """Remove it with all metrics."""
    if directory.exists():
        shutil.rmtree(directory)


def in_memory_directory(cache_directory: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """The same for every run on `cache_directory`, so that nothing piles up after a kill -9."""
    name = hashlib.sha256(os.fsencode(cache_directory.resolve())).hexdigest()[:16]
    return shared_memory / f"forebay-{os.geteuid()}-{name}"


def _usable(directory: Path, room_bytes: int) -> bool:
    """Make it. A directory of that name that somebody else put into the shared place is not used."""
    try:
        if directory.exists() and _is_mine(directory):
            shutil.rmtree(directory)
        if shutil.disk_usage(directory.parent).free < room_bytes:
            return False
        directory.mkdir(mode=0o700)
    except OSError:
        return False
    return True


def _is_mine(directory: Path) -> bool:
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()

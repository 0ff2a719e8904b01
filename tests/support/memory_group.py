"""Memory taken away from processes as the kernel does it when memory is short: mapped pages too. Takes root.

`drop_caches` and `posix_fadvise` leave alone what a process has mapped. A memory cgroup of their own is asked to give
everything back at once.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.root import require_root_marker

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_RECLAIM_BYTES = str(2**40)

RECLAIM_SECONDS = 0.1
"""The kernel goes on as long as it finds anything: for ever, while those that are deprived of it fetch it back."""


class MemoryGroup:
    """Who joins belongs to it, with the children and with what they read and write of files before others do."""

    def __init__(self) -> None:
        require_root_marker()
        self._is_v1 = (_V1 / "cgroup.procs").exists()
        parent = _own_group() if self._is_v1 else _V2
        if not self._is_v1:
            (parent / "cgroup.subtree_control").write_text("+memory")
        self._path = parent / f"forebay-test-{uuid.uuid4().hex[:12]}"
        self._path.mkdir()

    def join(self) -> None:
        """For a child, between fork and exec."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))

    def reclaim(self) -> None:
        """Take all memory away that can be: every clean page of a file, mapped or not."""
        name, argument = ("memory.force_empty", "0") if self._is_v1 else ("memory.reclaim", _RECLAIM_BYTES)
        command = ["sh", "-c", f"echo {argument} > {self._path / name} 2>&1"]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=RECLAIM_SECONDS, check=False)  # v2: "less was there"

    def remove(self) -> None:
        """No process may be left in it."""
        self._path.rmdir()


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    group = MemoryGroup()
    try:
        yield group
    finally:
        group.remove()


def _own_group() -> Path:
    """Of this process, in the hierarchy `memory` of version 1."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    fields = [line.split(":", 2) for line in lines]
    return next(Path(f"{_V1}{path}") for _, controllers, path in fields if "memory" in controllers.split(","))

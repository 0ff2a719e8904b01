"""A process that makes or deletes a snapshot, and kills itself before one of the steps that change what is on disk."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from gateway.disk import atomic_write
from gateway.metadata.snapshots import staging as staging_module
from gateway.metadata.snapshots import store as store_module
from gateway.metadata.snapshots.staging import ObjectTable, Origins, SnapshotStaging
from gateway.metadata.snapshots.store import SnapshotStore
from tests.support.snapshots import entry

STEPS_MAX = 200

DIGEST = hashlib.sha256(b'a\0"c4ca4238a0b923820dcc509a6f75849b"\x001\n').hexdigest()
"""Of one object `a` with the content `1`, as docs/on-disk-format.md says."""


def make(root: Path) -> None:
    """A snapshot `new` of one object."""
    staging = SnapshotStaging.begin(SnapshotStore(root), "m", Origins("new", "s3://bucket/", "memory", 1.0))
    staging.append([entry("a", b"1")])
    staging.publish(2.0)


def bring_in(root: Path) -> None:
    """The same, as an import makes it."""
    store = SnapshotStore(root)
    staging = SnapshotStaging.begin(store, "import-m", Origins("new", "s3://bucket/", "memory", 1.0))
    staging.insert([entry("a", b"1")])
    staging.publish(2.0, expected=(1, DIGEST))


def delete(root: Path) -> None:
    """The snapshot `old`."""
    SnapshotStore(root).delete("old")


WORKS: dict[str, Callable[[Path], None]] = {"make": make, "bring in": bring_in, "delete": delete}


def kill_before_each(work: str, roots: Path) -> None:
    """Do it in `roots/0`, `roots/1`, … up to the first step, the second, and so on, until it comes to its end."""
    for step in range(STEPS_MAX):
        process = os.fork()
        if process == 0:
            _count(step)
            WORKS[work](roots / f"{step}")
            os._exit(0)
        _, status = os.waitpid(process, 0)
        if os.WIFEXITED(status):
            (roots / "steps").write_text(f"{step} {os.WEXITSTATUS(status)}")
            return


def _count(left: int) -> None:
    """Have every step counted, and the process killed before one of them."""

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def counting(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return counting

    for name in ("rename", "mkdir", "unlink", "rmdir", "fsync", "open"):
        setattr(os, name, counted(getattr(os, name)))
    for module in (atomic_write, store_module, staging_module):
        setattr(module, "sync_directory", counted(atomic_write.sync_directory))  # noqa: B010 - mypy forbids the other way
    for method in ("append", "insert", "close"):
        setattr(ObjectTable, method, counted(getattr(ObjectTable, method)))


if __name__ == "__main__":
    kill_before_each(sys.argv[1], Path(sys.argv[2]))

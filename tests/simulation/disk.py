"""A disk that forgets, at a power cut, what was not synced: bytes of files, and names in directories.

It may be full for a while. It may lie, for a whole history: then a sync of files and directories does nothing.

The files are real ones, below one directory, so that SQLite works on them; its own syncs are its own (a commit that has
returned survives, one that has not may or may not). What is tracked are the staged files and small files beside them.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

_CREATES = os.O_CREAT
_FREE_BYTES = 100 * 1024**3


class SimulatedDisk:
    """Of one node."""

    CALLS = ("open", "close", "pwrite", "write", "fsync", "unlink", "rename", "posix_fallocate", "statvfs")

    def __init__(self, root: Path, *, lies: bool = False) -> None:
        self.root = root
        self.lies = lies
        self.is_full = False
        self.journal_is_full = False
        """The journal cannot grow either; it can when the ballast is given up."""

        self._aside = root.with_name(root.name + ".removed")
        self._aside.mkdir(exist_ok=True)
        self._of_descriptor: dict[int, Path] = {}
        self._synced_bytes: dict[Path, int] = {}
        self._unsynced_names: set[Path] = set()
        self._removed: dict[Path, Path] = {}
        self._number = 0

    # What the write-back calls in the place of `os`

    def open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if not flags & (_CREATES | os.O_DIRECTORY):
            return os.open(path, flags, mode, **more)
        found = Path(path)
        is_new = bool(flags & _CREATES) and not os.path.exists(path)
        descriptor = os.open(path, flags, mode, **more)
        if found.is_relative_to(self.root):
            self._of_descriptor[descriptor] = found
            if is_new and "staged" in found.parts:
                self._unsynced_names.add(found)
                self._synced_bytes[found] = 0
        return descriptor

    def close(self, descriptor: int) -> None:
        self._of_descriptor.pop(descriptor, None)
        os.close(descriptor)

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        self._take()
        return os.pwrite(descriptor, data, offset)

    def write(self, descriptor: int, data: Any) -> int:
        self._take()
        return os.write(descriptor, data)

    def posix_fallocate(self, descriptor: int, offset: int, count: int) -> None:
        size_bytes = os.fstat(descriptor).st_size
        if offset + count > size_bytes:
            self._take()
            os.ftruncate(descriptor, offset + count)

    def statvfs(self, path: Any) -> os.statvfs_result:
        facts = list(os.statvfs(path))
        facts[3] = facts[4] = 0 if self.is_full else _FREE_BYTES // facts[1]
        return os.statvfs_result(facts)

    def fsync(self, descriptor: int) -> None:
        path = self._of_descriptor.get(descriptor)
        if path is None or self.lies:
            return
        if path.is_dir():
            for one in [name for name in self._unsynced_names if name.parent == path]:
                self._unsynced_names.discard(one)
            for one in [name for name in self._removed if name.parent == path]:
                self._removed.pop(one).unlink(missing_ok=True)
        elif path in self._synced_bytes:
            self._synced_bytes[path] = os.fstat(descriptor).st_size

    def unlink(self, path: Any, **more: Any) -> None:
        found = Path(path)
        if found.name == "ballast":
            self.journal_is_full = False
        if "staged" in found.parts and found.exists() and found not in self._unsynced_names:
            self._number += 1
            kept = self._aside / str(self._number)
            os.link(found, kept)
            self._removed[found] = kept
        self._synced_bytes.pop(found, None)
        self._unsynced_names.discard(found)
        os.unlink(path, **more)

    # What happens to it

    def fill(self, *, journal: bool) -> None:
        """Somebody else takes all the room that there is."""
        self.is_full, self.journal_is_full = True, journal

    def make_room(self) -> None:
        self.is_full = self.journal_is_full = False

    def _take(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def cut_power(self, dice: Random) -> None:
        """Everybody who has it open is dead. What was not synced is there, or partly, or not; removed names return."""
        for path, kept in sorted(self._removed.items()):
            if dice.random() < 0.5 and not path.exists():
                shutil.copyfile(kept, path)
            kept.unlink(missing_ok=True)
        for path, synced in sorted(self._synced_bytes.items()):
            if not path.exists():
                continue
            if path in self._unsynced_names and dice.random() < 0.5:
                path.unlink()
            elif (size := path.stat().st_size) > synced:
                _tear(path, dice.randint(synced, size), size, dice)
        wal = self.root / "journal-wal"
        if wal.exists() and dice.random() < 0.3:  # a commit that was being written
            with wal.open("ab") as file:
                file.write(dice.randbytes(dice.randint(1, 5000)))
        (self.root / "journal-shm").unlink(missing_ok=True)
        self._removed.clear()
        self._unsynced_names.clear()
        self._synced_bytes = {path: path.stat().st_size for path in self._synced_bytes if path.exists()}

    def all_dead(self, below: Path | None = None) -> None:
        """What killed processes had open for writing is closed; `below`: of those that had their files there."""
        for descriptor, path in list(self._of_descriptor.items()):
            if (below is None or path.is_relative_to(below)) and _is_still(descriptor, path):
                self.close(descriptor)


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether it has not been closed by others, and its number been given to another file."""
    try:
        return Path(f"/proc/self/fd/{descriptor}").readlink() == path
    except OSError:
        return False


def _tear(path: Path, kept: int, size: int, dice: Random) -> None:
    """Up to `kept` it is as it was written; behind that nothing, or bytes that were never written."""
    with path.open("r+b") as file:
        file.truncate(kept)
        if dice.random() < 0.5:
            file.seek(kept)
            file.write(bytes(min(size - kept, 4096)))

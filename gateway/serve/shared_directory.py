"""The directory of the files that the processes of one gateway share in memory: metrics, heartbeats, locks of blocks.

The files are mapped into memory and changed by every request. On a disk under checkpoint load, changing a mapped page
may wait for the file system's journal, for as long as a flush takes; in memory (/dev/shm) it never waits. So they lie
in memory where there is room, in the cache directory otherwise, and among temporary files where both cannot be used.

A gateway has its directory locked as long as it lives, so that no other one takes it, and the next one removes
leftovers of a killed one. Others remove it all the same: systemd when its user logs out (RemoveIPC=), tmpfiles, an
administrator. Then it is made anew, for all processes.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from gateway.disk.atomic_write import UNFINISHED
from gateway.shared import recent_requests
from gateway.shared.heartbeats import Heartbeats
from gateway.telemetry import metric_kinds

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  checked for owner and mode below
_MODE = 0o700
_CLAIMS_MAX = 10
_CLAIM_PAUSE_SECONDS = 0.02
_GOES_BY_ITSELF = re.compile(rf"gauge_live|.*{re.escape(UNFINISHED)}$")
"""Files that prometheus_client removes when a process has died, and files that replace others."""

_log = structlog.get_logger("forebay.serve")


_COMMON_ROOM_BYTES = 2**20
"""For the locks of blocks and the heartbeats, which all processes use together, and some more."""


def room_needed_bytes(workers: int, slots: int) -> int:
    """Return the limit of all files' sizes together."""
    of_process = metric_kinds.room_bytes(slots) + recent_requests.FILE_BYTES
    return (workers + 2) * of_process + _COMMON_ROOM_BYTES


class SharedFiles:
    """A directory that this gateway alone has, with the heartbeats of its processes. Everything but `path` blocks."""

    def __init__(self, path: Path, lock: int) -> None:
        """`lock` is the directory's own descriptor, locked. OSError where it has no room for heartbeats."""
        self.path = path
        self._lock = lock
        self.heartbeats = Heartbeats(path / "heartbeats")
        self._heartbeats_file = os.stat(path / "heartbeats").st_ino
        self._names: set[str] = set()

    def is_lost(self) -> bool:
        """Return True if the directory, or a file in it, is gone or replaced."""
        if self._lock < 0:
            return True
        try:
            if not _is_still_at(self.path, self._lock):
                return True
            names = {name for name in os.listdir(self.path) if not _GOES_BY_ITSELF.match(name)}
            known, self._names = self._names, names
            return not known <= names or os.stat(self.path / "heartbeats").st_ino != self._heartbeats_file
        except FileNotFoundError:
            return True
        except OSError:  # the disk fails: that says nothing about who has the directory
            return False

    def give_up(self) -> None:
        """Let others have the directory. Mappings stay, for processes that know no other directory. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def remove(self) -> None:
        """Remove the directory, if it is this gateway's still, and give it up."""
        if not self.is_lost():
            shutil.rmtree(self.path, ignore_errors=True)
        self.heartbeats.close()
        self.give_up()


class SharedMemory:
    """The files that the processes of a gateway share now. `renewed` is called when they are others than before."""

    def __init__(
        self,
        cache_directory: Path,
        room_bytes: int,
        renewed: Callable[[SharedFiles], None],
        shared_memory: Path = SHARED_MEMORY,
    ) -> None:
        """OSError where there is no place for them."""
        self._cache_directory = cache_directory
        self._room_bytes = room_bytes
        self._renewed = renewed
        self._shared_memory = shared_memory
        self._looking = asyncio.Lock()
        self._is_told = False
        self.files = make_shared_files(cache_directory, room_bytes, shared_memory)

    async def whole_files(self) -> SharedFiles:
        """Return the files, made anew where they are lost."""
        async with self._looking:
            with suppress(RuntimeError):  # no thread can be started: that says nothing about who has the directory
                if await asyncio.to_thread(self.files.is_lost):
                    await self._renew()
            return self.files

    async def _renew(self) -> None:
        lost = self.files
        lost.give_up()
        try:
            made = await asyncio.to_thread(
                make_shared_files, self._cache_directory, self._room_bytes, self._shared_memory
            )
        except OSError as error:
            self._tell_failure(error)
            return
        self._is_told = False
        self.files = made
        self._renewed(made)
        _log.error(
            "somebody removed the files that the processes share in memory: Forebay makes them anew, counters begin "
            "again, and the processes start again one after the other",
            removed=str(lost.path),
            made=str(made.path),
        )

    def _tell_failure(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            _log.error(
                "somebody removed the files that the processes share in memory, and there is no place for new ones"
            )
            _log.error("no process can start again until there is a place", error=str(error))

    def remove(self) -> None:
        """Remove the directory at the end. Blocks."""
        self.files.remove()


def make_shared_files(cache_directory: Path, room_bytes: int, shared_memory: Path = SHARED_MEMORY) -> SharedFiles:
    """Return an empty directory with `room_bytes`; an earlier run's content is gone. OSError without a place for it."""
    failure = OSError("there is no place for them")
    for path in _places(cache_directory, room_bytes, shared_memory):
        try:
            lock = _claim(path)
        except OSError as error:
            failure = error
            continue
        try:
            return SharedFiles(path, lock)
        except OSError as error:
            failure = error
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    raise failure


def _places(cache_directory: Path, room_bytes: int, shared_memory: Path) -> Iterator[Path]:
    in_memory = in_memory_directory(cache_directory, shared_memory)
    on_disk = cache_directory / "run" / "metrics"
    with suppress(OSError):  # the disk fails: no process reads them there either
        shutil.rmtree(on_disk)
    _remove_left_behind(shared_memory)
    with suppress(OSError):
        if shutil.disk_usage(shared_memory).free >= room_bytes:
            yield in_memory
    with suppress(OSError):
        on_disk.parent.mkdir(mode=_MODE, parents=True, exist_ok=True)
        yield on_disk
    yield Path(tempfile.mkdtemp(prefix="forebay-metrics-"))


def in_memory_directory(cache_directory: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return the path for the gateway on `cache_directory`; it includes the inode, as containers share paths."""
    return shared_memory / f"{_beginning_of_names()}{_digest(cache_directory, _identity(cache_directory))}"


def name_by_path(cache_directory: Path) -> str:
    """Return a name that is the same for any directory there, also for one that cannot be read."""
    return f"forebay-{os.geteuid()}-{_digest(cache_directory, b'')}"


def _beginning_of_names() -> str:
    return f"forebay-run-{os.geteuid()}-"


def _digest(cache_directory: Path, identity: bytes) -> str:
    return hashlib.sha256(os.fsencode(cache_directory.resolve()) + identity).hexdigest()[:16]


def _identity(directory: Path) -> bytes:
    try:
        status = directory.stat()
    except OSError:
        return b"\0unknown"
    return b"\0%d:%d" % (status.st_dev, status.st_ino)


def _remove_left_behind(shared_memory: Path) -> None:
    for path in shared_memory.glob(f"{_beginning_of_names()}*"):
        with suppress(OSError):
            lock = _try_claim(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _claim(path: Path) -> int:
    """Claim a directory although another starting process may briefly check whether it is left behind."""
    for _ in range(_CLAIMS_MAX - 1):
        with suppress(BlockingIOError, FileNotFoundError):
            return _try_claim(path)
        time.sleep(_CLAIM_PAUSE_SECONDS)
    return _try_claim(path)


def _try_claim(path: Path) -> int:
    """Make or empty a directory, and lock it: its descriptor. OSError where it is another's, or not to be had."""
    with suppress(FileExistsError):
        path.mkdir(mode=_MODE)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user")
        if not _is_still_at(path, lock):
            raise FileNotFoundError(f"{path} has just been removed")
        os.fchmod(lock, _MODE)
        _empty(path)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _is_still_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()

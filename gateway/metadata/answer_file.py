"""The file of small answers as one process has it open: opened when first used, made anew when it is harmed.

All of this blocks, never for long, and belongs on one thread: SQLite's connections are bound to theirs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import diskcache

from gateway.metadata.raw_disk import DATABASE, RawCache

SIZE_BYTES_MAX = 8 * 1024**2
"""What the file may take, give or take a few answers."""

LOCK_TIMEOUT_SECONDS = 0.05
"""How long another process's transaction is waited for; they take less than a millisecond."""

_OPENING_TRIES = 20
_OPENING_PAUSE_SECONDS = 0.01
"""Opening takes about ten milliseconds, and the workers of a gateway may all begin at once."""

_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)
"""What is wrong with the disk or the moment, and not with the file."""


R = TypeVar("R")


class Trouble(StrEnum):
    """Why there is no answer: the disk gives or takes nothing now, or the file was not what had been written."""

    UNAVAILABLE = "unavailable"
    DAMAGED = "damaged"


class AnswerFile:
    """Records by place, in a directory that several processes share."""

    def __init__(self, directory: Path, *, size_bytes_max: int = SIZE_BYTES_MAX) -> None:
        self._directory = directory
        self._database = directory / DATABASE
        self._size_bytes_max = size_bytes_max
        self._cache: RawCache | None = None
        self._inode: int | None = None

    def get(self, place: bytes) -> bytes | Trouble | None:
        """The record that was put there last; None when there is none."""
        return self._attempt(lambda cache: cache.get(place))

    def put(self, place: bytes, record: bytes) -> Trouble | None:
        """Keep a record in place of the one there."""
        return self._attempt(lambda cache: cache.set(place, record))

    def close(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.close()

    def _attempt(self, use: Callable[[RawCache], R]) -> R | Trouble:
        try:
            return use(self._opened())
        except Exception as error:  # noqa: BLE001 - diskcache does what its file says: harmed, it may fail in any way
            if _is_passing(error):
                self._leave_transaction()
                return Trouble.UNAVAILABLE
            self.close()
            self._discard()
            return Trouble.DAMAGED

    def _opened(self) -> RawCache:
        """The connection, made anew where another process has made the file anew."""
        if self._cache is not None and _inode(self._database) == self._inode:
            return self._cache
        self.close()
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with _alone(self._directory):
            self._inode = None
            _create(self._database)
            self._inode = _inode(self._database)
            _refuse_locked(self._database)
            self._cache = RawCache(
                self._directory, size_bytes_max=self._size_bytes_max, lock_timeout_seconds=LOCK_TIMEOUT_SECONDS
            )
        return self._cache

    def _leave_transaction(self) -> None:
        """Keep no lock. Otherwise the connection stays: on a full disk answers can be read, but it cannot be made."""
        if self._cache is not None and self._cache.in_transaction:
            self.close()

    def _discard(self) -> None:
        """Remove the file, unless another process has. The journal first: it would be played into the next one."""
        with suppress(OSError), _alone(self._directory):  # what cannot be removed is met, and counted, again
            if _inode(self._database) == self._inode:
                for ending in ("-journal", "-wal", "-shm", ""):
                    self._database.with_name(DATABASE + ending).unlink(missing_ok=True)


def _is_passing(error: BaseException | None) -> bool:
    """Whether it began with the disk or the moment: after a full disk, SQLite has nothing left to roll back either."""
    if error is None:
        return False
    if isinstance(error, (OSError, diskcache.Timeout)):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return (code is not None and code & 0xFF in _PASSING) or _is_passing(error.__context__)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _create(database: Path) -> None:
    """For this user alone, as SQLite then makes its journal. Never opened where it is there: to close it again would
    give up the locks that SQLite holds on it for the whole process.
    """
    path = str(database.parent)
    if os.path.expandvars(os.path.expanduser(path)) != path:
        raise OSError(f"diskcache takes {path} for another directory")
    with suppress(FileExistsError):
        os.close(os.open(database, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _refuse_locked(database: Path) -> None:
    """Raise where diskcache would wait a minute: while a process that was stopped in a transaction holds the lock."""
    with closing(sqlite3.connect(database, timeout=LOCK_TIMEOUT_SECONDS, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Alone among the processes that open or remove the file; BlockingIOError when another one stays at it."""
    descriptor = os.open(directory / "opening.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    """A lock that waits for others, but not for one that was stopped: flock itself knows no timeout."""
    for _ in range(_OPENING_TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_OPENING_PAUSE_SECONDS)
    raise BlockingIOError(errno.EAGAIN, "another process is opening the file")

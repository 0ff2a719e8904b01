"""The origin's answers about buckets, kept on disk for all workers: small, often asked for, seldom changed.

An answer is valid for a TTL, and only while its bucket's invalidation epoch (entries.py) is the one in which the
origin was asked: an own change of the bucket voids it at once, on every worker, even if it lands later.

The disk is diskcache, used for bytes in the database alone: it unpickles anything else, so that an attacker who can
write to the file could run code here (CVE-2025-69872). A thread of its own asks it, and callers never wait long: a
locked, slow, full or harmed file is a miss.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import diskcache
from diskcache.core import DBNAME, MODE_RAW, UNKNOWN

from gateway.metadata.entries import Freshness, ObservedAt, answer_freshness
from gateway.metadata.store import DiskThread
from gateway.policy.slots import Slot
from gateway.telemetry import metrics

ANSWER_BYTES_MAX = 64 * 1024
"""Longer answers, headers included, are not kept."""

SIZE_BYTES_MAX = 8 * 1024**2
"""Size limit of the file; a few answers may exceed it."""

WAITING_MAX = 64
"""Questions and answers that wait for the disk at once; further ones do without it."""

RECALL_SECONDS_MAX = 0.25
"""Seconds for which a caller waits for the disk."""

LOCK_SECONDS_MAX = 0.05
"""Seconds for which SQLite waits for another process's transaction; they take less than a millisecond."""

PAUSE_SECONDS = 1.0
"""Seconds for which the disk is left alone after it failed to give or take something."""

_CLOSE_SECONDS_MAX = 5.0
_FORMAT = 1
_FIXED = struct.Struct("<IBIQdHI")
_CHECKSUM_BYTES = 4

_SETTINGS: Mapping[str, int | str] = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "least-recently-stored",  # any other writes whenever it is read
    "cull_limit": 10,
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 256,
    "sqlite_journal_mode": "truncate",  # write-ahead logging maps a file: harm to it would kill the process
    "sqlite_mmap_size": 0,
    "sqlite_synchronous": 0,  # dropped after an unclean boot, as all of the catalog
}

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
"""SQLite errors that come from the disk or the moment, not from a damaged file."""

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class BucketQuery:
    """A question to the origin about a bucket: an operation by its S3 name."""

    operation: str
    bucket: str

    @property
    def record_key(self) -> bytes:
        return f"{self.operation}\0{self.bucket}".encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class BucketAnswer:
    """The origin's answer as the gateway passes it on: `headers` are lower-case names and latin-1 values in order."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


@dataclass(frozen=True, slots=True)
class Recalled:
    """A remembered answer, and how far it may be used."""

    answer: BucketAnswer
    freshness: Freshness


class StoreTrouble(StrEnum):
    """Why there is no answer: the disk gives or takes nothing now, or the file was not what had been written."""

    UNAVAILABLE = "unavailable"
    DAMAGED = "damaged"


class BucketMetadataCache:
    """One worker process's view of the answers that all workers share in `directory`; made when first used.

    `now` gives a bucket's epoch and the time (`ListingIndex.moment`). `ttl_seconds` 0: it is switched off.
    """

    def __init__(
        self,
        directory: Path,
        now: Callable[[str], ObservedAt],
        *,
        ttl_seconds: float,
        size_bytes_max: int = SIZE_BYTES_MAX,
    ) -> None:
        self.now = now
        self.is_on = ttl_seconds > 0
        self._ttl_seconds = ttl_seconds
        self._file = BucketMetadataFile(directory, size_bytes_max=size_bytes_max)
        self._thread = DiskThread("bucket metadata")
        self._paused_until_seconds = 0.0

    async def recall(self, question: BucketQuery, slot: Slot) -> Recalled | None:
        """Return the remembered answer and how far it may be used in `slot`, the one that contains the whole bucket."""
        if not self._may_use_disk(question):
            return None
        try:
            record = await self._thread.run(RECALL_SECONDS_MAX, self._file.get, question.record_key)
        except TimeoutError:
            record = StoreTrouble.UNAVAILABLE
        self._count(question, record)
        return self._judged(question, record, slot) if isinstance(record, bytes) else None

    def keep(self, question: BucketQuery, asked: ObservedAt, answer: BucketAnswer) -> None:
        """Remember what the origin answered; `asked` is what `now` gave before it was asked."""
        record = pack(question.record_key, asked, answer)
        if len(record) > ANSWER_BYTES_MAX or asked.epoch != self.now(question.bucket).epoch:
            return
        if self._may_use_disk(question):
            keeping = self._thread.submit(self._file.put, question.record_key, record)
            keeping.add_done_callback(lambda kept: self._count(question, kept.result()))

    async def settle(self) -> None:
        with suppress(TimeoutError):
            await self._thread.run(_CLOSE_SECONDS_MAX, lambda: None)

    async def close(self) -> None:
        self._thread.submit(self._file.close)
        await self._thread.close(_CLOSE_SECONDS_MAX)

    def _may_use_disk(self, question: BucketQuery) -> bool:
        if self.now(question.bucket).seconds >= self._paused_until_seconds and self._thread.waiting < WAITING_MAX:
            return True
        metrics.SMALL_ANSWER_TROUBLES.add(1, StoreTrouble.UNAVAILABLE)
        return False

    def _judged(self, question: BucketQuery, record: bytes, slot: Slot) -> Recalled | None:
        found = unpack(question.record_key, record)
        if found is None:
            metrics.SMALL_ANSWER_TROUBLES.add(1, StoreTrouble.DAMAGED)
            return None
        observed, answer = found
        state = answer_freshness(observed, self.now(question.bucket), slot, ttl_seconds=self._ttl_seconds)
        return Recalled(answer, state)

    def _count(self, question: BucketQuery, result: object) -> None:
        if isinstance(result, StoreTrouble):
            metrics.SMALL_ANSWER_TROUBLES.add(1, result)
            self._paused_until_seconds = self.now(question.bucket).seconds + PAUSE_SECONDS


class BucketMetadataFile:
    """Records by key, in a diskcache that several processes share: opened when first used, made anew when harmed.

    Blocks, never for long, and belongs on one thread: SQLite's connections are bound to theirs.
    """

    def __init__(self, directory: Path, *, size_bytes_max: int = SIZE_BYTES_MAX) -> None:
        self._directory = directory
        self._database = directory / DBNAME
        self._size_bytes_max = size_bytes_max
        self._cache: _Cache | None = None
        self._inode: int | None = None

    def get(self, key: bytes) -> bytes | StoreTrouble | None:
        return self._attempt(lambda cache: cast("bytes | None", cache.get(key)))

    def put(self, key: bytes, record: bytes) -> StoreTrouble | None:
        result = self._attempt(lambda cache: cache.set(key, record))
        return result if isinstance(result, StoreTrouble) else None

    def close(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.close()

    def _attempt(self, use: Callable[[_Cache], R]) -> R | StoreTrouble:
        try:
            return use(self._opened())
        except Exception as error:  # noqa: BLE001 - diskcache does what its file says: harmed, it may fail in any way
            is_passing = _is_passing(error)
            if not is_passing or (self._cache is not None and self._cache._con.in_transaction):
                self.close()  # keep no lock; otherwise a full disk still gives what can be read
            if not is_passing:
                self._discard()
            return StoreTrouble.UNAVAILABLE if is_passing else StoreTrouble.DAMAGED

    def _opened(self) -> _Cache:
        """Return the connection, opened again where another process has replaced the file."""
        if self._cache is not None and _inode(self._database) == self._inode:
            return self._cache
        self.close()
        path = str(self._directory)
        if os.path.expandvars(os.path.expanduser(path)) != path:
            raise OSError(f"diskcache takes {path} for another directory")
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with self._alone():
            with suppress(FileExistsError):  # for this user alone, as SQLite then makes its journal
                os.close(os.open(self._database, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            # diskcache would wait a minute for a process that was stopped in a transaction.
            with closing(sqlite3.connect(self._database, timeout=LOCK_SECONDS_MAX, isolation_level=None)) as found:
                self._inode = _inode(self._database)
                found.execute("BEGIN IMMEDIATE")
                found.execute("ROLLBACK")
            self._cache = _Cache(
                path, timeout=LOCK_SECONDS_MAX, disk=RawDisk, size_limit=self._size_bytes_max, **_SETTINGS
            )
        return self._cache

    def _discard(self) -> None:
        """Remove the file, unless another process has. The journal first: it would be played into the next one."""
        with suppress(OSError), self._alone():  # a later call meets and counts a leftover file again
            if _inode(self._database) == self._inode:
                for ending in ("-journal", "-wal", "-shm", ""):
                    self._database.with_name(DBNAME + ending).unlink(missing_ok=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Alone among the processes that open or remove the file; BlockingIOError when another one is at it."""
        descriptor = os.open(self._directory / "opening.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(descriptor)


class _Cache(diskcache.Cache):  # type: ignore[misc]  # it has no types
    def __init__(self, directory: str, **settings: object) -> None:
        try:
            super().__init__(directory, **settings)
        except BaseException:
            self.close()  # diskcache leaves its connection open
            raise


class RawDisk(diskcache.Disk):  # type: ignore[misc]  # it has no types
    """Bytes go in, bytes come out. A value of another type counts as missing."""

    def __init__(self, directory: str, **_settings: object) -> None:
        super().__init__(directory)

    def put(self, key: object) -> tuple[memoryview, bool]:
        return sqlite3.Binary(_bytes(key)), True

    def get(self, key: object, raw: object) -> bytes:
        return _bytes(key)

    def store(
        self, value: object, read: object, key: object = UNKNOWN
    ) -> tuple[int, int, str | None, memoryview | None]:
        return 0, MODE_RAW, None, sqlite3.Binary(_bytes(value))

    def fetch(self, mode: object, filename: object, value: object, read: object) -> bytes | None:
        return value if mode == MODE_RAW and filename is None and isinstance(value, bytes) else None

    def filename(self, key: object = UNKNOWN, value: object = UNKNOWN) -> NoReturn:
        raise TypeError("nothing is kept in files of its own")

    def remove(self, file_path: object) -> None:
        """Do nothing: no file that a record may name is ours."""


def pack(key: bytes, observed: ObservedAt, answer: BucketAnswer) -> bytes:
    """Pack a record. Its checksum covers the key, too: one that is damaged, or lies elsewhere, is none."""
    headers = "\n".join(f"{name}:{value}" for name, value in answer.headers).encode("latin-1")
    fixed = _FIXED.pack(0, _FORMAT, observed.boot, observed.epoch, observed.seconds, answer.status, len(headers))
    record = fixed[_CHECKSUM_BYTES:] + headers + answer.body
    return _checksum(key, record).to_bytes(_CHECKSUM_BYTES, "little") + record


def unpack(key: bytes, record: bytes) -> tuple[ObservedAt, BucketAnswer] | None:
    """Return the record packed for this key; None when the bytes are another key's or damaged."""
    if len(record) < _FIXED.size:
        return None
    checksum, version, boot, epoch, seconds, status, headers_bytes = _FIXED.unpack_from(record)
    if version != _FORMAT or checksum != _checksum(key, record[_CHECKSUM_BYTES:]):
        return None
    body_start = _FIXED.size + headers_bytes
    lines = record[_FIXED.size : body_start].decode("latin-1")
    named = [line.partition(":") for line in lines.split("\n")] if lines else []
    headers = [(name, value) for name, _, value in named]
    return ObservedAt(epoch, seconds, boot), BucketAnswer(status, headers, record[body_start:])


def _checksum(key: bytes, record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(key))


def _bytes(value: object) -> bytes:
    if type(value) is not bytes:
        raise TypeError(f"only bytes are kept, not {type(value).__name__}")
    return value


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _is_passing(error: BaseException | None) -> bool:
    """Return True unless the file caused the error. After a full disk, SQLite has nothing left to roll back."""
    if error is None:
        return False
    if isinstance(error, (OSError, diskcache.Timeout)):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return (code is not None and code & 0xFF in _PASSING) or _is_passing(error.__context__)

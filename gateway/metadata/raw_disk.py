"""diskcache with nothing but bytes in it.

diskcache pickles what it does not know and unpickles whatever its file calls a pickle: who can write to the file could
run code here (CVE-2025-69872). This `Disk` knows bytes in the database and nothing else: no pickle, no text, no
numbers, no files beside the database, in neither direction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import diskcache
from diskcache.core import MODE_RAW, UNKNOWN

DATABASE = diskcache.core.DBNAME
"""The name of the file within the directory."""

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


class RawDisk(diskcache.Disk):  # type: ignore[misc]  # it has no types
    """Bytes go in, bytes come out. What a file claims to be something else is not there."""

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
        """Nothing: no file that a record may name is ours."""


class RawCache:
    """One thread's connection to the directory's database; no value is larger than what memory may take.

    Raises sqlite3.Error, OSError and diskcache.Timeout when the disk gives or takes nothing now, and whatever diskcache
    makes of a file that is not its own.
    """

    def __init__(self, directory: Path, *, size_bytes_max: int, lock_timeout_seconds: float) -> None:
        self._cache = _Cache(
            str(directory), timeout=lock_timeout_seconds, disk=RawDisk, size_limit=size_bytes_max, **_SETTINGS
        )

    def get(self, key: bytes) -> bytes | None:
        return cast("bytes | None", self._cache.get(key))

    def set(self, key: bytes, value: bytes) -> None:
        self._cache.set(key, value)

    @property
    def in_transaction(self) -> bool:
        """Whether something that failed has left a transaction open."""
        return bool(self._cache._con.in_transaction)

    def close(self) -> None:
        self._cache.close()


class _Cache(diskcache.Cache):  # type: ignore[misc]  # it has no types
    def __init__(self, directory: str, **settings: Any) -> None:
        try:
            super().__init__(directory, **settings)
        except BaseException:
            self.close()  # diskcache leaves its connection open
            raise


def _bytes(value: object) -> bytes:
    if type(value) is not bytes:
        raise TypeError(f"only bytes are kept, not {type(value).__name__}")
    return value

"""Detection of writes to an LMDB environment: one look at memory, instead of a look-up.

LMDB keeps the number of the last transaction in its lock file, and a reader sees the state of that number. This module
reads it from a mapping of its own. A caller that takes the number before a look-up, and finds it unchanged later, would
get the same result again, whichever process writes.

LMDB holds POSIX locks on the lock file for as long as an environment is open: by them processes know that they are not
alone, and that readers live. A process loses its locks on a file when it closes any descriptor of it, and a mapping has
one. So the mapping is made before the environment is opened, and let go of when that is closed.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import lmdb

from gateway.disk.atomic_write import opened

READERS_MAX = 1024
_LOCK_BYTES = 17 * 4096
"""For so many readers, in whole pages."""

_MAGIC_AND_FORMAT = 0x10001_BEEFC0DE
_NUMBER_WORD = 6
"""In a lock file of this format: LMDB 0.9, 64 bits (`MDB_txbody` of mdb.c)."""


def _set_aside_lock_file(environment: Path) -> None:
    """Reserve disk room for the lock file of an LMDB environment before it is opened. Raises OSError.

    LMDB maps it, and lets it grow by a hole: on a full disk the process that touches a page of it, as the next reader,
    would be killed. One of an earlier version that finds no room is used as it is.
    """
    with opened(environment / "lock.mdb") as descriptor:
        size_bytes = os.fstat(descriptor).st_size  # an open environment's file keeps its size
        if size_bytes < mmap.PAGESIZE:  # new, or cut short: the first opener writes it anew
            os.posix_fallocate(descriptor, 0, _LOCK_BYTES)
        else:
            with suppress(OSError):
                os.posix_fallocate(descriptor, 0, size_bytes)


class LastCommit:
    """To be made before an environment is opened, and closed behind it. Any thread may ask; nothing blocks."""

    __slots__ = ("_map", "_others", "_words")

    def __init__(self, directory: Path) -> None:
        _set_aside_lock_file(directory)
        with (directory / "lock.mdb").open("rb") as file:
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)
        self._words: memoryview | None = memoryview(self._map).cast("Q")
        self._others = itertools.count()

    def number(self) -> int:
        """Another one when any process has committed a transaction since.

        Another one each time where the lock file is not as known here, or was closed.
        """
        words = self._words
        if words is None or words[0] != _MAGIC_AND_FORMAT:
            return next(self._others)
        return words[_NUMBER_WORD]

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        words, self._words = self._words, None
        if words is not None:
            words.release()
        self._map.close()


Table: TypeAlias = Any
"""An LMDB named database: an opaque handle."""

Cursor: TypeAlias = Any
"""Rows come as bytes: no environment is opened with buffers."""

OLD_ENGINE, NEW_ENGINE = 0, 1
"""Keys of up to 511 bytes, and of up to 1,978."""


def is_cut_short(directory: Path, engine: int = OLD_ENGINE) -> bool:
    """Return True if the file lacks pages at its end: the disk has lost them.

    LMDB maps the file, and a touch of a missing page kills the process (SIGBUS). Callers ask while no process has
    the environment open. After one commit in thousands a whole file lacks pages, too: the commit took and freed them.
    """
    try:
        environment = lmdb.open(str(directory), readonly=True, lock=False, lib_version=engine)
    except lmdb.Error:
        return False  # the opening that follows says what is wrong
    with environment:
        pages = environment.info()["last_pgno"] + 1
        return bool((directory / "data.mdb").stat().st_size < pages * environment.stat()["psize"])


def open_environment(
    directory: Path, names: Sequence[bytes], *, map_bytes: int, engine: int
) -> tuple[lmdb.Environment, list[Table]]:
    """Open the environment and its tables; create missing ones.

    Blocks while another process writes to it, as LMDB opens tables in write transactions alone. Raises lmdb.Error,
    OSError.
    """
    _set_aside_lock_file(directory)
    environment = lmdb.open(
        str(directory),
        map_size=map_bytes,
        max_dbs=4,
        max_readers=READERS_MAX,
        sync=False,
        mode=0o600,
        subdir=True,
        lib_version=engine,
    )
    try:
        environment.reader_check()
        with environment.begin(write=True) as transaction:  # open_db's own would wait with the interpreter's lock held
            return environment, [environment.open_db(name, txn=transaction) for name in names]
    except BaseException:
        environment.close()  # LMDB opens none twice in a process
        raise

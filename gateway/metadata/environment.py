"""Opening the catalog's LMDB environments: shared by processes, unsynced, one writer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import lmdb

from gateway.disk.atomic_write import LMDB_READERS_MAX, set_aside_lock_file

Table: TypeAlias = Any
"""An LMDB named database: an opaque handle."""

Cursor: TypeAlias = Any
"""Rows come as bytes: no environment is opened with buffers."""

OLD_ENGINE, NEW_ENGINE = 0, 1
"""Keys of up to 511 bytes, and of up to 1,978."""


def open_environment(
    directory: Path, names: Sequence[bytes], *, map_bytes: int, engine: int
) -> tuple[lmdb.Environment, list[Table]]:
    """Open the environment and its tables; create missing ones.

    Blocks while another process writes to it, as LMDB opens tables in write transactions alone. Raises lmdb.Error,
    OSError.
    """
    set_aside_lock_file(directory)
    environment = lmdb.open(
        str(directory),
        map_size=map_bytes,
        max_dbs=4,
        max_readers=LMDB_READERS_MAX,
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

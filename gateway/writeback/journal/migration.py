"""Conversion of older journals, in one transaction: a kill leaves the old version or the new one.

Version 2 knew no checkpoints: the known layouts say which ones pending writes belong to. A damaged row stays damaged.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from dataclasses import replace

from gateway.core.errors import BufferDamaged
from gateway.writeback.checkpoints.layouts import member_of
from gateway.writeback.journal import codec
from gateway.writeback.journal.checkpoints import CheckpointRows
from gateway.writeback.journal.records import Write

_ROWS_AT_ONCE = 1000
"""Pending rows in memory at a time."""


def find_checkpoints(connection: sqlite3.Connection) -> None:
    """Enter the pending writes of an older journal in their checkpoints. Call it within a transaction."""
    rows, last = CheckpointRows(connection), -1
    query = "SELECT sequence, id, record FROM writes WHERE pending = 1 AND sequence > ? ORDER BY sequence LIMIT ?"
    while found := connection.execute(query, (last, _ROWS_AT_ONCE)).fetchall():
        for sequence, write_id, record in found:
            last = sequence
            with suppress(BufferDamaged):  # its readers find it damaged
                _find_checkpoint(connection, rows, codec.unpack_write(write_id, record))


def _find_checkpoint(connection: sqlite3.Connection, rows: CheckpointRows, write: Write) -> None:
    member = member_of(write.key)
    if member is not None:
        write = replace(write, member=member)
        connection.execute("UPDATE writes SET record = ? WHERE id = ?", (codec.pack_write(write), write.id))
        rows.acknowledged(write)

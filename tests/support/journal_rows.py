"""What a journal says, as rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

TABLES = ("files", "writes", "parts", "profiles", "origin", "checkpoints", "checkpoint_objects")


def said_by(connection: sqlite3.Connection) -> Mapping[str, set[tuple[Any, ...]]]:
    """All rows by table, with what follows from them, and the last id; without files that are only to be removed."""
    said = {table: set(connection.execute(f"SELECT * FROM {table}")) for table in (*TABLES, "node")}
    usage = "SELECT * FROM usage WHERE staged_bytes <> 0 OR objects <> 0"
    ids = "SELECT name, seq FROM sqlite_sequence WHERE seq <> 0"
    return said | {"usage": set(connection.execute(usage)), "ids": set(connection.execute(ids))}

"""Staged files, the files that nothing refers to, and the usage of each slot: `files`, `freed`, `usage`, `local_usage`.

Files without references go to `freed`: they are unlinked once the transaction is durable, or else by the next process
that opens the buffer. The triggers of schema.py keep the usage.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.writeback.files.staged_file import StagedFile
from gateway.writeback.journal import codec
from gateway.writeback.journal.rows import Table

_USAGES = (
    "SELECT usage.slot, staged_bytes, usage.objects, coalesce(local_usage.size_bytes, 0), "
    "coalesce(local_usage.objects, 0) FROM usage LEFT JOIN local_usage USING (slot)"
)


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of referenced staged files, a shared file once, and the number of pending objects and tombstones.

    The local ones (`State.LOCAL`) among both, a shared file once per object.
    """

    staged_bytes: int = 0
    objects: int = 0
    local_bytes: int = 0
    local_objects: int = 0

    @property
    def unsent_bytes(self) -> int:
        return max(0, self.staged_bytes - self.local_bytes)


class Files(Table):
    """`freed` names the files that this transaction leaves without references."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        super().__init__(connection)
        self.freed: list[str] = []

    def knows(self, name: str) -> bool:
        """Return whether anything refers to a staged file: its own row, or, if that is damaged, a part's."""
        return not self.unknown([name])

    def unknown(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names to which nothing refers, in one query: callers ask about all files."""
        return self._column(
            f"WITH asked (name) AS (VALUES {', '.join(['(?)'] * len(names))}) SELECT name FROM asked "
            "WHERE NOT EXISTS (SELECT 1 FROM files WHERE files.name = asked.name) "
            "AND NOT EXISTS (SELECT 1 FROM parts WHERE parts.file = asked.name)",
            *names,
        )

    def left_behind(self) -> Sequence[str]:
        """Return unreferenced files that may not be removed yet."""
        return self._column("SELECT name FROM freed WHERE name NOT IN (SELECT name FROM files)")

    def put(self, file: StagedFile, slot: str) -> None:
        """Enter a file on a slot's account, unless it is on another's already, or only the origin has it."""
        if file.is_here:
            row = (file.name, slot, file.size_bytes, codec.pack_file(file))
            self._change("INSERT INTO files VALUES (?, ?, ?, ?) ON CONFLICT (name) DO NOTHING", *row)

    def free(self, names: Iterable[str]) -> None:
        """Free those of the files that no part refers to any more."""
        for name in filter(None, names):
            if self._row("SELECT 1 FROM parts WHERE file = ?", name) is None:
                self._change("DELETE FROM files WHERE name = ?", name)
                self._change("INSERT OR IGNORE INTO freed VALUES (?)", name)
                self.freed.append(name)

    def removed(self, names: Iterable[str]) -> None:
        self._rows.executemany("DELETE FROM freed WHERE name = ?", [(name,) for name in names])

    def usage(self, slot: str) -> Usage:
        row = self._row(f"{_USAGES} WHERE usage.slot = ?", slot)
        return Usage(*row[1:]) if row else Usage()

    def usages(self) -> Mapping[str, Usage]:
        return {slot: Usage(*counted) for slot, *counted in self._all(_USAGES)}

    def counted(self) -> Mapping[str, Usage]:
        """Return `usages` by counting all rows, without slots that have nothing."""
        sums = dict(self._all("SELECT slot, sum(size_bytes) FROM files GROUP BY slot"))
        counts = dict(self._all("SELECT slot, count(*) FROM writes WHERE pending = 1 GROUP BY slot"))
        found = self._all("SELECT slot, sum(size_bytes), count(*) FROM writes WHERE state = -1 GROUP BY slot")
        local = {slot: sizes for slot, *sizes in found}
        return {
            slot: Usage(sums.get(slot, 0), counts.get(slot, 0), *local.get(slot, (0, 0)))
            for slot in sums.keys() | counts.keys()
        }

    def recount(self) -> None:
        """Set the usage of all slots by counting."""
        counted = self.counted()
        self._change("DELETE FROM usage")
        self._change("DELETE FROM local_usage")
        for slot, usage in counted.items():
            self._put("usage", slot, usage.staged_bytes, usage.objects)
            if usage.local_objects:
                self._put("local_usage", slot, usage.local_bytes, usage.local_objects)

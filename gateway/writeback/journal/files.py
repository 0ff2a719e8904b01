"""Staged files, the parts that name them, and the usage of slots: `files`, `parts`, `freed`, `usage`, `local_usage`.

Files without references go to `freed`: they are unlinked once the transaction is durable, or else by the next process
that opens the buffer. The triggers of schema.py keep the usage.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gateway.s3.requests import PARTS_COUNT_MAX
from gateway.writeback.journal.records import Part, pack_file, pack_part, unpack_file, unpack_part
from gateway.writeback.journal.rows import Table
from gateway.writeback.staged_file import StagedFile

_USAGES = (
    "SELECT usage.slot, staged_bytes, usage.objects, coalesce(local_usage.size_bytes, 0), "
    "coalesce(local_usage.objects, 0) FROM usage LEFT JOIN local_usage USING (slot)"
)


class Usage(NamedTuple):
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
            row = (file.name, slot, file.size_bytes, pack_file(file))
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


class Parts(Table):
    def __init__(self, files: Files) -> None:
        super().__init__(files._rows)
        self._files = files

    def of(
        self, write_id: int, after: int = 0, until: int = PARTS_COUNT_MAX, count_max: int = PARTS_COUNT_MAX
    ) -> Iterator[Part]:
        """Yield at most `count_max` parts of a write with numbers after `after`, up to `until`, in order."""
        found = self._rows.execute(
            "SELECT number, parts.record, name, files.record FROM parts LEFT JOIN files ON file = name "
            "WHERE write_id = ? AND number > ? AND number <= ? ORDER BY number LIMIT ?",
            (write_id, after, until, count_max),
        )
        for number, record, name, file in found:
            staged = unpack_file(name, file) if name is not None else None
            yield unpack_part(write_id, number, record, staged)

    def part(self, write_id: int, number: int) -> Part | None:
        return next(self.of(write_id, number - 1, number), None)

    def unsent(self, write_id: int, count_max: int) -> Sequence[Part]:
        """Return the first parts of an upload that the origin lacks."""
        unsent = "SELECT number FROM parts WHERE write_id = ? AND sent = 0 ORDER BY number LIMIT ?"
        numbers = self._column(unsent, write_id, count_max)
        return [part for number in numbers if (part := self.part(write_id, number)) is not None]

    def files_of(self, write_id: int) -> dict[int, str]:
        """Return the names of a write's staged files, by the numbers of its parts."""
        return dict(self._all("SELECT number, file FROM parts WHERE write_id = ?", write_id))

    def put(self, write_id: int, part: Part, slot: str) -> None:
        """Store a part, and its file on the slot's account, in place of one with the same number."""
        replaced = self._column("SELECT file FROM parts WHERE write_id = ? AND number = ?", write_id, part.number)
        self._files.put(part.file, slot)
        self.put_row(write_id, part)
        self._files.free(replaced)

    def put_row(self, write_id: int, part: Part) -> None:
        is_sent = part.origin_etag is not None
        packed = pack_part(write_id, part)
        self._put("parts", write_id, part.number, part.file.name, is_sent, part.file.size_bytes, packed)

    def send_again(self, write_id: int) -> None:
        """Note that the origin has none of the parts that are here."""
        for part in list(self.of(write_id)):
            if part.file.is_here and part.origin_etag is not None:
                self.put_row(write_id, replace(part, origin_etag=None))

    def keep(self, write_id: int, numbers: set[int]) -> None:
        """Drop all parts of a write but these."""
        dropped = {number: file for number, file in self.files_of(write_id).items() if number not in numbers}
        self._rows.executemany(
            "DELETE FROM parts WHERE write_id = ? AND number = ?", [(write_id, number) for number in dropped]
        )
        self._files.free(dropped.values())

    def drop(self, write_id: int) -> None:
        files = self._column("SELECT DISTINCT file FROM parts WHERE write_id = ?", write_id)
        self._change("DELETE FROM parts WHERE write_id = ?", write_id)
        self._files.free(files)

"""The parts of writes: the table `parts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gateway.s3.requests import PARTS_COUNT_MAX
from gateway.writeback.journal import codec
from gateway.writeback.journal.files import Files
from gateway.writeback.journal.records import Part
from gateway.writeback.journal.rows import Table


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
            staged = codec.unpack_file(name, file) if name is not None else None
            yield codec.unpack_part(write_id, number, record, staged)

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
        packed = codec.pack_part(write_id, part)
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

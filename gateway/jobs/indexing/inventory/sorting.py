"""Sorting the rows of an inventory, of which there may be more than memory holds: runs on disk, merged. Blocking.

A run is a file of rows in the order of their keys: u16 length of the key, u16 length of the record, key, record
(metadata/listing/records.py). The order is that of bytes, as S3 lists keys.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from gateway.metadata.listing.pages import Listed

ROWS_AT_ONCE = 200_000
"""What is held in memory: about 50 MiB."""

_RUNS_AT_ONCE = 64
_LENGTHS = struct.Struct("<HH")
_BUFFER_BYTES = 256 * 1024


class SortedRuns:
    """Rows in, rows in order out. `directory` is for the runs; who made it removes it."""

    def __init__(self, directory: Path, *, rows_at_once: int = ROWS_AT_ONCE) -> None:
        self._directory = directory
        self._rows_at_once = rows_at_once
        self._runs: list[Path] = []
        self._number = 0

    def add(self, rows: Iterable[Listed]) -> int:
        """Some more, in any order; how many."""
        rows, count = iter(rows), 0
        while taken := list(islice(rows, self._rows_at_once)):
            taken.sort()
            self._write(taken)
            count += len(taken)
        return count

    def rows(self) -> Iterator[Listed]:
        """All that were added, in order; of those with the same key the first."""
        while len(self._runs) > _RUNS_AT_ONCE:
            merged, self._runs = self._runs[:_RUNS_AT_ONCE], self._runs[_RUNS_AT_ONCE:]
            self._write(_merged(merged))
            for path in merged:
                path.unlink()
        return _merged(self._runs)

    def _write(self, rows: Iterable[Listed]) -> None:
        self._number += 1
        path = self._directory / f"run-{self._number}"
        with path.open("wb", _BUFFER_BYTES) as file:
            for key, record in rows:
                file.write(_LENGTHS.pack(len(key), len(record)) + key + record)
        self._runs.append(path)


def _merged(paths: Iterable[Path]) -> Iterator[Listed]:
    last = None
    with ExitStack() as stack:
        runs = []
        for path in paths:
            runs.append(_read(path))
            stack.callback(runs[-1].close)
        for row in heapq.merge(*runs):
            if row[0] != last:
                yield row
                last = row[0]


def _read(path: Path) -> Generator[Listed, None, None]:
    with path.open("rb", _BUFFER_BYTES) as file:
        while lengths := file.read(_LENGTHS.size):
            key_bytes, record_bytes = _LENGTHS.unpack(lengths)
            yield file.read(key_bytes), file.read(record_bytes)

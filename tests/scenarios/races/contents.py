"""Bytes that say which value they are of and where in it they belong: a mixed, torn or moved answer shows at once."""

from __future__ import annotations

import hashlib
import sys
from array import array
from dataclasses import dataclass
from functools import lru_cache

RECORD_BYTES = 16
"""A value is a row of records: its number (u64), the record's position (u64), little-endian."""


@dataclass(frozen=True, slots=True)
class Value:
    """What one write stored. No two have the same number."""

    number: int
    size_bytes: int

    @property
    def content(self) -> bytes:
        return _content(self.number, self.size_bytes)

    @property
    def etag(self) -> str:
        """As S3 makes it for an object that came in one piece."""
        return f'"{hashlib.md5(self.content).hexdigest()}"'

    @property
    def etag_of_one_part(self) -> str:
        """As S3 makes it for a multipart upload of a single part."""
        return f'"{hashlib.md5(hashlib.md5(self.content).digest()).hexdigest()}-1"'


@lru_cache(maxsize=128)
def _content(number: int, size_bytes: int) -> bytes:
    count = -(-size_bytes // RECORD_BYTES)
    records = array("Q", [number, 0]) * count
    records[1::2] = array("Q", range(count))
    if sys.byteorder == "big":
        records.byteswap()
    return records.tobytes()[:size_bytes]


def described(body: bytes, first: int) -> str:
    """Which values' records a body holds, from which record to which, in runs; `first` is where it begins."""
    runs: list[tuple[int, int, int]] = []
    for start in range(-first % RECORD_BYTES, len(body) - RECORD_BYTES + 1, RECORD_BYTES):
        number = int.from_bytes(body[start : start + 8], "little")
        position = int.from_bytes(body[start + 8 : start + 16], "little")
        if runs and runs[-1][0] == number and runs[-1][2] == position - 1:
            runs[-1] = (number, runs[-1][1], position)
        else:
            runs.append((number, position, position))
    shown = ", ".join(f"value {number} records {begin}-{end}" for number, begin, end in runs[:8])
    return f"{len(body)} bytes at {first}: {shown or 'no whole record'}{' and more' if len(runs) > 8 else ''}"

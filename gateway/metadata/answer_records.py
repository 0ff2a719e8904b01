"""Small answers of the origin, packed and unpacked. Pure; docs/on-disk-format.md is the reference."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.metadata.records import Learned

FORMAT = 1

_FIXED = struct.Struct("<IBIQdHI")
_CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class Question:
    """What the origin is asked about a bucket: an operation by its S3 name."""

    operation: str
    bucket: str

    @property
    def place(self) -> bytes:
        """The key of its record."""
        return f"{self.operation}\0{self.bucket}".encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the origin has said, as it is told on: `headers` are lower-case names and latin-1 values in order."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes


def pack(place: bytes, learned: Learned, answer: Answer) -> bytes:
    """The record. Its checksum covers the place, too: one that is damaged, or lies elsewhere, is none."""
    headers = "\n".join(f"{name}:{value}" for name, value in answer.headers).encode("latin-1")
    fixed = _FIXED.pack(0, FORMAT, learned.boot, learned.generation, learned.seconds, answer.status, len(headers))
    record = fixed[_CHECKSUM_BYTES:] + headers + answer.body
    return _checksum(place, record).to_bytes(_CHECKSUM_BYTES, "little") + record


def unpack(place: bytes, record: bytes) -> tuple[Learned, Answer] | None:
    """What was packed for this place; None when these bytes are not that."""
    if len(record) < _FIXED.size:
        return None
    checksum, version, boot, generation, seconds, status, headers_bytes = _FIXED.unpack_from(record)
    if version != FORMAT or checksum != _checksum(place, record[_CHECKSUM_BYTES:]):
        return None
    body_start = _FIXED.size + headers_bytes
    lines = record[_FIXED.size : body_start].decode("latin-1")
    headers = [_field(line) for line in lines.split("\n")] if lines else []
    return Learned(generation, seconds, boot), Answer(status, headers, record[body_start:])


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name, value


def _checksum(place: bytes, record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(place))

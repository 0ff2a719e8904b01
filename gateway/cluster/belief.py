"""The state in which this node believes the registry: one record in memory that its processes share.

The background process writes it; the others read it at every question. Its checksum tells whether it is whole.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Final, NamedTuple

from gateway.disk.atomic_write import map_shared

_RECORD: Final = struct.Struct("<Q16sqd?")
_CHECKSUM: Final = struct.Struct("<I")
_BYTES: Final = _RECORD.size + _CHECKSUM.size


class Belief(NamedTuple):
    """`number` counts the times at which this node has begun to believe. `run`: the primary's, 16 hexadecimal digits.

    `horizon`: this node remembers nothing that it has learned before this sequence number. `until`, on the monotonic
    clock: the registry is believed before then. `is_known`: all nodes know what this one says of itself.
    """

    number: int = 0
    run: str = ""
    horizon: int = 0
    until: float = 0.0
    is_known: bool = False


class SharedBelief:
    """The record at `path`, made where it does not exist. OSError."""

    def __init__(self, path: Path) -> None:
        self._map = map_shared(path, _BYTES)
        self._last = (b"", Belief())

    def close(self) -> None:
        self._map.close()

    def write(self, belief: Belief) -> None:
        """Only one process writes."""
        record = _RECORD.pack(belief.number, belief.run.encode(), *belief[2:])
        self._map[:_BYTES] = record + _CHECKSUM.pack(zlib.crc32(record))

    def read(self) -> Belief:
        """Return the record; a belief that has ended while another one is being written."""
        content = self._map[:_BYTES]
        if content == self._last[0]:
            return self._last[1]
        record = content[: _RECORD.size]
        if zlib.crc32(record) != _CHECKSUM.unpack_from(content, _RECORD.size)[0]:
            return Belief()
        number, run, *more = _RECORD.unpack(record)
        belief = Belief(number, run.rstrip(b"\0").decode(), *more)
        self._last = content, belief
        return belief

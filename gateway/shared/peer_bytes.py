"""Bytes that this node has sent to each other node, or received from it: a small table of each process.

A process counts in its own table, in memory that all of them share, and continues the table of the process that had its
number before. To show the figures, a process adds up all tables. A table knows a node by a digest of its address. If it
is full, a new node takes the row of the one that was counted longest ago.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, TypeAlias

import structlog
from xxhash import xxh3_64_intdigest

from gateway.disk.atomic_write import map_shared

NODES_MAX: Final = 1024
"""Nodes in one table."""

FILE_BYTES: Final = NODES_MAX * 16
"""A row of two u64 for each node: the digest, 0 in a free row, and the number of bytes."""

Direction: TypeAlias = Literal["sent", "received"]

_log = structlog.get_logger("forebay.cluster")


def digest(address: str) -> int:
    return xxh3_64_intdigest(address) or 1


class PeerBytes:
    """The table of one process and direction. Event loop only."""

    def __init__(self, directory: Path | None = None, direction: Direction = "sent", process: int = 0) -> None:
        """Without a directory, or room in it, only this process has the figures."""
        self._words = memoryview(bytearray(FILE_BYTES)).cast("Q")
        if directory is not None:
            try:
                self._words = memoryview(map_shared(_file(directory, direction, process), FILE_BYTES)).cast("Q")
            except OSError as error:
                _log.warning("bytes to and from each node are not shown", error=str(error))
        nodes = self._words[::2].tolist()
        self._rows = OrderedDict((node, row) for row, node in enumerate(nodes) if node)

    def add(self, address: str, size_bytes: int) -> None:
        node = digest(address)
        row = self._rows.get(node)
        if row is None:
            row = len(self._rows)
            if row >= NODES_MAX:
                _, row = self._rows.popitem(last=False)
            self._words[2 * row + 1], self._words[2 * row] = 0, node
            self._rows[node] = row
        self._rows.move_to_end(node)
        self._words[2 * row + 1] += size_bytes


def bytes_by_peer(directory: Path, direction: Direction) -> Counter[int]:
    """Return the bytes of all processes by `digest` of the other node's address. Blocks."""
    found = Counter[int]()
    for file in directory.glob(_file(directory, direction, "*").name):
        with suppress(OSError):  # the directory goes: the gateway ends
            words = memoryview(file.read_bytes()[:FILE_BYTES]).cast("Q")
            for node, count in zip(words[::2].tolist(), words[1::2].tolist(), strict=True):
                found[node] += count
    del found[0]
    return found


def _file(directory: Path, direction: Direction, process: int | str) -> Path:
    return directory / f"peer-bytes-{direction}-{process}"

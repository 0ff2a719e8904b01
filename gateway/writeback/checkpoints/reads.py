"""How far the files of checkpoints have been read: a small table of each worker, in memory that all processes share.

A worker counts what it sends of objects in slots that write back whose keys belong to a checkpoint. To show
checkpoints, a process reads the tables of all workers. A table knows a file by a digest of its name, so it holds no
keys, and each file takes equal room. Beyond FILES_MAX it forgets the files that were not read for longest.

One pass is the reads of a file without a break of a minute; the last two are kept. A process may read figures while a
worker writes them, and may then see older or partly written ones.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gateway.core.clock import Clock
from gateway.core.model import ObjectKey
from gateway.disk.atomic_write import map_shared
from gateway.policy.slots import Slot
from gateway.writeback.checkpoints.layouts import member_of, rules_of

FILES_MAX = 4096
"""Files in one worker's table."""

PAUSE_SECONDS = 60.0
"""Seconds without a read after which a read begins another pass."""

_NAME = "checkpoint-reads-"
_ID_BYTES = 24
_ROW = struct.Struct(f"<{_ID_BYTES}sIxxxxQddQdd")
_FILE_BYTES = FILES_MAX * _ROW.size


def checkpoint_id(bucket: str, prefix: str) -> bytes:
    """Return the id of a checkpoint; the ids of its files begin with it."""
    return hashlib.blake2b(f"{bucket}\0{prefix}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def file_id(of_checkpoint: bytes, key: str) -> bytes:
    return of_checkpoint + hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def counted_file(key: ObjectKey, slot: Slot) -> bytes | None:
    """Return the id of an object whose reads count, or None."""
    if not slot.is_buffered:
        return None
    member = member_of(key, rules_of(slot.checkpoints))
    return None if member is None else file_id(checkpoint_id(key.bucket, member.checkpoint.prefix), key.key)


class ReadPass(NamedTuple):
    """The reads of a file without a long break. Times in seconds since 1970."""

    read_bytes: int
    first_at: float
    last_at: float
    open: int = 0
    """Answers that are being sent."""


@dataclass(slots=True)
class _Entry:
    """The passes of a file; `at` is its row."""

    at: int
    first_at: float
    last_at: float
    read_bytes: int = 0
    open: int = 0
    of_before: tuple[int, float, float] = (0, 0.0, 0.0)


class CheckpointReads:
    """The reads that one worker counts. Event loop only; `close` at the end."""

    def __init__(self, directory: Path, worker: int, clock: Clock) -> None:
        """Continue the table of the worker that had this number before. OSError."""
        self._clock = clock
        self._map = map_shared(directory / f"{_NAME}{worker}", _FILE_BYTES)
        self._entries = OrderedDict[bytes, _Entry]()
        """Files in the order of their last reads."""
        found = [(file, at, passes) for at, (file, passes) in enumerate(_rows(self._map)) if passes]
        for file, at, passes in sorted(found, key=lambda one: one[2][0].last_at):
            read_bytes, first_at, last_at, _ = passes[0]
            entry = self._entries[file] = _Entry(at, first_at, last_at, read_bytes)
            entry.of_before = passes[1][:3] if len(passes) > 1 else entry.of_before
            self._write(file, entry)

    def close(self) -> None:
        self._map.close()

    def begin(self, file: bytes) -> None:
        """Count an answer with bytes of a file that is about to be sent; `end` must follow."""
        now, entry = self._clock.now(), self._entries.get(file)
        if entry is None:
            at = len(self._entries)
            if at >= FILES_MAX:
                _, oldest = self._entries.popitem(last=False)
                at = oldest.at
            entry = self._entries[file] = _Entry(at, now, now)
        else:
            self._entries.move_to_end(file)
            if not entry.open and now - entry.last_at >= PAUSE_SECONDS:
                entry.of_before = (entry.read_bytes, entry.first_at, entry.last_at)
                entry.read_bytes, entry.first_at = 0, now
        entry.open += 1
        entry.last_at = now
        self._write(file, entry)

    def end(self, file: bytes, sent_bytes: int) -> None:
        entry = self._entries.get(file)
        if entry is None:  # evicted by other files meanwhile
            return
        entry.open = max(0, entry.open - 1)
        entry.last_at = self._clock.now()
        entry.read_bytes += sent_bytes
        self._write(file, entry)

    def _write(self, file: bytes, one: _Entry) -> None:
        if self._map.closed:
            return
        row = (file, one.open, one.read_bytes, one.first_at, one.last_at, *one.of_before)
        _ROW.pack_into(self._map, one.at * _ROW.size, *row)


def _rows(content: bytes | mmap.mmap) -> Iterator[tuple[bytes, Sequence[ReadPass]]]:
    """Yield files with their passes, the last pass first; no passes for an unread file."""
    for at in range(0, _FILE_BYTES, _ROW.size):
        file, opened, read_bytes, first_at, last_at, *of_before = _ROW.unpack_from(content, at)
        if not any(file):
            return
        passes = [ReadPass(read_bytes, first_at, last_at, opened), ReadPass(*of_before[:3])]
        yield file, [one for one in passes if one.last_at]


def reads_by_checkpoint(directory: Path | None) -> Mapping[bytes, Mapping[bytes, Sequence[ReadPass]]]:
    """Return all workers' passes: id of a checkpoint → id of a file → passes. Takes milliseconds for a full table."""
    found: dict[bytes, dict[bytes, list[ReadPass]]] = {}
    for path in sorted(directory.glob(f"{_NAME}*")) if directory is not None else []:
        content = path.read_bytes()
        if len(content) < _FILE_BYTES:  # being made
            continue
        for file, passes in _rows(content):
            found.setdefault(file[:8], {}).setdefault(file, []).extend(passes)
    return found

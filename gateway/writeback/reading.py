"""Reading what is pending: from its staged files, verified, a piece at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from gateway.objects import ByteRange
from gateway.writeback.files.staged_file import StagedFile, Staging, read_verified
from gateway.writeback.journal.records import Part, PendingObject
from gateway.writeback.threads import BufferThreads

PIECE_BYTES = 1024 * 1024


class FileGone(Exception):
    """A staged file is there no more: since its journal entry was read the object was flushed, or overwritten.

    `read_bytes` of the range have been read before.
    """

    def __init__(self, read_bytes: int) -> None:
        super().__init__(f"a staged file is gone, {read_bytes} bytes into the range")
        self.read_bytes = read_bytes


@dataclass(frozen=True, slots=True)
class _Span:
    """`count` bytes at `position` of a file."""

    file: StagedFile
    position: int
    count: int


class PendingReader:
    """Reads pending objects of one buffer."""

    def __init__(self, staging: Staging, threads: BufferThreads) -> None:
        self._staging = staging
        self._threads = threads

    async def pieces(self, pending: PendingObject, byte_range: ByteRange) -> AsyncGenerator[memoryview, None]:
        """The bytes of a range, in order, each piece verified. FileGone, BufferDamaged, OSError as the disk says it."""
        read_bytes = 0
        for span in _spans(pending.parts, byte_range):
            try:
                opened = await self._threads.open(self._staging.open, span.file)
            except FileNotFoundError:
                raise FileGone(read_bytes) from None
            with opened:
                for position in range(span.position, span.position + span.count, PIECE_BYTES):
                    count = min(PIECE_BYTES, span.position + span.count - position)
                    yield await self._threads.run_holding(opened, read_verified, span.file, position, count)
                    read_bytes += count


def part_range(pending: PendingObject, number: int) -> ByteRange | None:
    """Where the `number`th part lies in the object, counted from 1 as GetObject does; None: it has no bytes.

    IndexError when there is no such part.
    """
    sizes = [part.file.size_bytes for part in pending.parts]
    size_bytes = sizes[number - 1]
    first = sum(sizes[: number - 1])
    return ByteRange(first, first + size_bytes - 1) if size_bytes else None


def _spans(parts: Sequence[Part], byte_range: ByteRange) -> Iterator[_Span]:
    start = 0
    for part in parts:
        if start >= byte_range.stop:
            return
        stop = start + part.file.size_bytes
        first, last = max(start, byte_range.first), min(stop, byte_range.stop)
        if first < last:
            yield _Span(part.file, first - start, last - first)
        start = stop

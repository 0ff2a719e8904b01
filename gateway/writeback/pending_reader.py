"""Reading what is pending: from its staged files, verified, a piece at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence

from gateway.core.errors import BufferDamaged
from gateway.core.model import ByteRange
from gateway.origin.client import StreamedBody
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Part, Run, Write
from gateway.writeback.staged_file import BufferThreads, StagedFile, Staging, read_verified

PIECE_BYTES = 1024 * 1024

IN_MEMORY_BYTES_MAX = 256 * 1024
"""Bodies up to this length are sent from memory, so the origin client can retry them itself."""

PARTS_AT_ONCE = 16
"""Parts that one look-up on the event loop reads."""


class FileGone(Exception):
    """A staged file is gone: since its journal entry was read, the object was flushed or overwritten.

    `read_bytes` of the range were read before.
    """

    def __init__(self, read_bytes: int) -> None:
        super().__init__(f"a staged file is gone, {read_bytes} bytes into the range")
        self.read_bytes = read_bytes


async def staged_body(staging: Staging, threads: BufferThreads, file: StagedFile) -> bytes | StreamedBody:
    """Return a file's bytes, verified, for a request to the origin. BufferDamaged, OSError, now or while it is sent."""
    pieces = _pieces_of(staging, threads, file)
    if file.size_bytes > IN_MEMORY_BYTES_MAX:
        return StreamedBody(pieces, file.size_bytes)
    return b"".join([bytes(piece) async for piece in pieces])


async def _pieces_of(staging: Staging, threads: BufferThreads, file: StagedFile) -> AsyncIterator[bytes | memoryview]:
    try:
        opened = await threads.open(staging.open, file)
    except FileNotFoundError as error:
        raise BufferDamaged(f"staged file {file.name} is gone") from error
    with opened:
        for position in range(0, file.size_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, file.size_bytes - position)
            yield await threads.run_holding(opened, read_verified, file, position, count)


async def pending_pieces(
    journal: Journal, staging: Staging, threads: BufferThreads, pending: Write, byte_range: ByteRange
) -> AsyncGenerator[memoryview, None]:
    """Yield the bytes of a range, in order, each piece verified. FileGone, BufferDamaged, OSError from the disk."""
    read_bytes = 0
    for first, last, start in _numbers(pending.runs, byte_range):
        parts = journal.read(lambda tx: list(tx.parts.of(pending.id, first - 1, last)))  # noqa: B023
        if len(parts) != last - first + 1:
            raise FileGone(read_bytes)
        for file, begin, end in _spans(parts, start, byte_range):
            try:
                opened = await threads.open(staging.open, file)
            except FileNotFoundError:
                raise FileGone(read_bytes) from None
            with opened:
                for position in range(begin, end, PIECE_BYTES):
                    count = min(PIECE_BYTES, end - position)
                    yield await threads.run_holding(opened, read_verified, file, position, count)
                    read_bytes += count


def part_range(pending: Write, number: int) -> ByteRange | None:
    """Return the range of part `number`, from 1 as in GetObject; None: it has no bytes. IndexError: no such part."""
    left, start = number - 1, 0
    for run in pending.runs:
        if left < run.length:
            first = start + left * run.size_bytes
            return ByteRange(first, first + run.size_bytes - 1) if run.size_bytes else None
        left -= run.length
        start += run.length * run.size_bytes
    raise IndexError(f"{pending.key} has no part {number}")


def _numbers(runs: Sequence[Run], byte_range: ByteRange) -> Iterator[tuple[int, int, int]]:
    """Yield the parts in which a range lies, some at a time: numbers of first and last, and the start of the first."""
    start = 0
    for run in runs:
        stop = start + run.length * run.size_bytes
        if run.size_bytes and start < byte_range.stop and byte_range.first < stop:
            first = max(0, byte_range.first - start) // run.size_bytes
            last = min(run.length - 1, (byte_range.last - start) // run.size_bytes)
            for begin in range(first, last + 1, PARTS_AT_ONCE):
                end = min(begin + PARTS_AT_ONCE - 1, last)
                yield run.first + begin, run.first + end, start + begin * run.size_bytes
        start = stop


def _spans(parts: Sequence[Part], start: int, byte_range: ByteRange) -> Iterator[tuple[StagedFile, int, int]]:
    """Yield the files that have bytes of a range, with the positions in each from which on and up to which."""
    for part in parts:
        stop = start + part.file.size_bytes
        first, last = max(start, byte_range.first), min(stop, byte_range.stop)
        if first < last:
            yield part.file, first - start, last - start
        start = stop

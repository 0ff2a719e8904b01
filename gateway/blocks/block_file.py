"""An open file of blocks, with the parts of it that this process has verified.

Bytes count as intact when they were read and compared with the checksums of their chunks, and their pages have stayed
in memory since (page_cache.py), and the file is still the one it was: same inode, size and times. After any other event
in the page cache or the device, they are read and checked again before a client gets them.

A process keeps the files open that it has used last, with what it has checked of them (`OpenFiles`): so most reads open
and check nothing. A file that is evicted keeps its room on disk while a process has it open, so each process closes
files without a name every second.
"""

from __future__ import annotations

import os
import resource
import struct
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

from awscrt import checksums as crt

from gateway.blocks.layout import CHUNK_BYTES, Extent, chunk_count
from gateway.blocks.page_cache import PAGE_BYTES, MappedPages, Residency
from gateway.core.errors import BlockDamaged
from gateway.disk.file_lease import FileLease, LeaseEnded, SharedFile

VERIFY_STEP_BYTES = 4 * CHUNK_BYTES
"""Little enough for the processor's cache: what is read is checked before it has left it."""

VERIFIED_AT_ONCE_BYTES_MAX = 512 * 1024
"""A tenth of a millisecond, as long as the event loop may serve one client at a time."""

READ_STEP_BYTES = 2 * 1024 * 1024
"""Bytes that a reader maps and verifies at once, while other readers of the file wait."""

_CRC = struct.Struct("<I")


def chunk_aligned(extent: Extent, position: int, count: int) -> tuple[int, int]:
    """Return the chunks of a block that `count` bytes at `position` lie in: first byte, first byte behind them."""
    stop = -(-(position + count) // CHUNK_BYTES) * CHUNK_BYTES
    return position // CHUNK_BYTES * CHUNK_BYTES, min(stop, extent.length)


def read_verified(descriptor: int, extent: Extent, position: int, count: int) -> memoryview:
    """`count` bytes at `position` of a block, every chunk they touch read whole and checked. Blocks.

    BlockDamaged when the file is short or a checksum differs, or the device gives an error.
    """
    first, last = chunk_aligned(extent, position, count)
    content = memoryview(bytearray(last - first))
    _read_chunks(descriptor, extent, first, content)
    return content[position - first : position - first + count]


def check(descriptor: int, extent: Extent, first: int, count: int) -> None:
    """Read and check whole chunks as `read_verified`, a little at a time, and keep nothing. Blocks; BlockDamaged."""
    buffer = memoryview(bytearray(min(VERIFY_STEP_BYTES, count)))
    for start in range(first, first + count, VERIFY_STEP_BYTES):
        _read_chunks(descriptor, extent, start, buffer[: first + count - start])


def _read_chunks(descriptor: int, extent: Extent, first: int, content: memoryview) -> None:
    """Fill `content` with the block's bytes from `first` on, where a chunk begins, and check them."""
    _read_whole(descriptor, extent.offset + first, content)
    for start in range(0, len(content), CHUNK_BYTES):
        expected = _CRC.unpack_from(extent.checksums, (first + start) // CHUNK_BYTES * _CRC.size)[0]
        if crt.crc32c(content[start : start + CHUNK_BYTES]) != expected:
            raise BlockDamaged(f"the checksum of chunk {(first + start) // CHUNK_BYTES} differs")


def _read_whole(descriptor: int, offset: int, content: memoryview) -> None:
    done = 0
    while done < len(content):
        try:
            got = os.preadv(descriptor, [content[done:]], offset + done)
        except OSError as error:
            raise BlockDamaged(f"the block's file cannot be read: {error}") from error
        if got == 0:
            raise BlockDamaged("the block's file is shorter than the block")
        done += got


def _bring_in(descriptor: int, offset: int, count: int, *, reads_on: bool) -> None:
    """Bring bytes of a file into memory, without copying them anywhere. Blocks.

    `reads_on`: the following bytes are wanted, too: the kernel's own readahead goes on with them, in folios of
    many pages. A hint for a range makes it read page by page, which costs three times the processor's time.
    """
    if reads_on:
        offset, count = offset - offset % CHUNK_BYTES, count + offset % CHUNK_BYTES  # from 0 it knows for a sequence
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    else:
        os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_WILLNEED)
    with suppress(OSError):  # the check of the bytes finds out what is wrong with the file
        stop = offset + count
        while offset < stop and (sent := os.sendfile(_null(), descriptor, offset, stop - offset)):
            offset += sent
    if reads_on:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # as all block files are opened


@cache
def _null() -> int:
    return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class ChunkChecksums:
    """The checksums of a block's chunks while its bytes come in pieces of any size."""

    def __init__(self, length: int) -> None:
        self.packed = bytearray()
        self._length = length
        self._position = 0
        self._running = 0

    @property
    def complete_bytes(self) -> int:
        return min(len(self.packed) // _CRC.size * CHUNK_BYTES, self._length)

    @property
    def complete(self) -> bool:
        return len(self.packed) == chunk_count(self._length) * _CRC.size

    def take(self, extent: Extent, stop: int) -> None:
        """Take the checksums of an extent's verified chunks, up to byte `stop`."""
        self.packed += extent.checksums[len(self.packed) : chunk_count(stop) * _CRC.size]
        self._position = stop

    def go_back(self, complete: int) -> int:
        """Forget all but the first complete chunks; return how many bytes these have."""
        del self.packed[complete * _CRC.size :]
        self._position, self._running = self.complete_bytes, 0
        return self._position

    def update(self, content: bytes | bytearray | memoryview) -> None:
        rest = memoryview(content)
        while rest:
            room = CHUNK_BYTES - self._position % CHUNK_BYTES
            part, rest = rest[:room], rest[room:]
            self._running = crt.crc32c(part, self._running)
            self._position += len(part)
            if self._position % CHUNK_BYTES == 0 or self._position == self._length:
                self.packed += _CRC.pack(self._running)
                self._running = 0


Fingerprint: TypeAlias = tuple[int, int, int, int, int]

SEGMENT_MAPPED_BYTES = 18 * 1024 * 1024
"""Address space for a segment, which may still grow: its longest, and a record that begins at its end."""

RECORD_UNIT_BYTES = 64
"""Records of a segment begin at multiples of this (store.py)."""

_BYTE_COVERS = 8 * RECORD_UNIT_BYTES
"""Bytes of a file that one byte of marks covers."""


def fingerprint(descriptor: int) -> Fingerprint:
    """Return values that change whenever a file's bytes may have changed. Raises OSError."""
    facts = os.fstat(descriptor)
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


class ChunkMarks:
    """The checked parts of a file. Changed under a lock, read without: each change is one step.

    A bit for each 64 KiB chunk of a file of large blocks, whose chunks follow each other without gaps.
    """

    def __init__(self) -> None:
        self._marks = 0, 0
        """Offset of chunks in the file, modulo their size, and the marks."""

    def covers(self, extent: Extent, position: int, count: int) -> bool:
        phase, chunks = self._marks
        offset = extent.offset - phase
        if offset % CHUNK_BYTES:
            return False
        offset += position
        first = offset // CHUNK_BYTES
        wanted = (2 << (offset + count - 1) // CHUNK_BYTES - first) - 1
        return chunks >> first & wanted == wanted

    def add(self, extent: Extent, position: int, count: int) -> None:
        phase, chunks = self._marks
        if extent.offset % CHUNK_BYTES != phase:
            phase, chunks = extent.offset % CHUNK_BYTES, 0
        self._marks = phase, chunks | _mask(phase, extent.offset + position, count)

    def withdraw(self, offset: int, count: int) -> None:
        phase, chunks = self._marks
        self._marks = phase, chunks & ~_mask(phase, max(offset, phase), count)

    def clear(self) -> None:
        self._marks = 0, 0


def _mask(phase: int, offset: int, count: int) -> int:
    first = max(0, offset - phase) // CHUNK_BYTES
    last = max(0, offset - phase + count - 1) // CHUNK_BYTES
    return ((1 << (last - first + 1)) - 1) << first


class RecordMarks:
    """A bit for each record of a segment where it begins, and one where it ends: they are checked as a whole.

    4 KiB for each MiB. Where records end is known for good; that they begin counts.
    """

    def __init__(self) -> None:
        self._begins = bytearray()
        self._ends = bytearray()

    def covers(self, extent: Extent, position: int, count: int) -> bool:
        byte, bit = divmod(extent.offset // RECORD_UNIT_BYTES, 8)
        begins = self._begins  # `clear` replaces it
        return byte < len(begins) and bool(begins[byte] >> bit & 1)

    def add(self, extent: Extent, position: int, count: int) -> None:
        if position or count < extent.length:
            return
        _set_bit(self._ends, (extent.offset + extent.length - 1) // RECORD_UNIT_BYTES)
        _set_bit(self._begins, extent.offset // RECORD_UNIT_BYTES)

    def withdraw(self, offset: int, count: int) -> None:
        first, stop = offset // _BYTE_COVERS, (offset + count) // _BYTE_COVERS
        begins = self._begins
        stop = min(stop, len(begins))
        if first < stop:
            begins[first:stop] = bytes(stop - first)
        byte = len(begins[:first].rstrip(b"\0")) - 1
        if byte >= 0:  # the last record that begins before may reach into the part
            bit = begins[byte].bit_length() - 1
            ends_before = self._ends[byte] >> bit or self._ends[byte + 1 : first].strip(b"\0")
            if not ends_before:
                begins[byte] &= ~(1 << bit)

    def clear(self) -> None:
        self._begins = bytearray()
        self._ends = bytearray()


def _set_bit(bits: bytearray, number: int) -> None:
    byte, bit = divmod(number, 8)
    if byte >= len(bits):
        bits.extend(bytes(byte + 1 - len(bits)))
    bits[byte] |= 1 << bit


class _Written(NamedTuple):
    """From where on a file holds what this process wrote, and in which state of it (`Residency.state`)."""

    first: int
    state: tuple[int, ...]


class BlockFile(SharedFile):
    """An open file, shared by its readers and by the threads that work for them."""

    def __init__(self, descriptor: int, *, is_segment: bool = False, is_mappable: bool = True) -> None:
        """`is_mappable`: whether the system tells what stays in memory (`page_cache.is_supported`)."""
        super().__init__(descriptor)
        self._is_segment = is_segment
        self._is_mappable = is_mappable
        self._marks: ChunkMarks | RecordMarks = RecordMarks() if is_segment else ChunkMarks()
        self.withdrawals = 0
        """Grows when marks have been taken away, before what they stood for can look as if it were known again."""
        self._pages: MappedPages | None = None
        self._state: Fingerprint | None = None
        self._written: _Written | None = None
        self._verifying = threading.Lock()

    def intact(self, extent: Extent, position: int, count: int) -> bool:
        """Return True if bytes of a block are verified and unchanged in memory. Never blocks."""
        try:
            if self._pages is None or fingerprint(self.descriptor) != self._state:
                return False
        except OSError:
            return False
        # Marks are looked at last: a thread that finds the file changed clears them, and then knows its new state.
        return self.stayed(extent, position, count)

    def stayed(self, extent: Extent, position: int, count: int, since: int = -1) -> bool:
        """As `model.SpanFile.stayed`; `since`: `withdrawals` before the bytes were found intact, if that is known."""
        pages, withdrawals = self._pages, self.withdrawals
        if pages is None:
            return False
        if since != withdrawals and not self._marks.covers(extent, position, count):
            return False
        try:
            if not pages.present(extent.offset + position, count):
                return False
        except OSError:
            return False
        # A page that has just been mapped anew was withdrawn before (`_map`).
        return self.withdrawals == withdrawals or self._marks.covers(extent, position, count)

    def was_written(self, first: int, residency: Residency) -> None:
        """Note that this process has written the whole file.

        From byte `first` on it holds what was given to be written, as long as that waits to be written to the device.
        """
        with suppress(OSError):  # then its bytes are read and checked, as those of every other file
            self._written = _Written(first, residency.state(self.descriptor))

    def unwritten(self, residency: Residency, offset: int, count: int) -> bool:
        """Return True if bytes need no check: this process wrote them, and the device lacks them. Never blocks."""
        written = self._written
        if written is None or offset < written.first or not residency.unwritten(self.descriptor, offset, count):
            return False
        try:
            return residency.state(self.descriptor) == written.state
        except OSError:
            return False

    def verify(self, extent: Extent, position: int, count: int) -> None:
        """Read and check all chunks that bytes of a block lie in.

        They are `intact` from then on, as long as they stay in memory. Blocks. BlockDamaged when they are not what was
        written.
        """
        first, stop = self._checked_part(extent, position, count)
        with self._verifying:  # one reader's work is of use to the others, and only one may map pages
            self._verify(extent, first, stop - first)

    def verify_at_once(self, extent: Extent, position: int, count: int) -> bool:
        """`verify` bytes that are in memory and few; whether they are intact then.

        False where there is anything to wait for, and where they are damaged: `verify` says so. A thread that is handed
        so little costs ten times as much.
        """
        first, stop = self._checked_part(extent, position, count)
        if not self._is_mappable or stop - first > VERIFIED_AT_ONCE_BYTES_MAX:
            return False
        if not self._verifying.acquire(blocking=False):
            return False
        try:
            pages = self._prepared()
            if pages is None or not pages.in_memory(extent.offset + first, stop - first):
                return False
            self._verify(extent, first, stop - first)
        except (BlockDamaged, OSError):
            return False
        finally:
            self._verifying.release()
        return self.intact(extent, position, count)

    def _checked_part(self, extent: Extent, position: int, count: int) -> tuple[int, int]:
        """From where to where bytes of a block are checked together with some of them."""
        return (0, extent.length) if self._is_segment else chunk_aligned(extent, position, count)

    def _verify(self, extent: Extent, first: int, count: int) -> None:
        """`verify`, by who has the lock."""
        if self.intact(extent, first, count):
            return
        mapped = self._map(extent.offset + first, count)
        check(self.descriptor, extent, first, count)
        if mapped is not None and mapped.present(extent.offset + first, count) and self._is_unchanged():
            self._marks.add(extent, first, count)

    def verify_unread(
        self,
        extent: Extent,
        position: int,
        count: int,
        *,
        reads_on: bool,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """`verify` bytes that may have to come from the device, a step at a time, as long as they are wanted.

        `reads_on`: what follows them in the block is wanted, too.
        """
        reads_on = reads_on and not self._is_segment
        for start in range(position, position + count, READ_STEP_BYTES):
            step = min(READ_STEP_BYTES, position + count - start)
            if not is_wanted():
                return
            if not self.intact(extent, start, step):
                _bring_in(self.descriptor, extent.offset + start, step, reads_on=reads_on)
                self.verify(extent, start, step)

    def make_ready(self, extent: Extent, position: int, count: int) -> None:
        """Bring bytes into memory for `verify_at_once`, or verify them if they are too many. Blocks."""
        first, stop = self._checked_part(extent, position, count)
        if self._is_mappable and stop - first <= VERIFIED_AT_ONCE_BYTES_MAX:
            _bring_in(self.descriptor, extent.offset + first, stop - first, reads_on=False)
        else:
            self.verify_unread(extent, position, count, reads_on=position + count == extent.length)

    def distrust(self) -> None:
        """Make all bytes be read and checked again: some of them were wrong, or could not be sent."""
        self._state = self._written = None  # the file is a new one then; never waits for a thread that verifies

    def close_file(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None:
            pages.close()
        super().close_file()

    def _map(self, offset: int, count: int) -> MappedPages | None:
        """Map the missing pages of a part, and withdraw their marks; None if that is impossible."""
        try:
            pages = self._prepared()
            if pages is None or offset + count > pages.size_bytes:
                return None
            for first, size in pages.absent_runs(offset, count):
                self._marks.withdraw(first, size)
                self.withdrawals += 1
                pages.map(first, size)
        except OSError:  # `check` says what is wrong with the file; without pages it is read each time
            return None
        return pages

    def _prepared(self) -> MappedPages | None:
        """Return the mapping, and forget what was checked of another state of the file."""
        state = fingerprint(self.descriptor)
        if state != self._state:
            self._marks.clear()
            self.withdrawals += 1
            self._state = state
        if self._pages is None and self._is_mappable:
            size_bytes = max(SEGMENT_MAPPED_BYTES, state[2]) if self._is_segment else state[2]
            self._pages = MappedPages(self.descriptor, max(size_bytes, PAGE_BYTES))
        return self._pages

    def _is_unchanged(self) -> bool:
        try:
            return fingerprint(self.descriptor) == self._state
        except OSError:
            return False


BlockLease: TypeAlias = FileLease[BlockFile]


def lease_of(descriptor: int, *, is_segment: bool = False, is_mappable: bool = True) -> BlockLease:
    return FileLease(BlockFile(descriptor, is_segment=is_segment, is_mappable=is_mappable))


FILES_OPEN_MAX = 32_768
"""A descriptor, a mapping and about a KiB each; 256 GiB in blocks of 8 MiB, or as many small objects in segments."""

LOOKED_AT_ONCE = 512

_MAPPINGS_MAX = 65_530
"""Default of `vm.max_map_count`."""


class OpenFiles:
    """The most recently used open files, `files_max` at most. Event loop only, except `keep` and `drop`."""

    def __init__(self, files_max: int | None = None) -> None:
        self._files_max = _affordable() if files_max is None else files_max
        self._leases: OrderedDict[str, BlockLease] = OrderedDict()

    def get(self, file: str) -> BlockLease | None:
        kept = self._leases.get(file)
        if kept is None:
            return None
        try:
            self._leases.move_to_end(file)
            return kept.share()
        except (KeyError, LeaseEnded):  # dropped by another thread since
            return None

    def opened(self, extent: Extent, open_published: Callable[[Extent], BlockLease]) -> BlockLease:
        """Return a lease on an extent's file. Raises, and if it opens it blocks, as `BlockStore.open_published`."""
        lease = self.get(extent.file)
        if lease is None:
            lease = open_published(extent)
            self.keep(extent.file, lease)
        return lease

    def keep(self, file: str, opened: BlockLease) -> None:
        """Keep a file open by a lease of its own."""
        if file in self._leases:
            return
        self._leases[file] = opened.share()
        if len(self._leases) > self._files_max:
            self._leases.popitem(last=False)[1].close()

    def drop(self, *files: str) -> None:
        """Let go of files that are gone, or do not hold what they should. Any thread."""
        for file in files:
            lease = self._leases.pop(file, None)
            if lease is not None:
                lease.close()

    async def drop_unlinked(self, on_disk_thread: Callable[..., Awaitable[list[str]]]) -> None:
        """Let go of those that have been evicted. `on_disk_thread` has a thread call a function with its arguments."""
        names = list(self._leases)
        for start in range(0, len(names), LOOKED_AT_ONCE):
            some = names[start : start + LOOKED_AT_ONCE]
            leases = [(name, lease) for name in some if (lease := self._shared(name)) is not None]
            self.drop(*await on_disk_thread(_unlinked, leases))

    def _shared(self, file: str) -> BlockLease | None:
        try:
            return self._leases[file].share()
        except (KeyError, LeaseEnded):
            return None

    def close(self) -> None:
        while self._leases:
            self._leases.popitem()[1].close()


def _unlinked(leases: Sequence[tuple[str, BlockLease]]) -> list[str]:
    """Return the open files that have no name any more or cannot be looked at; end the leases. Blocks."""
    found = []
    for file, lease in leases:
        links = 0
        with lease, suppress(OSError):
            links = os.fstat(lease.descriptor).st_nlink
        if not links:
            found.append(file)
    return found


def _affordable() -> int:
    """Half of the descriptors and mappings that the process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    mappings = _MAPPINGS_MAX
    with suppress(OSError, ValueError):  # an unreadable setting has its usual value
        mappings = int(Path("/proc/sys/vm/max_map_count").read_text())
    descriptors = FILES_OPEN_MAX if soft == resource.RLIM_INFINITY else soft // 2
    return max(1, min(FILES_OPEN_MAX, descriptors, mappings // 2))

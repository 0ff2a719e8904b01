"""Pages of a file that have stayed in memory since this process verified them: zero-copy rests on it.

A page that was verified may leave memory and come back from the device, wrong, because of any program. "Verified once,
and in memory now" proves nothing. A page table entry does: the kernel removes it before it takes the page away, and
only this process can put one into its own mapping. So as long as the entry is there, the page is the one that was
mapped.

    map the pages → read and verify them → still mapped?     they are verified, as long as they stay mapped

Three things keep this sound:

- No code touches the mapping. It has access rights only for the moment in which pages are mapped, so neither a stray
  access nor a truncated file can hurt the process, and nothing is mapped by accident.
- The kernel maps neighbours of a page along with it ("fault-around"), never beyond the memory area (VMA). Changing the
  rights of exactly the missing pages makes them an area of their own for that moment.
- A page that is mapped anew may hold other bytes than those that were verified. Its marks are withdrawn before it is
  mapped (`BlockFile.verify`), and one thread at a time maps pages of a file.

Without pagemap (/proc hidden, gVisor) or MADV_POPULATE_READ (before Linux 5.14) `is_supported` says no, and every byte
is read and verified each time. `Residency` answers a smaller question, and promises nothing: whether bytes are in
memory just now, and whether they wait to be written to the device.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import tempfile
from pathlib import Path

from gateway.blocks.layout import CHUNK_BYTES

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PAGE_MASK = -PAGE_BYTES

_PROT_NONE, _PROT_READ, _MAP_SHARED = 0, 1, 1
_MADV_RANDOM, _MADV_POPULATE_READ = 1, 22
_MAP_FAILED = ctypes.c_void_p(-1).value

_SCAN = (3 << 30) | (96 << 16) | (ord("f") << 8) | 16
"""PAGEMAP_SCAN: _IOWR('f', 16, struct pm_scan_arg)."""
_PAGE_IS_PRESENT = 1 << 3
_SCAN_RESULT = (ctypes.c_uint64 * 3)()
_SCAN_FOR_ABSENT = struct.pack(
    "=12Q",
    *(96, 0, 0, 0, 0, ctypes.addressof(_SCAN_RESULT), 1, 1),
    *(_PAGE_IS_PRESENT, _PAGE_IS_PRESENT, 0, _PAGE_IS_PRESENT),
)
"""Asks for the first page that is not present, if there is one: the category is inverted. The part is filled in."""
_SCANNED_PART, _SCANNED_PART_AT = struct.Struct("=2Q"), 16
_ENTRY_BYTES = 8
_PRESENT_BIT = 0x80
"""Bit of an entry's last byte, little-endian."""

_TRIAL_PAGES = 64
_NOT_OF_THIS_SYSTEM = {errno.EINVAL, errno.ENOSYS, errno.ENODEV, errno.EOPNOTSUPP}
"""The kernel's errors for a call that it or the file system does not know."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_mincore = ctypes.PyDLL(None, use_errno=True).mincore
"""The interpreter's lock is kept: it waits for nothing."""
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class _PageTable:
    """This process's own page table, as the kernel shows it."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._scan = True

    def forget(self) -> None:
        """After a fork: what is open shows the parent's."""
        self.__init__()  # type: ignore[misc]

    def all_present(self, start: int, stop: int) -> bool:
        """Return True if all pages from address `start` to `stop` are mapped. Raises OSError if unknown."""
        if self._scan:
            argument = bytearray(_SCAN_FOR_ABSENT)  # one of its own, as the kernel writes into it
            _SCANNED_PART.pack_into(argument, _SCANNED_PART_AT, start, stop)
            try:
                return not fcntl.ioctl(self._open(), _SCAN, argument, True)
            except OSError:  # before Linux 6.7, or forbidden
                self._scan = False
        return min(self._entries(start, stop)) >= _PRESENT_BIT

    def absent_runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts from `start` to `stop` that are not mapped, as addresses. Raises OSError."""
        entries = self._entries(start, stop)
        if entries.isascii():  # none has the bit: the most frequent case
            return [(start, stop)]
        runs: list[tuple[int, int]] = []
        for number, entry in enumerate(entries):
            if entry >= _PRESENT_BIT:
                continue
            address = start + number * PAGE_BYTES
            if runs and runs[-1][1] == address:
                runs[-1] = runs[-1][0], address + PAGE_BYTES
            else:
                runs.append((address, address + PAGE_BYTES))
        return runs

    def _entries(self, start: int, stop: int) -> bytes:
        """Return the last byte of each page's entry."""
        count = (stop - start) // PAGE_BYTES * _ENTRY_BYTES
        entries = os.pread(self._open(), count, start // PAGE_BYTES * _ENTRY_BYTES)
        if len(entries) != count:
            raise OSError("the page table is shorter than the address space")
        return entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]

    def _open(self) -> int:
        if self._descriptor < 0:
            self._descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptor


_page_table = _PageTable()
os.register_at_fork(after_in_child=_page_table.forget)


class MappedPages:
    """The mapping of one open file. Offsets and counts are bytes of the file; a page counts as a whole.

    Any thread may ask `present`; one at a time may map. OSError where the system has no more mappings to give.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        address = _libc.mmap(None, self.size_bytes, _PROT_NONE, _MAP_SHARED, descriptor, 0)
        if address in (None, _MAP_FAILED):
            raise _error("mmap")
        self._address: int = address
        self._is_guarded = True
        """True while the mapping has no access rights: with rights, neighbours might be mapped by accident."""
        # Else each page that is mapped has the device asked for its neighbours, too. Who knows that pages have to come
        # from the device tells it of all of them before.
        _libc.madvise(address, self.size_bytes, _MADV_RANDOM)

    def close(self) -> None:
        _libc.munmap(self._address, self.size_bytes)

    def present(self, offset: int, count: int) -> bool:
        """Return True if all pages of a part have stayed in memory since they were mapped."""
        stop = offset + count
        if stop > self.size_bytes or not self._is_guarded:
            return False
        address = self._address
        return _page_table.all_present(address + offset & _PAGE_MASK, address + stop + PAGE_BYTES - 1 & _PAGE_MASK)

    def in_memory(self, offset: int, count: int) -> bool:
        """Return True if all pages of a part are in memory now, whole, mapped or not. Never blocks.

        Pages that are on their way from the device are in the page cache, too, and `Residency` counts them.
        """
        stop = offset + count
        if stop > self.size_bytes:
            return False
        start = self._address + offset & _PAGE_MASK
        pages = (self._address + stop + PAGE_BYTES - 1 - start) // PAGE_BYTES
        found = ctypes.create_string_buffer(pages)
        return not _mincore(start, pages * PAGE_BYTES, found) and found.raw.count(b"\x01") == pages

    def absent_runs(self, offset: int, count: int) -> list[tuple[int, int]]:
        """Return the first byte and count of each run of pages of a part that are not mapped."""
        first, last = offset // PAGE_BYTES, (offset + count - 1) // PAGE_BYTES
        runs = _page_table.absent_runs(self._address + first * PAGE_BYTES, self._address + (last + 1) * PAGE_BYTES)
        return [(start - self._address, stop - start) for start, stop in runs]

    def map(self, offset: int, count: int) -> None:
        """Map whole pages, none of them mapped, and no others. Blocks while they come from the device. OSError."""
        start = self._address + offset
        try:
            if _libc.mprotect(start, count, _PROT_READ):
                raise _error("mprotect")
            if _libc.madvise(start, count, _MADV_POPULATE_READ):
                raise _error("madvise")
        finally:  # a call that fails may have changed a part
            if _libc.mprotect(start, count, _PROT_NONE):
                self._is_guarded = False


def is_supported(directory: Path) -> bool:
    """Return True if this system keeps the module's promises for files of a directory: tested with one. Blocks.

    An error of the disk (it is full, say) does not count against the system: then the test uses a file in memory.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_TRIAL_PAGES * PAGE_BYTES))
            file.flush()
            return _keeps_promises(file.fileno())
    except OSError as error:
        if error.errno in _NOT_OF_THIS_SYSTEM:
            return False
    try:
        descriptor = os.memfd_create("forebay-pages", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, _TRIAL_PAGES * PAGE_BYTES)
            return _keeps_promises(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        return False


def _keeps_promises(descriptor: int) -> bool:
    mapped = MappedPages(descriptor, _TRIAL_PAGES * PAGE_BYTES)
    try:
        mapped.map(8 * PAGE_BYTES, 2 * PAGE_BYTES)
        runs = mapped.absent_runs(0, _TRIAL_PAGES * PAGE_BYTES)
        as_told = mapped.present(8 * PAGE_BYTES, 1) and not mapped.present(0, 1)
    finally:
        mapped.close()
    return as_told and runs == [(0, 8 * PAGE_BYTES), (10 * PAGE_BYTES, (_TRIAL_PAGES - 10) * PAGE_BYTES)]


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


_CACHESTAT = 451

_AT_EMPTY_PATH, _BASIC_STATS = 0x1000, 0x7FF
_STATX = struct.Struct("=32xQQ48xqI4xqI12xQ112x")
"""Inode and size, the times at which they and the bytes changed, in seconds and nanoseconds, and the device."""


class Residency:
    """Answers for one thread: the buffers of the system calls are reused."""

    def __init__(self, *, cachestat: bool = True) -> None:
        self._cachestat = cachestat
        # The interpreter's lock is kept: these calls wait for nothing, and to get it back takes longer than they do.
        self._system_call = ctypes.PyDLL(None, use_errno=True).syscall
        self._range = (ctypes.c_uint64 * 2)()
        self._counts = (ctypes.c_uint64 * 5)()
        self._byte = bytearray(1)
        self._statx = ctypes.PyDLL(None, use_errno=True).statx
        self._facts = ctypes.create_string_buffer(_STATX.size)

    def state(self, descriptor: int) -> tuple[int, ...]:
        """Return what changes whenever a file's bytes may have changed. Raises OSError."""
        if self._statx(descriptor, b"", _AT_EMPTY_PATH, _BASIC_STATS, self._facts):
            raise _error("statx")
        return _STATX.unpack(self._facts)

    def resident(self, descriptor: int, offset: int, count: int) -> bool:
        """Return True if all of `count` bytes at `offset` were in memory just now."""
        if not self._cachestat:
            return self._sampled(descriptor, offset, count)
        cached_pages = self._cached_pages(descriptor, offset, count)
        if cached_pages is None or (cached_pages == 0 and self._blind(descriptor, offset)):
            self._cachestat = False
            return self._sampled(descriptor, offset, count)
        return cached_pages == (offset + count - 1) // PAGE_BYTES - offset // PAGE_BYTES + 1

    def unwritten(self, descriptor: int, offset: int, count: int) -> bool:
        """Return True if all of these bytes are in memory and not yet written to the device.

        Such bytes are those written to the file, as bytes read from the device do not wait to be written. False if
        unknown.
        """
        pages = (offset + count - 1) // PAGE_BYTES - offset // PAGE_BYTES + 1
        if not self._cachestat or self._cached_pages(descriptor, offset, count) is None:
            return False
        return int(self._counts[1]) == pages

    def _cached_pages(self, descriptor: int, offset: int, count: int) -> int | None:
        self._range[0], self._range[1] = offset, count
        if self._system_call(_CACHESTAT, descriptor, self._range, self._counts, 0):
            return None
        return self._counts[0]

    def _blind(self, descriptor: int, offset: int) -> bool:
        """Return True if a byte is in memory and cachestat denies it, twice: a thread may be reading the file."""
        return self._readable_now(descriptor, offset) and self._cached_pages(descriptor, offset, 1) == 0

    def _sampled(self, descriptor: int, offset: int, count: int) -> bool:
        stop = offset + count
        ends = ((start, min(start + CHUNK_BYTES, stop) - 1) for start in range(offset, stop, CHUNK_BYTES))
        return all(
            self._readable_now(descriptor, first) and self._readable_now(descriptor, last) for first, last in ends
        )

    def _readable_now(self, descriptor: int, offset: int) -> bool:
        try:
            return os.preadv(descriptor, [self._byte], offset, os.RWF_NOWAIT) == 1
        except OSError:  # EAGAIN: not in memory; EOPNOTSUPP: this file system cannot tell, so a thread reads
            return False

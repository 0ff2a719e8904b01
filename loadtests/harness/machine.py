"""Cores, CPU time and memory of process trees, as /proc shows them (Linux)."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROCESS_MADVISE, _MADV_PAGEOUT = 440, 21
_libc = ctypes.CDLL(None, use_errno=True)

_THREAD_NUMBER = re.compile(r"_\d+$")
_TOUCHED_BYTES_MAX = 4 * 1024**3
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_CORES = sorted(os.sched_getaffinity(0))


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """What is started inside inherits these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def server_core() -> set[int]:
    """The core that servers under test are held to: the first."""
    return set(_CORES[:1])


def client_cores() -> set[int]:
    """Everything else, or the same core where there is one only."""
    return set(_CORES[1:] or _CORES)


def all_cores() -> set[int]:
    """For what is no single process: the client shares them."""
    return set(_CORES)


def prepare_client() -> None:
    """Hold this process to the client's cores; let it and what it starts open as many files as the system allows."""
    os.sched_setaffinity(0, client_cores())
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tree(root: int) -> list[int]:
    """`root` and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def cpu_seconds(root: int) -> float:
    """User and system time of `root` and its living descendants."""
    return sum((int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND for pid in tree(root) if (fields := _stat(pid)))


def cpu_nanoseconds_by_thread(pid: int) -> Counter[str]:
    """User and system time of the process's threads by name; the first of them is "loop".

    Threads of a pool (NAME_0, NAME_1, ...) count together. Time of threads that have ended is not in it.
    """
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name = (task / "comm").read_text(encoding="utf-8", errors="replace").strip()
            nanoseconds = int((task / "schedstat").read_text(encoding="utf-8").split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended while we looked
        found["loop" if task.name == str(pid) else _THREAD_NUMBER.sub("", name)] += nanoseconds
    return found


def cpu_seconds_of_ended_children() -> float:
    """User and system time of all children of this process that have ended and been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def peak_memory_bytes(pid: int) -> int:
    """The most that the process has had resident (VmHWM)."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no VmHWM of process {pid}")


def anonymous_bytes(pid: int) -> int:
    """What the process has resident without mapped files (RssAnon)."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no RssAnon of process {pid}")


def free_bytes() -> int:
    """Memory that nothing uses, not even the page cache (MemFree)."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemFree:"):
            return int(line.split()[1]) * 1024
    raise LookupError("no MemFree")


def touch_memory(size_bytes: int) -> bool:
    """Touch `size_bytes` of free memory and let go of it. Return False if less was free, and a part was touched.

    A virtual machine may give free memory back to its host; the first use of such a page (4 KiB) then costs 4 to
    11 µs. The pages that this function touches are the ones that the test uses next.
    """
    given = min(size_bytes, free_bytes() * 3 // 4, _TOUCHED_BYTES_MAX)
    if given >= mmap.PAGESIZE:
        mmap.mmap(-1, given, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()
    return given >= size_bytes


def forget_pages(directory: Path) -> None:
    """Drop the files below `directory` from the page cache, and no other file."""
    os.sync()
    for parent, _, names in os.walk(directory):
        for name in names:
            forget_file(os.path.join(parent, name))


def page_out(pid: int, directory: Path) -> None:
    """Take from a process what it has mapped of files below `directory`: those pages stay when asked to be forgotten.

    Takes root (process_madvise(2) with MADV_PAGEOUT), and leaves alone what another process has mapped, too.
    """
    process = os.pidfd_open(pid)
    try:
        for start, stop in _mapped(pid, directory):
            vector = (ctypes.c_uint64 * 2)(start, stop - start)
            if _libc.syscall(_PROCESS_MADVISE, process, vector, 1, _MADV_PAGEOUT, 0) < 0:
                number = ctypes.get_errno()
                raise OSError(number, f"mapped pages cannot be dropped: {os.strerror(number)}; this takes root")
    finally:
        os.close(process)


def _mapped(pid: int, directory: Path) -> Iterator[tuple[int, int]]:
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{directory}/"):
            start, _, stop = fields[0].partition("-")
            yield int(start, 16), int(stop, 16)


def forget_file(path: str | Path) -> None:
    """Drop what was synced of a file from the page cache."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return  # evicted while we walked
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _stat(pid: int) -> list[str]:
    """The fields behind the process's name: state, parent, ...; nothing when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []

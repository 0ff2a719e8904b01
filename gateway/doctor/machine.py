"""This machine: the disk under the cache directory, and the limits that processes have. Everything blocks."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from gateway.admin.formatting import size_text
from gateway.config import Settings
from gateway.config.defaults import disk_usage, file_system_kind
from gateway.doctor import Area, Finding
from gateway.serve.shared_directory import SHARED_MEMORY, room_needed_bytes
from gateway.serve.system import DESCRIPTORS_ADVISED, DESCRIPTORS_MIN
from gateway.shared.arena import names_max

DISK, LIMITS = Area("disk"), Area("limits")

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_OF_A_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "afs", "gpfs", "beegfs", "glusterfs"})
_FREE_SHARE_MIN = 0.05
_GROUPS = Path("/sys/fs/cgroup")

_SYNC_SECONDS = 1.0
_SYNCS_MAX = 100
_SYNC_BYTES = 4096
_SLOW_SYNC_SECONDS = 0.010

_WORKER_BYTES = 300 * 2**20
"""The most memory that a worker takes (docs/operations.md), without the page cache."""


def disk(settings: Settings) -> Iterator[Finding]:
    """Its type, its room, whether it can be written, and how fast it is at what an acknowledged write waits for."""
    directory = settings.cache.directory
    kind = file_system_kind(directory)
    existing = next((path for path in (directory, *directory.parents) if path.exists()), Path("/"))
    yield from _file_system(settings, kind)
    yield from _room(directory)
    if existing.stat().st_uid not in (0, os.geteuid()) and existing == directory:
        yield DISK.error(
            f"{directory} belongs to user {existing.stat().st_uid}, and this is user {os.geteuid()}",
            "change its owner, or give Forebay a directory of its own",
        )
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield DISK.error(f"{existing} cannot be written by user {os.geteuid()}", "change its owner, or cache.directory")
    else:
        yield _sync_speed(settings, existing)


def _file_system(settings: Settings, kind: str) -> Iterator[Finding]:
    directory, is_kept = settings.cache.directory, settings.cache.persistent
    says_kept = "cache.persistent is true, and " if is_kept else ""
    if kind in _IN_MEMORY:
        found = f"{says_kept}{directory} lies in memory ({kind}): a restart of the machine or the pod loses it"
        advice = "put cache.directory on a local disk" + (", or set cache.persistent = false" if is_kept else "")
        yield DISK.error(found, advice) if is_kept else DISK.warning(found, advice)
    elif kind == "overlay":
        found = f"{says_kept}{directory} lies in a container's own layer ({kind}): it goes with the container"
        yield (DISK.error if is_kept else DISK.warning)(found, "mount a volume of a local disk there")
    elif kind in _OF_A_NETWORK or kind.startswith("fuse"):
        yield DISK.error(
            f"{directory} lies on {kind}: memory-mapped databases and locks need a local file system",
            "put cache.directory on a local disk: ext4, xfs, btrfs or zfs",
        )
    elif kind:
        lasting = "said to outlive restarts" if is_kept else "not said to outlive restarts (cache.persistent)"
        yield DISK.ok(f"{directory} lies on {kind}, {lasting}")
    else:
        yield DISK.note(f"the system does not tell on what file system {directory} lies")


def _room(directory: Path) -> Iterator[Finding]:
    usage = disk_usage(directory)
    if usage is None:
        yield DISK.error(f"the file system of {directory} cannot be measured", "see dmesg, and what is mounted there")
        return
    found = f"{size_text(usage.free)} of {size_text(usage.total)} free"
    if usage.free < _FREE_SHARE_MIN * usage.total:
        yield DISK.warning(f"{found}: nearly full", "make room, or make cache.capacity smaller")
    else:
        yield DISK.ok(found)


def _sync_speed(settings: Settings, directory: Path) -> Finding:
    """4 KiB, written and synced again and again for a second at most; the file is gone afterwards."""
    seconds: list[float] = []
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            until = time.monotonic() + _SYNC_SECONDS
            while len(seconds) < _SYNCS_MAX and time.monotonic() < until:
                begun = time.monotonic()
                os.pwrite(file.fileno(), b"\0" * _SYNC_BYTES, len(seconds) * _SYNC_BYTES)
                os.fsync(file.fileno())
                seconds.append(time.monotonic() - begun)
    except OSError as failure:
        return DISK.error(
            f"{directory} takes no file: {failure.strerror}", "see dmesg, quotas, and what is mounted there"
        )
    median = statistics.median(seconds)
    found = f"a sync takes {median * 1000:.2g} ms, {max(seconds) * 1000:.2g} ms at most (4 KiB, {len(seconds)} times)"
    is_waited_for = any(slot.write == "back" for slot in settings.slots)
    if median > _SLOW_SYNC_SECONDS and is_waited_for:
        return DISK.warning(
            f"{found}: each written-back PUT waits for two or more", "put cache.directory on an NVMe SSD"
        )
    return DISK.ok(found)


def limits(settings: Settings) -> Iterator[Finding]:
    """Open files, memory, processors, /dev/shm."""
    yield from _open_files()
    yield _memory(settings)
    yield _processors(settings)
    yield _shared_memory(settings)


def _open_files() -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"raise it to {DESCRIPTORS_ADVISED} or more: ulimit -n, LimitNOFILE= of systemd, --ulimit nofile of docker"
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_MIN:
        yield LIMITS.error(f"{hard} open files at most: the gateway does not start", advice)
    elif hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_ADVISED:
        yield LIMITS.warning(f"{hard} open files at most: connections and open blocks need one each", advice)
    else:
        yield LIMITS.ok("any number of open files" if hard == resource.RLIM_INFINITY else f"{hard} open files at most")


def _memory(settings: Settings) -> Finding:
    processes = settings.server.workers + 2
    needed = processes * _WORKER_BYTES
    limit = _group_limit("memory.max", _whole)
    if limit is None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return LIMITS.ok(f"{size_text(total)} of memory, and no limit of this group of processes")
    found = f"{size_text(int(limit))} of memory at most for this group of processes, the page cache included"
    if limit < needed:
        return LIMITS.warning(
            f"{found}: {processes} processes may take {size_text(needed)}", "raise the limit, or lower server.workers"
        )
    return LIMITS.ok(found)


def _processors(settings: Settings) -> Finding:
    count = float(len(os.sched_getaffinity(0)))
    quota = _group_limit("cpu.max", _quota)
    if quota is not None:
        count = min(count, quota)
    workers = settings.server.workers
    found = f"{count:g} processor{'' if count == 1 else 's'} for {workers} worker{'' if workers == 1 else 's'}"
    if workers > count:
        return LIMITS.warning(
            f"{found}: workers take turns", f"set server.workers = {max(1, int(count))}, or give more"
        )
    return LIMITS.ok(found)


def _shared_memory(settings: Settings) -> Finding:
    needed = room_needed_bytes(settings.server.workers, names_max(len(settings.slots)))
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        free = 0
    if free < needed:
        return LIMITS.warning(
            f"{SHARED_MEMORY} has {size_text(free)}: metrics and locks need {size_text(needed + 2**20)}, and lie on "
            "the disk otherwise, where they wait for it",
            "mount a larger one: --shm-size of docker, an emptyDir with medium: Memory in Kubernetes",
        )
    return LIMITS.ok(f"{SHARED_MEMORY} has {size_text(free)} free")


def _whole(text: str) -> float | None:
    return None if text.strip() == "max" else float(text)


def _quota(text: str) -> float | None:
    """`cpu.max`: how much of how long, in microseconds."""
    quota, _, period = text.strip().partition(" ")
    return None if quota == "max" else float(quota) / float(period or 100_000)


def _group_limit(name: str, parse: Callable[[str], float | None]) -> float | None:
    """Return the tightest limit of this process's control group and all above it (version 2); None: there is none."""
    found: list[float] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    path = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    group = _GROUPS / path
    for one in (group, *group.parents):
        if one.is_relative_to(_GROUPS):
            with suppress(OSError, ValueError):  # the topmost group has no limits
                value = parse((one / name).read_text())
                found += [value] if value is not None else []
    return min(found, default=None)

"""Rules about write-back buffers: where their settings belong, and whether the disk can hold them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gateway.config.defaults import disk_usage, held_bytes
from gateway.config.settings import Settings
from gateway.config.units import format_size
from gateway.core.checkpoint_patterns import too_many
from gateway.core.errors import ConfigError

_OF_BUFFERS = ("buffer_bytes", "checkpoints", "upload_expiry_seconds")

_OF_WRITE_BACK = (
    "when_buffer_full",
    "unflushed_bytes_max",
    "unflushed_age_seconds_max",
    "order",
    "markers",
    "manifests",
    "etag",
    "flush",
    "keep_last",
)


def buffer_problems(settings: Settings) -> Iterator[ConfigError]:
    """Report settings that would do nothing, and a disk that could never hold what is promised."""
    for i, slot in enumerate(settings.slots):
        refused = {name: "needs write = back" for name in _OF_WRITE_BACK if slot.write != "back"}
        if not slot.is_buffered:
            refused |= dict.fromkeys(_OF_BUFFERS, "needs write = back or scratch")
        if not (slot.write == "scratch" or (slot.write == "back" and slot.flush != "all")):
            refused["scratch_expiry_seconds"] = "needs write = scratch, or flush"
        for name, why in refused.items():
            if name in slot.model_fields_set and getattr(slot, name) is not None:
                key = type(slot).model_fields[name].alias or name
                yield ConfigError(f"slots[{i}].{key}", getattr(slot, name), f"{why}, in slot {slot.name}")
        if slot.checkpoints is not None and (why_not := too_many(slot.checkpoints)) is not None:
            yield ConfigError(f"slots[{i}].checkpoints", slot.checkpoints, why_not)
    buffers_bytes = _buffers_bytes(settings)
    disk = disk_usage(settings.cache.directory) if buffers_bytes else None
    if disk is not None and settings.cache.capacity_bytes + buffers_bytes > disk.total:
        sizes_bytes = [(slot.buffer_bytes or 0) * slot.is_buffered for slot in settings.slots]
        largest = sizes_bytes.index(max(sizes_bytes))
        others_bytes = buffers_bytes - sizes_bytes[largest]
        others = f", and the other buffers, {format_size(others_bytes)}" if others_bytes else ""
        allowed = (
            f"of slot {settings.slots[largest].name}: together with cache.capacity, "
            f"{format_size(settings.cache.capacity_bytes)}{others}, at most what the file system of cache.directory "
            f"holds, {disk.total} bytes"
        )
        yield ConfigError(f"slots[{largest}].buffer", format_size(sizes_bytes[largest]), allowed)


def not_fitting(settings: Settings) -> list[str]:
    """Return a warning if the disk has too little. No refusal: acknowledged writes may wait there."""
    buffers_bytes = _buffers_bytes(settings)
    directory, wanted_bytes = settings.cache.directory, settings.cache.capacity_bytes + buffers_bytes
    disk = disk_usage(directory)
    if disk is None or wanted_bytes <= disk.free:
        return []
    room_bytes = disk.free + held_bytes(directory)
    if wanted_bytes <= room_bytes:
        return []
    room = format_size(room_bytes - room_bytes % 2**20)
    taken = "cache.capacity and the write-back buffers take" if buffers_bytes else "cache.capacity takes"
    yielding = "the cache will yield" if buffers_bytes else "the cache will be smaller"
    more = ", and writes will go through or slow down before the buffers are full" if buffers_bytes else ""
    return [
        f"{taken} up to {format_size(wanted_bytes)}, and the file system of {directory} has about {room} "
        f"for them: {yielding}{more}"
    ]


_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def not_lasting(settings: Settings) -> list[str]:
    """Return a warning if the directory should outlive a restart, but is in memory."""
    kind = file_system_kind(settings.cache.directory) if settings.cache.persistent else ""
    if kind not in _IN_MEMORY:
        return []
    return [
        f"cache.persistent is true, and {settings.cache.directory} lies in memory ({kind}): A RESTART OF THE MACHINE "
        "OR THE POD LOSES ACKNOWLEDGED WRITES that are not at the origin yet"
    ]


def file_system_kind(directory: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system that a directory is on, or will be; empty if the system does not say."""
    try:
        path = os.path.realpath(directory)
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = _unescaped(before.split(" ")[4])
        if len(point) >= len(best) and (point == "/" or path == point or path.startswith(f"{point}/")):
            best, kind = point, after.split(" ")[0]
    return kind


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _buffers_bytes(settings: Settings) -> int:
    return sum(slot.buffer_bytes or 0 for slot in settings.slots if slot.is_buffered)

"""Rules about write-back buffers: where their settings belong, and whether the disk can hold them."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.config.defaults import disk_usage, held_bytes
from gateway.config.settings import Settings
from gateway.config.units import format_size
from gateway.errors import ConfigError

_OF_WRITE_BACK = ("buffer_bytes", "buffer_full", "exposure_bytes_max", "exposure_age_seconds_max")


def buffer_problems(settings: Settings) -> Iterator[ConfigError]:
    """Settings that would do nothing, and a disk that could never hold what is promised."""
    for i, slot in enumerate(settings.slots):
        if slot.write == "back":
            continue
        for name in _OF_WRITE_BACK:
            if name in slot.model_fields_set and getattr(slot, name) is not None:
                key = type(slot).model_fields[name].alias or name
                yield ConfigError(f"slots[{i}].{key}", getattr(slot, name), "only together with write = back")
    buffers_bytes = _buffers_bytes(settings)
    disk = disk_usage(settings.cache.directory) if buffers_bytes else None
    if disk is not None and settings.cache.capacity_bytes + buffers_bytes > disk.total:
        allowed = (
            f"together with cache.capacity ({settings.cache.capacity_bytes} bytes) at most what the file system of "
            f"cache.directory holds ({disk.total} bytes)"
        )
        yield ConfigError("slots[].buffer", buffers_bytes, allowed)


def not_fitting(settings: Settings) -> list[str]:
    """A warning where other files on the disk leave too little. No refusal: acknowledged writes may wait there."""
    buffers_bytes = _buffers_bytes(settings)
    disk = disk_usage(settings.cache.directory) if buffers_bytes else None
    if disk is None:
        return []
    wanted_bytes = settings.cache.capacity_bytes + buffers_bytes
    room_bytes = disk.free + held_bytes(settings.cache.directory)
    if wanted_bytes <= room_bytes:
        return []
    return [
        f"cache.capacity and the write-back buffers take up to {format_size(wanted_bytes)}, and the file system of "
        f"{settings.cache.directory} has {format_size(room_bytes)} for them: the cache will yield, and writes will go "
        "through or slow down before the buffers are full"
    ]


def _buffers_bytes(settings: Settings) -> int:
    return sum(slot.buffer_bytes or 0 for slot in settings.slots if slot.write == "back")

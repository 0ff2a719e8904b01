"""Rules over the settings of slots: what goes together, and whether the disk can hold what is promised."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.config.defaults import disk_usage, file_system_kind, held_bytes
from gateway.config.entries import SlotSettings
from gateway.config.settings import Settings
from gateway.config.units import format_duration, format_size
from gateway.core.checkpoint_patterns import too_many
from gateway.core.errors import ConfigError
from gateway.core.prefixes import Prefix

BLOCKS_MIN = 8
"""With room for fewer, a reader's own readahead would push out what it is about to read."""


RESERVED_SLOTS = ("default", "none")
"""Names in metrics and the access log for requests in no configured slot, and in none at all."""


def slot_problems(settings: Settings) -> Iterator[ConfigError]:
    names: set[str] = set()
    prefixes: set[Prefix] = set()
    for i, slot in enumerate(settings.slots):
        if slot.name in RESERVED_SLOTS:
            allowed = f"reserved, like {' and '.join(RESERVED_SLOTS)}: these mean other requests in metrics and logs"
            yield ConfigError(f"slots[{i}].name", slot.name, allowed)
        elif slot.name in names:
            yield ConfigError(f"slots[{i}].name", slot.name, "another slot has this name")
        if slot.prefix in prefixes:
            yield ConfigError(f"slots[{i}].prefix", str(slot.prefix), "another slot has this prefix")
        names.add(slot.name)
        prefixes.add(slot.prefix)
        limit, block_size_bytes = slot.capacity_limit_bytes, slot.block_size_bytes or settings.cache.block_size_bytes
        if limit is not None and not (slot.capacity_bytes or 0) <= limit <= settings.cache.capacity_bytes:
            allowed = (
                f"at least the slot's capacity, {format_size(slot.capacity_bytes or 0)}, and at most cache.capacity, "
                f"{format_size(settings.cache.capacity_bytes)}"
            )
            yield ConfigError(f"slots[{i}].capacity_limit", format_size(limit), allowed)
        elif limit is not None and limit < BLOCKS_MIN * block_size_bytes:
            yield ConfigError(f"slots[{i}].capacity_limit", format_size(limit), enough_blocks(block_size_bytes))
        yield from _authorized(f"slots[{i}]", slot)
        yield from _frozen(f"slots[{i}]", slot)
        yield from _written_back(f"slots[{i}]", slot, persistent=settings.cache.persistent)


def enough_blocks(block_size_bytes: int) -> str:
    size = format_size(block_size_bytes)
    return f"at least {format_size(BLOCKS_MIN * block_size_bytes)}: room for {BLOCKS_MIN} blocks of {size}"


def _authorized(key: str, slot: SlotSettings) -> Iterator[ConfigError]:
    if slot.authorization != "origin":
        if "authorization_ttl_seconds" in slot.model_fields_set:
            ttl = format_duration(slot.authorization_ttl_seconds)
            yield ConfigError(f"{key}.authorization_ttl", ttl, 'needs authorization = "origin"')
    elif slot.is_buffered:
        allowed = (
            'needs write = "through": the origin is to judge each write, and what this node acknowledges '
            f'(write = "{slot.write}") is flushed with the gateway\'s own rights'
        )
        yield ConfigError(f"{key}.authorization", slot.authorization, allowed)


def _frozen(key: str, slot: SlotSettings) -> Iterator[ConfigError]:
    if slot.consistency != "snapshot":
        if slot.snapshot is not None:
            yield ConfigError(f"{key}.snapshot", slot.snapshot, 'needs consistency = "snapshot"')
        return
    if slot.snapshot is None:
        allowed = 'consistency = "snapshot" needs the name of one: make it with forebay snapshot create'
        yield ConfigError(f"{key}.snapshot", None, allowed)
    if slot.mode != "read-only":
        yield ConfigError(f"{key}.mode", slot.mode, 'must be read-only with consistency = "snapshot"')
    if not slot.prefix.bucket:
        yield ConfigError(
            f"{key}.prefix", str(slot.prefix), 'must name a bucket with consistency = "snapshot": s3://bucket/prefix'
        )


def _written_back(key: str, slot: SlotSettings, *, persistent: bool) -> Iterator[ConfigError]:
    if not slot.is_buffered:
        return
    if slot.flush != "all" and slot.order == "strict":
        yield ConfigError(f"{key}.flush", slot.flush, "must be all with order = strict, which leaves out nothing")
    if not persistent:
        allowed = (
            "needs cache.persistent = true: you state that cache.directory outlives the pod and a restart of the "
            "machine, because it holds the only copy of acknowledged writes that are not flushed"
        )
        yield ConfigError(f"{key}.write", slot.write, allowed)
    if slot.mode == "read-only":
        yield ConfigError(f"{key}.write", slot.write, "must be through in a read-only slot, which takes no writes")


def guarantee_problems(settings: Settings) -> Iterator[ConfigError]:
    for direction in ("read", "write"):
        link, total = getattr(settings.origin, f"{direction}_bandwidth_bytes_per_second"), 0
        for i, slot in enumerate(settings.slots):
            guarantee = getattr(slot, f"{direction}_guarantee_bytes_per_second")
            ceiling = getattr(slot, f"{direction}_bandwidth_bytes_per_second")
            if guarantee is None:
                continue
            total += guarantee
            key = f"slots[{i}].{direction}_guarantee"
            if link is None:
                allowed = f"needs origin.{direction}_bandwidth: what the link bears"
                yield ConfigError(key, _rate(guarantee), allowed)
            elif ceiling is not None and guarantee > ceiling:
                allowed = f"at most the slot's {direction}_bandwidth, {_rate(ceiling)}"
                yield ConfigError(key, _rate(guarantee), allowed)
        if link is not None and link != "auto" and total > link:
            allowed = f"all slots together may have at most origin.{direction}_bandwidth, {_rate(link)}"
            yield ConfigError(f"slots[].{direction}_guarantee", _rate(total), allowed)


def _rate(bytes_per_second: int) -> str:
    return f"{format_size(bytes_per_second)}/s"


_INDEX_KEYS = ("index_refresh_seconds", "index_concurrency", "index_inventory")


def index_problems(settings: Settings) -> Iterator[ConfigError]:
    for i, slot in enumerate(settings.slots):
        if not slot.index:
            for name in _INDEX_KEYS:
                if name in slot.model_fields_set:
                    key = type(slot).model_fields[name].alias or name
                    yield ConfigError(f"slots[{i}].{key}", getattr(slot, name), "needs index = true")
            continue
        consistency = slot.consistency
        if consistency not in ("ttl", "immutable"):
            allowed = f"needs consistency = ttl or immutable: with {consistency} no crawl may answer a LIST"
            yield ConfigError(f"slots[{i}].index", True, allowed)
        if not slot.prefix.bucket:
            yield ConfigError(f"slots[{i}].index", True, "needs a prefix that names a bucket")
        refresh = slot.index_refresh_seconds
        if consistency == "ttl" and slot.metadata_ttl_seconds < 2:
            yield ConfigError(
                f"slots[{i}].metadata_ttl", format_duration(slot.metadata_ttl_seconds), "at least 2s with index = true"
            )
        elif consistency == "ttl" and refresh is not None and refresh > slot.metadata_ttl_seconds:
            ttl = format_duration(slot.metadata_ttl_seconds)
            allowed = f"at most metadata_ttl, {ttl}: LIST never answers anything older"
            yield ConfigError(f"slots[{i}].index_refresh", format_duration(refresh), allowed)


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
                given = getattr(slot, name)
                value = list(given) if isinstance(given, tuple) else given  # as it is written
                yield ConfigError(f"slots[{i}].{key}", value, f"{why}, in slot {slot.name}")
        if slot.checkpoints is not None and (why_not := too_many(slot.checkpoints)) is not None:
            yield ConfigError(f"slots[{i}].checkpoints", list(slot.checkpoints), why_not)
    of_buffers_bytes = buffers_bytes(settings)
    disk = disk_usage(settings.cache.directory) if of_buffers_bytes else None
    if disk is not None and settings.cache.capacity_bytes + of_buffers_bytes > disk.total:
        sizes_bytes = [(slot.buffer_bytes or 0) * slot.is_buffered for slot in settings.slots]
        largest = sizes_bytes.index(max(sizes_bytes))
        others_bytes = of_buffers_bytes - sizes_bytes[largest]
        others = f", and the other buffers, {format_size(others_bytes)}" if others_bytes else ""
        allowed = (
            f"of slot {settings.slots[largest].name}: together with cache.capacity, "
            f"{format_size(settings.cache.capacity_bytes)}{others}, at most what the file system of cache.directory "
            f"holds, {disk.total} bytes"
        )
        yield ConfigError(f"slots[{largest}].buffer", format_size(sizes_bytes[largest]), allowed)


def buffers_bytes(settings: Settings) -> int:
    return sum(slot.buffer_bytes or 0 for slot in settings.slots if slot.is_buffered)


def not_fitting(settings: Settings) -> list[str]:
    """Return a warning if the disk has too little. No refusal: acknowledged writes may wait there."""
    of_buffers_bytes = buffers_bytes(settings)
    directory, wanted_bytes = settings.cache.directory, settings.cache.capacity_bytes + of_buffers_bytes
    disk = disk_usage(directory)
    if disk is None or wanted_bytes <= disk.free:
        return []
    room_bytes = disk.free + held_bytes(directory)
    if wanted_bytes <= room_bytes:
        return []
    room = format_size(room_bytes - room_bytes % 2**20)
    taken = "cache.capacity and the write-back buffers take" if of_buffers_bytes else "cache.capacity takes"
    yielding = "the cache will yield" if of_buffers_bytes else "the cache will be smaller"
    more = ", and writes will go through or slow down before the buffers are full" if of_buffers_bytes else ""
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

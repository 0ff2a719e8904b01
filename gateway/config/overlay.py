"""Slots that were set over the admin port while the gateway ran: a file in the cache directory, beside the settings.

    slots.json   {"format": "forebay slots 1", "slots": [{"name": …, "prefix": …, …}, …], "checksum": …}

The keys of a slot are those of `[[slots]]`. The configuration takes precedence for the same slot or prefix, and when
the two do not fit together; each reading reports that. But a slot that restricts callers is never left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from gateway.config.entries import BucketSettings, ReplicaSettings
from gateway.config.loading import OVERLAY_BYTES_MAX, LoadedSettings, content_of, load_settings
from gateway.config.problems import SettingsError
from gateway.config.settings import OriginSettings, Settings
from gateway.core.errors import ConfigError
from gateway.disk.atomic_write import remove_durably, write_durably

NAME = "slots.json"
FORMAT = "forebay slots 1"

KEYS_TOLD_MAX = 50

SlotTable = Mapping[str, Any]
"""The keys of one slot, as in the TOML file."""


def load_with_overlay(path: Path | None, environment: Mapping[str, str]) -> LoadedSettings:
    """As `load_settings`, and the slots that were set while the gateway ran the last time.

    SettingsError for settings that cannot be used, and for an overlay that is damaged.
    """
    loaded = load_settings(path, environment)
    directory = loaded.settings.cache.directory
    try:
        return with_overlay(path, environment, loaded, read_overlay(directory))
    except OSError as error:  # the disk fails: the gateway does without it, and says so
        text = f"slots that were set over the admin port are not in force: {directory / NAME}: {error.strerror}"
        return replace(loaded, warnings=(*loaded.warnings, text))


def with_overlay(
    path: Path | None, environment: Mapping[str, str], loaded: LoadedSettings, overlay: Sequence[SlotTable]
) -> LoadedSettings:
    """Return the settings with `overlay` added; slots that do not fit are left out, with a warning.

    SettingsError if a slot that restricts callers would be left out: its prefix would be open to them.
    """
    found, kept = fitting(path, environment, loaded, overlay)
    prefixes = {str(slot.prefix) for slot in found.settings.slots}
    opened = [slot for slot in overlay if slot not in kept and _restricts(slot) and slot["prefix"] not in prefixes]
    if opened:
        told = "; ".join(warning for warning in found.warnings if warning not in loaded.warnings)
        allowed = (
            f"these slots do not fit the configuration, and without them their prefixes would be open to more callers "
            f"({told}). Change the configuration, or remove the slots: over the admin port while the gateway runs, "
            f"else by moving {loaded.settings.cache.directory / NAME} away"
        )
        raise SettingsError(
            [ConfigError("slots (set over the admin port)", [slot["name"] for slot in opened], allowed)]
        )
    return found


def _restricts(slot: SlotTable) -> bool:
    """Return whether callers may do less in a slot, or the origin is asked with another key, than around it."""
    return (
        slot.get("mode") == "read-only"
        or slot.get("authorization") == "origin"
        or slot.get("consistency") == "snapshot"
        or slot.get("origin_credentials") is not None
    )


def fitting(
    path: Path | None, environment: Mapping[str, str], loaded: LoadedSettings, overlay: Sequence[SlotTable]
) -> tuple[LoadedSettings, list[SlotTable]]:
    """Do the work of `with_overlay`, and also return the overlay's slots that are then in force."""
    kept: list[SlotTable] = []
    warnings: list[str] = []
    names = {slot.name for slot in loaded.settings.slots}
    prefixes = {str(slot.prefix) for slot in loaded.settings.slots}
    for slot in overlay:
        if slot["name"] in names or slot["prefix"] in prefixes:
            warnings.append(
                f"the configuration has the slot {slot['name']!r} or its prefix {slot['prefix']}: it is in force, and "
                "not what was set over the admin port"
            )
        else:
            kept.append(slot)
    if not kept:
        return replace(loaded, warnings=(*loaded.warnings, *warnings)), kept
    try:
        found = load_settings(path, environment, more_slots=kept, running=loaded.settings)
    except SettingsError:
        found, together = loaded, list[SlotTable]()
        for slot in kept:
            try:
                found = load_settings(path, environment, more_slots=[*together, slot], running=loaded.settings)
                together.append(slot)
            except SettingsError as error:
                warnings.append(
                    f"the slot {slot['name']!r}, set over the admin port, is not in force beside the configuration: "
                    f"{'; '.join(str(one) for one in error.problems)}"
                )
        kept = together
    return replace(found, warnings=(*found.warnings, *warnings)), kept


def read_overlay(directory: Path) -> list[SlotTable]:
    """Return its slots; none without a file. SettingsError for a damaged one, OSError."""
    path = directory / NAME
    try:
        document = orjson.loads(content_of(path, OVERLAY_BYTES_MAX))
        slots = document["slots"]
        if document["format"] == FORMAT and document["checksum"] == _checksum(slots):
            return list(slots)
        problem = f"it is damaged, or of another version than {FORMAT!r}"
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (ValueError, KeyError, TypeError):
        problem = "it is damaged"
    allowed = f"this file cannot be used ({problem}): move it away, and set its slots again"
    raise SettingsError([ConfigError("slots (set over the admin port)", str(path), allowed)])


def write_overlay(directory: Path, slots: Sequence[SlotTable]) -> None:
    """Replace the file; after an OSError it is as it was. Blocks."""
    if not slots:
        remove_durably(directory / NAME)
        return
    document = {"format": FORMAT, "slots": list(slots), "checksum": _checksum(slots)}
    write_durably(directory / NAME, orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")


def _checksum(slots: Any) -> str:
    canonical = orjson.dumps(slots, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


def changed_keys(before: Settings, after: Settings) -> list[str]:
    """Return the keys of changed settings, at most `KEYS_TOLD_MAX`, entries by name, no values: some are secret."""
    keys = [key for _, key in _changed(before, after)]
    more = len(keys) - KEYS_TOLD_MAX
    return keys if more <= 0 else [*keys[:KEYS_TOLD_MAX], f"{more} more"]


def _changed(before: Settings, after: Settings) -> Iterator[tuple[str | tuple[str, str], str]]:
    """Yield the table, for a list, or table and field, with the key as people know it."""
    for table in type(before).model_fields:
        old, new = getattr(before, table), getattr(after, table)
        if isinstance(old, list):
            was, now = ({_name_of(one): one for one in entries} for entries in (old, new))
            yield from ((table, f"{table} {name!r}") for name in {**was, **now} if was.get(name) != now.get(name))
            continue
        if old is None or new is None:  # a table that may be missing as a whole
            if old != new:
                yield (table, ""), table
            continue
        for name, field in type(old).model_fields.items():
            is_any_port = name == "port" and getattr(new, name) == 0
            if getattr(old, name) != getattr(new, name) and not is_any_port:
                yield (table, name), f"{table}.{field.alias or name}"


def _name_of(entry: object) -> str:
    return str(getattr(entry, "name", None) or getattr(entry, "access_key_id", ""))


def restart_needed(before: Settings, after: Settings) -> list[str]:
    """Return the changed keys that need a restart."""
    keys = [key for which, key in _changed(before, after) if which not in _LIVE | _LIVE_LISTS]
    sizes = {slot.name: slot.block_size_bytes for slot in before.slots}
    keys += [
        f"block_size of the slot {slot.name!r}"
        for slot in after.slots
        if slot.block_size_bytes != sizes.get(slot.name, slot.block_size_bytes)
    ]
    if (before.origin.access_key_id is None) != (after.origin.access_key_id is None):
        keys.append("origin.access_key_id, from or to the usual AWS chain")
    here, there = _ways(before), _ways(after)
    keys += [f"where the bucket {name!r} is" for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    if bool(before.credentials) != bool(after.credentials):
        keys.append("the first or the last of credentials")
    return keys


def _ways(settings: Settings) -> dict[str, tuple[object, ...]]:
    """Return how the buckets are reached that are not reached as the origin."""

    def way(one: OriginSettings | BucketSettings | ReplicaSettings) -> tuple[object, ...]:
        return one.endpoint_url, one.region, one.addressing_style, one.dialect, one.ca_bundle

    def home(one: OriginSettings | BucketSettings) -> tuple[object, ...]:
        return *way(one), tuple(one.datanodes), one.symlinks, one.file_mode

    def ways(one: BucketSettings) -> tuple[object, ...]:
        return *home(one), *((copy.name, copy.origin_credentials, *way(copy)) for copy in one.replicas)

    return {one.name: ways(one) for one in settings.buckets if ways(one) != home(settings.origin)}


_LIVE_LISTS = frozenset({"slots", "credentials", "caller_classes", "origin_credentials", "buckets"})
_LIVE = frozenset(
    {
        ("origin", "read_bandwidth_bytes_per_second"),
        ("origin", "write_bandwidth_bytes_per_second"),
        ("origin", "secret_access_key"),
        ("origin", "secret_access_key_file"),
        ("origin", "access_key_id"),
        ("origin", "session_token"),
        ("server", "certificate_file"),
        ("server", "key_file"),
        ("server", "caller_wait_seconds"),
        ("admin", "token"),
        ("admin", "token_file"),
        ("cache", "capacity_bytes"),
        ("cluster", "secret_file"),
        ("cluster", "weight"),
        ("cluster", "fallback_requests"),
    }
)
"""Settings that can change while the gateway runs, besides those lists."""

"""The start-up message of `forebay serve` on standard error: lines for people, one event for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import structlog

from gateway.admin.formatting import size_text
from gateway.config import Settings
from gateway.config.entries import SlotSettings
from gateway.config.fields import is_store
from gateway.config.settings import ClusterSettings, signers
from gateway.config.units import format_size
from gateway.md5_lanes.streams import LANES
from gateway.serve.own_credentials import OwnKey
from gateway.telemetry.log_file import write_bounded
from gateway.telemetry.logs import is_console

_SLOTS_MAX = 20
_ONE_MD5 = "one at a time by a core (docs/write-back.md)"


def tell_what_is_served(settings: Settings, key: OwnKey | None, warnings: Sequence[str]) -> None:
    """Tell origin and key, callers, data on this disk, and disabled settings."""
    facts = what_is_served(settings, key)
    if is_console(settings.logging.format, sys.stderr):
        write_bounded(sys.stderr.fileno(), banner(facts, warnings))
    else:
        structlog.get_logger("forebay.serve").info("serving", **facts, warnings=list(warnings))


def banner(facts: dict[str, str | list[str]], warnings: Sequence[str]) -> str:
    lines = []
    for name, found in {**facts, "WARNING": list(warnings)}.items():
        for number, text in enumerate([found] if isinstance(found, str) else found):
            lines.append(f"  {name.replace('_', ' ') if number == 0 or name == 'WARNING' else '':<8} {text}\n")
    return "".join(lines)


def what_is_served(settings: Settings, key: OwnKey | None) -> dict[str, str | list[str]]:
    """By name; no secret among it."""
    origin, cache = settings.origin, settings.cache
    lasting = "outlives a restart" if cache.persistent else "may be lost with the machine"
    slots = [_slot(slot) for slot in settings.slots[:_SLOTS_MAX]]
    if len(settings.slots) > _SLOTS_MAX:
        slots.append(f"and {len(settings.slots) - _SLOTS_MAX} more: forebay status")
    is_directory = is_store(origin.endpoint_url)
    own_key = f"{key.access_key_id}, from {key.source}" if key is not None else "none found; looked for again"
    facts: dict[str, str | list[str]] = {
        "origin": origin.endpoint_url if is_directory else f"{origin.endpoint_url}, region {origin.region}",
        **({} if is_directory else {"own_key": own_key}),
        **({"buckets": differing} if (differing := _differing(settings)) else {}),
        **({"events": [one.queue_url for one in settings.event_sources]} if settings.event_sources else {}),
        "callers": _callers(settings),
        "cache": f"{cache.directory}: up to {size_text(cache.capacity_bytes)}, {lasting}",
        "workers": str(settings.server.workers),
        **({"cluster": _cluster(settings.cluster)} if settings.cluster is not None else {}),
        "slots": [*slots, "all else: read-write, strict, write through"],
    }
    if any(slot.is_buffered for slot in settings.slots):
        facts["md5"] = f"{LANES} at a time by a core" if LANES > 1 else _ONE_MD5
    return facts


def _cluster(cluster: ClusterSettings) -> str:
    return f"{cluster.name}: other nodes ask at {cluster.advertise or cluster.listen}"


def _differing(settings: Settings) -> list[str]:
    """Buckets that differ from `[origin]`, and slots with a key of their own."""
    found = []
    for one in signers(settings):
        signed = f", region {one.region}, signed by {one.credentials}" if not is_store(one.endpoint_url) else ""
        place = one.place if one.slot is None else f"{one.prefix} (slot {one.slot})"
        found.append(f"{place}: {one.endpoint_url}{signed}")
    more = [f"and {len(found) - _SLOTS_MAX} more: forebay status"] if len(found) > _SLOTS_MAX else []
    return found[:_SLOTS_MAX] + more


def _callers(settings: Settings) -> str:
    if settings.credentials:
        ids = ", ".join(entry.access_key_id for entry in settings.credentials[:_SLOTS_MAX])
        return f"{len(settings.credentials)} of [[credentials]]: {ids}"
    if settings.server.allow_unsigned:
        return "anybody: requests need no signature (server.allow_unsigned)"
    return "whoever signs with the gateway's own key"


def _slot(slot: SlotSettings) -> str:
    text = f"{slot.name}: {slot.prefix} {slot.mode}, {slot.consistency}, write {slot.write}"
    text += ", callers judged by the origin" if slot.authorization == "origin" else ""
    return f"{text}, {format_size(slot.capacity_bytes)} guaranteed" if slot.capacity_bytes else text

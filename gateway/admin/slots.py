"""Slots over the admin port: what each has of the disk and of the link, what it is entitled to, and what binds it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.responses import json_answer, posted, problem
from gateway.admin.slot_changes import SlotChanges, SlotRefused
from gateway.admin.writeback import WritebackHolder
from gateway.config import SlotSettings
from gateway.config.entries import NAME
from gateway.config.live import LiveSettings
from gateway.config.loading import validated
from gateway.config.problems import SettingsError
from gateway.policy.slots import DEFAULT_SLOT
from gateway.telemetry import metrics
from gateway.telemetry.metric_reading import MetricReading, by_labels

RATE_SECONDS = 1.0
"""Rates are those of so long a time: an answer takes as long."""

_NEARLY = 0.98
"""A bound of which so much is used binds: evictions and fills keep it from being used to the last byte."""

Direction = Literal["read", "write"]
_Counts = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class _Sample:
    """What the counters of all processes stand at, and what was found of the link."""

    at: float
    moved: _Counts
    waited: _Counts
    throttled: _Counts
    """Seconds for which requests to the origin were held back, and what has become of them, by slot."""
    found: _Counts
    delay: _Counts

    def since(self, before: _Sample, direction: Direction, slot: str) -> float:
        """Bytes per second to or from the origin."""
        key = direction, slot
        return max(0.0, self.moved.get(key, 0.0) - before.moved.get(key, 0.0)) / max(1e-3, self.at - before.at)

    def waited_since(self, before: _Sample, by: str, direction: Direction, slot: str) -> float:
        key = by, direction, slot
        return max(0.0, self.waited.get(key, 0.0) - before.waited.get(key, 0.0))


def _sample(read: Path | MetricReading) -> _Sample:
    read = read if isinstance(read, MetricReading) else MetricReading(read)
    [moved] = by_labels(read, ("direction", "slot"), metrics.ORIGIN_BYTES)
    [waited] = by_labels(read, ("by", "direction", "slot"), metrics.BANDWIDTH_WAIT_SECONDS)
    counted = by_labels(read, ("slot",), *_THROTTLING.values())
    throttled: _Counts = {
        (name, slot): n for name, one in zip(_THROTTLING, counted, strict=True) for (slot,), n in one.items()
    }
    found, delay = by_labels(read, ("direction",), metrics.LINK_CAPACITY, metrics.LINK_DELAY)
    return _Sample(monotonic(), moved, waited, throttled, found, delay)


_THROTTLING = {
    "throttled": metrics.ORIGIN_THROTTLED,
    "waited_seconds": metrics.ORIGIN_THROTTLE_WAIT_SECONDS,
    "in_vain": metrics.ORIGIN_THROTTLED_IN_VAIN,
    "slow_down": metrics.ORIGIN_SLOW_DOWN,
}


class SlotsApi:
    """The endpoint."""

    def __init__(
        self,
        live: LiveSettings,
        metrics_directory: Path,
        writeback: WritebackHolder,
        changes: SlotChanges | None = None,
    ) -> None:
        self._live = live
        self._directory = metrics_directory
        self._writeback = writeback
        self._changes = changes
        self._last: _Sample | None = None

    async def put(self, request: Request) -> Response:
        """Set a slot: the document has the keys of `[[slots]]`, without its name."""
        try:
            slot = orjson.loads(await posted(request))
        except ValueError as error:
            return problem(400, f"the body is to be a JSON object with the keys of [[slots]]: {error}")
        if not isinstance(slot, dict) or slot.get("name", request.path_params["name"]) != request.path_params["name"]:
            return problem(400, "the body is to be a JSON object with the keys of [[slots]], of this very name")
        try:
            validated({"slots": [{**slot, "name": request.path_params["name"]}]})
        except SettingsError as error:
            return problem(400, "; ".join(str(one).removeprefix("slots[0].") for one in error.problems))
        return await self._make(request, slot)

    async def delete(self, request: Request) -> Response:
        """Remove a slot that was set here. What it has on disk goes to the slots that its keys belong to then."""
        if not re.fullmatch(NAME, request.path_params["name"]):
            return problem(409, "there is no slot of that name: it is none")
        return await self._make(request, None)

    async def reload(self, request: Request) -> Response:
        """Have the supervisor read its file, environment and secrets anew, as SIGHUP does, and say what has changed."""
        return await self._make(request, None)

    async def _make(self, request: Request, slot: dict[str, Any] | None) -> Response:
        name: str | None = request.path_params.get("name")
        remote = request.client.host if request.client is not None else None
        if self._changes is None:
            return problem(503, "the gateway is starting")
        try:
            made = await self._changes.make(name, slot, remote)
        except SlotRefused as refusal:
            return problem(refusal.status, str(refusal))
        told = {"file": made.config_file, "changed": made.changed} if name is None else {"name": name}
        return json_answer({**told, "in_force": made.is_followed}, 200 if made.is_followed else 202)

    async def list(self, _request: Request) -> Response:
        """Every slot, the built-in one last."""
        before = await asyncio.to_thread(_sample, self._directory)
        await asyncio.sleep(RATE_SECONDS)
        now = await asyncio.to_thread(_sample, self._directory)
        held = await asyncio.to_thread(_held, self._directory)
        return json_answer(self._documents(held, await self._writeback.summary(), before, now))

    def since_last(self, reading: MetricReading, summary: Mapping[str, Any] | None) -> dict[str, Any]:
        """The same at once: rates are those since it was called last. `summary`: of what is unflushed."""
        now = _sample(reading)
        before, self._last = self._last or now, now
        return self._documents(_held(reading), summary, before, now)

    def _documents(
        self,
        held: Mapping[str, Mapping[str, float]],
        summary: Mapping[str, Any] | None,
        before: _Sample,
        now: _Sample,
    ) -> dict[str, Any]:
        pending = {one["slot"]: one for one in summary["slots"]} if summary is not None else {}
        settings = self._live.now
        names = [slot.name for slot in settings.slots] + [DEFAULT_SLOT.name]
        configured: Mapping[str, SlotSettings] = {slot.name: slot for slot in settings.slots}
        links = {direction: self._link(direction, names, configured, before, now) for direction in _DIRECTIONS}
        documents = [
            _document(name, configured.get(name), held, pending.get(name), links, before, now) for name in names
        ]
        return {"link": {name: link.document() for name, link in links.items()}, "slots": documents}

    def _link(
        self,
        direction: Direction,
        names: Iterable[str],
        configured: Mapping[str, SlotSettings],
        before: _Sample,
        now: _Sample,
    ) -> _Link:
        origin = self._live.now.origin
        configured_capacity = origin.read_bandwidth_bytes_per_second
        if direction == "write":
            configured_capacity = origin.write_bandwidth_bytes_per_second
        found = configured_capacity == "auto"
        capacity: float | None = configured_capacity if configured_capacity != "auto" else now.found.get((direction,))
        moving = {name: now.since(before, direction, name) for name in names}
        weights = {name: configured[name].weight if name in configured else 1 for name in moving}
        active = sum(weight for name, weight in weights.items() if moving[name])
        delay = now.delay.get((direction,), 0.0) if found else None
        return _Link(capacity or None, found, delay, sum(moving.values()), moving, weights, active)


_DIRECTIONS: tuple[Direction, ...] = ("read", "write")


@dataclass(frozen=True, slots=True)
class _Link:
    """One direction; `active_weight` is that of the slots that move something. `is_found`: what it bears is found out,
    and `delay_seconds` how late answers are."""

    bytes_per_second_max: float | None
    is_found: bool
    delay_seconds: float | None
    bytes_per_second: float
    moving: Mapping[str, float]
    weights: Mapping[str, int]
    active_weight: int

    def document(self) -> dict[str, Any]:
        capacity = self.bytes_per_second_max
        return {
            "capacity": None if capacity is None else round(capacity),
            "capacity_found": self.is_found,
            "delay_seconds": self.delay_seconds,
            "bytes_per_second": round(self.bytes_per_second),
        }

    def share(self, slot: str) -> float | None:
        """What it has by its weight, if all that move something now wanted all they could get."""
        if self.bytes_per_second_max is None:
            return None
        more = 0 if self.moving[slot] else self.weights[slot]
        return self.bytes_per_second_max * self.weights[slot] / (self.active_weight + more)


def _held(read: Path | MetricReading) -> dict[str, dict[str, float]]:
    read = read if isinstance(read, MetricReading) else MetricReading(read)
    of_slot = {
        "used": metrics.CACHE_USAGE_BYTES,
        "reserved": metrics.CACHE_RESERVED_BYTES,
        "pinned": metrics.CACHE_PINNED_BYTES,
        "hit": metrics.CACHE_HIT_BYTES,
        "miss": metrics.CACHE_MISS_BYTES,
    }
    found = by_labels(read, ("slot",), *of_slot.values())
    held: dict[str, dict[str, float]] = {}
    for name, values in zip(of_slot, found, strict=True):
        for (slot,), value in values.items():
            held.setdefault(slot, {})[name] = value
    [missed] = by_labels(read, ("slot", "reason"), metrics.MISSES)
    for (slot, reason), value in missed.items():
        held.setdefault(slot, {})[f"missed {reason}"] = value
    return held


def _document(
    name: str,
    slot: SlotSettings | None,
    held: Mapping[str, Mapping[str, float]],
    pending: Mapping[str, Any] | None,
    links: Mapping[Direction, _Link],
    before: _Sample,
    now: _Sample,
) -> dict[str, Any]:
    counts = held.get(name, {})
    used, reserved = int(counts.get("used", 0)), int(counts.get("reserved", 0))
    guaranteed = (slot.capacity_bytes if slot is not None else None) or 0
    limit = slot.capacity_limit_bytes if slot is not None else None
    given = counts.get("hit", 0.0) + counts.get("miss", 0.0)
    moved = {one: _moved(name, slot, one, links[one], before, now) for one in _DIRECTIONS}
    binds = [f"{one}-{moved[one]['bound_by']}" for one in _DIRECTIONS if moved[one]["bound_by"] is not None]
    if limit is not None and used + reserved >= _NEARLY * limit:
        binds.append("capacity-limit")
    if pending is not None and pending["buffer_bytes"] and pending["staged_bytes"] >= _NEARLY * pending["buffer_bytes"]:
        binds.append("buffer")
    throttled = {key: now.throttled.get((key, name), 0.0) for key in _THROTTLING}
    if any(throttled[key] > before.throttled.get((key, name), 0.0) for key in ("throttled", "in_vain")):
        binds.append("request-rate")
    return {
        "name": name,
        "prefix": slot.prefix if slot is not None else "s3://",
        "mode": slot.mode if slot is not None else DEFAULT_SLOT.mode,
        "consistency": slot.consistency_in_force if slot is not None else DEFAULT_SLOT.consistency,
        "write": slot.write if slot is not None else DEFAULT_SLOT.write,
        "authorization": slot.authorization if slot is not None else DEFAULT_SLOT.authorization,
        "weight": slot.weight if slot is not None else 1,
        "capacity": {
            "guaranteed_bytes": guaranteed,
            "limit_bytes": limit,
            "used_bytes": used,
            "reserved_bytes": reserved,
            "pinned_bytes": int(counts.get("pinned", 0)),
            "borrowed_bytes": max(0, used + reserved - guaranteed),
            "lendable_bytes": max(0, guaranteed - used - reserved),
        },
        "hit_ratio": counts.get("hit", 0.0) / given if given else None,
        "misses": {key.removeprefix("missed "): int(n) for key, n in counts.items() if key.startswith("missed ")},
        "unflushed": {"objects": pending["objects"], "bytes": pending["bytes"]} if pending is not None else None,
        **{f"{one}_bandwidth": moved[one] for one in _DIRECTIONS},
        "origin_requests": {key: round(n, 3) if key == "waited_seconds" else int(n) for key, n in throttled.items()},
        "binds": binds,
    }


def _moved(
    name: str, slot: SlotSettings | None, direction: Direction, link: _Link, before: _Sample, now: _Sample
) -> dict[str, Any]:
    guarantee = ceiling = None
    if slot is not None and direction == "read":
        guarantee, ceiling = slot.read_guarantee_bytes_per_second, slot.read_bandwidth_bytes_per_second
    elif slot is not None:
        guarantee, ceiling = slot.write_guarantee_bytes_per_second, slot.write_bandwidth_bytes_per_second
    waited = {by: now.waited_since(before, by, direction, name) for by in ("ceiling", "link")}
    longest = max(waited, key=waited.__getitem__)
    share = link.share(name)
    return {
        "bytes_per_second": round(link.moving[name]),
        "guarantee": guarantee,
        "ceiling": ceiling,
        "share": round(share) if share is not None else None,
        "waited_seconds": {by: round(now.waited.get((by, direction, name), 0.0), 3) for by in waited},
        "bound_by": longest if waited[longest] else None,
    }

"""Slots over the admin port: what each has of the disk and of the link, what it is entitled to, and what binds it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.backends import Backends
from gateway.admin.operations import TEXT, TOKEN, body, operation, parameter
from gateway.admin.responses import Refused, json_answer, posted
from gateway.admin.slot_changes import SlotChanges
from gateway.api import documents as to
from gateway.api.documents import PREFIX_OF_BUCKET
from gateway.config import SlotSettings
from gateway.config.live import LiveSettings
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


_SET = {202: "It is set; a process that is stopped keeps to it when it goes on."}
_CHANGE = {
    **TOKEN,
    403: "Not from this machine, and there is no admin.token.",
    409: "Refused, with why: the configuration has this slot, the settings cannot be together, or the slot has what "
    "the origin does not have yet.",
    503: "The supervisor has not answered, or too many changes are under way.",
}
_OF_SLOT = (parameter("path", "name", TEXT, required=True),)
_SLOT = body(prefix=PREFIX_OF_BUCKET)
_SLOT["application/json"]["description"] = "the keys of [[slots]], with the values that they have in the file"


class SlotsApi:
    def __init__(
        self, live: LiveSettings, metrics_directory: Path, lent: Backends, changes: SlotChanges | None = None
    ) -> None:
        self._live = live
        self._directory = metrics_directory
        self._lent = lent
        self._changes = changes
        self._last: _Sample | None = None

    @operation(
        "PUT /api/v1/slots/{name}",
        "Set a slot beside those of the configuration, while the gateway runs.",
        to.SlotChanged,
        {**_CHANGE, 400: "The body is no slot."},
        parameters=_OF_SLOT,
        body=_SLOT,
        also=_SET,
    )
    async def put(self, request: Request) -> Response:
        try:
            slot = orjson.loads(await posted(request))
        except ValueError as error:
            raise Refused(400, f"the body is to be a JSON object with the keys of [[slots]]: {error}") from error
        if not isinstance(slot, dict) or slot.get("name", request.path_params["name"]) != request.path_params["name"]:
            raise Refused(400, "the body is to be a JSON object with the keys of [[slots]], of this very name")
        if not isinstance(slot.get("prefix"), str):
            raise Refused(400, "the slot needs a prefix: s3://bucket/ or s3://bucket/prefix")
        return await self._make(request, slot)

    @operation(
        "DELETE /api/v1/slots/{name}",
        "Remove a slot that was set here.",
        to.SlotChanged,
        _CHANGE,
        parameters=_OF_SLOT,
        also=_SET,
    )
    async def delete(self, request: Request) -> Response:
        """Remove a slot. What it has on disk goes to the slots that its keys belong to then."""
        return await self._make(request, None)

    @operation(
        "POST /api/v1/reload",
        "Read the configuration anew, as at SIGHUP.",
        to.Reloaded,
        {**_CHANGE, 409: "Refused, with why: nothing has changed. Keys that need a restart are named."},
        also=_SET,
    )
    async def reload(self, request: Request) -> Response:
        return await self._make(request, None)

    async def _make(self, request: Request, slot: dict[str, Any] | None) -> Response:
        name: str | None = request.path_params.get("name")
        remote = request.client.host if request.client is not None else None
        if self._changes is None:
            raise Refused(503, "the gateway is starting")
        made = await self._changes.make(name, slot, remote)
        told: to.Reloaded | to.SlotChanged
        if name is None:
            told = to.Reloaded(file=made.config_file, changed=list(made.changed), in_force=made.is_followed)
        else:
            told = to.SlotChanged(name=name, in_force=made.is_followed)
        return json_answer(told, 200 if made.is_followed else 202)

    @operation("GET /api/v1/slots", "Slots, and which limit binds each.", to.Slots)
    async def list(self, _request: Request) -> to.Slots:
        """Answer with every slot, the built-in one last."""
        before = await asyncio.to_thread(_sample, self._directory)
        await asyncio.sleep(RATE_SECONDS)
        now = await asyncio.to_thread(_sample, self._directory)
        held = await asyncio.to_thread(_held, self._directory)
        return self._documents(held, await self._lent.pending(), before, now)

    def since_last(self, reading: MetricReading, summary: to.Writeback | None) -> to.Slots:
        """The same at once: rates are those since it was called last. `summary`: of what is unflushed."""
        now = _sample(reading)
        before, self._last = self._last or now, now
        return self._documents(_held(reading), summary, before, now)

    def _documents(
        self, held: Mapping[str, Mapping[str, float]], summary: to.Writeback | None, before: _Sample, now: _Sample
    ) -> to.Slots:
        pending = {one.slot: one for one in summary.slots} if summary is not None else {}
        settings = self._live.now
        names = [slot.name for slot in settings.slots] + [DEFAULT_SLOT.name]
        configured: Mapping[str, SlotSettings] = {slot.name: slot for slot in settings.slots}
        links = {direction: self._link(direction, names, configured, before, now) for direction in _DIRECTIONS}
        return to.Slots(
            link=to.Links(read=links["read"].document(), write=links["write"].document()),
            slots=[
                _document(name, configured.get(name), held, pending.get(name), links, before, now) for name in names
            ],
        )

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

    def document(self) -> to.Link:
        capacity = self.bytes_per_second_max
        return to.Link(
            capacity=None if capacity is None else round(capacity),
            capacity_found=self.is_found,
            delay_seconds=self.delay_seconds,
            bytes_per_second=round(self.bytes_per_second),
        )

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
    pending: to.PendingSlot | None,
    links: Mapping[Direction, _Link],
    before: _Sample,
    now: _Sample,
) -> to.Slot:
    counts = held.get(name, {})
    used, reserved = int(counts.get("used", 0)), int(counts.get("reserved", 0))
    guaranteed = (slot.capacity_bytes if slot is not None else None) or 0
    limit = slot.capacity_limit_bytes if slot is not None else None
    given = counts.get("hit", 0.0) + counts.get("miss", 0.0)
    moved = {one: _moved(name, slot, one, links[one], before, now) for one in _DIRECTIONS}
    binds = [f"{one}-{moved[one].bound_by}" for one in _DIRECTIONS if moved[one].bound_by is not None]
    if limit is not None and used + reserved >= _NEARLY * limit:
        binds.append("capacity-limit")
    if pending is not None and pending.buffer_bytes and pending.staged_bytes >= _NEARLY * pending.buffer_bytes:
        binds.append("buffer")
    throttled = {key: now.throttled.get((key, name), 0.0) for key in _THROTTLING}
    if any(throttled[key] > before.throttled.get((key, name), 0.0) for key in ("throttled", "in_vain")):
        binds.append("request-rate")
    shown = slot if slot is not None else DEFAULT_SLOT
    return to.Slot(
        name=name,
        prefix=slot.prefix if slot is not None else "s3://",
        mode=shown.mode,
        consistency=slot.consistency_in_force if slot is not None else DEFAULT_SLOT.consistency,
        write=shown.write,
        authorization=shown.authorization,
        weight=slot.weight if slot is not None else 1,
        capacity=to.SlotCapacity(
            guaranteed_bytes=guaranteed,
            limit_bytes=limit,
            used_bytes=used,
            reserved_bytes=reserved,
            pinned_bytes=int(counts.get("pinned", 0)),
            borrowed_bytes=max(0, used + reserved - guaranteed),
            lendable_bytes=max(0, guaranteed - used - reserved),
        ),
        hit_ratio=counts.get("hit", 0.0) / given if given else None,
        misses={key.removeprefix("missed "): int(n) for key, n in counts.items() if key.startswith("missed ")},
        unflushed=to.Unflushed(objects=pending.objects, bytes=pending.bytes) if pending is not None else None,
        read_bandwidth=moved["read"],
        write_bandwidth=moved["write"],
        origin_requests=to.OriginRequests(
            throttled=int(throttled["throttled"]),
            waited_seconds=round(throttled["waited_seconds"], 3),
            in_vain=int(throttled["in_vain"]),
            slow_down=int(throttled["slow_down"]),
        ),
        binds=binds,
    )


def _moved(
    name: str, slot: SlotSettings | None, direction: Direction, link: _Link, before: _Sample, now: _Sample
) -> to.SlotBandwidth:
    guarantee = ceiling = None
    if slot is not None and direction == "read":
        guarantee, ceiling = slot.read_guarantee_bytes_per_second, slot.read_bandwidth_bytes_per_second
    elif slot is not None:
        guarantee, ceiling = slot.write_guarantee_bytes_per_second, slot.write_bandwidth_bytes_per_second
    waited = {by: now.waited_since(before, by, direction, name) for by in ("ceiling", "link")}
    longest = max(waited, key=waited.__getitem__)
    share = link.share(name)
    return to.SlotBandwidth(
        bytes_per_second=round(link.moving[name]),
        guarantee=guarantee,
        ceiling=ceiling,
        share=round(share) if share is not None else None,
        waited_seconds={by: round(now.waited.get((by, direction, name), 0.0), 3) for by in waited},
        bound_by=longest if waited[longest] else None,
    )

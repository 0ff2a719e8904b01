"""Slots over the admin port: what each has of the disk and of the link, what it is entitled to, and what binds it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
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
"""A bound binds once this share of it is used: evictions and fills keep the rest free."""

Direction = Literal["read", "write"]

_SLOT_NAME = re.compile(NAME[:-1])


class _Sample:
    """The counters of all processes at one time."""

    def __init__(self, reading: MetricReading) -> None:
        self.at = monotonic()
        [self.moved] = by_labels(reading, ("direction", "slot"), metrics.ORIGIN_BYTES)
        [self.waited] = by_labels(reading, ("by", "direction", "slot"), metrics.BANDWIDTH_WAIT_SECONDS)
        self.misses = dict[str, dict[str, int]]()
        for (slot, reason), count in by_labels(reading, ("slot", "reason"), metrics.MISSES)[0].items():
            self.misses.setdefault(slot, {})[reason] = int(count)
        self.capacity, self.delay = by_labels(reading, ("direction",), metrics.LINK_CAPACITY, metrics.LINK_DELAY)
        self._of_slots = dict(zip(_OF_SLOT, by_labels(reading, ("slot",), *_OF_SLOT.values()), strict=True))

    def of_slot(self, name: str, slot: str) -> float:
        return self._of_slots[name].get((slot,), 0.0)

    def since(self, before: _Sample, direction: Direction, slot: str) -> float:
        """Return the bytes per second from or to the origin."""
        key = direction, slot
        return max(0.0, self.moved.get(key, 0.0) - before.moved.get(key, 0.0)) / max(1e-3, self.at - before.at)

    def waited_since(self, before: _Sample, by: str, direction: Direction, slot: str) -> float:
        key = by, direction, slot
        return max(0.0, self.waited.get(key, 0.0) - before.waited.get(key, 0.0))


_OF_SLOT = {
    "used": metrics.CACHE_USAGE_BYTES,
    "reserved": metrics.CACHE_RESERVED_BYTES,
    "pinned": metrics.CACHE_PINNED_BYTES,
    "hit": metrics.CACHE_HIT_BYTES,
    "miss": metrics.CACHE_MISS_BYTES,
    "throttled": metrics.ORIGIN_THROTTLED,
    "waited_seconds": metrics.ORIGIN_THROTTLE_WAIT_SECONDS,
    "in_vain": metrics.ORIGIN_THROTTLED_IN_VAIN,
    "slow_down": metrics.ORIGIN_SLOW_DOWN,
}


def _sample(directory: Path) -> _Sample:
    return _Sample(MetricReading(directory))


_SET = {202: "It is set; a process that is stopped keeps to it when it goes on."}
_CHANGE = {
    **TOKEN,
    403: "Not from this machine, and there is no admin.token.",
    409: "Refused, with why: the configuration has this slot, the settings cannot be together, or the slot has what "
    "the origin does not have yet.",
    503: "The supervisor has not answered, or too many changes are under way.",
}
_NAMED = (parameter("path", "name", TEXT, required=True),)
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
        parameters=_NAMED,
        body=_SLOT,
        also=_SET,
    )
    async def put(self, request: Request) -> Response:
        try:
            slot = orjson.loads(await posted(request))
        except ValueError as error:
            raise Refused(400, f"the body must be a JSON object with the keys of [[slots]]: {error}") from error
        if not isinstance(slot, dict) or slot.get("name", request.path_params["name"]) != request.path_params["name"]:
            raise Refused(400, "the body must be a JSON object with the keys of [[slots]], of this very name")
        try:
            validated({"slots": [{**slot, "name": request.path_params["name"]}]})
        except SettingsError as error:
            raise Refused(400, "; ".join(str(one).removeprefix("slots[0].") for one in error.problems)) from None
        return await self._make(request, slot)

    @operation(
        "DELETE /api/v1/slots/{name}",
        "Remove a slot that was set here.",
        to.SlotChanged,
        _CHANGE,
        parameters=_NAMED,
        also=_SET,
    )
    async def delete(self, request: Request) -> Response:
        """Remove a slot. What it has on disk goes to the slots that its keys belong to then."""
        if not _SLOT_NAME.fullmatch(request.path_params["name"]):
            raise Refused(409, "there is no slot of that name: it is none")
        return await self._make(request, None)

    @operation(
        "POST /api/v1/reload",
        "Read the configuration anew, as at SIGHUP.",
        to.ReloadedDocument,
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
        told: to.ReloadedDocument | to.SlotChanged
        if name is None:
            told = to.ReloadedDocument(file=made.config_file, changed=list(made.changed), in_force=made.is_followed)
        else:
            told = to.SlotChanged(name=name, in_force=made.is_followed)
        return json_answer(told, 200 if made.is_followed else 202)

    @operation("GET /api/v1/slots", "Slots, and which limit binds each.", to.SlotsDocument)
    async def list(self, _request: Request) -> to.SlotsDocument:
        """Answer with every slot, the built-in one last."""
        before = await asyncio.to_thread(_sample, self._directory)
        await asyncio.sleep(RATE_SECONDS)
        now = await asyncio.to_thread(_sample, self._directory)
        return self._documents(await self._lent.pending(), before, now)

    def since_last(self, reading: MetricReading, summary: to.Writeback | None) -> to.SlotsDocument:
        """Return the slots at once, with rates since the last call. `summary` says what is unflushed."""
        now = _Sample(reading)
        before, self._last = self._last or now, now
        return self._documents(summary, before, now)

    def _documents(self, summary: to.Writeback | None, before: _Sample, now: _Sample) -> to.SlotsDocument:
        pending = {one.slot: one for one in summary.slots} if summary is not None else {}
        settings = self._live.now
        slots, origin = [*settings.slots, DEFAULT_SLOT], settings.origin
        capacities = {"read": origin.read_bandwidth_bytes_per_second, "write": origin.write_bandwidth_bytes_per_second}
        links = {direction: _Link(direction, capacities[direction], slots, before, now) for direction in _DIRECTIONS}
        return to.SlotsDocument(
            link=to.Links(read=links["read"].document(), write=links["write"].document()),
            slots=[_document(slot, pending.get(slot.name), links, before, now) for slot in slots],
        )


_DIRECTIONS: tuple[Direction, ...] = ("read", "write")


class _Link:
    """One direction of the link to the origin."""

    def __init__(
        self,
        direction: Direction,
        capacity: float | str | None,
        slots: list[SlotSettings],
        before: _Sample,
        now: _Sample,
    ) -> None:
        self._is_found = capacity == "auto"
        known = now.capacity.get((direction,)) if isinstance(capacity, str) else capacity
        self._capacity = known or None
        self._delay_seconds = now.delay.get((direction,), 0.0) if self._is_found else None
        self.moving = {slot.name: now.since(before, direction, slot.name) for slot in slots}
        self._weights = {slot.name: slot.weight for slot in slots}
        self._active_weight = sum(slot.weight for slot in slots if self.moving[slot.name])

    def document(self) -> to.LinkDocument:
        return to.LinkDocument(
            capacity=None if self._capacity is None else round(self._capacity),
            capacity_found=self._is_found,
            delay_seconds=self._delay_seconds,
            bytes_per_second=round(sum(self.moving.values())),
        )

    def share(self, slot: str) -> int | None:
        """Return the rate by a slot's weight, if all slots that move something now wanted all they could get."""
        if self._capacity is None:
            return None
        more = 0 if self.moving[slot] else self._weights[slot]
        return round(self._capacity * self._weights[slot] / (self._active_weight + more))


def _document(
    slot: SlotSettings, pending: to.PendingSlot | None, links: Mapping[Direction, _Link], before: _Sample, now: _Sample
) -> to.SlotDocument:
    name, limit, guaranteed = slot.name, slot.capacity_limit_bytes, slot.capacity_bytes or 0
    counts = {key: now.of_slot(key, name) for key in _OF_SLOT}
    used, reserved = int(counts["used"]), int(counts["reserved"])
    given = counts["hit"] + counts["miss"]
    moved = {one: _moved(slot, one, links[one], before, now) for one in _DIRECTIONS}
    binds = [f"{one}-{moved[one].bound_by}" for one in _DIRECTIONS if moved[one].bound_by is not None]
    if limit is not None and used + reserved >= _NEARLY * limit:
        binds.append("capacity-limit")
    if pending is not None and pending.buffer_bytes and pending.staged_bytes >= _NEARLY * pending.buffer_bytes:
        binds.append("buffer")
    if any(counts[key] > before.of_slot(key, name) for key in ("throttled", "in_vain")):
        binds.append("request-rate")
    return to.SlotDocument(
        name=name,
        prefix=str(slot.prefix),
        mode=slot.mode,
        consistency=slot.consistency,
        write=slot.write,
        authorization=slot.authorization,
        weight=slot.weight,
        capacity=to.SlotCapacity(
            guaranteed_bytes=guaranteed,
            limit_bytes=limit,
            used_bytes=used,
            reserved_bytes=reserved,
            pinned_bytes=int(counts["pinned"]),
            borrowed_bytes=max(0, used + reserved - guaranteed),
            lendable_bytes=max(0, guaranteed - used - reserved),
        ),
        hit_ratio=counts["hit"] / given if given else None,
        misses=now.misses.get(name, {}),
        unflushed=to.Unflushed(objects=pending.objects, bytes=pending.bytes) if pending is not None else None,
        read_bandwidth=moved["read"],
        write_bandwidth=moved["write"],
        origin_requests=to.OriginRequests(
            throttled=int(counts["throttled"]),
            waited_seconds=round(counts["waited_seconds"], 3),
            in_vain=int(counts["in_vain"]),
            slow_down=int(counts["slow_down"]),
        ),
        binds=binds,
    )


def _moved(slot: SlotSettings, direction: Direction, link: _Link, before: _Sample, now: _Sample) -> to.SlotBandwidth:
    guarantee, ceiling = slot.read_guarantee_bytes_per_second, slot.read_bandwidth_bytes_per_second
    if direction == "write":
        guarantee, ceiling = slot.write_guarantee_bytes_per_second, slot.write_bandwidth_bytes_per_second
    waited = {by: now.waited_since(before, by, direction, slot.name) for by in ("ceiling", "link")}
    longest = max(waited, key=waited.__getitem__)
    return to.SlotBandwidth(
        bytes_per_second=round(link.moving[slot.name]),
        guarantee=guarantee,
        ceiling=ceiling,
        share=link.share(slot.name),
        waited_seconds={by: round(now.waited.get((by, direction, slot.name), 0.0), 3) for by in waited},
        bound_by=longest if waited[longest] else None,
    )

"""Slots and callers over the admin port: what each has and takes, what it is entitled to, and which limit binds it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.backends import Backends, SlotChanges
from gateway.admin.operations import TEXT, TOKEN, RefusedRequest, body, json_answer, operation, parameter, posted
from gateway.api import documents as to
from gateway.api.documents import LIMITS, PREFIX_OF_BUCKET
from gateway.config import CallerLimitSettings, Settings, SlotSettings
from gateway.config.entries import NAME
from gateway.config.live import LiveSettings
from gateway.config.loading import validated
from gateway.config.problems import SettingsError
from gateway.policy.callers import OWN, UNSIGNED
from gateway.policy.slots import DEFAULT_SLOT
from gateway.telemetry import metrics
from gateway.telemetry.metric_kinds import GONE, Metric
from gateway.telemetry.metric_reading import MetricReading

RATE_SECONDS = 1.0
"""Rates are those of so long a time: an answer takes as long. A caller's limit binds if a request waited within it."""

CALLERS_SHOWN = 50
"""Callers that the dashboard shows."""

_NEARLY = 0.98
"""A bound binds once this share of it is used: evictions and fills keep the rest free."""

Direction = Literal["read", "write"]
_DIRECTIONS: tuple[Direction, ...] = ("read", "write")

_SLOT_NAME = re.compile(NAME[:-1])


class CounterSample:
    """The counters of all processes at one time."""

    def __init__(self, reading: MetricReading) -> None:
        self.at = monotonic()
        self._reading = reading
        self._sums: dict[tuple[Metric, tuple[str, ...]], dict[tuple[str, ...], float]] = {}

    def by(self, metric: Metric, *labels: str) -> Mapping[tuple[str, ...], float]:
        """Return a metric's sums by the values of some of its labels."""
        found = self._sums.get((metric, labels))
        if found is None:
            found = self._sums[metric, labels] = self._reading.by_labels(labels, metric)
        return found

    def of(self, metric: Metric, **labels: str) -> float:
        return self.by(metric, *labels).get(tuple(labels.values()), 0.0)


def _sample(directory: Path) -> CounterSample:
    return CounterSample(MetricReading(directory))


class CounterWindow(NamedTuple):
    """The counters at two times."""

    before: CounterSample
    now: CounterSample

    def rose(self, metric: Metric, **labels: str) -> float:
        return max(0.0, self.now.of(metric, **labels) - self.before.of(metric, **labels))

    def rate(self, metric: Metric, **labels: str) -> float:
        """Return how much a counter rose per second."""
        return self.rose(metric, **labels) / max(1e-3, self.now.at - self.before.at)


def known_credentials(settings: Settings) -> list[str]:
    unsigned = [UNSIGNED] if settings.server.allow_unsigned else []
    return [*([one.access_key_id for one in settings.credentials] or [OWN]), *unsigned, "none"]


def known_limits(settings: Settings) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the limits that may keep requests waiting, by the labels that name them in the metrics."""
    callers = [("credential", one.access_key_id, _limits(one)) for one in settings.credentials]
    callers += [("class", one.name, _limits(one)) for one in settings.caller_classes]
    return {
        ("scope", "name", "limit"): [(scope, name, limit) for scope, name, limits in callers for limit in limits],
        ("scope", "name"): [(scope, name) for scope, name, limits in callers if limits],
    }


def _limits(of: CallerLimitSettings) -> list[str]:
    of_bodies = of.read_bandwidth_bytes_per_second, of.write_bandwidth_bytes_per_second
    values = of.max_concurrent_requests, of.requests_per_second, *of_bodies
    return [limit for limit, value in zip(LIMITS, values, strict=True) if value is not None]


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
        self._last: CounterSample | None = None

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
            raise RefusedRequest(400, f"the body must be a JSON object with the keys of [[slots]]: {error}") from error
        if not isinstance(slot, dict) or slot.get("name", request.path_params["name"]) != request.path_params["name"]:
            raise RefusedRequest(400, "the body must be a JSON object with the keys of [[slots]], of this very name")
        try:
            validated({"slots": [{**slot, "name": request.path_params["name"]}]})
        except SettingsError as error:
            raise RefusedRequest(400, "; ".join(str(one).removeprefix("slots[0].") for one in error.problems)) from None
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
            raise RefusedRequest(409, "there is no slot of that name: it is none")
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
            raise RefusedRequest(503, "the gateway is starting")
        made = await self._changes.make(name, slot, remote)
        told: to.ReloadedDocument | to.SlotChanged
        if name is None:
            told = to.ReloadedDocument(file=made.config_file, changed=list(made.changed), in_force=made.is_followed)
        else:
            told = to.SlotChanged(name=name, in_force=made.is_followed)
        return json_answer(told, 200 if made.is_followed else 202)

    @operation("GET /api/v1/slots", "Slots, and which limit binds each.", to.SlotsDocument)
    async def show(self, _request: Request) -> to.SlotsDocument:
        """Answer with every slot, the built-in one last."""
        window = await self._window()
        return _slots(self._live.now, await self._lent.pending(), window)

    @operation("GET /api/v1/callers", "Callers, and which limit binds each.", to.CallersDocument)
    async def callers(self, _request: Request) -> to.CallersDocument:
        """Answer with every credential and class of the configuration, and all others that have called."""
        window = await self._window()
        return to.CallersDocument(callers=_callers(self._live.now, window))

    async def _window(self) -> CounterWindow:
        before = await asyncio.to_thread(_sample, self._directory)
        await asyncio.sleep(RATE_SECONDS)
        return CounterWindow(before, await asyncio.to_thread(_sample, self._directory))

    def since_last(
        self, reading: MetricReading, summary: to.Writeback | None
    ) -> tuple[to.SlotsDocument, list[to.CallerDocument]]:
        """Return slots and CALLERS_SHOWN callers at once, with rates since the last call. Limited callers come first.

        `summary` says what is unflushed.
        """
        now = CounterSample(reading)
        window, self._last = CounterWindow(self._last or now, now), now
        found = _callers(self._live.now, window)
        found.sort(key=lambda one: (bool(one.binds), one.used.requests if one.used is not None else 0), reverse=True)
        return _slots(self._live.now, summary, window), found[:CALLERS_SHOWN]


def _slots(settings: Settings, summary: to.Writeback | None, window: CounterWindow) -> to.SlotsDocument:
    pending = {one.slot: one for one in summary.slots} if summary is not None else {}
    slots, origin = [*settings.slots, DEFAULT_SLOT], settings.origin
    capacities = {"read": origin.read_bandwidth_bytes_per_second, "write": origin.write_bandwidth_bytes_per_second}
    links = {direction: _Link(direction, capacities[direction], slots, window) for direction in _DIRECTIONS}
    misses: dict[str, dict[str, int]] = {}
    for (slot, reason), count in window.now.by(metrics.MISSES, "slot", "reason").items():
        misses.setdefault(slot, {})[reason] = int(count)
    return to.SlotsDocument(
        link=to.Links(read=links["read"].document(), write=links["write"].document()),
        slots=[_slot(one, pending.get(one.name), misses.get(one.name, {}), links, window) for one in slots],
    )


class _Link:
    """One direction of the link to the origin."""

    def __init__(
        self, direction: Direction, capacity: float | str | None, slots: list[SlotSettings], window: CounterWindow
    ) -> None:
        self._is_found = capacity == "auto"
        known = window.now.of(metrics.LINK_CAPACITY, direction=direction) if isinstance(capacity, str) else capacity
        self._capacity = known or None
        self._delay_seconds = window.now.of(metrics.LINK_DELAY, direction=direction) if self._is_found else None
        self.moving = {one.name: window.rate(metrics.ORIGIN_BYTES, direction=direction, slot=one.name) for one in slots}
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


def _slot(
    slot: SlotSettings,
    pending: to.PendingSlot | None,
    misses: dict[str, int],
    links: Mapping[Direction, _Link],
    window: CounterWindow,
) -> to.SlotDocument:
    name, limit, guaranteed = slot.name, slot.capacity_limit_bytes, slot.capacity_bytes or 0

    def now(metric: Metric) -> int:
        return int(window.now.of(metric, slot=name))

    used, reserved = now(metrics.CACHE_USAGE_BYTES), now(metrics.CACHE_RESERVED_BYTES)
    hit, miss = now(metrics.CACHE_HIT_BYTES), now(metrics.CACHE_MISS_BYTES)
    moved = {one: _moved(slot, one, links[one], window) for one in _DIRECTIONS}
    binds = [f"{one}-{moved[one].bound_by}" for one in _DIRECTIONS if moved[one].bound_by is not None]
    if limit is not None and used + reserved >= _NEARLY * limit:
        binds.append("capacity-limit")
    if pending is not None and pending.buffer_bytes and pending.staged_bytes >= _NEARLY * pending.buffer_bytes:
        binds.append("buffer")
    if any(window.rose(one, slot=name) for one in (metrics.ORIGIN_THROTTLED, metrics.ORIGIN_THROTTLED_IN_VAIN)):
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
            pinned_bytes=now(metrics.CACHE_PINNED_BYTES),
            borrowed_bytes=max(0, used + reserved - guaranteed),
            lendable_bytes=max(0, guaranteed - used - reserved),
        ),
        hit_ratio=hit / (hit + miss) if hit + miss else None,
        misses=misses,
        unflushed=to.Unflushed(objects=pending.objects, bytes=pending.bytes) if pending is not None else None,
        read_bandwidth=moved["read"],
        write_bandwidth=moved["write"],
        origin_requests=to.OriginRequests(
            throttled=now(metrics.ORIGIN_THROTTLED),
            waited_seconds=round(window.now.of(metrics.ORIGIN_THROTTLE_WAIT_SECONDS, slot=name), 3),
            in_vain=now(metrics.ORIGIN_THROTTLED_IN_VAIN),
            slow_down=now(metrics.ORIGIN_SLOW_DOWN),
        ),
        binds=binds,
    )


def _moved(slot: SlotSettings, direction: Direction, link: _Link, window: CounterWindow) -> to.SlotBandwidth:
    guarantee, ceiling = slot.read_guarantee_bytes_per_second, slot.read_bandwidth_bytes_per_second
    if direction == "write":
        guarantee, ceiling = slot.write_guarantee_bytes_per_second, slot.write_bandwidth_bytes_per_second
    waits = {by: {"by": by, "direction": direction, "slot": slot.name} for by in ("ceiling", "link")}
    waited = {by: window.rose(metrics.BANDWIDTH_WAIT_SECONDS, **labels) for by, labels in waits.items()}
    longest = max(waited, key=waited.__getitem__)
    return to.SlotBandwidth(
        bytes_per_second=round(link.moving[slot.name]),
        guarantee=guarantee,
        ceiling=ceiling,
        share=link.share(slot.name),
        waited_seconds={
            by: round(window.now.of(metrics.BANDWIDTH_WAIT_SECONDS, **labels), 3) for by, labels in waits.items()
        },
        bound_by=longest if waited[longest] else None,
    )


def _callers(settings: Settings, window: CounterWindow) -> list[to.CallerDocument]:
    known = {one.access_key_id: one for one in settings.credentials}
    others = [name for (name,) in window.now.by(metrics.CALLER_REQUESTS, "credential") if name not in {*known, GONE}]
    found: list[tuple[str, str, CallerLimitSettings]] = [("credential", name, one) for name, one in known.items()]
    found += [("credential", name, CallerLimitSettings()) for name in sorted(others)]
    found += [("class", one.name, one) for one in settings.caller_classes]
    return [_caller(scope, name, limits, window) for scope, name, limits in found]


def _caller(scope: str, name: str, limits: CallerLimitSettings, window: CounterWindow) -> to.CallerDocument:
    keys = {limit: {"scope": scope, "name": name, "limit": limit} for limit in LIMITS}
    waiting = {limit: int(window.now.of(metrics.CALLER_WAITING, **key)) for limit, key in keys.items()}
    binds = {
        limit
        for limit, key in keys.items()
        if waiting[limit] > 0 or window.rose(metrics.CALLER_WAITS, **key) or window.rose(metrics.CALLER_REFUSED, **key)
    }
    is_credential = scope == "credential"
    used = {name_of: int(window.now.of(metric, credential=name)) for name_of, metric in _USED.items()}
    rates = {name_of: round(window.rate(metric, credential=name), 1) for name_of, metric in _USED.items()}
    return to.CallerDocument(
        scope=scope,
        name=name,
        limits=to.CallerLimitsDocument(
            max_concurrent_requests=limits.max_concurrent_requests,
            requests_per_second=limits.requests_per_second,
            read_bandwidth=limits.read_bandwidth_bytes_per_second,
            write_bandwidth=limits.write_bandwidth_bytes_per_second,
        ),
        running=int(window.now.of(metrics.CALLER_RUNNING, scope=scope, name=name)),
        waiting=sum(waiting.values()),
        throttled={limit: int(window.now.of(metrics.CALLER_WAITS, **key)) for limit, key in keys.items()},
        waited_seconds={
            limit: round(window.now.of(metrics.CALLER_WAIT_SECONDS, **key), 3) for limit, key in keys.items()
        },
        refused={limit: int(window.now.of(metrics.CALLER_REFUSED, **key)) for limit, key in keys.items()},
        used=to.CallerUse(**used) if is_credential else None,
        per_second=to.CallerRates(**rates) if is_credential else None,
        binds=sorted(binds),
    )


_USED = {
    "requests": metrics.CALLER_REQUESTS,
    "sent_bytes": metrics.CALLER_SENT_BYTES,
    "received_bytes": metrics.CALLER_RECEIVED_BYTES,
}

"""The figures of `forebay top`: values of a running gateway, taken again and again, and rates between two of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gateway.core.errors import AdminPortError
from gateway.telemetry import metrics

if TYPE_CHECKING:
    from gateway.admin.client import Checkpoint, Job, LiveAdminClient, RecentRequests, Slot, Status

CHECKPOINTS_MAX = 20
_HELD_UP = ("conflicts", "damaged", "failing", "waiting_for_bucket")
REQUESTS_MAX = 10
_CHECKPOINTS_READ = 100
_SLOTS_AGAIN_SECONDS = 1.0

_COUNTED: dict[str, tuple[str, dict[str, str]]] = {
    "served_bytes": (metrics.SENT_BYTES.name, {}),
    "received_bytes": (metrics.RECEIVED_BYTES.name, {}),
    "requests": (f"{metrics.REQUEST_SECONDS.name}_count", {}),
    "request_seconds": (f"{metrics.REQUEST_SECONDS.name}_sum", {}),
    "origin_read_bytes": (metrics.ORIGIN_BYTES.name, {"direction": "read"}),
    "origin_written_bytes": (metrics.ORIGIN_BYTES.name, {"direction": "write"}),
    "flush_bytes": (metrics.ORIGIN_BYTES.name, {"purpose": "flush"}),
    "hit_bytes": (metrics.CACHE_HIT_BYTES.name, {}),
    "miss_bytes": (metrics.CACHE_MISS_BYTES.name, {}),
}
"""Counter -> the metric, and the label that it must have."""


def counters(exposition: str) -> dict[str, float]:
    """Return the sums of all counters, over labels and processes, in the text of /metrics."""
    from gateway.admin.client import samples

    found = dict.fromkeys(_COUNTED, 0.0)
    for name, labels, value in samples(exposition, {name for name, _ in _COUNTED.values()}):
        for counter, (wanted, label) in _COUNTED.items():
            if name == wanted and label.items() <= labels.items():
                found[counter] += value
    return found


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, between two samples. `request_seconds`, `hit_ratio`: None without a request, or a read, meanwhile."""

    served_bytes: float
    received_bytes: float
    requests: float
    request_seconds: float | None
    origin_read_bytes: float
    origin_written_bytes: float
    flush_bytes: float
    hit_ratio: float | None


def rates(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> Rates | None:
    """None where counters have begun again in between: the gateway was started anew."""
    moved = {name: now[name] - before[name] for name in _COUNTED}
    if seconds <= 0 or min(moved.values()) < 0:
        return None
    read = moved["hit_bytes"] + moved["miss_bytes"]
    return Rates(
        moved["served_bytes"] / seconds,
        moved["received_bytes"] / seconds,
        moved["requests"] / seconds,
        moved["request_seconds"] / moved["requests"] if moved["requests"] else None,
        moved["origin_read_bytes"] / seconds,
        moved["origin_written_bytes"] / seconds,
        moved["flush_bytes"] / seconds,
        moved["hit_bytes"] / read if read else None,
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """One taking. `at` is in seconds since 1970.

    `problem` says why nothing was answered: what is shown besides is of the last answer then, if there was one.
    """

    at: float
    problem: str | None = None
    answered_at: float | None = None
    status: Status | None = None
    slots: list[Slot] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    requests: RecentRequests | None = None
    rates: Rates | None = None

    @property
    def state(self) -> str:
        """`ready`, `not ready`, `draining`, `starting` or `no answer`."""
        if self.problem is not None:
            return "no answer"
        gateway = self.status.gateway if self.status is not None else None
        if gateway is None:
            return "starting"
        return "draining" if gateway.draining else "ready" if gateway.ready else "not ready"

    def unflushed(self) -> dict[str, Any] | None:
        """Return the unflushed objects of all slots; None while unknown."""
        if self.status is None or self.status.writeback is None:
            return None
        slots = self.status.writeback.slots
        ages = [self.at - one.oldest_acknowledged_at for one in slots if one.oldest_acknowledged_at is not None]
        return {
            "objects": sum(one.objects for one in slots),
            "bytes": sum(one.bytes for one in slots),
            "oldest_age_seconds": round(max(0.0, *ages), 1) if ages else None,
            **{name: sum(getattr(one, name) for one in slots) for name in _HELD_UP},
        }

    def document(self) -> dict[str, Any]:
        known = self.status if self.problem is None else None
        rates = self.rates if known is not None else None
        return {
            "at": round(self.at, 3),
            "state": self.state,
            "problem": self.problem,
            "health": None
            if known is None
            else {
                "processes": [one.document() for one in known.gateway.processes] if known.gateway is not None else [],
                "origin_reachable": known.origin.reachable,
                "origin_problem": known.origin.problem,
                "cache_disk": known.cache.disk.state,
            },
            "per_second": None
            if rates is None
            else {
                "served_bytes": round(rates.served_bytes),
                "received_bytes": round(rates.received_bytes),
                "requests": round(rates.requests, 1),
                "origin_read_bytes": round(rates.origin_read_bytes),
                "origin_written_bytes": round(rates.origin_written_bytes),
                "flush_bytes": round(rates.flush_bytes),
            },
            "request_seconds": None if rates is None else rates.request_seconds,
            "hit_ratio": None if rates is None else rates.hit_ratio,
            "hit_ratio_since_start": None if known is None else known.cache.hit_ratio,
            "cache": None
            if known is None
            else {"used_bytes": known.cache.usage_bytes, "capacity_bytes": known.cache.capacity_bytes},
            "unflushed": None if known is None else self.unflushed(),
            "slots": [] if known is None else [one.document() for one in self.slots],
            "jobs": [] if known is None else [one.document() for one in self.jobs],
            "checkpoints": [] if known is None else [one.document() for one in self.checkpoints],
            "slowest_requests": []
            if known is None or self.requests is None
            else [one.document() for one in self.requests.slowest],
        }


def _latest(found: list[Checkpoint]) -> list[Checkpoint]:
    """Return checkpoints that are not durable first, then the latest."""
    return sorted(found, key=lambda one: (one.state == "durable", -one.last_at))[:CHECKPOINTS_MAX]


class Watch:
    """Takes figures of one gateway, and goes on when it is away and comes back. Event loop only."""

    def __init__(self, client: LiveAdminClient) -> None:
        self._client = client
        self._last = Figures(time.time())
        self._counters: tuple[float, float, dict[str, float]] | None = None
        """When they were taken, of the gateway that was started when, and they."""
        self._slots: list[Slot] = []
        self._slots_come = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def take(self, *, whole: bool = False) -> Figures:
        """Return the present figures, or the reason why there are none; with `whole`, wait for those of slots, too."""
        from gateway.admin.client import CheckpointPage, JobList, RecentRequests, Status

        if self._following is None:
            self._following = asyncio.create_task(self._follow_slots(), name="slots")
        try:
            status, exposition = await asyncio.gather(
                self._client.get("/api/v1/status", Status), self._client.text("/metrics")
            )
        except AdminPortError as error:
            self._counters = None
            last = self._last
            self._last = Figures(
                time.time(),
                str(error),
                last.answered_at,
                last.status,
                last.slots,
                last.jobs,
                last.checkpoints,
                last.requests,
            )
            return self._last
        if whole:
            await self._slots_come.wait()
        at = time.time()
        try:
            jobs = (await self._client.get("/api/v1/jobs", JobList)).jobs
            page = await self._client.get(f"/api/v1/checkpoints?limit={_CHECKPOINTS_READ}", CheckpointPage)
        except AdminPortError:  # the cache directory is not open, which the status says
            jobs, checkpoints = [], list["Checkpoint"]()
        else:
            checkpoints = _latest(page.checkpoints)
        try:
            requests = await self._client.get(f"/api/v1/requests?limit={REQUESTS_MAX}", RecentRequests)
        except AdminPortError:  # an older gateway
            requests = None
        self._last = Figures(
            at, None, at, status, self._slots, jobs, checkpoints, requests, self._rates(status, counters(exposition))
        )
        return self._last

    def _rates(self, status: Status, now: dict[str, float]) -> Rates | None:
        before, at = self._counters, time.monotonic()
        started_at = status.gateway.started_at if status.gateway is not None else 0.0
        self._counters = at, started_at, now
        if before is None or before[1] != started_at:
            return None
        return rates(before[2], now, at - before[0])

    async def _follow_slots(self) -> None:
        """Its answer takes a second each time: nothing else waits for it."""
        from gateway.admin.client import Slots

        while True:
            try:
                self._slots = (await self._client.get("/api/v1/slots", Slots)).slots
            except AdminPortError:
                self._slots_come.set()  # there are none: that is all that is known
                await asyncio.sleep(_SLOTS_AGAIN_SECONDS)
            else:
                self._slots_come.set()

    async def aclose(self) -> None:
        """Look no more."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._client.aclose()

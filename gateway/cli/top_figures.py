"""The figures of `forebay top`: values of a running gateway, taken again and again, and rates between two of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gateway.core.errors import AdminPortError
from gateway.telemetry import metrics

if TYPE_CHECKING:
    from gateway.admin.client import LiveAdminClient
    from gateway.api import documents as to

CHECKPOINTS_MAX = 20
_UNFLUSHED = {"objects", "bytes", "conflicts", "damaged", "failing", "waiting_for_bucket"}
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

    def per_second(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 1 if name == "requests" else None) for name in _PER_SECOND}


_PER_SECOND = ("served_bytes", "received_bytes", "requests", "origin_read_bytes", "origin_written_bytes", "flush_bytes")


def rates(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> Rates | None:
    """None where counters have begun again in between: the gateway was started anew."""
    moved = {name: now[name] - before[name] for name in _COUNTED}
    if seconds <= 0 or min(moved.values()) < 0:
        return None
    read = moved["hit_bytes"] + moved["miss_bytes"]
    return Rates(
        **{name: moved[name] / seconds for name in _PER_SECOND},
        request_seconds=moved["request_seconds"] / moved["requests"] if moved["requests"] else None,
        hit_ratio=moved["hit_bytes"] / read if read else None,
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """One taking. `at` is in seconds since 1970.

    `problem` says why nothing was answered: what is shown besides is of the last answer then, if there was one.
    """

    at: float
    problem: str | None = None
    answered_at: float | None = None
    status: to.Status | None = None
    slots: list[to.SlotDocument] = field(default_factory=list)
    jobs: list[to.JobDocument] = field(default_factory=list)
    checkpoints: list[to.Checkpoint] = field(default_factory=list)
    requests: to.RecentRequestsDocument | None = None
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

    def document(self) -> dict[str, Any]:
        """Return the figures for programs."""
        known = self.status if self.problem is None else None
        told = {"at": round(self.at, 3), "state": self.state, "problem": self.problem}
        if known is None:
            return told | dict.fromkeys(_OF_STATUS) | {name: [] for name in _LISTS}
        gateway, pending, rates = known.gateway, known.writeback, self.rates
        health = {
            "processes": [one.document() for one in gateway.processes] if gateway is not None else [],
            "origin_reachable": known.origin.reachable,
            "origin_problem": known.origin.problem,
            "cache_disk": known.cache.disk.state,
        }
        unflushed = None
        if pending is not None:
            age_seconds = self.oldest_age_seconds(pending)
            unflushed = pending.model_dump(include=_UNFLUSHED) | {
                "oldest_age_seconds": None if age_seconds is None else round(age_seconds, 1)
            }
        of_status = (
            health,
            rates.per_second() if rates is not None else None,
            rates.request_seconds if rates is not None else None,
            rates.hit_ratio if rates is not None else None,
            known.cache.hit_ratio,
            {"used_bytes": known.cache.usage_bytes, "capacity_bytes": known.cache.capacity_bytes},
            unflushed,
        )
        slowest = self.requests.slowest if self.requests is not None else []
        lists: tuple[Sequence[to.Document], ...] = (self.slots, self.jobs, self.checkpoints, slowest)
        told |= dict(zip(_OF_STATUS, of_status, strict=True))
        return told | {name: [one.document() for one in found] for name, found in zip(_LISTS, lists, strict=True)}

    def oldest_age_seconds(self, pending: to.Writeback) -> float | None:
        oldest_at = pending.oldest_acknowledged_at
        return None if oldest_at is None else max(0.0, self.at - oldest_at)


_OF_STATUS = ("health", "per_second", "request_seconds", "hit_ratio", "hit_ratio_since_start", "cache", "unflushed")
_LISTS = ("slots", "jobs", "checkpoints", "slowest_requests")


def _latest(found: list[to.Checkpoint]) -> list[to.Checkpoint]:
    """Return checkpoints that are not durable first, then the latest."""
    return sorted(found, key=lambda one: (one.state == "durable", -(one.last_at or 0.0)))[:CHECKPOINTS_MAX]


class Watch:
    """Takes figures of one gateway, and goes on when it is away and comes back. Event loop only."""

    def __init__(self, client: LiveAdminClient) -> None:
        self._client = client
        self._last = Figures(time.time())
        self._counters: tuple[float, float, dict[str, float]] | None = None
        """When they were taken, of the gateway that was started when, and they."""
        self._slots: list[to.SlotDocument] = []
        self._slots_come = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def take(self, *, whole: bool = False) -> Figures:
        """Return the present figures, or why there are none; with `whole`, wait for those of slots."""
        from gateway.api import documents as to

        if self._following is None:
            self._following = asyncio.create_task(self._follow_slots(), name="slots")
        try:
            status, requests, exposition = await asyncio.gather(
                self._client.get("/api/v1/status", to.Status),
                self._client.get(f"/api/v1/requests?limit={REQUESTS_MAX}", to.RecentRequestsDocument),
                self._client.text("/metrics"),
            )
        except AdminPortError as error:
            self._counters = None
            self._last = replace(self._last, at=time.time(), problem=str(error), rates=None)
            return self._last
        if whole:
            await self._slots_come.wait()
        at = time.time()
        try:
            jobs = (await self._client.get("/api/v1/jobs", to.JobsDocument)).jobs
            page = await self._client.get(f"/api/v1/checkpoints?limit={_CHECKPOINTS_READ}", to.CheckpointsDocument)
        except AdminPortError:  # the cache directory is not open, which the status says
            jobs, checkpoints = [], list[to.Checkpoint]()
        else:
            checkpoints = _latest(page.checkpoints)
        self._last = Figures(
            at, None, at, status, self._slots, jobs, checkpoints, requests, self._rates(status, counters(exposition))
        )
        return self._last

    def _rates(self, status: to.Status, now: dict[str, float]) -> Rates | None:
        before, at = self._counters, time.monotonic()
        started_at = status.gateway.started_at if status.gateway is not None else 0.0
        self._counters = at, started_at, now
        if before is None or before[1] != started_at:
            return None
        return rates(before[2], now, at - before[0])

    async def _follow_slots(self) -> None:
        """Its answer takes a second each time: nothing else waits for it."""
        from gateway.api import documents as to

        while True:
            try:
                self._slots = (await self._client.get("/api/v1/slots", to.SlotsDocument)).slots
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

"""An origin that takes so many requests per second, under a prefix or in a whole bucket, and refuses the others: as a
rule for any fake origin, and simulated with processes of a gateway that send to it, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gateway.core.errors import OriginBusy
from gateway.origin.client import Direction, OriginRequest, Purpose
from gateway.policy.request_rates import RequestRates, rows_for
from gateway.shared.arena import SharedCells, make_shared_memory
from tests.support.link_simulation import ProcessClock
from tests.support.manual_clock import ManualClock


@dataclass(slots=True)
class RequestLimits:
    """As S3 has it: a limit of its own for the reads and for the writes of each prefix, or (`per`) of each bucket.

    What is not used is saved up for `burst_seconds`. A prefix is the first part of the key; S3 does not tell where its
    own begin, and in most buckets these are finer.
    """

    reads_per_second: float
    writes_per_second: float
    per: Literal["prefix", "bucket"] = "prefix"
    burst_seconds: float = 0.25
    _levels: dict[tuple[str, str, Direction], tuple[float, float]] = field(default_factory=dict)

    def takes(self, method: str, bucket: str, key: str, now: float) -> bool:
        """Whether a request that comes now is carried out; else it is to be answered 503 SlowDown."""
        direction: Direction = "read" if method in ("GET", "HEAD") else "write"
        rate = self.reads_per_second if direction == "read" else self.writes_per_second
        name = bucket, key.partition("/")[0] if self.per == "prefix" else "", direction
        most = max(1.0, rate * self.burst_seconds)
        level, since = self._levels.get(name, (most, now))
        level = min(most, level + rate * (now - since))
        is_taken = level >= 1.0
        self._levels[name] = level - is_taken, now
        return is_taken


def shared_cells(slots: int, processes: int, started: float = 0.0) -> list[SharedCells]:
    """The same cells, as each process has them."""
    rows = rows_for(slots, processes)
    descriptor = make_shared_memory(rows, processes, started)
    try:
        return [SharedCells.attach(descriptor, rows, processes, own) for own in range(processes)]
    finally:
        os.close(descriptor)


class RequestSimulation:
    """To be made and used in an event loop. With `gated` False nothing is held back: there are retries only."""

    def __init__(
        self,
        limits: RequestLimits,
        weights: Mapping[str, int],
        processes: int = 1,
        *,
        latency_seconds: float = 0.03,
        wait_seconds_max: float = 20.0,
        gated: bool = True,
    ) -> None:
        self.limits = limits
        self.clock = ManualClock()
        self.clocks = [ProcessClock(self.clock) for _ in range(processes)]
        self.rates = [
            RequestRates(weights, clock, cells, wait_seconds_max=wait_seconds_max, buckets_told=["bucket"])
            for clock, cells in zip(self.clocks, shared_cells(len(weights), processes), strict=True)
        ]
        self.taken: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        """By slot: requests that the origin has carried out and refused, those of clients that came to nothing, and how
        long the others took."""

        self.tasks: list[asyncio.Task[None]] = []
        self._latency_seconds = latency_seconds
        self._gated = gated
        self._rng = random.Random(1)

    def send(
        self,
        process: int,
        slot: str,
        key: str,
        *,
        method: str = "GET",
        purpose: Purpose = Purpose.LIVE,
        pause_seconds: float = 0.0,
    ) -> asyncio.Task[None]:
        """A client that sends one request after the other for ever, with a pause after each."""
        request = OriginRequest(method, "bucket", key, purpose=purpose, slot=slot)
        task = asyncio.create_task(self._send_all(process, request, pause_seconds))
        self.tasks.append(task)
        return task

    async def _send_all(self, process: int, request: OriginRequest, pause_seconds: float) -> None:
        clock = self.clocks[process]
        while True:
            began = clock.monotonic()
            try:
                is_done = await self.send_one(process, request)
            except OriginBusy:
                is_done = False
            if is_done:
                self.seconds.setdefault(request.slot, []).append(clock.monotonic() - began)
            else:
                self.failed[request.slot] += 1
                await clock.sleep(1.0)
            if pause_seconds:
                await clock.sleep(self._rng.uniform(0.5, 1.5) * pause_seconds)

    async def send_one(self, process: int, request: OriginRequest) -> bool:
        """As `S3Origin` does, with its tries; OriginBusy. False: the origin has refused the last."""
        clock, rates = self.clocks[process], self.rates[process]
        for attempt in range(1, 5):
            if self._gated and not rates.passes(request):
                await rates.wait(request)
            sent_at = clock.monotonic()
            await clock.sleep(self._rng.uniform(0.3, 0.7) * self._latency_seconds)
            is_taken = self.limits.takes(request.method, request.bucket or "", request.key or "", clock.monotonic())
            await clock.sleep(0.5 * self._latency_seconds)
            if is_taken:
                self.taken[request.slot] += 1
                return True
            self.refused[request.slot] += 1
            if self._gated:
                rates.refused(request, sent_at)
            await clock.sleep(self._rng.uniform(0, min(5.0, 0.05 * 2**attempt)))
        return False

    async def pass_time(self, seconds: float) -> Passed:
        """What has become of requests meanwhile."""
        await self.clock.advance(0)
        taken, refused, failed = self.taken.copy(), self.refused.copy(), self.failed.copy()
        for times in self.seconds.values():
            times.clear()
        await self.clock.advance(seconds)
        return Passed(
            {slot: (count - taken[slot]) / seconds for slot, count in self.taken.items()},
            (self.taken.total() - taken.total()) / seconds,
            (self.refused.total() - refused.total()) / seconds,
            self.failed.total() - failed.total(),
        )

    def rate(self, process: int = 0) -> float:
        """What the origin is believed to take, of everything."""
        return sum(self.rates[process].rates().values())

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for rates in self.rates:
            await rates.aclose()


@dataclass(frozen=True, slots=True)
class Passed:
    """Requests per second that the origin has carried out, by slot and of all, and that it has refused; and how many
    of clients came to nothing."""

    taken: Mapping[str, float]
    all_taken: float
    refused: float
    failed: int

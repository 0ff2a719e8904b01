"""A link that slots share, in many processes that are simulated in one, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import functools
import math
import os
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.origin.client import Direction
from gateway.origin.traffic_meter import AnswerKind, Traffic
from gateway.policy.bandwidth import Bandwidth, BandwidthShare, Ceiling, numbering_of, rows_for
from gateway.policy.capacity_controller import TICK_SECONDS
from gateway.shared.arena import SharedCells, make_shared_memory
from tests.support.manual_clock import ManualClock


@dataclass(frozen=True, slots=True)
class SlotOfLink:
    """What is configured of a slot; rates are bytes per second."""

    name: str
    weight: int = 1
    ceiling: float | None = None
    guarantee: float | None = None


class ProcessClock:
    """The clock of one simulated process, which can be stopped as by SIGSTOP: then its sleeps end when it goes on."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    def now(self) -> float:
        return self._clock.now()

    def monotonic(self) -> float:
        return self._clock.monotonic()

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        await self._goes_on.wait()

    async def goes_on(self) -> None:
        """Wait until it is not stopped."""
        await self._goes_on.wait()

    def stop(self) -> None:
        self._goes_on.clear()

    def resume(self) -> None:
        self._goes_on.set()


class LinkSimulation:
    """To be made and used in an event loop."""

    def __init__(self, link: float, slots: Sequence[SlotOfLink], processes: int) -> None:
        self.clock = ManualClock()
        self.clocks = [ProcessClock(self.clock) for _ in range(processes)]
        ceilings = [Ceiling("read", None, link)]
        ceilings += [Ceiling("read", one.name, one.ceiling) for one in slots if one.ceiling is not None]
        shares = [BandwidthShare("read", one.name, one.weight, one.guarantee) for one in slots]
        rows = rows_for(numbering_of(ceilings, shares).most)
        descriptor = make_shared_memory(rows, processes, 0.0)
        try:
            cells = [SharedCells.attach(descriptor, rows, processes, own) for own in range(processes)]
        finally:
            os.close(descriptor)
        self.processes = [
            Bandwidth(ceilings, clock, own, shares) for clock, own in zip(self.clocks, cells, strict=True)
        ]
        self.passed: Counter[str] = Counter()
        """By slot, bytes."""

        self.tasks: list[asyncio.Task[None]] = []

    def read(
        self,
        process: int,
        slot: str,
        piece: int,
        *,
        rank: int = 0,
        pause_seconds: float = 0.0,
        told: Callable[[int], None] | None = None,
    ) -> asyncio.Task[None]:
        """A reader that wants piece after piece for ever, with a pause after each."""
        reader = asyncio.create_task(self._read(process, slot, piece, rank, pause_seconds, told))
        self.tasks.append(reader)
        return reader

    async def _read(
        self,
        process: int,
        slot: str,
        piece: int,
        rank: int,
        pause_seconds: float,
        told: Callable[[int], None] | None,
    ) -> None:
        clock = self.clocks[process]
        limiter = self.processes[process].limiter("read", slot)
        assert limiter is not None
        while True:
            await limiter.take(piece, lambda: rank)
            await clock.goes_on()
            self.passed[slot] += piece
            if told is not None:
                told(piece)
            if pause_seconds:
                await clock.sleep(pause_seconds)

    async def pass_time(self, seconds: float) -> Mapping[str, float]:
        """The bytes per second that each slot has had meanwhile."""
        await self.clock.advance(0)  # readers that have just been begun ask for their first pieces
        before = self.passed.copy()
        await self.clock.advance(seconds)
        return {slot: (self.passed[slot] - before[slot]) / seconds for slot in self.passed}

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def fair_rates(link: float, slots: Sequence[SlotOfLink]) -> Mapping[str, float]:
    """What slots that all want everything are due: each the most of its guarantee and its part by weight, and no more
    than its ceiling, such that the link is used up. By bisection of what a weight of 1 gets."""

    def rate(one: SlotOfLink, level: float) -> float:
        return min(max(level * one.weight, one.guarantee or 0.0), one.ceiling if one.ceiling is not None else link)

    low, high = 0.0, link
    for _ in range(100):
        middle = (low + high) / 2
        if sum(rate(one, middle) for one in slots) > link:
            high = middle
        else:
            low = middle
    return {one.name: rate(one, low) for one in slots}


_CHUNK_BYTES = 64 * 1024
_HEAD_BYTES = 500


class QueuedLink:
    """One direction of a link: whatever is carried waits in a queue, first in, first out, and leaves at `capacity`
    bytes per second, which may change. Each byte that is let in notes down what queue it has found."""

    def __init__(self, clock: ManualClock, capacity: float) -> None:
        self.capacity = capacity
        self._clock = clock
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self._queued_bytes = 0
        self._serving: asyncio.Task[None] | None = None
        self.carried_bytes = 0
        self.delays: list[tuple[float, float]] = []
        """When, and for how many seconds what came then had to wait."""

    @property
    def delay_seconds(self) -> float:
        return self._queued_bytes / self.capacity

    def carry(self, count: int, then: Callable[[], None]) -> None:
        """Call `then` when `count` bytes have come through."""
        self._queue.append((count, then))
        self._queued_bytes += count
        self.delays.append((self._clock.monotonic(), self.delay_seconds))
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())

    async def carried(self, count: int) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def tell() -> None:
            if not done.done():
                done.set_result(None)

        self.carry(count, tell)
        await done

    async def _serve(self) -> None:
        while self._queue:
            count, then = self._queue[0]
            await self._clock.sleep(count / self.capacity)
            self._queue.popleft()
            self._queued_bytes -= count
            self.carried_bytes += count
            then()
        self._serving = None

    async def end(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class FarOrigin:
    """How an origin answers: it thinks for a while, and has at most a window of each body on its way at a time.

    `jitter_seconds` is the mean of what is added to its think time, exponentially distributed. A stream gets no more
    than `stream_bytes_per_second`.
    """

    think_seconds: float = 0.025
    jitter_seconds: float = 0.0
    window_bytes: int = 2**20
    stream_bytes_per_second: float = math.inf


class _SimulatedProcess:
    def __init__(self, clock: ProcessClock, bandwidth: Bandwidth) -> None:
        self.clock = clock
        self.bandwidth = bandwidth
        self.arrived_bytes = self.handed_bytes = self.acknowledged_bytes = 0
        self.bodies = self.starved = 0
        self.window_bytes = math.inf
        self.asked: dict[object, tuple[AnswerKind, float]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.append(task)
        return task

    async def find_capacity(self) -> None:
        while True:
            await self.clock.sleep(TICK_SECONDS)
            now = self.clock.monotonic()
            waiting = [(kind, now - asked) for kind, asked in self.asked.values()]
            reading = [one for one in waiting if one[0].direction == "read"]
            writing = [one for one in waiting if one[0].direction == "write"]
            unacknowledged = self.handed_bytes - self.acknowledged_bytes
            self.window_bytes = self.bandwidth.window_bytes() or math.inf
            self.bandwidth.find_capacity(
                {
                    "read": Traffic(self.arrived_bytes, 0, reading, self.bodies, self.starved),
                    "write": Traffic(self.acknowledged_bytes, unacknowledged, writing),
                }
            )

    async def kill(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class _Body:
    """An answer's, of which a window is on its way to who reads it: what has arrived and was not taken counts, too, but
    for what the process lets be on its way at most."""

    def __init__(self, link: QueuedLink, process: _SimulatedProcess, size: int, window: int) -> None:
        self._link = link
        self._process = process
        self._size = size
        self._window = window
        self._arrived: asyncio.Queue[int] = asyncio.Queue()
        self._sent_bytes = self._arrived_bytes = self.taken_bytes = 0

    async def next(self) -> int:
        """The size of the next piece, when it has arrived."""
        self._send()
        if not self._arrived.empty():
            return self._arrived.get_nowait()
        self._process.starved += 1
        try:
            return await self._arrived.get()
        finally:
            self._process.starved -= 1

    def _send(self) -> None:
        limits = self._size, self.taken_bytes + self._window, self._arrived_bytes + self._process.window_bytes
        until = int(min(limits))
        while self._sent_bytes < until and (until - self._sent_bytes >= _CHUNK_BYTES or until == self._size):
            count = min(_CHUNK_BYTES, until - self._sent_bytes)
            self._sent_bytes += count
            self._link.carry(count, functools.partial(self._arrive, count))
        if self._sent_bytes == self._arrived_bytes and self._sent_bytes < self._size:  # the least that is ever sent
            self._sent_bytes += (count := min(_CHUNK_BYTES, self._size - self._sent_bytes))
            self._link.carry(count, functools.partial(self._arrive, count))

    def _arrive(self, count: int) -> None:
        self._arrived_bytes += count
        self._process.arrived_bytes += count
        self._arrived.put_nowait(count)
        if self._arrived_bytes < self._size and self._sent_bytes < self.taken_bytes + self._window:
            self._send()


class FoundLinkSimulation:
    """A link whose capacity the processes find out, or with `is_found` false do not: then nothing is held back. To be
    made and used in an event loop."""

    def __init__(
        self,
        capacity: float,
        processes: int = 2,
        origin: FarOrigin | None = None,
        *,
        seed: int = 1,
        is_found: bool = True,
    ) -> None:
        self.clock = ManualClock()
        self.origin = origin or FarOrigin()
        self.link = QueuedLink(self.clock, capacity)
        self._dice = random.Random(seed)
        ceilings, shares = [Ceiling("read", None, None), Ceiling("write", None, None)], [BandwidthShare("read", "a", 1)]
        rows = rows_for(numbering_of(ceilings, shares).most)
        descriptor = make_shared_memory(rows, processes, 0.0)
        try:
            self.processes = []
            for own in range(processes):
                clock, cells = ProcessClock(self.clock), SharedCells.attach(descriptor, rows, processes, own)
                self.processes.append(_SimulatedProcess(clock, Bandwidth(ceilings, clock, cells, shares)))
        finally:
            os.close(descriptor)
        if is_found:
            for one in self.processes:
                one.begin(one.find_capacity())

    def _think_seconds(self) -> float:
        origin = self.origin
        return origin.think_seconds + (
            self._dice.expovariate(1 / origin.jitter_seconds) if origin.jitter_seconds else 0
        )

    def read(self, process: int, block: int = 8 * 2**20, *, pause_seconds: float = 0.0) -> asyncio.Task[None]:
        """A reader that wants block after block for ever, each by a request of its own."""
        one = self.processes[process]
        return one.begin(self._read(one, block, pause_seconds))

    async def _read(self, process: _SimulatedProcess, block: int, pause_seconds: float) -> None:
        while True:
            await self._ask(process, AnswerKind.GET)
            body = _Body(self.link, process, block, self.origin.window_bytes)
            limiter = process.bandwidth.limiter("read", "a")
            assert limiter is not None
            process.bodies += 1
            try:
                while body.taken_bytes < block:
                    count = await body.next()
                    await process.clock.goes_on()
                    await limiter.take(count, lambda: 0)
                    if self.origin.stream_bytes_per_second < math.inf:
                        await self.clock.sleep(count / self.origin.stream_bytes_per_second)
                    body.taken_bytes += count
            finally:
                process.bodies -= 1
            if pause_seconds:
                await process.clock.sleep(pause_seconds)

    async def _ask(self, process: _SimulatedProcess, kind: AnswerKind) -> None:
        """A request that is complete, until its answer begins."""
        request, asked = object(), process.clock.monotonic()
        process.asked[request] = kind, asked
        await self.clock.sleep(self._think_seconds())
        if kind.direction == "read":
            await self.link.carried(_HEAD_BYTES)
        await process.clock.goes_on()
        del process.asked[request]
        process.bandwidth.answered(kind, process.clock.monotonic() - asked)

    def write(self, process: int, part: int = 8 * 2**20, *, buffer: int = 2**18) -> asyncio.Task[None]:
        """A writer that sends part after part for ever, through a socket whose buffer takes so much."""
        one = self.processes[process]
        return one.begin(self._write(one, part, buffer))

    async def _write(self, process: _SimulatedProcess, part: int, buffer: int) -> None:
        limiter = process.bandwidth.limiter("write", "a")
        assert limiter is not None
        piece, wake = 256 * 1024, asyncio.Event()
        handed = acknowledged = 0

        def acknowledge(count: int) -> None:
            nonlocal acknowledged
            acknowledged += count
            process.acknowledged_bytes += count
            wake.set()

        async def acknowledged_but(count: int) -> None:
            while handed - acknowledged > count:
                wake.clear()
                await wake.wait()

        while True:
            for _ in range(part // piece):
                await limiter.take(piece, lambda: 0)
                handed += piece
                process.handed_bytes += piece
                for _ in range(piece // _CHUNK_BYTES):
                    self.link.carry(_CHUNK_BYTES, functools.partial(acknowledge, _CHUNK_BYTES))
                await acknowledged_but(buffer)
            asked = process.clock.monotonic()
            process.asked[wake] = AnswerKind.LARGE_WRITE, asked
            await acknowledged_but(0)
            await self.clock.sleep(self._think_seconds())
            del process.asked[wake]
            process.bandwidth.answered(AnswerKind.LARGE_WRITE, process.clock.monotonic() - asked)

    def others(self, bytes_per_second: float) -> asyncio.Task[None]:
        """Traffic that is none of the gateway's goes through the same queue, at a steady rate."""
        return asyncio.create_task(self._others(bytes_per_second))

    async def _others(self, bytes_per_second: float) -> None:
        while True:
            self.link.carry(_CHUNK_BYTES, lambda: None)
            await self.clock.sleep(_CHUNK_BYTES / bytes_per_second)

    def rate(self, direction: Direction = "read") -> float:
        """What may pass now, as the last process that turns sees it."""
        bucket = self.processes[-1].bandwidth.link(direction)
        assert bucket is not None
        bucket.level(self.clock.monotonic())
        return bucket.rate

    async def pass_time(self, seconds: float) -> tuple[float, list[float]]:
        """The bytes per second that have come through meanwhile, and how long each chunk had to wait for the link."""
        await self.clock.advance(0)
        before, begin = self.link.carried_bytes, self.clock.monotonic()
        await self.clock.advance(seconds)
        delays = [delay for at, delay in self.link.delays if at >= begin]
        return (self.link.carried_bytes - before) / seconds, delays

    async def end(self) -> None:
        for one in self.processes:
            await one.kill()
        await self.link.end()

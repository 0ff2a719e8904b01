"""A link that slots share, in many processes that are simulated in one, by a clock that the test moves."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.policy.bandwidth import Bandwidth, Ceiling, Share, cells_for
from gateway.policy.token_bucket import SharedCells, make_shared_memory
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

    def go_on(self) -> None:
        self._goes_on.set()


class LinkSimulation:
    """To be made and used in an event loop."""

    def __init__(self, link: float, slots: Sequence[SlotOfLink], processes: int) -> None:
        self.clock = ManualClock()
        self.clocks = [ProcessClock(self.clock) for _ in range(processes)]
        ceilings = [Ceiling("read", None, link)]
        ceilings += [Ceiling("read", one.name, one.ceiling) for one in slots if one.ceiling is not None]
        shares = [Share("read", one.name, one.weight, one.guarantee) for one in slots]
        rows = cells_for(ceilings, shares)
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

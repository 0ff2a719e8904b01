"""Leases over their sockets: asked for, dealt out, and done without when nobody answers."""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from gateway.policy.bandwidth import Bandwidth, Ceiling
from gateway.policy.lease_channel import LeaseHolder, LeaseServer, channel
from gateway.policy.leases import ASK_SECONDS, LEASE_SECONDS, Lessee, floors, static_shares
from tests.support.manual_clock import ManualClock

CEILINGS = [Ceiling("read", "a", 1000.0), Ceiling("write", None, 4000.0)]
RATES = [one.bytes_per_second for one in CEILINGS]
HOLDERS = ["worker0", "worker1"]
STATIC = static_shares(RATES, 2)


class Worker:
    """A holder with its bandwidth; `history` is what it heard about being leased."""

    def __init__(self, clock: ManualClock, end: socket.socket) -> None:
        lessee = Lessee(RATES, len(HOLDERS), clock.monotonic())
        self.bandwidth = Bandwidth(CEILINGS, lessee.rates(clock.monotonic()), clock)
        self.history: list[bool] = []
        self.task = asyncio.create_task(LeaseHolder(self.bandwidth, lessee, end, clock, self.history.append).run())

    @property
    def rates(self) -> list[float]:
        return [limit.bucket.rate for limit in self.bandwidth._limits]

    def reads(self, count: int) -> None:
        gate = self.bandwidth.gate("read", "a")
        assert gate is not None
        gate.charge(count)


class Gateway:
    """Two workers and their channels; the server is started where a test wants it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.channels = {name: channel() for name in HOLDERS}
        self.workers = [Worker(self.clock, holder) for holder, _ in self.channels.values()]

    def new_server(self) -> LeaseServer:
        server = LeaseServer(RATES, {name: book for name, (_, book) in self.channels.items()}, self.clock)
        server.start()
        return server

    async def ticks(self, seconds: float) -> None:
        """Every asking and answering within that time."""
        for _ in range(round(seconds / ASK_SECONDS)):
            await self.clock.advance(ASK_SECONDS)
            for _ in range(8):  # asking, answering and taking are a round of the event loop each
                await asyncio.sleep(0)


@asynccontextmanager
async def gateway() -> AsyncIterator[Gateway]:
    one = Gateway()
    try:
        yield one
    finally:
        for worker in one.workers:
            worker.task.cancel()
        await asyncio.gather(*(worker.task for worker in one.workers), return_exceptions=True)
        for ends in one.channels.values():
            for end in ends:
                end.close()


def test_a_busy_worker_is_leased_what_the_idle_one_does_not_use() -> None:
    """And both know that they are leased."""

    async def run() -> None:
        async with gateway() as one:
            server = one.new_server()
            assert one.workers[0].rates == floors(RATES, 2)
            for _ in range(20):
                one.workers[0].reads(200)
                await one.ticks(ASK_SECONDS)
            busy, idle = (worker.rates for worker in one.workers)
            assert busy[0] > 950
            assert sum(rates[0] for rates in (busy, idle)) <= 1000
            assert busy[1] == idle[1] == 2000
            assert [worker.history for worker in one.workers] == [[True], [True]]
            server.stop()

    asyncio.run(run())


def test_without_a_server_workers_come_to_their_static_shares() -> None:
    """After the moment in which leases of others could still be out; nobody waits, and nothing piles up."""

    async def run() -> None:
        async with gateway() as one:
            await one.ticks(LEASE_SECONDS)
            assert [worker.rates for worker in one.workers] == [floors(RATES, 2)] * 2
            await one.ticks(100 * LEASE_SECONDS)
            assert [worker.rates for worker in one.workers] == [STATIC] * 2
            assert [worker.history for worker in one.workers] == [[], []]

    asyncio.run(run())


def test_a_server_that_is_gone_and_comes_back_is_asked_again() -> None:
    """Over the same channel; what was asked in between, it does not answer."""

    async def run() -> None:
        async with gateway() as one:
            one.new_server().stop()
            await one.ticks(4 * LEASE_SECONDS)
            server = one.new_server()
            await one.ticks(LEASE_SECONDS + 3 * ASK_SECONDS)
            assert [worker.history for worker in one.workers] == [[True], [True]]
            server.stop()
            await one.ticks(3 * LEASE_SECONDS)
            assert [worker.history for worker in one.workers] == [[True, False]] * 2
            assert [worker.rates for worker in one.workers] == [STATIC] * 2

    asyncio.run(run())


def test_a_holder_that_reads_no_answers_does_not_hold_up_the_server() -> None:
    """What its channel cannot take is not sent; the others are answered."""

    async def run() -> None:
        async with gateway() as one:
            server = one.new_server()
            silent, other = one.workers
            silent.task.cancel()
            await asyncio.gather(silent.task, return_exceptions=True)
            (end, _), asked = one.channels["worker0"], 0
            with closing(end.dup()) as dup:
                for _ in range(600):
                    asked += _ask(dup, one.clock.monotonic())
                    await one.ticks(ASK_SECONDS)
            assert asked == 600
            assert other.history == [True]
            server.stop()

    asyncio.run(run())


def _ask(end: socket.socket, now: float) -> int:
    return int(end.send(array("d", [now, 0.0, 0.0]).tobytes()) == 24)

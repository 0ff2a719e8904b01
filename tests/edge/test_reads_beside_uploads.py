"""Threads that receive bodies yield to reads: the scheduler prefers the event loop, and few receive beside reads."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from gateway.edge.receiving import THREADS_BESIDE_READS, LoopTurns, ReadRate, ReceiveThreads
from tests.support.waiting import until

_THREADS = 5


class Reads(ReadRate):
    """Many or few, as told."""

    def __init__(self) -> None:
        super().__init__()
        self.are_many = False

    def is_high(self) -> bool:
        return self.are_many


class Gate:
    """Work that goes on until `open`; counts how many are at it, and how many were at most."""

    def __init__(self) -> None:
        self._opened, self._lock = threading.Event(), threading.Lock()
        self.inside = self.most = self.done = 0

    def work(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self._opened.wait(20)
        with self._lock:
            self.inside -= 1
            self.done += 1

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def threads() -> Iterator[ReceiveThreads]:
    pool = ReceiveThreads(_THREADS, Reads())
    yield pool
    pool.shut_down()


def nothing() -> None:
    """What stops work that nobody needs to stop."""


def many(threads: ReceiveThreads, value: bool) -> None:
    assert isinstance(threads.reads, Reads)
    threads.reads.are_many = value


async def test_few_receive_beside_reads_and_all_without(threads: ReceiveThreads) -> None:
    """Each thread more takes the interpreter from those that answer."""

    async def most(are_many: bool) -> int:
        many(threads, are_many)
        gate = Gate()
        works = [asyncio.create_task(threads.run(nothing, gate.work)) for _ in range(3 * _THREADS)]
        await until(lambda: gate.inside == (THREADS_BESIDE_READS if are_many else _THREADS))
        gate.open()
        await asyncio.gather(*works)
        assert gate.done == 3 * _THREADS
        assert threads.asked == 0
        return gate.most

    assert await most(are_many=True) == THREADS_BESIDE_READS
    assert await most(are_many=False) == _THREADS


async def test_when_reads_end_the_others_receive_again(threads: ReceiveThreads) -> None:
    """Nobody who waits is forgotten when the limit rises."""
    many(threads, True)
    first, rest = Gate(), Gate()
    begun = [asyncio.create_task(threads.run(nothing, first.work)) for _ in range(THREADS_BESIDE_READS)]
    waiting = [asyncio.create_task(threads.run(nothing, rest.work)) for _ in range(2 * _THREADS)]
    await until(lambda: first.inside == THREADS_BESIDE_READS)
    many(threads, False)
    first.open()
    await until(lambda: rest.inside == _THREADS)
    rest.open()
    await asyncio.gather(*begun, *waiting)


async def test_who_leaves_while_waiting_leaves_no_hole(threads: ReceiveThreads) -> None:
    """Cancelled before their turn, and just when it has come: the others have theirs."""
    many(threads, True)
    first, rest = Gate(), Gate()
    begun = [asyncio.create_task(threads.run(nothing, first.work)) for _ in range(THREADS_BESIDE_READS)]
    await until(lambda: first.inside == THREADS_BESIDE_READS)
    leaving = [asyncio.create_task(threads.run(nothing, rest.work)) for _ in range(4)]
    await asyncio.sleep(0)
    leaving[0].cancel()
    first.open()
    await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
    for task in leaving[1:]:
        task.cancel()  # whether they wait or have just been let in
    rest.open()
    await asyncio.gather(*begun, *leaving, return_exceptions=True)
    assert threads.asked == 0
    last = Gate()
    last.open()
    await asyncio.wait_for(asyncio.gather(*(threads.run(nothing, last.work) for _ in range(9))), 20)
    assert last.done == 9


def test_the_rate_of_reads_is_that_of_the_last_tenth_of_a_second() -> None:
    """Fifty a second are many; a pause ends it, and the time before is forgotten."""
    now = [0.0]
    reads = ReadRate(lambda: now[0])
    assert not reads.is_high()
    reads.begun += 5
    now[0] = 0.05
    assert not reads.is_high()
    now[0] = 0.1
    assert reads.is_high()
    now[0] = 0.15
    assert reads.is_high()
    now[0] = 0.21
    assert not reads.is_high()
    reads.begun += 40
    now[0] = 1.21
    assert not reads.is_high()


async def test_the_scheduler_prefers_the_event_loop(threads: ReceiveThreads) -> None:
    """The nice value is the thread's own: the event loop keeps that of the process."""

    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    loops = own()
    assert await threads.run(nothing, own) == min(19, loops + 10)
    assert own() == loops


async def test_uploads_begin_one_in_each_turn_of_the_event_loop() -> None:
    """What is ready besides goes on between them; they keep their order, and one that has left takes no turn."""
    turns, begun, seen = LoopTurns(), list[int](), list[int]()

    async def upload(number: int) -> None:
        await turns.turn()
        begun.append(number)

    uploads = [asyncio.create_task(upload(number)) for number in range(20)]
    await asyncio.sleep(0)
    uploads[5].cancel()
    while len(begun) < 19:
        await asyncio.sleep(0)
        seen.append(len(begun))
    assert begun == [number for number in range(20) if number != 5]
    assert all(later - before <= 1 for before, later in zip([0, *seen], seen, strict=False))
    await asyncio.wait_for(turns.turn(), 20)

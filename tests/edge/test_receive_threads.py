"""Threads for request bodies: how many, whose buffers, and what a cancelled caller may rely on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gateway.edge.receiving import BUFFER_BYTES, ReadRate, ReceiveThreads
from tests.support.waiting import until


@pytest.fixture
def threads() -> Iterator[ReceiveThreads]:
    pool = ReceiveThreads(2)
    yield pool
    pool.shut_down()


def nothing() -> None:
    """What stops work that nobody needs to stop."""


async def test_outcomes_come_back(threads: ReceiveThreads) -> None:
    """Values and errors, as of a call."""
    assert await threads.run(nothing, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(nothing, divmod, 7, 0)
    assert threads.asked == 0


async def test_no_more_threads_than_agreed_run_and_each_has_one_buffer(threads: ReceiveThreads) -> None:
    """Memory is bounded whatever arrives."""
    both, buffers = threading.Barrier(2), set[int]()

    def work() -> None:
        buffer = threads.buffer()
        assert len(buffer) == BUFFER_BYTES
        buffers.add(id(buffer.obj))
        both.wait(20)

    await asyncio.gather(*(threads.run(nothing, work) for _ in range(8)))
    assert len(buffers) == 2


async def test_a_cancelled_caller_waits_until_its_work_has_ended(threads: ReceiveThreads) -> None:
    """Also when it is cancelled again and again: what the work uses is free once the caller knows."""
    begun, stopped, gate, ended = threading.Event(), threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert gate.wait(20)
        ended.set()
        raise OSError("nobody hears this")

    running = asyncio.create_task(threads.run(stopped.set, work))
    await until(begun.is_set)
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not running.done()
    assert stopped.is_set()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    assert threads.asked == 0


async def test_a_cancelled_caller_without_a_thread_leaves_the_queue(threads: ReceiveThreads) -> None:
    """Its work never begins."""
    gate, ran = threading.Event(), threading.Event()
    busy = [asyncio.create_task(threads.run(nothing, gate.wait, 20)) for _ in range(2)]
    await until(lambda: threads.asked == 2)
    queued = asyncio.create_task(threads.run(nothing, ran.set))
    await until(lambda: threads.asked == 3)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    gate.set()
    await asyncio.gather(*busy)
    await asyncio.gather(*(threads.run(nothing, int) for _ in range(2)))
    assert not ran.is_set()


class LeavesNow(ReadRate):
    """Is asked whenever a thread falls free: `leaving` is cancelled in that very moment."""

    leaving: asyncio.Task[object] | None = None

    def is_high(self) -> bool:
        if self.leaving is not None:
            self.leaving.cancel()
        return False


async def test_a_caller_that_is_cancelled_as_a_thread_falls_free_hears_of_nothing_else() -> None:
    """And the next in the queue has the thread."""
    gate, ran, reads = threading.Event(), threading.Event(), LeavesNow()
    threads = ReceiveThreads(1, reads)
    busy = asyncio.create_task(threads.run(nothing, gate.wait, 20))
    await until(lambda: threads.asked == 1)
    leaving = asyncio.create_task(threads.run(nothing, ran.set))
    following = asyncio.create_task(threads.run(nothing, int))
    await until(lambda: threads.asked == 3)
    reads.leaving = leaving
    gate.set()
    assert await following == 0
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await busy
    assert threads.asked == 0
    assert not ran.is_set()
    threads.shut_down()

"""A thread for disk work that may hang: in order, and nobody waits for longer than he says."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.metadata.store import DiskThread


async def test_work_is_done_in_order_and_gives_its_result() -> None:
    """An error reaches who waits for it, and ends nothing."""
    thread, done = DiskThread("test"), list[int]()
    for number in range(100):
        thread.submit(done.append, number)
    assert await thread.run(10.0, len, done) == 100
    assert done == list(range(100))
    with pytest.raises(ZeroDivisionError):
        await thread.run(10.0, divmod, 1, 0)
    assert await thread.run(10.0, divmod, 7, 2) == (3, 1)
    assert thread.waiting == 0
    assert await thread.close(10.0)
    with pytest.raises(RuntimeError):
        thread.submit(done.append, 0)


async def test_nobody_waits_for_work_that_hangs() -> None:
    """Who comes later not at all; what was submitted is done when it can be, though its waiter has gone."""
    thread, hanging, done = DiskThread("test"), threading.Event(), list[int]()
    thread.submit(hanging.wait)
    with pytest.raises(TimeoutError):
        await thread.run(0.1, done.append, 1)
    assert thread.is_stuck(0.1)
    for _ in range(100):
        with pytest.raises(TimeoutError):
            await thread.run(0.1, done.append, 2)
    assert thread.waiting == 2, "the hanging one, and who waited for it"
    leaving = asyncio.create_task(thread.run(60.0, done.append, 3))
    await asyncio.sleep(0)
    leaving.cancel()
    hanging.set()
    assert await thread.run(10.0, len, done) == 2
    assert done == [1, 3]
    assert await thread.close(10.0)


async def test_a_thread_that_hangs_is_left_behind() -> None:
    """It keeps neither the loop nor the process from ending."""
    thread = DiskThread("test")
    thread.submit(threading.Event().wait)
    assert not await thread.close(0.1)

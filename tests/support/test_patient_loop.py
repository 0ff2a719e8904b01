"""The loop of tests that busy machines must not fail."""

from __future__ import annotations

import asyncio
import time

from tests.support.patient_loop import run_patiently


def test_no_timer_overtakes_what_is_ready_or_what_a_thread_does() -> None:
    """However long either takes; and it goes off once nobody has anything to do."""

    def work() -> None:
        end = time.perf_counter() + 0.1
        while time.perf_counter() < end:
            pass

    async def scenario() -> None:
        gone_off = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, gone_off.set)
        for _ in range(3):
            work()
            await asyncio.sleep(0)
        await asyncio.to_thread(work)
        assert not gone_off.is_set()
        await gone_off.wait()

    run_patiently(scenario())

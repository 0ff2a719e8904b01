"""How often somebody looks who waits for the origin."""

from __future__ import annotations

import asyncio
import itertools

from gateway.operations.writeback.past_the_buffer import (
    LOOK_SECONDS,
    LOOK_SECONDS_MAX,
    PATIENCE_SECONDS,
    until_next_look,
)
from tests.support.manual_clock import ManualClock


class QuickClock(ManualClock):
    """Time passes for whoever sleeps, at once."""

    async def sleep(self, seconds: float) -> None:
        await self.advance(seconds)


def test_who_waits_for_long_looks_seldom_and_hears_soon() -> None:
    """The first looks come as soon as they can; each later one a tenth of the wait later at most, and 0.1 s."""
    clock, looks = QuickClock(), [0.0]

    async def wait() -> None:
        while clock.monotonic() < PATIENCE_SECONDS:
            await until_next_look(clock, 0.0)
            looks.append(clock.monotonic())

    asyncio.run(wait())
    pauses = [after - before for before, after in itertools.pairwise(looks)]
    slack = 1e-9
    assert all(LOOK_SECONDS - slack <= pause <= LOOK_SECONDS_MAX + slack for pause in pauses)
    assert all(
        pause <= max(LOOK_SECONDS, waited / 10) + slack for waited, pause in zip(looks[:-1], pauses, strict=True)
    )
    assert len(looks) < PATIENCE_SECONDS / LOOK_SECONDS_MAX + 50

"""Writes in doubt: each is ended once, in time, and they are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gateway.metadata import doubts as doubts_module
from gateway.metadata.doubts import DOUBT_SECONDS, WritesInDoubt
from tests.support.manual_clock import ManualClock


def ending(ended: list[int], number: int) -> Callable[[], Awaitable[None]]:
    async def end() -> None:
        ended.append(number)

    return end


def test_each_is_ended_when_its_time_is_over() -> None:
    """Once, not before; and one that comes when all others are over, too."""

    async def scenario() -> None:
        clock, ended = ManualClock(), list[int]()
        doubts = WritesInDoubt(clock)
        doubts.add(ending(ended, 1))
        await clock.advance(DOUBT_SECONDS / 2)
        doubts.add(ending(ended, 2))
        await clock.advance(DOUBT_SECONDS / 2 - 0.5)
        assert ended == []
        await clock.advance(1.0)
        assert ended == [1]
        await clock.advance(DOUBT_SECONDS)
        doubts.add(ending(ended, 3))
        await clock.advance(DOUBT_SECONDS + 1)
        assert ended == [1, 2, 3]
        await doubts.close()

    asyncio.run(scenario())


def test_one_that_cannot_be_ended_keeps_none_of_the_others() -> None:
    """The disk may fail at any of them."""

    async def scenario() -> None:
        clock, ended = ManualClock(), list[int]()
        doubts = WritesInDoubt(clock)

        async def fail() -> None:
            raise OSError("the disk is gone")

        doubts.add(fail)
        doubts.add(ending(ended, 1))
        await clock.advance(DOUBT_SECONDS + 1)
        assert ended == [1]
        await doubts.close()

    asyncio.run(scenario())


def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more, the oldest is ended sooner; what is left is not ended when the gateway stops."""
    monkeypatch.setattr(doubts_module, "DOUBTS_MAX", 10)

    async def scenario() -> None:
        clock, ended = ManualClock(), list[int]()
        doubts = WritesInDoubt(clock)
        for number in range(50):
            doubts.add(ending(ended, number))
        await clock.advance(1.0)
        assert ended == list(range(40))
        await doubts.close()
        await clock.advance(DOUBT_SECONDS + 1)
        assert ended == list(range(40))

    asyncio.run(scenario())

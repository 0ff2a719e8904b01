"""Writes in doubt: each is ended once, in time, and they are bounded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from gateway.metadata import entries as epochs_module
from gateway.metadata.entries import IN_DOUBT_SECONDS, InDoubtWrites
from tests.support.manual_clock import ManualClock


def ending(ended: list[int], number: int) -> Callable[[], Awaitable[None]]:
    async def end() -> None:
        ended.append(number)

    return end


async def test_each_is_ended_when_its_time_is_over() -> None:
    """Once, not before; and one that comes when all others are over, too."""
    clock, ended = ManualClock(), list[int]()
    writes = InDoubtWrites(clock)
    writes.add(ending(ended, 1))
    await clock.advance(IN_DOUBT_SECONDS / 2)
    writes.add(ending(ended, 2))
    await clock.advance(IN_DOUBT_SECONDS / 2 - 0.5)
    assert ended == []
    await clock.advance(1.0)
    assert ended == [1]
    await clock.advance(IN_DOUBT_SECONDS)
    writes.add(ending(ended, 3))
    await clock.advance(IN_DOUBT_SECONDS + 1)
    assert ended == [1, 2, 3]
    await writes.close()


async def test_one_that_cannot_be_ended_keeps_none_of_the_others() -> None:
    """The disk may fail at any of them."""
    clock, ended = ManualClock(), list[int]()
    writes = InDoubtWrites(clock)

    async def fail() -> None:
        raise OSError("the disk is gone")

    writes.add(fail)
    writes.add(ending(ended, 1))
    await clock.advance(IN_DOUBT_SECONDS + 1)
    assert ended == [1]
    await writes.close()


async def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more, the oldest is ended sooner; what is left is not ended when the gateway stops."""
    monkeypatch.setattr(epochs_module, "IN_DOUBT_MAX", 10)
    clock, ended = ManualClock(), list[int]()
    writes = InDoubtWrites(clock)
    for number in range(50):
        writes.add(ending(ended, number))
    await clock.advance(1.0)
    assert ended == list(range(40))
    await writes.close()
    await clock.advance(IN_DOUBT_SECONDS + 1)
    assert ended == list(range(40))

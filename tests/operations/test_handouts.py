"""Who is sent bytes that many nodes want at once, who waits, and who is told where they are."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.operations import handouts as module
from gateway.operations.handouts import SENT_AT_ONCE, Handouts

ASKED = ObjectVersion(ObjectKey("bucket", "key"), '"1"', 100), ByteRange(0, 99)


def sending(count: int = SENT_AT_ONCE) -> Handouts:
    handouts = Handouts()
    for _ in range(count):
        handouts.begin(ASKED)
    return handouts


async def waiting(handouts: Handouts) -> asyncio.Task[Sequence[str]]:
    """One more that asks; what is its turn to be sent is sent at once."""

    async def answer() -> Sequence[str]:
        others = await handouts.turn(ASKED, "last")
        if not others:
            handouts.begin(ASKED)
        return others

    task = asyncio.create_task(answer())
    await asyncio.sleep(0)
    return task


def test_a_few_are_sent_the_bytes_and_others_the_same_bytes_of_another_range() -> None:
    assert sending(SENT_AT_ONCE - 1).others(ASKED, "one") == ()
    handouts = sending()
    assert handouts.others(ASKED, "one") is None
    assert handouts.others((ASKED[0], ByteRange(0, 9)), "one") == ()


async def test_the_fifth_waits_until_three_have_the_bytes() -> None:
    handouts = sending()
    fifth = await waiting(handouts)
    for number in range(2):
        handouts.end(ASKED, f"node {number}")
        handouts.begin(ASKED)
        await asyncio.sleep(0)
        assert not fifth.done()
    handouts.end(ASKED, "node 2")
    handouts.begin(ASKED)
    assert await fifth == ["node 2", "node 1", "node 0"]
    assert handouts.others(ASKED, "node 1") is None  # it was told of two others before it asked


async def test_the_fifth_is_sent_the_bytes_in_the_place_of_one_that_left() -> None:
    handouts = sending()
    fifth, sixth = [await waiting(handouts) for _ in range(2)]
    handouts.end(ASKED, "")
    assert await fifth == ()
    assert not sixth.done()
    handouts.end(ASKED, "")
    assert await sixth == ()


async def test_one_that_leaves_while_it_waits_takes_nobodys_place() -> None:
    handouts = sending()
    left, stays = [await waiting(handouts) for _ in range(2)]
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    handouts.end(ASKED, "")
    assert await stays == ()


async def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS_MAX", 0.01)
    handouts = sending()
    assert await handouts.turn(ASKED, "last") == []
    handouts.end(ASKED, "one")
    handouts.begin(ASKED)
    assert await handouts.turn(ASKED, "last") == ["one"]


def test_what_is_remembered_is_bounded_and_what_is_being_sent_is_not_forgotten() -> None:
    handouts = sending()
    for number in range(2 * module.REMEMBERED_MAX):
        asked = ASKED[0], ByteRange(number, number)
        handouts.begin(asked)
        handouts.end(asked, "one")
    assert len(handouts._of) == module.REMEMBERED_MAX
    assert handouts.others(ASKED, "last") is None
    handouts.end(ASKED, "one")
    handouts.begin(ASKED)
    assert handouts._of[ASKED].takers == ("one",)

"""How connections are shared out."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from gateway.core.errors import OriginBusy
from gateway.origin.http1_client.client import Claim, ConnectionShares


async def _settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def _waiting(shares: ConnectionShares, claims: Sequence[Claim], order: list[Claim]) -> list[asyncio.Task[None]]:
    async def take(claim: Claim) -> None:
        await shares.take(claim)
        order.append(claim)

    return [asyncio.create_task(take(claim)) for claim in claims]


@pytest.mark.parametrize("total", [4, 5, 8, 256])
async def test_a_quarter_is_left_to_others(total: int) -> None:
    """However much one account asks for, brief or lasting; another one is served at once."""
    shares, order = ConnectionShares(total, 5.0), list[Claim]()
    greedy = [Claim("a", is_lasting=bool(number % 2)) for number in range(3 * total)]
    tasks = _waiting(shares, greedy, order)
    await _settled()
    assert len(order) == total - total // 4
    assert sum(claim.is_lasting for claim in order) <= total // 2
    await asyncio.wait_for(shares.take(Claim("b")), 1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_lasting_claims_of_many_accounts_leave_a_quarter_too() -> None:
    """Uploads last as long as their clients like: readers do not wait for them."""
    shares, order = ConnectionShares(8, 5.0), list[Claim]()
    tasks = _waiting(shares, [Claim(str(number), is_lasting=True) for number in range(20)], order)
    await _settled()
    assert len(order) == 6
    await asyncio.wait_for(shares.take(Claim("reader")), 1.0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_accounts_take_turns_and_within_one_who_came_first_is_first() -> None:
    """A thousand requests of one do not come before one of another."""
    shares, order = ConnectionShares(1, 5.0), list[Claim]()
    await shares.take(Claim("held"))
    tasks = _waiting(shares, [Claim("a")] * 4 + [Claim("b")] * 2 + [Claim("c")], order)
    await _settled()
    shares.release(Claim("held"))
    for _ in range(7):
        await _settled()
        shares.release(order[-1])
    await asyncio.gather(*tasks)
    assert [claim.account for claim in order] == ["a", "b", "c", "a", "b", "a", "a"]


async def test_the_wait_is_bounded() -> None:
    """Then it is SlowDown; nothing was taken."""
    shares = ConnectionShares(1, 0.05)
    await shares.take(Claim("a"))
    with pytest.raises(OriginBusy):
        await shares.take(Claim("b"))
    shares.release(Claim("a"))
    assert shares.granted == 0
    await shares.take(Claim("b"))


@pytest.mark.parametrize("seed", range(8))
async def test_nothing_is_lost_whoever_leaves_when(seed: int) -> None:
    """Takers that are cancelled at any moment, the one of their turn included: in the end all is free, nobody waits."""
    rng = random.Random(seed)
    shares = ConnectionShares(4, 5.0)

    async def work(claim: Claim) -> None:
        await shares.take(claim)
        try:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        finally:
            shares.release(claim)

    tasks = set[asyncio.Task[None]]()
    for _ in range(500):
        tasks.add(asyncio.create_task(work(Claim(rng.choice("abc"), is_lasting=rng.random() < 0.4))))
        if rng.random() < 0.5:
            rng.choice(list(tasks)).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        assert shares.granted <= 4
    await asyncio.gather(*tasks, return_exceptions=True)
    assert shares.granted == 0
    assert not shares._waiting

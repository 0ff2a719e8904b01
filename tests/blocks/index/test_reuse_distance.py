"""What is read from returns: since when something must have been unused before it may go."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gateway.blocks.policies import RETURNS_MIN, ReuseDistance

EPOCH = 10_000


def read_epoch(returns: ReuseDistance, order_before: list[int], order: list[int], begun: int) -> None:
    """Every block comes back once; `order_before` says where it was read in the epoch before."""
    last_used = {block: begun - EPOCH + at * EPOCH // len(order_before) for at, block in enumerate(order_before)}
    for at, block in enumerate(order):
        returns.add(begun + at * EPOCH // len(order), last_used[block])


def test_nothing_is_known_at_first() -> None:
    """Without returns there is nothing to protect."""
    assert ReuseDistance().kept_since(123) is None


def test_a_few_returns_protect_everything() -> None:
    """Until there are enough of them to tell how old the oldest is."""
    returns = ReuseDistance()
    for number in range(RETURNS_MIN // 4):
        returns.add(20_000 + number, 10_000 + number)
        assert returns.kept_since(20_000 + number) == 0


@given(st.integers(0, 2**32))
def test_what_the_epoch_before_has_read_is_kept_and_nothing_much_older(seed: int) -> None:
    """At the end of an epoch, no block of it and few of the one before may go; two epochs before that, all may."""
    generator, blocks = random.Random(seed), list(range(400))
    orders = [generator.sample(blocks, len(blocks)) for _ in range(7)]
    returns = ReuseDistance()
    for number in range(1, 7):
        read_epoch(returns, orders[number - 1], orders[number], number * EPOCH)
    kept_since = returns.kept_since(7 * EPOCH)
    assert kept_since is not None
    assert 2.8 * EPOCH <= kept_since <= 5 * EPOCH + EPOCH // 20


def test_what_stopped_coming_back_is_kept_for_as_long_as_it_took() -> None:
    """And not for ever: then lru decides again."""
    generator, blocks = random.Random(1), list(range(400))
    returns = ReuseDistance()
    read_epoch(returns, generator.sample(blocks, 400), generator.sample(blocks, 400), EPOCH)
    assert returns.kept_since(2 * EPOCH + EPOCH // 2) is not None
    assert returns.kept_since(4 * EPOCH) is None


def test_a_block_that_was_away_while_nothing_came_back_is_of_another_data_set() -> None:
    """From then on only what comes back with it counts."""
    returns = ReuseDistance()
    for number in range(100):
        returns.add(20_000 + number, 10_000 + number)
    for number in range(RETURNS_MIN):
        returns.add(40_000 + number, 30_000 + number)
    kept_since = returns.kept_since(40_100)
    assert kept_since is not None
    assert 25_000 < kept_since <= 30_000


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5000)), max_size=50))
def test_it_survives_being_written_down(steps: list[tuple[int, int]]) -> None:
    """What is packed and unpacked says the same."""
    returns, position = ReuseDistance(), 10_000
    for step, age in steps:
        position += step
        returns.add(position, position - age)
        assert ReuseDistance.unpack(returns.pack()) == returns

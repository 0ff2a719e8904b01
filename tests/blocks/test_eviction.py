"""Which blocks make room."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway.blocks.eviction import least_recently_used


@dataclass(frozen=True)
class Sized:
    disk_bytes: int


@given(st.lists(st.integers(1, 100).map(Sized)), st.integers(-10, 1000), st.integers(1, 20))
def test_the_fewest_of_the_oldest_go(oldest_first: list[Sized], needed: int, most: int) -> None:
    """Victims are the oldest in order, enough of them and not one more, or as many as one step may take."""
    victims = least_recently_used(oldest_first, needed, most)
    assert victims == oldest_first[: len(victims)]
    freed = sum(victim.disk_bytes for victim in victims)
    if victims:
        assert freed - victims[-1].disk_bytes < needed
    assert freed >= needed or len(victims) in (most, len(oldest_first))


def test_nothing_goes_when_nothing_is_needed() -> None:
    """Room that is there costs no block."""
    assert least_recently_used([Sized(1)], 0, 64) == []

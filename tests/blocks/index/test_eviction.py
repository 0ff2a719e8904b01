"""Which slot makes room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.blocks.index.eviction import Holding, yielding


def holding(taken: int, guaranteed: int = 0, limit: int = 1000) -> Holding:
    return Holding(taken, guaranteed, limit)


def test_nobody_yields_while_everything_fits() -> None:
    """Idle room is lent: no slot is held to its guarantee while nobody else needs the room."""
    assert yielding({"a": holding(0, guaranteed=40), "b": holding(100)}, 100) == []


def test_who_has_borrowed_most_yields_first() -> None:
    """The example of the module's docstring: a is within its guarantee, b has borrowed more than c."""
    holdings = {"a": holding(30, guaranteed=40), "b": holding(60), "c": holding(30)}
    assert yielding(holdings, 100) == ["b", "c"]


def test_a_slot_at_its_limit_makes_room_by_itself() -> None:
    """Even while the directory is half empty, and even when others have borrowed more."""
    assert yielding({"a": holding(30, limit=25), "b": holding(60)}, 200) == ["a"]


def test_what_is_nobodys_takes_room_too() -> None:
    """Files that a survey has not come to count against the capacity; slots yield for them."""
    assert yielding({"a": holding(60)}, 100, unowned_bytes=30) == []
    assert yielding({"a": holding(60)}, 100, unowned_bytes=50) == ["a"]


@st.composite
def crowded(draw: st.DrawFn) -> tuple[dict[str, Holding], int]:
    """Slots whose guarantees fit in together, holding more than fits."""
    guarantees = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
    capacity = sum(guarantees) + draw(st.integers(0, 100))
    holdings = {str(n): holding(draw(st.integers(0, 300)), guarantee, 10_000) for n, guarantee in enumerate(guarantees)}
    return holdings, capacity


@given(crowded())
def test_evicting_as_told_ends_with_everybody_at_their_due(case: tuple[dict[str, Holding], int]) -> None:
    """It always ends, within the capacity; who was within its guarantee gave nothing; nobody fell below it.

    And it is fair: whoever gave something has borrowed no less afterwards than anybody else, but for one byte.
    """
    holdings, capacity = case
    before = {slot: one.taken_bytes for slot, one in holdings.items()}
    while order := yielding(holdings, capacity):
        assert all(holdings[slot].borrowed_bytes > 0 for slot in order)
        holdings[order[0]].taken_bytes -= 1
    assert sum(one.taken_bytes for one in holdings.values()) <= max(capacity, sum(before.values()))
    assert sum(one.taken_bytes for one in holdings.values()) <= capacity or sum(before.values()) <= capacity
    gave = [slot for slot in holdings if holdings[slot].taken_bytes < before[slot]]
    most = max(one.borrowed_bytes for one in holdings.values())
    assert all(holdings[slot].taken_bytes >= holdings[slot].guaranteed_bytes for slot in gave)
    assert all(holdings[slot].borrowed_bytes >= most - 1 for slot in gave)

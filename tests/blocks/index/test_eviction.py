"""Which slot makes room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.blocks.eviction import Capacity, Holdings, Share
from gateway.blocks.policies import Queue, SlotAccount


def account(taken_bytes: int) -> SlotAccount:
    account = SlotAccount()
    account.queue_bytes[Queue.MAIN] = taken_bytes
    return account


def holdings(taken: list[int], shares: list[Share]) -> Holdings:
    """Slots by their numbers, which are their names too."""
    found = Holdings(Capacity(1000, {str(slot): share for slot, share in enumerate(shares)}))
    for slot, taken_bytes in enumerate(taken):
        found.update(slot, account(taken_bytes), str(slot))
    return found


def test_who_is_within_its_guarantee_gives_nothing() -> None:
    """However little room there is: what is guaranteed is not borrowed."""
    assert list(holdings([40, 0], [Share(40), Share()]).borrowers()) == []


def test_who_has_borrowed_most_yields_first() -> None:
    """The example of the module's docstring: a is within its guarantee, b has borrowed more than c."""
    assert list(holdings([30, 60, 30], [Share(40), Share(), Share()]).borrowers()) == [1, 2]


def test_a_slot_at_its_limit_is_known() -> None:
    """Others may have borrowed more."""
    assert holdings([30, 60], [Share(0, 25), Share()]).over_limit() == [0]


def test_the_order_is_asked_for_again_and_again() -> None:
    """Whether the one before was gone through or broken off, and while what slots hold changes."""
    found = holdings([30, 60, 50], [Share(), Share(), Share()])
    assert next(found.borrowers()) == 1
    assert list(found.borrowers()) == [1, 2, 0]
    found.update(1, account(10))
    assert list(found.borrowers()) == [2, 0, 1]
    found.update(1, account(60))
    found.update(1, account(60))
    assert list(found.borrowers()) == [1, 2, 0]


@st.composite
def crowded(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """What slots hold, what they are guaranteed, and what fits: all guarantees together do."""
    guarantees = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
    taken = [draw(st.integers(0, 300)) for _ in guarantees]
    return taken, guarantees, sum(guarantees) + draw(st.integers(0, 100))


@given(crowded())
def test_evicting_as_told_ends_with_everybody_at_their_due(case: tuple[list[int], list[int], int]) -> None:
    """It always ends, within the capacity; who was within its guarantee gave nothing; nobody fell below it.

    And it is fair: whoever gave something has borrowed no less afterwards than anybody else, but for one byte.
    """
    before, guarantees, capacity = case
    taken, found = list(before), holdings(before, [Share(guaranteed) for guaranteed in guarantees])
    while sum(taken) > capacity:
        slot = next(found.borrowers())
        taken[slot] -= 1
        found.update(slot, account(taken[slot]))
    borrowed = [count - guaranteed for count, guaranteed in zip(taken, guarantees, strict=True)]
    for slot in range(len(taken)):
        if taken[slot] < before[slot]:
            assert 0 <= borrowed[slot] >= max(borrowed) - 1


@given(crowded(), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), max_size=30))
def test_what_is_kept_up_to_date_is_what_is_read_anew(
    case: tuple[list[int], list[int], int], changes: list[tuple[int, int]]
) -> None:
    """Sums and order, after any changes."""
    taken, guarantees, _ = case
    shares = [Share(guaranteed) for guaranteed in guarantees]
    found = holdings(taken, shares)
    for slot, count in changes:
        if slot < len(taken):
            taken[slot] = count
            found.update(slot, account(count))
    anew = holdings(taken, shares)
    assert found.kept_bytes == anew.kept_bytes
    assert [found[slot].borrowed_bytes for slot in found.borrowers()] == [
        anew[slot].borrowed_bytes for slot in anew.borrowers()
    ]

"""Which parts of a bucket the index may answer for, and how old its answers may be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metadata.entries import ObservedAt
from gateway.metadata.listing.ranges import KeyBound, answerable, bound_of
from gateway.policy.slots import DEFAULT_SLOT, Prefix, Slots
from tests.support.slots import Slot

TEXT = st.text("ab/é", max_size=4)
SLOT = st.builds(
    lambda bucket, prefix, consistency, ttl: Slot(
        f"{bucket}{prefix}", Prefix(bucket, prefix), "read-write", consistency, float(ttl)
    ),
    st.sampled_from(["b", "b", "c"]),
    TEXT,
    st.sampled_from(["strict", "ttl", "immutable"]),
    st.integers(1, 5),
)
EVERYWHERE = st.sampled_from(["strict", "ttl"]).map(lambda one: Slot("all", Prefix(""), "read-write", one))
SLOTS = st.tuples(st.lists(SLOT, max_size=5, unique_by=lambda slot: slot.name), st.none() | EVERYWHERE).map(
    lambda found: Slots([*found[0], *([found[1]] if found[1] else [])])
)


@given(SLOTS, TEXT)
def test_a_key_is_answerable_where_its_slot_is_not_strict(slots: Slots, key: str) -> None:
    """And nowhere else, whatever slots lie within others."""
    place = key.encode()
    within = [start <= place < stop for start, stop in answerable(slots, "b")]
    assert sum(within) <= 1
    assert any(within) == (slots.find("b", key).consistency != "strict")


@given(SLOTS, TEXT, TEXT)
def test_the_slots_under_a_prefix_are_all_that_its_keys_may_lie_in(slots: Slots, prefix: str, rest: str) -> None:
    """So that the bound of a listing is never laxer than that of a key in it."""
    found = list(slots.under("b", prefix))
    slot = slots.find("b", prefix + rest)
    assert slot in found
    bound = bound_of(found)
    if slot.consistency == "strict":
        assert bound is None
    elif slot.consistency == "ttl" and bound is not None:
        assert bound.fresh_seconds <= slot.metadata_ttl_seconds


def test_the_strictest_of_several_decides() -> None:
    """Each limit by itself."""
    short = Slot("a", Prefix("b"), "read-only", "ttl", 10.0, stale_if_unreachable_seconds=100.0)
    long = Slot("b", Prefix("b", "x"), "read-only", "ttl", 50.0)
    for_ever = Slot("c", Prefix("b", "y"), "read-only", "immutable")
    assert bound_of([short, long, for_ever]) == KeyBound(10.0, 50.0)
    assert bound_of([for_ever]) == KeyBound(math.inf, math.inf)
    assert bound_of([for_ever, DEFAULT_SLOT]) is None


NOW = ObservedAt(7, 100.0, 1)


@pytest.mark.parametrize(
    ("learned", "fresh", "stale", "for_ever"),
    [
        (ObservedAt(7, 100.0, 1), True, True, True),
        (ObservedAt(7, 90.1, 1), True, True, True),
        (ObservedAt(7, 90.0, 1), False, True, True),
        (ObservedAt(7, 50.0, 1), False, False, True),
        (ObservedAt(7, 100.1, 1), False, False, True),
        (ObservedAt(7, 100.0, 2), False, False, True),
        (ObservedAt(6, 100.0, 1), False, False, False),
    ],
)
def test_what_was_learned_is_allowed_by_its_age(learned: ObservedAt, fresh: bool, stale: bool, for_ever: bool) -> None:
    """Of another boot its age is unknown, of the future too; of another write epoch it is void."""
    bound = KeyBound(10.0, 50.0)
    assert bound.allows(learned, NOW) is fresh
    assert bound.allows(learned, NOW, stale=True) is stale
    assert KeyBound(math.inf, math.inf).allows(learned, NOW) is for_ever

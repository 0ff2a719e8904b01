"""Maps by prefix: they answer as looking at every prefix would, and cost the same however many there are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.slots import DEFAULT_SLOT, Grant, Prefix, PrefixMap, Slots
from tests.support.slots import Slot

BUCKETS = st.sampled_from(["", "a", "b"])
KEYS = st.text(st.sampled_from("xy/\0\U0010ffff"), max_size=5)
PREFIXES = st.builds(lambda bucket, key: Prefix(bucket, key if bucket else ""), BUCKETS, KEYS)


@given(st.lists(PREFIXES, max_size=12), st.sampled_from("ab"), KEYS)
def test_a_look_up_answers_as_looking_at_every_prefix_would(prefixes: list[Prefix], bucket: str, key: str) -> None:
    """The longest that covers the key, that of its bucket before that of every bucket; and those within."""
    numbered = dict(reversed([(prefix, number) for number, prefix in enumerate(prefixes)]))  # the first counts
    covering = [prefix for prefix in numbered if prefix.covers(bucket, key)]
    covering.sort(key=lambda prefix: (prefix.bucket, len(prefix.key_prefix)), reverse=True)
    found = PrefixMap((prefix, number) for number, prefix in enumerate(prefixes))
    assert found.longest(bucket, key) == (numbered[covering[0]] if covering else None)
    within = [one for one in numbered if one.bucket == bucket and one.key_prefix.startswith(key)]
    within = sorted((one for one in within if one.key_prefix != key), key=lambda one: one.key_prefix)
    assert list(found.within(bucket, key)) == [numbered[prefix] for prefix in within]


def lines_of(work: Callable[[], object]) -> int:
    """Lines of Python that run."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def prefixes_of(count: int) -> list[Prefix]:
    return [Prefix("train", f"{number:06}/") for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["000003/x", "000003", "zzz", ""])
def test_the_slot_of_a_key_is_found_as_fast_among_10_000_slots_as_among_10(key: str) -> None:
    """A thousand slots used to cost a hundred microseconds for every look-up."""
    few, many = (
        Slots(Slot(str(prefix), prefix) for prefix in (*prefixes_of(count), Prefix("train", "000003/deep/")))
        for count in (10, 10_000)
    )
    assert lines_of(lambda: many.find("train", key)) <= lines_of(lambda: few.find("train", key)) + 2
    assert many.find("train", "009999/x").name == "s3://train/009999/"
    assert many.find("train", "010000/x") is DEFAULT_SLOT


@pytest.mark.parametrize("key", ["000003/x", "000003", "zzz", ""])
def test_a_credential_is_looked_at_as_fast_with_10_000_prefixes_as_with_10(key: str) -> None:
    """Every request asks whether its credential covers the key."""
    few, many = (Grant(prefixes_of(count)) for count in (10, 10_000))
    assert lines_of(lambda: many.covers("train", key)) <= lines_of(lambda: few.covers("train", key)) + 2
    assert many.covers("train", "009999/x")
    assert not many.covers("train", "010000/x")


@pytest.mark.slow
def test_what_lies_under_a_prefix_is_found_as_fast_among_10_000_slots_as_among_10() -> None:
    """LIST asks which slots lie under its prefix."""
    few, many = (Slots(Slot(str(prefix), prefix) for prefix in prefixes_of(count)) for count in (10, 10_000))
    searches = 40
    """Comparisons of one binary search more, with the lines of each."""
    assert lines_of(lambda: list(many.under("train", "000003/"))) <= searches + lines_of(
        lambda: list(few.under("train", "000003/"))
    )

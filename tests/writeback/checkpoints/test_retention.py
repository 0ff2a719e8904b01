"""Which checkpoints of a run need not be sent any more, and which stay in the cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.writeback.checkpoints.retention import FlushRule, Save, flush_rule_of, kept, superseded
from gateway.writeback.checkpoints.state import CheckpointState

S = CheckpointState


def run_of(*states: S) -> list[Save]:
    """In the order in which they were begun, with ids from 1."""
    return [
        Save(number, number, number, state, state not in (S.WRITING, S.STALLED))
        for number, state in enumerate(states, 1)
    ]


@pytest.mark.parametrize(
    ("rule", "expected"), [("all", []), ("latest", [1, 2, 4]), (2, [1]), (4, [1, 2]), (1000, [1, 2, 4])]
)
def test_older_ones_are_left_out_once_a_newer_one_is_durable(rule: FlushRule, expected: list[int]) -> None:
    """Those that are durable themselves, and those that are newer than the newest durable one, never are."""
    states = (S.ACKNOWLEDGED, S.FAILED, S.DURABLE, S.LOCAL, S.DURABLE, S.FLUSHING, S.WRITING)
    assert superseded(run_of(*states), rule) == expected


@given(st.lists(st.sampled_from([one for one in S if one is not S.DURABLE])), st.sampled_from(["latest", 2, 3]))
def test_nothing_is_left_out_before_anything_is_durable(states: list[S], rule: FlushRule) -> None:
    """Whatever else is said of them."""
    assert superseded(run_of(*states), rule) == []


@given(st.lists(st.sampled_from(list(S)), max_size=12), st.sampled_from(["latest", 2, 3]))
def test_what_is_left_out_is_older_than_one_that_is_durable(states: list[S], rule: FlushRule) -> None:
    """And so the newest is always sent."""
    durable = [number for number, state in enumerate(states, 1) if state is S.DURABLE]
    assert all(one < max(durable) for one in superseded(run_of(*states), rule))


def test_one_that_is_saved_again_is_a_newer_one() -> None:
    """Its place is where its last save began."""
    first, second = run_of(S.FLUSHING, S.DURABLE)
    again = Save(1, first.ordinal, 3, S.FLUSHING, True)
    assert superseded([again, second], "latest") == []


def test_one_with_fewer_files_supersedes_nothing() -> None:
    """A job that died while it saved leaves a directory of which names may not tell that something is missing."""
    whole, part = run_of(S.FLUSHING, S.DURABLE)
    assert superseded([replace(whole, objects=3), part], "latest") == []
    assert superseded([replace(whole, objects=3), replace(part, objects=3)], "latest") == [1]


def test_the_newest_complete_ones_are_kept_and_those_being_saved() -> None:
    """One that lacks something for long does not count, and takes nobody's place."""
    saves = run_of(S.DURABLE, S.DURABLE, S.STALLED, S.ACKNOWLEDGED, S.LOCAL, S.WRITING)
    assert sorted(kept(saves, 3)) == [2, 4, 5, 6]
    assert sorted(kept(saves, 100)) == [1, 2, 4, 5, 6]


def test_rules_are_read_as_they_are_written() -> None:
    """As settings have them."""
    assert [flush_rule_of(one) for one in ("all", "latest", "every-2nd", "every-33rd", "every-5th")] == [
        "all",
        "latest",
        2,
        33,
        5,
    ]
    for wrong in ("", "every", "every-", "every-1st", "every-x", "last"):
        with pytest.raises(ValueError, match="no rule"):
            flush_rule_of(wrong)

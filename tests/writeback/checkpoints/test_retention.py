"""Which checkpoints of a run need not be sent any more, and which stay in the cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.writeback.admin.checkpoint_queries import CheckpointRow
from gateway.writeback.admin.checkpoint_retention import FlushRule, flush_rule_of, kept, superseded, whole_since
from gateway.writeback.checkpoints.layouts import CheckpointName
from gateway.writeback.checkpoints.state import CheckpointState, ObjectFacts, checkpoint_document

S = CheckpointState


def saved(number: int, state: S, files: int = 1, save_order: int = 0) -> CheckpointRow:
    objects = [ObjectFacts(f"{number}", 1, 0.0, float(number))] * files
    made = checkpoint_document(CheckpointName("b", f"step-{number}/", number, "step"), "", objects, [], 0.0, [], 0.0)
    missing = made.missing.model_copy(update={"ranks": [1] if state is S.STALLED else []})
    document = made.model_copy(update={"state": state.value, "missing": missing})
    return CheckpointRow(number, number, save_order or number, document)


def run_of(*states: S) -> list[CheckpointRow]:
    """The newest first, begun in this order, with ids from 1."""
    return [saved(number, state) for number, state in enumerate(states, 1)][::-1]


@pytest.mark.parametrize(
    ("rule", "expected"), [("all", []), ("latest", [1, 2, 4]), (2, [1]), (4, [1, 2]), (1000, [1, 2, 4])]
)
def test_older_ones_are_left_out_once_a_newer_one_is_durable(rule: FlushRule, expected: list[int]) -> None:
    """Those that are durable themselves, and those that are newer than the newest durable one, never are."""
    states = (S.ACKNOWLEDGED, S.FAILED, S.DURABLE, S.LOCAL, S.DURABLE, S.FLUSHING, S.WRITING)
    assert superseded(run_of(*states), rule) == set(expected)


@given(st.lists(st.sampled_from([one for one in S if one is not S.DURABLE])), st.sampled_from(["latest", 2, 3]))
def test_nothing_is_left_out_before_anything_is_durable(states: list[S], rule: FlushRule) -> None:
    """Whatever else is said of them."""
    assert superseded(run_of(*states), rule) == set()


@given(st.lists(st.sampled_from(list(S)), max_size=12), st.sampled_from(["latest", 2, 3]))
def test_what_is_left_out_is_older_than_one_that_is_durable(states: list[S], rule: FlushRule) -> None:
    """And so the newest is always sent."""
    durable = [number for number, state in enumerate(states, 1) if state is S.DURABLE]
    assert all(one < max(durable) for one in superseded(run_of(*states), rule))


def test_one_that_is_saved_again_is_a_newer_one() -> None:
    """Its place is where its last save began."""
    assert superseded([saved(1, S.FLUSHING, save_order=3), saved(2, S.DURABLE)], "latest") == set()


def test_one_with_fewer_files_supersedes_nothing() -> None:
    """A job that died while it saved leaves a directory of which names may not tell that something is missing."""
    whole, part = saved(1, S.FLUSHING, files=3), saved(2, S.DURABLE)
    assert superseded([part, whole], "latest") == set()
    assert whole_since([part, whole], whole) == 0.0
    newer = saved(2, S.DURABLE, files=3)
    assert superseded([newer, whole], "latest") == {1}
    assert whole_since([saved(3, S.WRITING, files=3), newer, whole], whole) == 2.0


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

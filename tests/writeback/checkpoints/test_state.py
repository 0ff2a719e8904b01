"""What state a checkpoint is in, from its objects and open uploads: what is missing, what is over, how far it got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import documents as to
from gateway.core.model import ObjectKey
from gateway.writeback.checkpoints.layouts import CheckpointName, rank_of
from gateway.writeback.checkpoints.state import (
    QUIET_SECONDS,
    STALLED_SECONDS,
    CheckpointState,
    ObjectFacts,
    UploadFacts,
    checkpoint_document,
)

BEGAN, NOW = 1000.0, 1030.0
S = CheckpointState


def obj(name: str, at: float = 1010.0, **changed: object) -> ObjectFacts:
    key = f"run/step-1/{name}"
    made = ObjectFacts(key, 100, at - 5, at, rank_of(ObjectKey("b", key)))
    return replace(made, **changed)  # type: ignore[arg-type]


def facts(
    objects: Sequence[ObjectFacts],
    uploads: Sequence[UploadFacts] = (),
    before: set[int] | None = None,
    now: float = NOW,
) -> to.Checkpoint:
    name = CheckpointName("b", "run/step-1/", 1, "dcp")
    return checkpoint_document(name, "slot", objects, uploads, BEGAN, before or set(), now)


DCP = [obj(f"__{rank}_0.distcp") for rank in range(3)]
META = obj(".metadata", 1011.0)


def test_a_save_is_over_with_its_manifest() -> None:
    """At once, however many ranks the checkpoint before it had; without it, it is being written."""
    assert facts(DCP, now=1011.0).state == S.WRITING
    assert facts(DCP, now=1011.0).missing.objects == ["run/step-1/.metadata"]
    over = facts([*DCP, META], before={0, 1, 2, 3}, now=1011.0)
    assert (over.state, over.ranks_seen) == (S.ACKNOWLEDGED, [0, 1, 2])
    assert over.save_seconds == 11.0


def test_a_save_without_a_manifest_is_over_when_nothing_comes_any_more() -> None:
    """Nobody says that it is."""
    ranks = [obj(f"rank_{rank}.pt") for rank in range(2)]
    assert facts(ranks, now=1010.0 + QUIET_SECONDS - 1).state == S.WRITING
    assert facts(ranks, now=1010.0 + QUIET_SECONDS).state == S.ACKNOWLEDGED


def test_a_save_that_lacks_ranks_stalls_and_says_which() -> None:
    """As many are expected as the checkpoint before it had, or as names say."""
    ranks = [obj(f"rank_{rank}.pt") for rank in (0, 2)]
    soon = facts(ranks, before={0, 1, 2, 3}, now=1010.0 + STALLED_SECONDS - 1)
    assert (soon.state, soon.missing.ranks) == (S.WRITING, [1, 3])
    assert facts(ranks, before={0, 1, 2, 3}, now=1010.0 + STALLED_SECONDS).state == S.STALLED
    said = facts([obj(f"model_world_size_4_rank_{rank}.pt") for rank in (0, 2, 3)], now=2000.0)
    assert (said.state, said.missing.ranks) == (S.STALLED, [1])
    other_layout = facts([obj("model.pt")], before={0, 1}, now=2000.0)
    assert other_layout.state == S.ACKNOWLEDGED


def test_a_node_that_has_its_own_ranks_has_all_that_it_will_be_given() -> None:
    """Of a job on several nodes: the other ranks, and the manifest of the first, go through other gateways."""
    second = [obj(f"__{rank}_0.distcp") for rank in range(8, 16)]
    assert facts(second, now=2000.0).state == S.ACKNOWLEDGED
    named = [obj(f"model_world_size_16_rank_{rank}.pt") for rank in range(8, 16)]
    assert facts(named, now=2000.0).state == S.ACKNOWLEDGED
    assert facts(named[:-1], now=2000.0).missing.ranks == [0, 1, 2, 3, 4, 5, 6, 7, 15]
    assert facts(named[1:], before=set(range(8, 16)), now=2000.0).missing.ranks == [8]


def test_no_name_makes_it_expect_more_ranks_than_there_are() -> None:
    """A number in a name may be any."""
    assert facts([obj("model_world_size_999999999_rank_2.pt")], now=2000.0).missing.ranks == []


def test_shards_and_their_index_are_waited_for() -> None:
    """Names say how many there are."""
    shards = [obj(f"model-0000{number}-of-00003.safetensors") for number in (1, 3)]
    missing = facts(shards).missing.objects
    assert missing == ["run/step-1/model-.safetensors (1 of 3)", "run/step-1/model.safetensors.index.json"]
    whole = [*shards, obj("model-00002-of-00003.safetensors"), obj("model.safetensors.index.json")]
    assert facts(whole, now=2000.0).state == S.ACKNOWLEDGED


def test_an_upload_that_moves_is_being_written_and_one_that_does_not_stalls() -> None:
    """Its rank is missing until it is completed."""
    upload = UploadFacts("run/step-1/rank_3.pt", 1001.0, 1090.0, rank=3)
    moving = facts([obj("rank_0.pt")], [upload], now=1090.0 + STALLED_SECONDS - 1)
    assert (moving.state, moving.missing.ranks, moving.missing.open_uploads) == (S.WRITING, [3], 1)
    assert facts([obj("rank_0.pt")], [upload], now=1090.0 + STALLED_SECONDS).state == S.STALLED
    begun = facts([], [upload], now=1091.0)
    assert (begun.state, begun.save_seconds, begun.files) == (S.WRITING, None, 0)


@pytest.mark.parametrize(
    ("changed", "state", "flushed_bytes"),
    [
        ({}, S.ACKNOWLEDGED, 0),
        ({"sent_bytes": 30}, S.FLUSHING, 30),
        ({"is_sending": True}, S.FLUSHING, 0),
        ({"is_durable": True}, S.FLUSHING, 100),
        ({"is_failing": True, "reason": "403"}, S.FAILED, 0),
        ({"is_waiting": True, "sent_bytes": 30, "reason": "no answer"}, S.WAITING, 30),
        ({"is_waiting": True, "is_failing": True, "reason": "403"}, S.FAILED, 0),
        ({"is_conflict": True, "is_failing": True, "reason": "others"}, S.CONFLICT, 0),
        ({"sent_bytes": 500}, S.FLUSHING, 100),
    ],
)
def test_states_follow_from_how_objects_fare(
    changed: dict[str, object], state: CheckpointState, flushed_bytes: int
) -> None:
    """A conflict before a failure, these before all else."""
    found = facts([*DCP[:2], replace(DCP[2], **changed), META])  # type: ignore[arg-type]
    assert (found.state, found.bytes_flushed, found.reason) == (state, flushed_bytes, changed.get("reason"))
    assert (found.bytes, found.exposed_seconds) == (400, NOW - 1010.0)


def test_it_is_durable_when_the_origin_has_all_of_it() -> None:
    """And nothing is exposed then."""
    found = facts([replace(one, is_durable=True) for one in [*DCP, META]])
    assert (found.state, found.exposed_seconds, found.bytes_flushed) == (S.DURABLE, None, 400)


def test_what_is_left_of_an_earlier_save_of_the_same_name_is_not_of_this_one() -> None:
    """Its ranks are missing until they come again."""
    old = [replace(obj(f"__{rank}_0.distcp", 500.0), is_durable=True) for rank in range(3)]
    again = [obj("__0_0.distcp")]
    found = facts([*old[1:], *again, replace(obj(".metadata", 501.0), is_durable=True)])
    assert (found.state, found.ranks_seen) == (S.WRITING, [0])
    assert found.missing.objects == ["run/step-1/.metadata"]


@given(
    done=st.lists(st.booleans(), max_size=8),
    uploads=st.integers(0, 2),
    before=st.sets(st.integers(0, 9)),
    now=st.floats(BEGAN, BEGAN + 500),
)
def test_only_what_is_whole_at_the_origin_is_durable(
    done: list[bool], uploads: int, before: set[int], now: float
) -> None:
    """Whatever else is so: nothing open, nothing missing, nothing here alone."""
    objects = [obj(f"rank_{rank}.pt", is_durable=is_durable) for rank, is_durable in enumerate(done)]
    open_ones = [UploadFacts(f"run/step-1/x{number}", BEGAN, BEGAN) for number in range(uploads)]
    found = facts(objects, open_ones, before, now)
    if found.state == S.DURABLE:
        assert all(done)
        assert not uploads
        assert not before - set(found.ranks_seen) or not done
    assert 0 <= found.bytes_flushed <= found.bytes
    assert (found.exposed_seconds is None) == all(done)

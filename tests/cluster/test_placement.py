"""Who looks after a block: equal shares, and a change of the members moves only what it must."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster.members import Member
from gateway.cluster.placement import Placement
from gateway.core.model import ObjectKey

KEYS = st.builds(ObjectKey, st.text(min_size=1, max_size=8), st.text(max_size=12))
NAMES = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=12, unique=True)
BLOCK = ObjectKey("train", "shard-0001.tar")


def nodes(count: int, *weights: int) -> list[Member]:
    return [
        Member(f"10.0.0.{i}:9002", f"10.0.0.{i}:9002", weight=weight)
        for i, weight in enumerate(weights or (1,) * count, start=1)
    ]


@given(names=NAMES, weights=st.lists(st.integers(1, 3), min_size=12, max_size=12), key=KEYS, number=st.integers(0, 99))
def test_only_blocks_of_the_node_that_goes_change_their_owner_and_their_second_takes_over(
    names: list[str], weights: list[int], key: ObjectKey, number: int
) -> None:
    """For any names and weights; a join is the same, backwards. The order of the list does not matter."""
    members = [Member(name, name, weight=weight) for name, weight in zip(names, weights, strict=False)]
    owners = Placement(members).owners(key, number)
    assert len(owners) == min(2, len(members))
    assert Placement(members[::-1]).owners(key, number) == owners
    for gone in members:
        left = Placement(one for one in members if one is not gone).owners(key, number)
        if gone is owners[0]:
            assert left[:1] == owners[1:]
        elif len(owners) == 2 and gone is owners[1]:
            assert left[0] is owners[0]
        else:
            assert left == owners


@given(names=NAMES, weight=st.integers(1, 9), key=KEYS, number=st.integers(0, 99))
def test_12_6_a_changed_weight_moves_blocks_only_to_or_from_its_node(
    names: list[str], weight: int, key: ObjectKey, number: int
) -> None:
    before = [Member(name, name, weight=3) for name in names]
    after = [replace(before[0], weight=weight), *before[1:]]
    owner, now = (Placement(members).owners(key, number)[0].name for members in (before, after))
    assert owner == now or (now if weight > 3 else owner) == names[0]


def test_nodes_own_blocks_in_proportion_to_their_weights() -> None:
    """Also where several nodes have the same weight, and one alone has another."""
    members = nodes(4, 1, 2, 2, 5)
    placement, blocks = Placement(members), 20_000
    owned = Counter(placement.owners(BLOCK, number)[0].name for number in range(blocks))
    for member in members:
        assert owned[member.name] / blocks == pytest.approx(member.weight / 10, abs=0.012)


def test_all_blocks_of_an_object_spread_over_all_nodes() -> None:
    """So a large file loads no node more than others."""
    placement = Placement(nodes(8))
    owned = Counter(placement.owners(BLOCK, number)[0].name for number in range(8_000))
    assert len(owned) == 8
    assert max(owned.values()) < 1.1 * 1_000


def test_owners_of_known_blocks_stay_the_same_over_versions_of_forebay() -> None:
    """Nodes of two versions must agree during an upgrade: a change of the hash is a change of the protocol."""
    placement = Placement(nodes(5))
    found = [placement.owners(ObjectKey("bücket", "a/\udcff"), number)[0].name for number in range(6)]
    weighted = Placement(nodes(0, 1, 2, 3))
    assert found == [f"10.0.0.{i}:9002" for i in (1, 2, 5, 2, 2, 1)]
    assert [weighted.owners(BLOCK, number)[0].weight for number in range(6)] == [2, 3, 1, 3, 3, 2]


def test_nobody_owns_anything_where_nobody_is() -> None:
    assert Placement[Member]([]).owners(BLOCK, 0) == ()

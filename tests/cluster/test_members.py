"""The view of the members: zones, closed directories, silence, who owned a block before; and the file it comes from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway.cluster.members import LOOK_SECONDS, SETTLED_SECONDS, Gone, Member, Members, View, view_document
from gateway.core.model import ObjectKey
from gateway.disk.atomic_write import write_durably
from tests.support.manual_clock import ManualClock

KEY = ObjectKey("train", "shard-0001.tar")
OLD = -SETTLED_SECONDS
BLOCKS = range(200)


def member(number: int, **fields: Any) -> Member:
    address = f"10.0.0.{number}:9002"
    return replace(Member(address, address, since=OLD), **fields)


def view(*members: Member, me: int = 1, clock: ManualClock | None = None, **more: Any) -> View:
    return View(members, f"10.0.0.{me}:9002", "", clock or ManualClock(), **more)


def test_owners_are_those_of_the_own_zone_whose_directory_is_open() -> None:
    """A node of another zone, or one that caches nothing, is as good as not there."""
    members = [member(1), member(2), member(3, zone="b"), member(4, caches=False)]
    found = view(*members)
    alone = view(*members[:2])
    assert [found.owners(KEY, number) for number in BLOCKS] == [alone.owners(KEY, number) for number in BLOCKS]
    assert found.me is members[0]


def test_a_node_that_is_not_listed_owns_nothing_and_asks_those_that_are() -> None:
    found = view(member(2), member(3), me=9)
    assert found.me is None
    assert {one.name for number in BLOCKS for one in found.owners(KEY, number)} == {"10.0.0.2:9002", "10.0.0.3:9002"}


def test_the_second_owner_comes_first_while_the_first_is_silent() -> None:
    """And the first is still there, for when the second fails; if both are silent, nothing changes."""
    silent: set[str] = set()
    found = view(member(1), member(2), member(3), is_silent=lambda one: one.name in silent)
    number = next(number for number in BLOCKS if found.owners(KEY, number)[0] is not found.me)
    first, second = found.owners(KEY, number)
    silent.add(first.name)
    assert found.owners(KEY, number) == (second, first)
    silent.add(second.name)
    assert found.owners(KEY, number) == ((first, second) if second is not found.me else (second, first))
    silent.clear()
    assert found.owners(KEY, number) == (first, second)


def test_after_a_join_the_owner_before_is_known_for_ten_minutes() -> None:
    """It is who owned the block among those that are not new; where that is this node, there is none to ask."""
    clock = ManualClock()
    new = member(4, since=0.0)
    before = view(member(1), member(2), member(3), me=4)
    found = view(member(1), member(2), member(3), new, me=4, clock=clock)
    of_new = [number for number in BLOCKS if found.owners(KEY, number)[0] is new]
    assert of_new
    for number in of_new:
        assert found.owner_before(KEY, number) == before.owners(KEY, number)[0]
    at_old = view(member(1), member(2), member(3), new, me=1, clock=clock)
    for number in of_new:
        owner = before.owners(KEY, number)[0]
        assert at_old.owner_before(KEY, number) == (None if owner.name == "10.0.0.1:9002" else owner)


async def test_two_nodes_that_join_at_once_do_not_take_each_other_for_the_owner_before() -> None:
    """Whoever joined first counts as old as soon as it is ten minutes old, and nobody is asked when all are."""
    clock = ManualClock()
    await clock.advance(1000)
    first, last = member(3, since=900.0), member(4, since=1000.0)
    found = view(member(1), member(2), first, last, me=4, clock=clock)

    def asked() -> set[str]:
        return {one.name for number in BLOCKS if (one := found.owner_before(KEY, number)) is not None}

    assert asked() == {"10.0.0.1:9002", "10.0.0.2:9002"}
    await clock.advance(SETTLED_SECONDS - 100)
    assert asked() == {"10.0.0.1:9002", "10.0.0.2:9002", first.name}
    await clock.advance(100)
    assert asked() == set()


async def test_a_member_that_has_gone_is_asked_for_ten_minutes_unless_it_is_silent() -> None:
    clock, silent = ManualClock(), set[str]()
    gone = member(3)
    found = view(member(1), member(2), clock=clock, gone=[Gone(gone, 0.0)], is_silent=lambda one: one.name in silent)
    before = view(member(1), member(2), gone)
    number = next(number for number in BLOCKS if before.owners(KEY, number)[0] is gone)
    assert found.owner_before(KEY, number) == gone
    silent.add(gone.name)
    assert found.owner_before(KEY, number) != gone
    silent.clear()
    await clock.advance(SETTLED_SECONDS)
    assert found.owner_before(KEY, number) is None


def test_a_cluster_that_begins_as_a_whole_has_no_owner_before() -> None:
    """A hundred nodes that start at once ask the bucket, not each other."""
    found = view(*(member(number, since=0.0) for number in range(1, 9)))
    assert {found.owner_before(KEY, number) for number in BLOCKS} == {None}
    unknown = view(*(member(number, since=None) for number in range(1, 9)))
    assert {unknown.owner_before(KEY, number) for number in BLOCKS} == {None}


async def test_a_process_follows_the_view_file(tmp_path: Path) -> None:
    """Until it is there, and while it cannot be read, the view before counts."""
    clock, file = ManualClock(), tmp_path / "cluster-view"
    members = Members(file, [member(1), member(2)], "10.0.0.1:9002", "", clock)
    first = members.view
    following = asyncio.create_task(members.follow())
    try:
        await clock.advance(LOOK_SECONDS)
        assert members.view is first
        write_durably(file, view_document([member(1), member(5, weight=7)], [Gone(member(2), 0.0)]))
        await clock.advance(LOOK_SECONDS)
        assert members.view.members == (member(1), member(5, weight=7))
        assert members.view.me == member(1)
        assert any(members.view.owner_before(KEY, number) == member(2) for number in BLOCKS)
        followed = members.view
        await clock.advance(LOOK_SECONDS)
        assert members.view is followed, "it is made once for each file"
        write_durably(file, b'{"members": [{"x": 1}]}')
        await clock.advance(LOOK_SECONDS)
        assert members.view is followed
        write_durably(file, view_document([member(1)], []))
        await clock.advance(LOOK_SECONDS)
        assert members.view.members != followed.members
        assert len(members.view.members) == 1
    finally:
        following.cancel()


def test_a_process_that_starts_takes_the_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "cluster-view"
    write_durably(file, view_document([member(1), member(3)], []))
    members = Members(file, [member(1), member(2)], "10.0.0.1:9002", "", ManualClock())
    assert members.view.members == (member(1), member(3))

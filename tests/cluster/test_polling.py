"""Finding out who is there: names, hellos, who is silent, how long a node has been a member, and the view file."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.cluster import polling
from gateway.cluster.members import SETTLED_SECONDS, Gone, Member, read_view, view_document
from gateway.cluster.polling import KEEP_SECONDS, RESOLVE_SECONDS, TURN_SECONDS, Membership, addresses_of
from tests.support.manual_clock import ManualClock
from tests.support.polled_node import FIRST, SECOND, THIRD, Peers, PolledNode


async def test_what_members_say_of_themselves_reaches_the_view_file(tmp_path: Path) -> None:
    """Zone, weight, closed directory and age; this node's own come from its settings and its disk."""
    node = PolledNode(tmp_path, [FIRST, SECOND, THIRD], SECOND, THIRD)
    node.peers.change(SECOND, zone="b", weight=3)
    node.peers.change(THIRD, caches=False)
    async with node.running():
        assert node.seen() == {
            FIRST: Member(FIRST, FIRST, "a", 7, True, 0.0),
            SECOND: Member(SECOND, SECOND, "b", 3, True, -5000.0),
            THIRD: Member(THIRD, THIRD, "", 1, False, -5000.0),
        }
        node.peers.change(THIRD, caches=True, zone="a", age_seconds=5000 + TURN_SECONDS)
        node.own = Member(FIRST, FIRST, "a", 9)
        await node.turn()
        assert node.seen()[THIRD] == Member(THIRD, THIRD, "a", 1, True, -5000.0)
        assert node.seen()[FIRST].weight == 9
    assert FIRST not in node.peers.asked


async def test_a_member_never_heard_of_counts_as_being_like_this_node(tmp_path: Path) -> None:
    """So nodes that start at once agree before they have spoken; and a silent one stays a member as it was."""
    node = PolledNode(tmp_path, [FIRST, SECOND])
    async with node.running():
        assert node.seen()[SECOND] == Member(SECOND, SECOND, "a", 7, True, None, answers=False)
        assert node.polling.heard[SECOND].problem == "refused"
        node.peers.hellos |= Peers(node.clock, SECOND).hellos
        await node.turn()
        told = node.seen()[SECOND]
        assert told.zone == ""
        assert node.polling.heard[SECOND].problem is None
        del node.peers.hellos[SECOND]
        await node.turn()
        assert node.seen()[SECOND] == replace(told, answers=False)
        assert node.polling.heard[SECOND].problem == "refused"
        assert node.polling.heard[SECOND].hello is not None


async def test_a_member_of_another_protocol_owns_nothing(tmp_path: Path) -> None:
    node = PolledNode(tmp_path, [FIRST, SECOND], SECOND)
    node.peers.change(SECOND, protocol="99")
    async with node.running():
        assert not node.seen()[SECOND].caches


async def test_an_answer_that_is_no_hello_or_does_not_come_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling, "HELLO_SECONDS_MAX", 0.01)
    node = PolledNode(tmp_path, [FIRST, SECOND, THIRD])

    async def ask(address: str) -> bytes:
        if address == SECOND:
            return b"<html>"
        await asyncio.Event().wait()
        return b""

    node.peers.ask = ask  # type: ignore[method-assign]
    node.polling = node.poll()
    async with node.running():
        assert "JSON" in (node.polling.heard[SECOND].problem or "")
        assert node.polling.heard[THIRD].problem == "no answer within 0.01 s"


async def test_names_are_resolved_again_and_again(tmp_path: Path) -> None:
    """A name that cannot be resolved, or that stands for nobody, changes nothing."""
    node = PolledNode(tmp_path, ["dns://peers:9002"], SECOND, THIRD)
    node.listed = [FIRST, SECOND]
    async with node.running():
        assert list(node.seen()) == [FIRST, SECOND]
        node.listed = []
        await node.turn(RESOLVE_SECONDS)
        assert list(node.seen()) == [FIRST, SECOND]
        node.listed = [FIRST, THIRD]
        await node.turn(RESOLVE_SECONDS)
        await node.turn()
        assert list(node.seen()) == [FIRST, THIRD]
        assert SECOND not in node.polling.heard
        (gone,) = read_view(node.file)[1]
        assert gone.member.address == SECOND
        node.listed = [FIRST, SECOND, THIRD]
        await node.turn(RESOLVE_SECONDS)
        await node.turn()
        assert read_view(node.file)[1] == [], "it is back"


async def test_a_member_that_leaves_as_hellos_begin_ends_nothing(tmp_path: Path) -> None:
    node = PolledNode(tmp_path, [FIRST, SECOND, THIRD], SECOND, THIRD)
    answer = node.peers.ask

    async def ask(address: str) -> bytes:
        if address == SECOND:
            node.polling._list([FIRST, SECOND])
        return await answer(address)

    node.peers.ask = ask  # type: ignore[method-assign]
    node.polling = node.poll()
    async with node.running():
        await node.turn()
        assert list(node.seen()) == [FIRST, SECOND]


async def test_who_has_gone_is_forgotten_after_ten_minutes(tmp_path: Path) -> None:
    node = PolledNode(tmp_path, [FIRST, SECOND], SECOND)
    async with node.running():
        node.listed = [FIRST]
        await node.turn(RESOLVE_SECONDS)
        await node.turn()
        assert len(read_view(node.file)[1]) == 1
        await node.turn(SETTLED_SECONDS)
        await node.turn()
        assert read_view(node.file)[1] == []


async def test_a_process_that_takes_over_keeps_what_the_one_before_it_had_found_out(tmp_path: Path) -> None:
    """Or the blocks would change their owners whenever the background process is restarted."""
    node = PolledNode(tmp_path, [FIRST, SECOND])
    known, gone = Member(SECOND, SECOND, "b", 3, True, -50.0), Gone(Member(THIRD, THIRD, "", 1, True, -9.0), 0.0)
    node.file.write_bytes(view_document([node.own, known], [gone]))
    async with node.running():
        assert node.seen()[SECOND] == replace(known, answers=False)
        assert read_view(node.file)[1] == [gone]


@pytest.mark.slow
async def test_a_large_cluster_is_asked_at_a_bounded_rate(tmp_path: Path) -> None:
    """A thousand members are asked once in 50 seconds."""
    others = [f"10.1.{number // 250}.{number % 250}:9002" for number in range(999)]
    node = PolledNode(tmp_path, [FIRST, *others], *others)
    async with node.running():
        for _ in range(200):
            if len(node.peers.asked) == 999:
                break
            await node.turn(0)
        for _ in range(24):
            await node.turn()
        assert len(node.peers.asked) == 999
        await node.turn()
        assert len(node.peers.asked) == 2 * 999


async def test_the_difference_of_clocks_is_known(tmp_path: Path) -> None:
    node = PolledNode(tmp_path, [FIRST, SECOND], SECOND)
    node.peers.ahead_seconds = 12.5
    async with node.running():
        assert node.polling.heard[SECOND].clock_seconds == pytest.approx(12.5)


def begun(directory: Path, clock: ManualClock, cluster: str = "train") -> Membership:
    membership = Membership(directory / "cluster.json", cluster, clock)
    membership.begin()
    return membership


async def test_a_node_that_was_away_for_ten_minutes_or_more_begins_as_a_new_member(tmp_path: Path) -> None:
    """A restart is no gap; another cluster's membership is none of this one; no note goes back behind the boot."""
    clock = ManualClock()
    first = begun(tmp_path, clock)
    first.note()
    await clock.advance(KEEP_SECONDS - 1)
    first.note()
    await clock.advance(SETTLED_SECONDS - KEEP_SECONDS)
    assert begun(tmp_path, clock).since == first.since
    await clock.advance(2)
    assert begun(tmp_path, clock).since == clock.monotonic(), "it was noted once: 599 seconds are no gap, 601 are"
    first.note()
    await clock.advance(1)
    assert begun(tmp_path, clock).since == first.since
    assert begun(tmp_path, clock, "other").since == clock.monotonic()


@pytest.mark.parametrize("way", ["unlisted", "cut off"])
@pytest.mark.parametrize(
    ("seconds", "others_restart"), [(SETTLED_SECONDS, False), (60.0, False), (SETTLED_SECONDS, True)]
)
async def test_a_node_that_ran_while_it_was_away_for_long_begins_anew_among_older_ones(
    tmp_path: Path, way: str, seconds: float, *, others_restart: bool
) -> None:
    """What it looked after has been read through others. If these are the younger ones, it has what they lack."""
    node = PolledNode(tmp_path, [FIRST, SECOND], SECOND)
    async with node.running():
        hello = dict(node.peers.hellos)
        if way == "unlisted":
            node.listed = [SECOND]
        else:
            node.peers.hellos.clear()
        await node.turn(RESOLVE_SECONDS)
        await node.turn(seconds)
        node.peers.hellos, node.listed = hello, [FIRST, SECOND]
        node.peers.change(SECOND, age_seconds=1.0 if others_restart else 5000.0)
        await node.turn(RESOLVE_SECONDS)
        await node.turn()
        is_new = seconds == SETTLED_SECONDS and not others_restart
        assert node.seen()[FIRST].since == (pytest.approx(node.clock.monotonic(), abs=10) if is_new else 0.0)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"cluster": "train"}', b'{"cluster": "train", "seen": "x"}'])
def test_a_damaged_note_of_the_membership_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cluster.json").write_bytes(content)
    clock = ManualClock()
    assert begun(tmp_path, clock).since == clock.monotonic()


def test_a_node_without_a_cache_directory_is_a_new_member() -> None:
    membership = Membership(None, "train", ManualClock())
    membership.begin()
    membership.note()
    assert membership.since == 0.0


async def test_addresses_are_taken_as_they_are_and_names_resolved() -> None:
    """Each once, sorted within a name, IPv6 in brackets."""
    assert await addresses_of([SECOND, "[::1]:9002", SECOND]) == [SECOND, "[::1]:9002"]
    assert await addresses_of(["dns://127.0.0.1:9002", "dns://[::1]:9003"]) == ["127.0.0.1:9002", "[::1]:9003"]
    with pytest.raises(OSError):
        await addresses_of([f"dns://{'x' * 64}.test:9002"])

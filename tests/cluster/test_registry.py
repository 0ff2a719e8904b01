"""The registry of several nodes over one Redis: what each knows of the others' writes, and when it believes Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.cluster import registry_beats, scripts
from gateway.cluster.belief import Belief, SharedBelief
from gateway.cluster.members import Member, View
from gateway.cluster.redis_link import Answer
from gateway.cluster.redis_registry import CONFIRM_SECONDS_MAX, RedisRegistry
from gateway.cluster.registry_beats import (
    FOLLOWED_SECONDS,
    HORIZON_SECONDS,
    RECONCILE_SECONDS,
    RegistryBeats,
    member_of,
)
from gateway.cluster.scripts import AWAY_SECONDS, BEAT_SECONDS, FIRST_SECONDS, LEASE_SECONDS
from gateway.core.errors import RegistryAway
from gateway.core.model import Claim, Known, ObjectKey, PendingClaim
from gateway.core.prefixes import Prefix
from gateway.policy.registry import SEQUENCE_BITS
from gateway.policy.slots import Slot
from tests.simulation.cluster.redis_model import ModelLink, RedisModel
from tests.support.manual_clock import ManualClock

BUCKET = "bucket"
RUNS = [f"{number:016x}" for number in (1 << 40, 2 << 40, 3 << 40)]


def key(name: str) -> ObjectKey:
    return ObjectKey(BUCKET, name)


class Journal:
    """What a node has pending: key → token. `orders`: the numbers of claims."""

    def __init__(self) -> None:
        self.pending: dict[ObjectKey, str] = {}
        self.orders: dict[ObjectKey, int] = {}

    def page(self, after: int, count_max: int) -> tuple[Sequence[PendingClaim], int]:
        keys = list(self.pending)[after : after + count_max]
        return list(self.last(keys).values()), after + len(keys)

    def highest_order(self) -> int:
        return max(self.orders.values(), default=0)

    def last(self, keys: Iterable[ObjectKey]) -> Mapping[ObjectKey, PendingClaim]:
        found = [key for key in keys if key in self.pending]
        return {key: PendingClaim(key, self.pending[key], self.orders.get(key, 0)) for key in found}


class Node:
    """A node, with its background process and one worker."""

    def __init__(self, cluster: Cluster, name: str, *, acknowledges: bool = True) -> None:
        self.name = name
        self.cluster = cluster
        self.journal = Journal()
        self.own = Member(name, f"{name}:9002", store=f"store-{name}" if acknowledges else "")
        self.forgotten = 0
        self._directory = cluster.directory / name
        self._directory.mkdir()
        self.belief = SharedBelief(self._directory / "belief")
        self.link, self.of_worker = (ModelLink(cluster.model, f"store-{name}") for _ in range(2))
        self._task: asyncio.Task[None] | None = None
        self.start()
        view = View([], "", "", cluster.clock)
        self.registry = RedisRegistry(cast("Any", self.of_worker), self.belief.read, lambda: view, cluster.clock)

    def start(self) -> None:
        self.beats = RegistryBeats(
            cast("Any", self.link), self.belief, lambda: self.own, self.journal, self._forget,
            self._directory / "members", self.cluster.clock,
        )  # fmt: skip
        self._task = asyncio.create_task(self.beats.run())

    @property
    def runs(self) -> bool:
        return self._task is not None

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _forget(self) -> None:
        self.forgotten += 1

    def members(self) -> dict[str, int]:
        """Return the weights of all members that it knows."""
        return {name: member_of(name, info).weight for name, info in self.beats.listed.members.items()}

    async def look(self, name: str = "key") -> Known:
        return (await self.registry.look([key(name)]))[0]

    async def write(self, name: str = "key") -> int:
        """Write past the buffer; the stamp."""
        (known,) = await self.registry.begin([key(name)])
        await self.registry.end([key(name)])
        return known.stamp or 0

    async def absorb(self, name: str = "key", token: str = "t1") -> Known:
        known = await self.registry.claim(Claim(key(name), token))
        if known.store is None:
            self.journal.pending[key(name)] = token
            self.journal.orders[key(name)] = known.order
        return known

    async def commits(self, name: str = "key", token: str = "t1") -> None:
        self.journal.pending[key(name)] = token

    async def flushed(self, name: str = "key", token: str = "t1") -> None:
        if self.journal.pending.get(key(name)) == token:
            del self.journal.pending[key(name)]
        self.beats.settle([Claim(key(name), token)])
        await self.cluster.clock.advance(0)

    async def believes(self) -> bool:
        for _ in range(2):  # the first may find out that the connection has broken
            try:
                await self.look("anything")
            except RegistryAway:
                continue
            return True
        return False


def is_of_run(node: Node, number: int) -> bool:
    return number >> SEQUENCE_BITS == int(node.belief.read().run[:6], 16)


async def all_rows(registry: RedisRegistry, start: bytes = b"") -> list[tuple[bytes, Known]]:
    found, place = list[tuple[bytes, Known]](), start
    while True:
        rows, end, _ = await registry.rows(BUCKET, place, b"\xff")
        found += rows
        if end is None:
            return found
        place = end


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock()
        self.model = RedisModel(RUNS[0])
        self.nodes: dict[str, Node] = {}

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def add(self, name: str, *, acknowledges: bool = True) -> Node:
        self.nodes[name] = Node(self, name, acknowledges=acknowledges)
        return self.nodes[name]

    async def pass_time(self, seconds: float) -> None:
        steps = max(1, round(seconds / BEAT_SECONDS))
        for _ in range(steps):
            self.model.now_ms += round(1000 * seconds / steps)
            await self.clock.advance(seconds / steps)
            while self._at_work():  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0)

    def _at_work(self) -> bool:
        """Return whether a node still does what its last turn began, such as to write to its disk."""
        asleep = sum(not wake.done() for _, _, wake in self.clock._sleepers)
        return asleep < 2 * sum(node.runs for node in self.nodes.values())

    async def settle_down(self) -> None:
        """Until a new run can be complete."""
        await self.pass_time(FIRST_SECONDS + FOLLOWED_SECONDS)


@asynccontextmanager
async def cluster_of(directory: Path, *names: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(directory)
    for name in names:
        cluster.add(name)
    await cluster.settle_down()
    try:
        yield cluster
    finally:
        for node in cluster.nodes.values():
            await node.stop()


async def test_a_write_is_stamped_when_it_begins_and_when_it_ends(tmp_path: Path) -> None:
    """So what was learned meanwhile is void on every node once its end is seen."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        assert await b.look() == Known()
        begun = await a.write()
        seen = await b.look()
        assert (seen.stamp or 0) > begun > 0
        assert seen.store is None
        assert await a.look() == seen


async def test_what_one_node_has_pending_others_find_at_its_store_until_it_is_flushed(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        claimed = await a.absorb()
        assert claimed == Known(None, claimed.claim, 0, claimed.order)
        assert await b.look() == Known("store-a", claimed.claim, 0)
        assert (await a.look()).store is None
        assert (await b.registry.begin([key("key")]))[0].store == "store-a"
        await a.flushed()
        flushed = await b.look()
        assert (flushed.store, flushed.claim) == (None, 0)
        assert (flushed.stamp or 0) > claimed.claim


async def test_the_flush_of_an_older_write_does_not_settle_a_newer_claim(tmp_path: Path) -> None:
    """The newer write is between its claim and its commit."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        first = await a.absorb(token="t1")
        second = await a.absorb(token="t2")
        assert second.claim == first.claim, "the place in the order of all nodes is that of the oldest"
        a.journal.pending.clear()
        await a.flushed(token="t1")
        assert (await b.look()).store == "store-a"
        await a.flushed(token="t2")
        assert (await b.look()).store is None


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_write_keeps_its_claim_while_one_that_has_claimed_later_comes_and_goes(
    tmp_path: Path, *, is_late: bool
) -> None:
    """The later one is committed first, and flushed. `is_late`: before the other one's commit."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        first = await a.registry.claim(Claim(key("key"), "t1"))
        await a.absorb(token="t2")
        for is_flush in (is_late, not is_late):
            await (a.flushed(token="t2") if is_flush else a.commits(token="t1"))
            assert await b.look() == Known("store-a", first.claim, 0)
        await a.flushed(token="t1")
        assert (await b.look()).store is None


async def test_a_deletion_that_is_acknowledged_without_redis_gets_a_claim(tmp_path: Path) -> None:
    """It has come behind a write that is being flushed."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        await a.absorb(token="t1")
        await a.commits(token="t2")
        await a.flushed(token="t1")
        assert (await b.look()).store == "store-a"
        await a.flushed(token="t2")
        assert (await b.look()).store is None


async def test_rows_are_all_entries_of_a_range_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: in pages."""
    monkeypatch.setattr(scripts, "ROWS_MAX", 3)
    monkeypatch.setattr("gateway.cluster.redis_registry.ROWS_MAX", 3)
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        for number in range(8):
            await a.absorb(f"k{number}")
        await a.write("ä")
        rows = await all_rows(b.registry, b"k1")
        assert [name for name, _ in rows] == [*(b"k%d" % number for number in range(1, 8)), "ä".encode()]
        assert {known.store for _, known in rows[:-1]} == {"store-a"}
        found = await b.registry.rows(BUCKET, b"k1", b"k3")
        assert ([name for name, _ in found.rows], found.end) == ([b"k1", b"k2"], None)


async def test_nothing_is_believed_before_all_known_nodes_have_signed(tmp_path: Path) -> None:
    """Redis starts empty while one node is down: what that node has pending must not be missed."""
    async with cluster_of(tmp_path, "a", "b", "c") as cluster:
        a, b, c = (cluster[name] for name in "abc")
        await c.absorb("pending")
        await c.stop()
        cluster.model.restart_empty(RUNS[1])
        await cluster.pass_time(LEASE_SECONDS + FIRST_SECONDS + AWAY_SECONDS)
        assert not await a.believes()
        assert "c (1 in all)" in b.beats.problem
        c.start()
        await cluster.settle_down()
        assert (await a.look("pending")).store == "store-c"
        assert a.beats.problem == ""


async def test_a_process_that_asked_nothing_meanwhile_is_answered_by_the_new_primary(tmp_path: Path) -> None:
    """Its connection is still to the one before. The first claim behind a failover is as good as the next."""
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster["a"].look()
        cluster.model.fail_over(RUNS[1])
        await cluster.settle_down()
        assert (await cluster["a"].absorb()).store is None


async def test_a_clock_of_redis_that_is_set_back_delays_nothing(tmp_path: Path) -> None:
    """As soon after the boot of its machine: a run is believed, and who is gone may be given up, as soon as ever."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        cluster.model.restart_empty(RUNS[1])
        await cluster.pass_time(3.0)
        await b.stop()
        cluster.model.now_ms -= 3_600_000
        await cluster.pass_time(FIRST_SECONDS + LEASE_SECONDS + FOLLOWED_SECONDS)
        assert await a.believes()
        assert await a.beats.forget_node("b") == 0


async def test_a_node_that_acknowledges_nothing_need_not_sign(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a") as cluster:
        reader = cluster.add("reader", acknowledges=False)
        await cluster.pass_time(3)
        await reader.stop()
        cluster.model.restart_empty(RUNS[1])
        await cluster.settle_down()
        assert await cluster["a"].believes()
        assert list(cluster["a"].beats.listed.members) == ["a"]


async def test_a_node_that_is_forgotten_is_not_waited_for_and_its_keys_are_free(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        await b.absorb()
        assert await a.beats.forget_node("b") is None, "it beats"
        await b.stop()
        await cluster.pass_time(LEASE_SECONDS + 2)
        assert await a.beats.forget_node("b", only_ask=True) == 1
        assert (await a.look()).store == "store-b"
        assert await a.beats.forget_node("b") == 1
        await cluster.pass_time(2)
        assert (await a.look()).store is None
        assert a.members() == {"a": 1}
        cluster.model.restart_empty(RUNS[1])
        await cluster.settle_down()
        assert await a.believes()


async def test_a_store_that_no_node_has_any_more_is_forgotten_by_its_name(tmp_path: Path) -> None:
    """Its node began anew on an empty disk: nobody withdraws what the old buffer had claimed."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        await b.absorb()
        await b.stop()
        b.own, b.link.store, b.journal = replace(b.own, store="new"), "new", Journal()
        b.start()
        await cluster.pass_time(3 * RECONCILE_SECONDS)
        assert (await a.look()).store == "store-b"
        assert await a.beats.forget_node("store-b") == 1
        assert (await a.look()).store is None


async def test_a_node_that_changed_its_name_keeps_what_it_has_pending(tmp_path: Path) -> None:
    """Its old name is forgotten, and the name of a buffer that a living node has is no name to be forgotten."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        await b.absorb()
        await b.stop()
        b.own = replace(b.own, name="c")
        b.start()
        await cluster.pass_time(LEASE_SECONDS + 2)
        assert await a.beats.forget_node("b") == 0
        assert (await a.look()).store == "store-b"
        assert await a.beats.forget_node("store-b") is None, "c beats"
        assert (await a.look()).store == "store-b"
        await cluster.pass_time(2)
        assert a.members() == {"a": 1, "c": 1}


async def test_a_run_that_lost_its_last_second_gets_it_again(tmp_path: Path) -> None:
    """A failover: a claim that the new primary never had is put by its node before anybody believes."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        cluster.model.replicate()
        before = await a.absorb()
        stamp = await a.write("other")
        cluster.model.fail_over(RUNS[1])
        assert not await b.believes()
        await cluster.pass_time(2)
        assert not await b.believes()
        await cluster.settle_down()
        known = await b.look()
        assert known.store == "store-a"
        assert known.claim != before.claim
        assert b.forgotten == 2, "the stamp is lost: nothing that was remembered then is believed"
        assert not is_of_run(b, stamp)
        await a.flushed()
        assert (await b.look()).store is None


async def test_what_another_node_has_written_under_the_run_before_is_forgotten(tmp_path: Path) -> None:
    """It has not noticed the failover yet, and its stamp is at the primary of before."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        before, after = cluster.model, RedisModel(RUNS[1])
        before.replicate()
        after.content, after.now_ms = before.replica(), before.now_ms
        cluster.model = a.link.model = a.of_worker.model = after
        await cluster.pass_time(3.0)
        assert not await a.believes()
        forgotten = a.forgotten
        await b.write()
        b.link.model = b.of_worker.model = after
        await cluster.settle_down()
        assert await a.believes()
        assert (await a.look()).stamp == 0
        assert a.forgotten == forgotten + 1


async def test_a_write_that_was_claimed_under_another_run_is_claimed_again(tmp_path: Path) -> None:
    """The node has found another run, and has read its journal: a commit after that is not in it."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        claim, claimed_at = Claim(key("key"), "t1"), cluster.clock.monotonic()
        claimed = await a.registry.claim(claim)
        assert is_of_run(a, claimed.claim)
        cluster.model.restart_empty(RUNS[1])
        await cluster.pass_time(2 * BEAT_SECONDS)
        assert a.belief.read().run == RUNS[1]
        assert not is_of_run(a, claimed.claim)
        await cluster.settle_down()
        assert (await b.look()).store is None
        confirming = asyncio.create_task(a.registry.confirm(claim, claimed, claimed_at))
        await cluster.pass_time(CONFIRM_SECONDS_MAX + 1)
        await confirming
        assert (await b.look()).store == "store-a"


async def test_a_claim_is_confirmed_if_its_write_took_long(tmp_path: Path) -> None:
    """It may have been taken for one that no write has followed."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        claim, claimed_at = Claim(key("key"), "t1"), cluster.clock.monotonic()
        claimed = await a.registry.claim(claim)
        await cluster.pass_time(2 * RECONCILE_SECONDS + 5)
        assert (await b.look()).store is None
        await a.registry.confirm(claim, claimed, claimed_at)
        assert (await b.look()).store == "store-a"
        await a.registry.release(claim)
        assert (await b.look()).store is None


async def test_belief_ends_with_the_lease_and_comes_back_with_the_next_beat(tmp_path: Path) -> None:
    """In between the worker may reach Redis; its node does not know whether others do."""
    async with cluster_of(tmp_path, "a") as cluster:
        a = cluster["a"]
        a.link.problem = "cut"
        await cluster.pass_time(LEASE_SECONDS - 2 * BEAT_SECONDS)
        assert await a.believes()
        assert a.beats.problem == "cut"
        await cluster.pass_time(3 * BEAT_SECONDS)
        assert not await a.believes()
        a.link.problem = ""
        await cluster.pass_time(2)
        assert await a.believes()
        assert a.forgotten == 1, "Redis has kept all stamps meanwhile"


@pytest.mark.slow
async def test_stamps_are_swept_when_all_living_nodes_have_outlived_them(tmp_path: Path) -> None:
    """And one that could not beat meanwhile forgets all that it remembers before it believes again."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        await cluster.pass_time(HORIZON_SECONDS)
        b.link.problem = "cut"
        await a.write()
        await cluster.pass_time(HORIZON_SECONDS - 20)
        assert (await a.look()).stamp
        await cluster.pass_time(40)
        assert await a.look() == Known()
        assert cluster.model.content.entries[BUCKET.encode()] == {}
        b.belief.write(b.belief.read()._replace(until=1e9))  # its own clock stands still, say
        with pytest.raises(RegistryAway, match="has forgotten changes"):
            await b.look()
        b.link.problem = ""
        await cluster.pass_time(2)
        assert (a.forgotten, b.forgotten) == (1, 2)
        assert await b.look() == Known()


async def test_a_living_node_that_has_not_outlived_a_stamp_keeps_it(tmp_path: Path) -> None:
    """It has come later: what it remembers may be younger than what the others remember."""
    async with cluster_of(tmp_path, "a") as cluster:
        await cluster.pass_time(HORIZON_SECONDS)
        late = cluster.add("late")
        await cluster.settle_down()
        await cluster["a"].write()
        await cluster.pass_time(HORIZON_SECONDS - 20)
        assert (await late.look()).stamp
        await cluster.pass_time(40)
        assert not (await late.look()).stamp


async def test_a_lost_settle_and_a_claim_without_a_commit_are_found(tmp_path: Path) -> None:
    """But a claim whose commit is late stays: it is made again by then."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        for name in ("lost", "late"):
            await a.absorb(name)
        a.journal.pending.clear()
        await cluster.pass_time(RECONCILE_SECONDS)
        assert {(await b.look(name)).store for name in ("lost", "late")} == {"store-a"}
        await a.absorb("late")
        a.journal.pending.clear()
        await cluster.pass_time(RECONCILE_SECONDS + 2)
        assert [(await b.look(name)).store for name in ("lost", "late")] == [None, "store-a"]
        assert (await b.look("lost")).stamp, "readers ask again"
        await cluster.pass_time(RECONCILE_SECONDS + 2)
        assert (await b.look("late")).store is None


async def test_what_the_registry_has_lost_is_put_again(tmp_path: Path) -> None:
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        for number in range(registry_beats.PAGE + 20):
            a.journal.pending[key(f"k{number:03}")] = "t"
        await cluster.pass_time(RECONCILE_SECONDS + 2)
        rows = await all_rows(b.registry)
        assert len(rows) == registry_beats.PAGE + 20
        assert {known.store for _, known in rows} == {"store-a"}


async def test_a_claim_whose_end_a_failover_has_lost_gives_way_to_a_later_one(tmp_path: Path) -> None:
    """12.4 The later one, of another node, is lost with it. The first node must not claim the key over its own."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        await a.absorb()
        cluster.model.replicate()
        await a.flushed()
        await b.absorb(token="t2")
        cluster.model.fail_over(RUNS[1])
        await cluster.settle_down()
        assert (await a.look()).store == "store-b"
        assert (await a.absorb(token="t3")).store == "store-b"


async def test_a_write_that_never_had_a_claim_takes_no_other_nodes(tmp_path: Path) -> None:
    """12.4 Also once its node has made later claims, of other keys."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        a.journal.orders[key("key")] = (await a.absorb("before")).order
        await b.absorb(token="t2")
        await a.commits()
        await a.absorb("behind")
        await cluster.pass_time(2 * RECONCILE_SECONDS)
        assert (await a.look()).store == "store-b"


async def test_a_claim_is_not_put_again_that_was_settled_meanwhile(tmp_path: Path) -> None:
    """The journal was read before the flush ended, and Redis is told of the claim after that."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        await a.absorb()
        ask = a.link.ask

        async def asked(question: Sequence[scripts.Word], run: str = "") -> Answer:
            if question[0] == "put" and a.journal.pending:
                a.journal.pending.clear()
                await ask(scripts.question("settle", BUCKET, ["key", "t1"]))
            return await ask(question, run)

        a.link.ask = asked  # type: ignore[method-assign]
        await cluster.pass_time(RECONCILE_SECONDS + 2)
        assert not a.journal.pending
        assert (await b.look()).store is None


async def test_settled_claims_wait_for_redis_and_the_queue_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_beats, "UNSETTLED_MAX", 2)
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a, b = cluster["a"], cluster["b"]
        for name in ("one", "two", "three"):
            await a.absorb(name)
        a.link.problem = "cut"
        for name in ("one", "two", "three"):
            await a.flushed(name)
        a.link.problem = ""
        await cluster.pass_time(2)
        assert [(await b.look(name)).store for name in ("one", "two", "three")] == [None, None, "store-a"]
        await cluster.pass_time(2 * RECONCILE_SECONDS + 2)
        assert (await b.look("three")).store is None


async def test_a_node_claims_once_all_others_have_its_word_on_disk(tmp_path: Path) -> None:
    """They must know, even after a restart of Redis, that there is somebody who may have something pending."""
    async with cluster_of(tmp_path, "a") as cluster:
        b = cluster.add("b")
        cluster["a"].link.problem = "cut"
        await cluster.pass_time(3)
        assert not b.belief.read().is_known
        with pytest.raises(RegistryAway):
            await b.absorb()
        cluster["a"].link.problem = ""
        await cluster.pass_time(FOLLOWED_SECONDS)
        assert not b.belief.read().is_known
        await cluster.pass_time(3)
        assert b.belief.read().is_known
        assert (await b.absorb()).store is None
        b.own = replace(b.own, weight=5)
        await cluster.pass_time(3)
        assert cluster["a"].members() == {"a": 1, "b": 5}


async def test_a_background_process_that_is_killed_is_replaced_within_the_lease(tmp_path: Path) -> None:
    """The node has signed: its claims are there. What it remembers is forgotten: nobody knows how old it is."""
    async with cluster_of(tmp_path, "a", "b") as cluster:
        a = cluster["a"]
        await a.absorb()
        await a.stop()
        a.start()
        await cluster.pass_time(2)
        assert await a.believes()
        assert a.forgotten == 2
        assert a.members() == {"a": 1, "b": 1}


async def test_a_worker_that_is_connected_to_another_run_believes_nothing(tmp_path: Path) -> None:
    """Two primaries: it asks the one that nobody tells anything any more."""
    async with cluster_of(tmp_path, "a") as cluster:
        a = cluster["a"]
        a.of_worker.model = other = RedisModel(RUNS[2])
        a.of_worker.run_of_connection = RUNS[2]
        for claims in (False, True):  # nor does it tell others there of a write that it will not acknowledge
            with pytest.raises(RegistryAway, match="another run"):
                await (a.registry.claim(Claim(key("key"), "token")) if claims else a.look())
        assert not other.content.entries
        a.of_worker.model = cluster.model
        assert await a.look() == Known()


def test_who_asks_goes_by_own_slots_and_by_what_others_publish(tmp_path: Path) -> None:
    """A read-only slot never asks; nor does a strict one that writes through where no other node holds back."""
    clock = ManualClock()
    views = [View([Member("b", "b:9002", prefixes=prefixes)], "", "", clock) for prefixes in ((), ("s3://bucket/a/",))]
    slots = {
        "through": Slot(name="x", prefix=Prefix(BUCKET, "a/b/"), mode="read-write"),
        "aside": Slot(name="x", prefix=Prefix(BUCKET, "c/"), mode="read-write"),
        "ttl": Slot(name="x", prefix=Prefix(BUCKET, "a/"), mode="read-write", stated_consistency="ttl"),
        "back": Slot(name="x", prefix=Prefix(BUCKET, "c/"), mode="read-write", write="back"),
        "read-only": Slot(name="x", prefix=Prefix(BUCKET, "a/"), mode="read-only", stated_consistency="ttl"),
    }
    found = []
    for view in views:
        registry = RedisRegistry(cast("Any", None), Belief, lambda: view, clock)  # noqa: B023
        found.append({name for name, slot in slots.items() if registry.asks(slot) and registry.asks(slot)})
    assert found == [{"ttl", "back"}, {"ttl", "back", "through"}]


def test_a_record_that_is_not_whole_is_no_belief(tmp_path: Path) -> None:
    """The reader sees it while it is being written."""
    one, other = SharedBelief(tmp_path / "belief"), SharedBelief(tmp_path / "belief")
    assert other.read() == Belief()
    belief = Belief(3, RUNS[0], 17, 12.5, True)
    one.write(belief)
    assert other.read() == belief
    one._map[3] ^= 1
    assert other.read() == Belief()
    one.close()
    other.close()

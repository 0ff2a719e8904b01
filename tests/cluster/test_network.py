"""Nodes on a network in which ways are cut, and machines late: clients notice it by the time alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.cluster.cluster_origin import BUSY_SECONDS_MAX
from gateway.cluster.peers import LEFT_OUT_SECONDS
from tests.support.memory_origin.faults import Hold
from tests.support.network import Machine, Network
from tests.support.nodes import BLOCK, BUCKET, PASSING, PEER_PORT, SENT, SIZES, Nodes, load, nodes

pytestmark = [pytest.mark.root, pytest.mark.timeout(240)]

RATION = 4
DELAY_SECONDS = 0.2
RATIONED = 'forebay_cluster_fallback_requests_total{reason="unreachable"}'

START_SECONDS_MAX = 10.0
START_TIMES_MAX = 10.0
"""Times as long as one node takes alone, five may take at once, on a machine that does much else."""

SETTINGS = {"fallback_requests": RATION}
ATTEMPTS_MAX = 3
"""A machine that stands still for two seconds makes nodes take each other for dead: then others are asked."""


class Site:
    """A cluster on a network. `names`: what each node calls itself before the bucket."""

    def __init__(self, network: Network, cluster: Nodes) -> None:
        self.network = network
        self.cluster = cluster
        self._numbers = itertools.count()
        everyone = range(len(cluster.nodes))
        for number in everyone:
            cluster.wait_for_states(number, ["up"] * len(everyone))
        own = [cluster.owned_by(number, f"name{number}-", 1)[0] for number in everyone]
        self.names = [next(iter(cluster.asked_by(number, own[number]))) for number in everyone]

    def machine(self, number: int) -> Machine:
        machine = self.cluster[number].machine
        assert machine is not None
        return machine

    def cut(self, *ways: tuple[int, int], port: int | None = None) -> None:
        for sender, receiver in ways:
            self.network.cut(self.machine(sender), self.machine(receiver), port)

    def cut_from_bucket(self, number: int) -> None:
        self.network.cut(self.machine(number), None, int(self.cluster.origin.endpoint_url.rpartition(":")[2]))

    def put(self, owner: int, second: int, count: int = 10) -> list[str]:
        """Put new objects in the bucket that one node owns, and of which another is the second owner."""
        keys = self.cluster.owned_by(owner, f"{next(self._numbers)}-", count, second=second)
        for key in keys:
            self.cluster.origin.model.put(BUCKET, key, f"{key} ".encode() * 100)
        return keys

    def expect(self, number: int, owner: int, second: int, seen: str, asker: int) -> None:
        """Assert where new objects of two owners come from, read through a node, and who asks the bucket for them."""
        found = list[tuple[set[str], set[str]]]()
        for _ in range(ATTEMPTS_MAX):
            keys = self.put(owner, second)
            found.append(({self.cluster.read(number, key) for key in keys}, self.cluster.askers(keys)))
            if found[-1] == ({seen}, {self.names[asker]}):
                return
        raise AssertionError(found)

    def heal(self) -> None:
        """Mend the network, and wait until each node gets what is another's from that one again."""
        self.network.heal()
        for asker, owner in itertools.permutations(range(len(self.names)), 2):
            (third,) = {0, 1, 2} - {asker, owner}
            self.cluster.wait_until(lambda: self._gives(owner, third, asker))  # noqa: B023 - called here

    def _gives(self, owner: int, second: int, asker: int) -> bool:
        (key,) = self.put(owner, second, 1)
        return self.cluster.read(asker, key) == "peer" and self.cluster.askers([key]) == {self.names[owner]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Three nodes, whose network each test leaves whole."""
    directory = tmp_path_factory.mktemp("network")
    with Network() as network, nodes(directory, 3, [PASSING], network=network, cluster=SETTINGS) as cluster:
        yield Site(network, cluster)


@pytest.mark.parametrize(
    ("ways", "port"),
    [
        pytest.param([(0, 1)], PEER_PORT, id="requests of one"),
        pytest.param([(0, 1)], None, id="one direction"),
        pytest.param([(0, 1), (1, 0)], None, id="both directions"),
    ],
)
def test_12_5_a_cut_between_two_nodes_fails_no_read(site: Site, ways: list[tuple[int, int]], port: int | None) -> None:
    """Their blocks come from the second owner; if only one direction is refused, the other one asks as before."""
    keys = site.cluster.store(f"{port}-{len(ways)}-", [300_000, 2 * BLOCK] * 4)
    with load(site.cluster, keys, [0, 1, 2]) as reading:
        reading.more(len(keys))
        site.cut(*ways, port=port)
        reading.more(3 * len(keys))
        site.expect(0, owner=1, second=2, seen="peer", asker=2)
        site.expect(0, owner=1, second=0, seen="miss", asker=0)
        site.expect(1, owner=0, second=2, seen="peer", asker=0 if port is not None else 2)
        site.heal()


def test_12_5_a_node_that_is_cut_from_the_bucket_alone_sends_nobody_away(site: Site) -> None:
    """It gives what it has, and has others ask the second owner for what it has not, without any wait."""
    warm = site.put(owner=1, second=2)

    def is_warm() -> bool:
        asked = len(site.cluster.origin.request_lines)
        seen = {site.cluster.read(0, key) for key in warm}
        return (seen, site.cluster.asked(asked)) == ({"peer"}, (0, 0))

    site.cluster.wait_until(is_warm)
    site.cut_from_bucket(1)
    assert any(is_warm() for _ in range(ATTEMPTS_MAX))
    site.expect(0, owner=1, second=2, seen="peer", asker=2)  # it finds out
    began = time.monotonic()
    site.expect(0, owner=1, second=2, seen="peer", asker=2)
    site.expect(2, owner=1, second=0, seen="peer", asker=0)
    assert time.monotonic() - began < 2 * BUSY_SECONDS_MAX  # it would be so long for two of the objects
    site.expect(1, owner=0, second=2, seen="peer", asker=0)
    site.heal()


def test_12_5_a_node_that_is_cut_from_all_others_reads_by_ration(site: Site) -> None:
    """Its clients are served, by no more than so many requests at once for what is not its own."""
    node, origin = site.cluster[0], site.cluster.origin
    for other in (1, 2):
        site.cut((0, other), (other, 0))
    site.expect(0, owner=1, second=2, seen="miss", asker=0)
    site.expect(0, owner=0, second=1, seen="miss", asker=0)
    site.expect(1, owner=0, second=2, seen="peer", asker=2)
    of_others, (own,) = site.put(owner=1, second=2, count=4 * RATION), site.put(owner=0, second=1, count=1)
    before, held, reached = node.metric(RATIONED), asyncio.Event(), asyncio.Event()
    origin.model.inject(lambda call: call.key in of_others, Hold(held, reached), times=None)
    with ThreadPoolExecutor(len(of_others)) as pool:
        reads = [pool.submit(site.cluster.read, 0, key) for key in of_others]
        site.cluster.wait_until(lambda: node.metric(RATIONED) >= before + len(of_others))
        origin.wait_for(reached)
        assert site.cluster.read(0, own) == "miss"
        assert len([key for key in of_others if f"GET /{BUCKET}/{key}".encode() in origin.request_lines]) == RATION
        origin.run_inside(held.set)
        assert {one.result() for one in reads} == {"miss"}
    origin.model.faults.clear()
    site.heal()


def test_12_5_a_slow_node_is_left_out_for_ten_seconds(site: Site) -> None:
    """Its blocks come from the second owner meanwhile."""
    slow, cluster = site.cluster[1], site.cluster
    keys = [*site.put(owner=1, second=2), *site.put(owner=2, second=1)]
    for key in keys:
        cluster.read(0, key)
    asked_at = time.monotonic()

    def gives() -> tuple[set[str], bool]:
        """Read all; where they came from, and whether the slow node was asked."""
        nonlocal asked_at
        began, before = time.monotonic(), slow.metric(SENT)
        seen = {cluster.read(0, key) for key in keys}
        is_asked = slow.metric(SENT) != before
        asked_at = began if is_asked else asked_at
        return seen, is_asked

    with site.network.delayed(site.machine(1), DELAY_SECONDS):
        cluster.wait_until(lambda: gives() == ({"peer"}, False))
        left_out_at = asked_at
        cluster.wait_until(lambda: gives()[1])
        assert time.monotonic() - left_out_at >= LEFT_OUT_SECONDS
    site.heal()


def test_12_6_nodes_that_restart_at_once_are_soon_ready_and_ask_for_nothing_twice(tmp_path: Path) -> None:
    everyone = range(5)
    with Network() as network, nodes(tmp_path, 5, [PASSING], network=network, cluster=SETTINGS) as cluster:
        warm = cluster.store("warm", [100_000] * 60)
        cluster.epoch(warm, everyone)
        asked, missing = list[int](), list[str]()
        while not asked or asked[-1] > len(missing) + RATION:
            assert len(asked) < ATTEMPTS_MAX, asked
            missing = cluster.store(f"missing{len(asked)}-", [100_000] * 20)
            alone_seconds = cluster[0].restart(cluster.addresses, member_for_seconds=3600)
            with ThreadPoolExecutor(len(everyone)) as pool:
                of_each = pool.map(lambda one: one.restart(cluster.addresses, member_for_seconds=3600), cluster.nodes)
                assert max(of_each) <= max(START_SECONDS_MAX, START_TIMES_MAX * alone_seconds)
            before = len(cluster.origin.request_lines)
            cluster.epoch([*warm, *missing], everyone)
            cluster.origin.settle()
            asked.append(sum(one.startswith(b"GET /bucket/") for one in cluster.origin.request_lines[before:]))


def test_12_6_what_two_nodes_have_four_read_without_the_bucket(tmp_path: Path) -> None:
    wanted = list[int]()
    while 0 not in wanted:
        assert len(wanted) < ATTEMPTS_MAX, wanted
        directory = tmp_path / str(len(wanted))
        directory.mkdir()
        with Network() as network, nodes(directory, 4, running=2, network=network) as cluster:
            wanted.append(cluster.grown(cluster.store("k", SIZES)).size_bytes)

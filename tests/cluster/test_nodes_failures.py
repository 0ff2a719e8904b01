"""Whole gateways of which some die, hang, come, or think otherwise of who is there: no client notices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.serve.claim import closed_mark
from tests.support.gateway_process import to_toml
from tests.support.nodes import BLOCK, PASSING, SECRET, SENT, SIZES, PeerName, load, nodes

NEXT_SECRET = "the next secret of the cluster, 32 characters"


ATTEMPTS_MAX = 3
"""As in test_nodes.py."""

TAKEN_FOR_DEAD_MAX = 0.1
"""The share of bytes that may come from the bucket after all: a machine that stands still for two seconds makes nodes
take each other for dead."""


@pytest.mark.slow
def test_12_5_a_node_that_dies_fails_no_read(tmp_path: Path) -> None:
    with nodes(tmp_path, 3, [PASSING]) as cluster:
        keys = cluster.store("k", [300_000, 2 * BLOCK] * 6)
        with load(cluster, keys, [0, 1]) as reading:
            reading.more(len(keys))
            cluster[2].kill()
            reading.more(4 * len(keys))
        fresh = cluster.store("fresh", [300_000, BLOCK] * 6)
        cluster.epoch(fresh, [0, 1])


@pytest.mark.slow
def test_12_5_a_node_that_hangs_fails_no_read_and_is_asked_again_when_it_answers(tmp_path: Path) -> None:
    with nodes(tmp_path, 3, [PASSING]) as cluster:
        keys = cluster.store("k", [300_000, 2 * BLOCK] * 6)
        with load(cluster, keys, [0, 1]) as reading:
            reading.more(len(keys))
            cluster[2].stop()
            reading.more(4 * len(keys))
            cluster[2].go_on()
            before = cluster[2].metric(SENT)
            cluster.wait_until(lambda: cluster[2].metric(SENT) > before)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="others are refused there: a mistake, not a disk that fails")
def test_12_5_a_node_without_its_directory_owns_nothing_and_serves_its_clients(tmp_path: Path) -> None:
    """Its directory cannot be made: the node says so, and the others ask it for nothing."""
    directory = Path("/proc/forebay-test")
    try:
        with nodes(tmp_path, 3, of_one={2: {"cache": {"directory": str(directory)}}}) as cluster:
            cluster.epoch(cluster.store("k", [300_000, 2 * BLOCK] * 4), [0, 1, 2])
            (closed,) = cluster.asked_by(2)
            for number in (0, 1):
                cluster.wait_for_states(number, ["up", "up", "closed"])
                own = iter(cluster.owned_by(2, f"own{number}-", 1000))
                cluster.wait_until(lambda: closed not in cluster.asked_by(number, next(own)))  # noqa: B023 - called here
            cluster.wait_for_states(2, ["up", "up", "closed"])
            later = cluster.store("later", [300_000, 2 * BLOCK] * 4)
            cluster.epoch(later, [0, 1])
            assert closed not in cluster.askers(later)
            cluster.epoch(later, [2])
    finally:
        closed_mark(directory).unlink(missing_ok=True)


@pytest.mark.slow
def test_12_5_nodes_that_think_otherwise_of_who_is_there_never_wait_for_each_other(tmp_path: Path) -> None:
    """Each takes the others for all members, so it owns nothing and asks for all; none has room for much."""
    small = {"capacity": "9MiB", "block_size": "1MiB"}
    views = {0: [1, 2], 1: [2, 0], 2: [0, 1]}
    with nodes(tmp_path, 3, views=views, cluster={"fallback_requests": 1}, cache=small) as cluster:
        keys = cluster.store("k", [10, 70_000, 300_000, BLOCK, 2 * BLOCK + 1, 5 * BLOCK] * 2)
        for _ in range(2):
            cluster.epoch(keys, [0, 1, 2], threads_each=6)


@pytest.mark.slow
def test_12_6_what_nodes_have_stays_theirs_when_others_come(tmp_path: Path) -> None:
    """Two more nodes come; the bucket gives nothing for it."""
    with nodes(tmp_path, 4, running=2) as cluster:
        keys = cluster.store("k", SIZES)
        assert cluster.grown(keys).size_bytes <= TAKEN_FOR_DEAD_MAX * cluster.size_bytes(keys)


@pytest.mark.slow
def test_12_6_a_weight_that_is_changed_while_nodes_read_moves_blocks_at_once(tmp_path: Path) -> None:
    """On a reload of its node, on all nodes, and no read fails for it."""
    with nodes(tmp_path, 2, cluster={"weight": 1}) as cluster:
        keys = cluster.store("k", [300_000, 2 * BLOCK] * 4)
        urls = [node.gateway.admin_url for node in cluster.nodes]

        def shares(number: int) -> list[float]:
            found = cluster[number].client.get(f"{urls[number]}/api/v1/cluster").json()["members"]
            return [one["share"] for one in found]

        with load(cluster, keys, [0, 1]) as reading:
            reading.more(len(keys))
            for number in (0, 1):
                cluster.wait_until(lambda: shares(number) == [0.5, 0.5])  # noqa: B023 - called here
            cluster[1].config["cluster"]["weight"] = 3
            cluster[1].gateway.config_file.write_text(to_toml(cluster[1].config), encoding="utf-8")
            assert cluster[1].client.post(f"{urls[1]}/api/v1/reload").is_success
            for number in (0, 1):
                cluster.wait_until(lambda: shares(number) == [0.25, 0.75])  # noqa: B023 - called here
            reading.more(len(keys))


@pytest.mark.slow
def test_12_6_nodes_come_and_go_as_their_name_says(tmp_path: Path) -> None:
    """And stay as they were while it cannot be resolved, or stands for nobody. No read fails meanwhile."""
    name = PeerName(tmp_path, 3)
    with nodes(tmp_path, 3, running=2, peers=name) as cluster:
        keys = cluster.store("k", [300_000, 2 * BLOCK] * 3)
        of_last = iter(cluster.owned_by(2, "of-last", 1000))

        def is_owned_by_last(number: int) -> bool:
            """Whether a node asks the last one for what that owns if it is a member."""
            (asker,) = cluster.asked_by(number, next(of_last))
            return asker == last

        with load(cluster, keys, [0]) as reading:
            name.tell(cluster.addresses)
            cluster[2].start()
            for number in range(3):
                cluster.wait_for_states(number, ["up"] * 3)
            (last,) = cluster.asked_by(2, next(of_last))
            for number in (0, 1):
                cluster.wait_until(lambda: is_owned_by_last(number))  # noqa: B023 - called here
            nothing: tuple[list[str] | None, ...] = (None, [])
            for told in nothing:
                name.tell(told)
                for _ in range(2 * len(cluster.nodes)):  # each node has
                    looked_up_at = name.looked_up_at()
                    cluster.wait_until(lambda: name.looked_up_at() > looked_up_at)  # noqa: B023 - called here
                reading.more(len(keys))
                assert is_owned_by_last(0)
                assert is_owned_by_last(1)
            name.tell(cluster.addresses[:2])
            for number in (0, 1):
                cluster.wait_for_states(number, ["up"] * 2)
                cluster.wait_until(lambda: not is_owned_by_last(number))  # noqa: B023 - called here
            cluster[2].kill()
            reading.more(len(keys))
        for number in range(ATTEMPTS_MAX):
            fresh = cluster.store(f"fresh{number}-", [300_000, 2 * BLOCK] * 3)
            if cluster.epoch(fresh, [0, 1]).size_bytes == cluster.size_bytes(fresh):
                break
        else:
            pytest.fail("the two that are left do not read together")


@pytest.mark.slow
def test_12_12_a_node_is_reached_under_a_name_that_it_does_not_know(tmp_path: Path) -> None:
    """Behind a mapped port, by a name, by its other address."""
    with nodes(tmp_path, 2, [PASSING]) as cluster:
        keys = cluster.store("k", [300_000] * 12)
        cluster[0].restart([cluster[0].address, cluster[1].address.replace("127.0.0.1", "localhost")], 3600)
        cluster.wait_for_states(0, ["up", "up"])
        for _ in range(2):
            assert "peer" in cluster.epoch(keys, [0]).seen


@pytest.mark.slow
def test_12_12_secrets_are_changed_while_nodes_read(tmp_path: Path) -> None:
    """Added everywhere, then first everywhere, then alone: no read fails, and none needs the bucket."""
    with nodes(tmp_path, 3, [PASSING]) as cluster:
        keys = cluster.store("k", [300_000, BLOCK] * 6)
        cluster.epoch(keys, [0, 1, 2])
        asked = len(cluster.origin.request_lines)
        with load(cluster, keys, [0, 1, 2]) as reading:
            for secrets in ([SECRET, NEXT_SECRET], [NEXT_SECRET, SECRET], [NEXT_SECRET]):
                cluster.secret_file.write_text("\n".join(secrets))
                for node in cluster.nodes:
                    url = f"{node.gateway.admin_url}/api/v1/reload"
                    assert node.client.post(url).is_success
                    reading.more(len(keys) // 2)
        assert cluster.asked(asked)[1] <= TAKEN_FOR_DEAD_MAX * cluster.size_bytes(keys)

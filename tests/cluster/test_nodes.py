"""Whole gateways that read from each other: what the bucket is asked for, and what their clients see."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gateway.origin import peer_protocol as peer
from tests.support import peers
from tests.support.asgi import signed_headers
from tests.support.nodes import BLOCK, BUCKET, PATIENCE_SECONDS, READ_ONLY, SECRET, Nodes, nodes
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

ALL = range(3)
SIZES = [10, 70_000, 300_000, BLOCK, 2 * BLOCK + 1, 5 * BLOCK]
TTL_SECONDS = 1.0

ATTEMPTS_MAX = 3
"""A machine that stands still for two seconds makes nodes take each other for dead: then the bucket is asked again."""


def slot(name: str, **changed: Any) -> Mapping[str, Any]:
    return {**READ_ONLY, "name": name, "prefix": f"s3://{BUCKET}/{name}/", **changed}


SLOTS = [
    slot("data"),
    slot("aging", metadata_ttl=f"{TTL_SECONDS:g}s", negative_ttl=f"{TTL_SECONDS:g}s"),
    slot("strict", mode="read-write", consistency="strict", metadata_ttl=None),
    slot("written", mode="read-write"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with nodes(tmp_path_factory.mktemp("cluster"), len(ALL), SLOTS) as running:
        yield running


@pytest.mark.slow
def test_12_1_each_byte_comes_from_the_bucket_once(cluster: Nodes) -> None:
    for number in range(ATTEMPTS_MAX):
        keys = cluster.store(f"data/epoch{number}-", SIZES * 2)
        first = cluster.epoch(keys, ALL)
        assert "peer" in first.seen
        if first.size_bytes <= 1.02 * cluster.size_bytes(keys):
            break
    else:
        pytest.fail(f"{first.size_bytes} bytes for {cluster.size_bytes(keys)}")
    second = cluster.epoch(keys, ALL)
    assert (second.questions, second.size_bytes) == (0, 0)


def test_each_node_tells_what_it_gave_to_each_other_one_and_took(cluster: Nodes) -> None:
    cluster.epoch(cluster.store("data/told", SIZES), ALL)

    def told() -> list[list[tuple[int, int]]]:
        documents = [node.client.get(f"{node.gateway.admin_url}/api/v1/cluster").json() for node in cluster.nodes]
        return [[(one["sent_bytes"], one["received_bytes"]) for one in of_node["members"]] for of_node in documents]

    def is_told() -> bool:
        found = told()
        pairs = [(one, other) for one in ALL for other in ALL if one != other]
        return all(found[one][other][0] >= found[other][one][1] > 0 for one, other in pairs)

    cluster.wait_until(is_told)
    assert [told()[number][number] for number in ALL] == [(0, 0)] * len(ALL)


def test_12_1_many_readers_of_one_object_cost_it_once(cluster: Nodes) -> None:
    wanted = []
    for number in range(ATTEMPTS_MAX):
        (key,) = cluster.store(f"data/crowd{number}-", [4 * BLOCK])
        asked = len(cluster.origin.request_lines)
        with ThreadPoolExecutor(12) as pool:
            assert len(list(pool.map(lambda node, of=key: cluster.read(node, of), [*ALL] * 4))) == 12
        wanted.append(cluster.asked(asked)[1])
        if wanted[-1] == 4 * BLOCK:
            break
    assert wanted[-1] == 4 * BLOCK, wanted


def test_12_3_the_bucket_is_asked_about_each_object_once(cluster: Nodes) -> None:
    """For all nodes; nobody writes in the slot, and an answer of some age will do."""
    keys = cluster.store("data/heads", [1000] * 40)
    asked = len(cluster.origin.request_lines)
    with ThreadPoolExecutor(6) as pool:
        heads = pool.map(lambda one: cluster[one[0]].request("HEAD", one[1]), [(n, key) for n in ALL for key in keys])
        assert {(head.status_code, head.headers["content-length"]) for head in heads} == {(200, "1000")}
    assert cluster.asked(asked)[0] <= 1.05 * len(keys)


@pytest.mark.slow
def test_12_3_no_node_tells_what_is_older_than_the_slot_allows(cluster: Nodes) -> None:
    """Wherever it comes from. A request that is sent later than that after a change sees the change."""
    keys = cluster.store("aging/k", [1000] * 6)
    cluster.epoch(keys, ALL)
    before = {key: cluster.content(key) for key in keys}
    absent = [cluster[number].request("GET", "aging/new") for number in ALL]
    assert [one.status_code for one in absent] == [404] * len(ALL)
    cluster.store("aging/k", [1000] * 6)
    cluster.origin.model.put(BUCKET, "aging/new", b"new")
    now = {key: cluster.content(key) for key in keys} | {"aging/new": b"new"}
    changed_at = time.monotonic()
    due = {(number, key) for number in ALL for key in now}
    while due:
        for number, key in random.sample(sorted(due), len(due)):
            began = time.monotonic()
            answer = cluster[number].request("GET", key)
            if answer.content == now[key]:
                due.discard((number, key))
            else:
                assert answer.status_code == 404 if key not in before else answer.content == before[key]
                assert began < changed_at + TTL_SECONDS, (number, key)


def test_12_3_strict_and_no_cache_ask_the_bucket(cluster: Nodes) -> None:
    """A change is seen at once, by every node."""
    keys = cluster.store("strict/k", [10, 300_000, 2 * BLOCK])
    cluster.epoch(keys, ALL)
    cluster.store("strict/k", [20, 300_000, 2 * BLOCK])
    cluster.epoch(keys, ALL)
    (key,) = cluster.store("data/no-cache", [300_000])
    cluster.epoch([key], ALL)
    cluster.store("data/no-cache", [300_000])
    for node in cluster.nodes:
        pair = (ACCESS_KEY_ID, SECRET_ACCESS_KEY)
        answer = node.signed("GET", key, {"cache-control": "no-cache"}, sign_key=pair)
        assert answer.content == cluster.content(key)


def test_12_4_a_write_is_seen_at_once_where_it_passes_and_by_all_who_ask_the_bucket(cluster: Nodes) -> None:
    """For the other nodes it is a write of others."""
    contents = [random.randbytes(2 * BLOCK + 7), random.randbytes(2 * BLOCK + 7)]
    for prefix, seeing in (("written", [1]), ("strict", [1, *ALL])):
        key = f"{prefix}/put"
        cluster.origin.model.put(BUCKET, key, b"before")
        cluster.epoch([key], ALL)
        for content in contents:
            assert cluster[1].request("PUT", key, content=content).status_code == 200
            assert cluster.content(key) == content
            for number in seeing:
                cluster.read(number, key)
    assert cluster[0].request("GET", "written/put").content in (b"before", *contents)


@pytest.mark.slow
def test_5_5_a_pin_over_the_cluster_holds_the_data_once(cluster: Nodes) -> None:
    """Each node what it owns; copies are not pinned."""
    keys, prefix = cluster.store("data/pinned/k", [300_000, 2 * BLOCK] * 6), f"s3://{BUCKET}/data/pinned/"

    def pinned() -> list[int]:
        of_slot = 'forebay_cache_pinned_bytes{slot="data"}'
        return [int(node.metric(of_slot)) for node in cluster.nodes]

    done = cluster[1].gateway.command("pin", prefix, "--cluster", "--wait")
    assert done.returncode == 0, done.stderr
    cluster.wait_until(lambda: sum(pinned()) >= cluster.size_bytes(keys))
    once = pinned()
    assert sum(once) < 1.2 * cluster.size_bytes(keys)
    assert all(once)
    assert cluster.epoch(keys, ALL).size_bytes == 0
    used = 'forebay_cache_usage_bytes{slot="data"}'
    cluster.wait_until(lambda: sum(node.metric(used) for node in cluster.nodes) >= 3 * cluster.size_bytes(keys))
    assert pinned() == once
    done = cluster[2].gateway.command("unpin", prefix, "--cluster")
    assert done.returncode == 0, done.stderr
    cluster.wait_until(lambda: not any(pinned()))


def test_12_12_a_client_says_nothing_that_nodes_say_to_themselves(cluster: Nodes) -> None:
    key, host, port = "written/said", *cluster[0].gateway.s3_url.removeprefix("http://").split(":")
    assert cluster[0].request("PUT", key, content=b"x" * BLOCK, headers={"x-forebay-copy": "1"}).status_code == 200
    assert cluster.content(key) == b"x" * BLOCK
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(f"GET /{BUCKET}/{key} HTTP/1.1\r\nHost: {host}\r\n{peer.COPY}: 1\r\n\r\n".encode())
        assert connection.recv(1024).split(b" ")[1] == b"400"


def test_12_12_each_port_refuses_the_others_keys(cluster: Nodes) -> None:
    """And what is altered, sent again, or not signed."""
    (key,) = cluster.store("data/rights", [1000])
    node, target = cluster[0], f"/{BUCKET}/{key}"
    said = peers.of_node({peer.MAX_AGE: "60"}, home=cluster.origin.endpoint_url)
    by_cluster = peers.signed("HEAD", target, said, host=node.address)
    pair = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    by_client = signed_headers("HEAD", target, said, b"", host=node.address, **pair)

    def at_peer_port(headers: Mapping[str, str]) -> int:
        return httpx.head(f"http://{node.address}{target}", headers=headers, timeout=PATIENCE_SECONDS).status_code

    altered = {**peers.signed("HEAD", target, peers.of_node(said), host=node.address), peer.MAX_AGE: "61"}
    assert [at_peer_port(one) for one in (said, by_client, altered, by_cluster, by_cluster)] == [403] * 3 + [200, 403]
    assert node.signed("GET", key, {}, sign_key=("forebay-train", SECRET)).status_code == 403


@pytest.mark.slow
def test_12_2_no_node_asks_one_that_has_the_bucket_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """8.7: each node gives the bytes of its own home."""
    with StrictOrigin() as other:
        buckets = {"buckets": [{"name": BUCKET, "endpoint_url": other.endpoint_url}]}
        with nodes(tmp_path_factory.mktemp("homes"), 2, of_one={1: buckets}) as cluster:
            keys = cluster.store("k", [10, 70_000, 2 * BLOCK + 1] * 3)
            for key in keys:
                other.model.put(BUCKET, key, random.randbytes(len(cluster.content(key))))
            for _ in range(2):
                for key in keys:
                    assert cluster.read(0, key) != "peer"
                    answer = cluster[1].request("GET", key)
                    assert answer.content == other.model.data(BUCKET, key)

"""Whom a node asks for what another node looks after, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import math
import string
from dataclasses import replace
from typing import Any

import pytest

from gateway.cluster import cluster_origin
from gateway.cluster.cluster_origin import BUSY_SECONDS_MAX, FOLLOWED_MAX
from gateway.cluster.members import Member
from gateway.cluster.peers import LEFT_OUT_SECONDS
from gateway.core.errors import OriginBusy, OriginUnreachable
from gateway.core.model import ObjectKey
from gateway.metadata.ages import AnswerAges
from gateway.metadata.entries import InvalidationEpochs
from gateway.metadata.listing.index import ListingIndex
from gateway.origin import peer_protocol as peer
from gateway.origin.client import OriginRequest, age_of, from_peer
from gateway.policy.slots import Prefix, Slot, Slots
from gateway.telemetry import metrics
from tests.cluster.nodes import Cluster, Node, pinned
from tests.support.blocks import BLOCK, BUCKET, TestClock, content_of
from tests.support.counting import by_label
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.faults import Unreachable, on
from tests.support.memory_origin.response import MemoryResponse
from tests.support.peers import SECRET, checksums


def slot_of(**changed: Any) -> Slots:
    settings = {"mode": "read-only", "stated_consistency": "ttl", "metadata_ttl_seconds": 60, **changed}
    return Slots([Slot(name="data", prefix=Prefix(BUCKET), **settings)])


def fallbacks() -> dict[str, float]:
    return by_label(metrics.CLUSTER_FALLBACK_REQUESTS, "reason")


def ages_of(slots: Slots) -> AnswerAges:
    """Return the ages for a key that nobody has invalidated, listed or shown."""
    key, clock = ObjectKey(BUCKET, "k"), TestClock()
    listing = ListingIndex(None, InvalidationEpochs(None), clock)
    return AnswerAges(key, slots.find(*key), math.inf, listing, lambda _key, age_seconds: False)


def question(slots: Slots, method: str = "HEAD", **headers: str) -> OriginRequest:
    return OriginRequest(method, BUCKET, "k", headers={peer.COPY: "1", **headers}, ages=ages_of(slots))


async def test_the_first_owner_is_asked_with_what_it_must_know() -> None:
    cluster = Cluster()
    version = cluster.store("k", 3 * BLOCK)
    assert await cluster.read(version, BLOCK, 2 * BLOCK - 1) == content_of(cluster.bucket, version)[BLOCK : 2 * BLOCK]
    assert (cluster.asked(), cluster.from_bucket()) == ({"one": 1}, 0)
    said = cluster.nodes["one"].headers()
    assert peer.COPY not in said
    assert {name: said[name] for name in (peer.PEER, peer.HOME, peer.SIZE, peer.FROM, peer.PURPOSE)} == {
        peer.PEER: "1",
        peer.HOME: peer.home_digest("memory"),
        peer.SIZE: str(3 * BLOCK),
        peer.FROM: "me",
        peer.PURPOSE: "live",
    }
    await cluster.read(version)
    assert said[peer.NONCE] != cluster.nodes["one"].headers()[peer.NONCE]
    assert cluster.connected == ["one"]


async def test_headers_between_nodes_stay_between_them() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    async with await cluster.origin.send(pinned(version)) as response:
        assert not [name for name in response.headers if name.startswith("x-forebay")]
        told = from_peer(response)
        assert told is not None
        assert len(told.checksums) == 4 * BLOCK // 65536


@pytest.mark.parametrize("state", ["unreachable", "silent"])
async def test_the_second_owner_is_asked_where_the_first_is_gone(state: str) -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    setattr(cluster.nodes["one"], state, True)
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert (cluster.asked(), cluster.from_bucket()) == ({"one": 1, "two": 1}, 0)


async def test_the_bucket_gives_what_no_owner_gives() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    before = fallbacks()
    cluster.nodes["one"].unreachable = cluster.nodes["two"].unreachable = True
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert (cluster.asked(), cluster.from_bucket()) == ({"one": 1, "two": 1}, 1)
    assert not [name for name in cluster.bucket.calls[0].headers if name.startswith("x-forebay")]
    assert fallbacks()["unreachable"] == before.get("unreachable", 0) + 1


async def test_this_node_as_an_owner_asks_the_bucket_without_ration() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    before = fallbacks()
    cluster.nodes["one"].unreachable = True
    cluster.view.order = (cluster.member("one"), cluster.member("me"))
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert (cluster.asked(), fallbacks()) == ({"one": 1}, before)


async def test_an_answer_without_a_valid_proof_is_none() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    cluster.nodes["one"].secret = b"another secret: of thirty-two characters"
    cluster.nodes["two"].secret = b"the one before: thirty-two characters"
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert (cluster.asked(), cluster.from_bucket()) == ({"one": 1, "two": 1}, 0)


@pytest.mark.parametrize("changed", ["etag", "content-range", peer.CRC32C])
async def test_the_proof_covers_what_is_told_of_the_bytes(changed: str) -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    node, told = cluster.nodes["one"], checksums(bytes(BLOCK)) if changed == peer.CRC32C else f'"{changed}"'

    class Changing(type(node)):  # type: ignore[misc]
        async def send(self, request: OriginRequest) -> object:
            response = await super().send(request)
            response.headers = {**response.headers, changed: told}
            return response

    cluster.nodes["one"] = Changing(cluster.at_nodes, cluster.clock)
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert cluster.asked() == {"one": 1, "two": 1}


@pytest.mark.parametrize("status", [400, 403, 421, 500, 507])
async def test_an_owner_that_refuses_is_passed_over(status: int) -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    cluster.nodes["one"].replies = [MemoryResponse(status)]
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert cluster.asked() == {"one": 1, "two": 1}


@pytest.mark.parametrize("status", [404, 412, 416])
async def test_a_proved_answer_about_the_object_is_the_objects(status: int) -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    cluster.nodes["one"].replies = [MemoryResponse(status)]
    async with await cluster.origin.send(pinned(version)) as response:
        assert response.status == status
    assert (cluster.asked(), cluster.from_bucket()) == ({"one": 1}, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"etag": '"another"'},
        {"content-range": "bytes 0-9/10"},
        {peer.CRC32C: ""},
        {peer.CRC32C: "AAAA"},
        {peer.CRC32C: "!"},
        {"content-length": "10"},
    ],
)
async def test_a_proved_answer_of_other_bytes_is_none(wrong: dict[str, str]) -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    body = content_of(cluster.bucket, version)
    headers = {
        "etag": version.etag,
        "content-range": f"bytes 0-{BLOCK - 1}/{BLOCK}",
        "content-length": str(BLOCK),
        peer.CRC32C: "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    cluster.nodes["one"].replies = [MemoryResponse(206, headers | wrong, BytesContent(body))]
    assert await cluster.read(version) == body
    assert cluster.asked() == {"one": 1, "two": 1}


async def test_a_busy_owner_is_waited_for() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    cluster.nodes["one"].replies = [MemoryResponse(503, {"retry-after": "0"}) for _ in range(3)]
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert (cluster.asked(), cluster.from_bucket()) == ({"one": 4}, 0)


async def test_busy_owners_are_not_waited_for_for_ever() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    before, began = fallbacks(), cluster.clock.time
    for name in ("one", "two"):
        cluster.nodes[name].replies = [MemoryResponse(503, {}) for _ in range(1000)]
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert BUSY_SECONDS_MAX <= cluster.clock.time - began < BUSY_SECONDS_MAX + 1
    assert (cluster.asked()["two"], cluster.from_bucket()) == (1, 1)
    assert fallbacks()["busy"] == before.get("busy", 0) + 1
    for number in range(2, 5):  # nor by each request anew
        began = cluster.clock.time
        assert await cluster.read(version) == content_of(cluster.bucket, version)
        assert (cluster.clock.time > began, cluster.from_bucket()) == (number == 2, number)
    cluster.clock.time += LEFT_OUT_SECONDS
    for name in ("one", "two"):
        cluster.nodes[name].replies[:] = [MemoryResponse(503, {})]
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert cluster.from_bucket() == 4


async def test_12_5_an_owner_that_gets_nothing_from_the_bucket_is_not_waited_for() -> None:
    """The second may get it. As long as this node gets nothing either, a miss tries one peer."""
    cluster = Cluster()
    version, began = cluster.store("k", BLOCK), cluster.clock.time
    content = content_of(cluster.bucket, version)
    cluster.nodes["one"].replies = [MemoryResponse(peer.BUCKET_AWAY) for _ in range(5)]
    assert await cluster.read(version) == content
    assert (cluster.asked(), cluster.from_bucket(), cluster.clock.time) == ({"one": 1, "two": 1}, 0, began)
    cluster.nodes["two"].replies = [MemoryResponse(peer.BUCKET_AWAY) for _ in range(2)]
    cluster.bucket.inject(on(), Unreachable(), times=2)
    for _ in range(2):
        with pytest.raises(OriginUnreachable):
            await cluster.read(version)
        assert cluster.asked()["two"] == 2
    assert await cluster.read(version) == content
    assert cluster.asked() == {"one": 4, "two": 2}
    assert await cluster.read(version) == content
    assert cluster.asked() == {"one": 5, "two": 3}


async def test_3_10_questions_about_a_bucket_go_to_the_bucket() -> None:
    """Each node remembers its own small answers, so it asks no peer for them; a peer cannot answer for a versionId."""
    cluster = Cluster()
    cluster.store("k", BLOCK)
    cluster.view.before = cluster.member("three")
    asked = OriginRequest("GET", BUCKET, headers={"range": "bytes=0-65535"}, ages=ages_of(slot_of()))
    versions = replace(asked, key="k", query=(("versionId", "null"),), ages=None)
    for request in (asked, replace(asked, method="HEAD"), replace(asked, query=(("location", None),)), versions):
        await (await cluster.origin.send(request)).aclose()
    assert (cluster.asked(), cluster.from_bucket()) == ({}, 4)


def named(*addresses: str) -> MemoryResponse:
    return MemoryResponse(303, {peer.ASK: ", ".join(addresses)})


async def test_a_node_that_an_owner_names_is_asked_for_what_it_has() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    cluster.nodes["one"].replies = [named("elsewhere", "three", "me")]
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert cluster.asked() == {"one": 1, "three": 1}
    assert cluster.nodes["three"].headers()[peer.ONLY] == "taken"


async def test_nodes_that_named_nodes_name_are_asked_each_once() -> None:
    """Two that name each other end no request."""
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    cluster.nodes["one"].replies = [named("two")]
    cluster.nodes["two"].replies = [named("three")]
    cluster.nodes["three"].replies = [named("two", "one")]
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert (cluster.asked(), cluster.from_bucket()) == ({"one": 2, "two": 1, "three": 1}, 0)
    assert cluster.nodes["one"].headers()[peer.LAST] == "1"


async def test_named_nodes_are_followed_six_times() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    names = [f"node {number}" for number in range(20)]
    members = cluster.view.members
    cluster.view.members = (*members, *(Member(name, name) for name in names))
    for name in names:
        cluster.nodes[name] = Node(cluster.at_nodes, cluster.clock, replies=[named(*names)])
    cluster.nodes["one"].replies = [named(*names)]
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert sorted(cluster.asked().values()) == [1] * FOLLOWED_MAX + [2]
    assert cluster.asked()["one"] == 2


async def test_the_owner_is_asked_again_where_the_named_node_has_nothing() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    cluster.nodes["one"].replies = [named("three")]
    cluster.nodes["three"].replies = [MemoryResponse(404)]
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert cluster.asked() == {"one": 2, "three": 1}
    assert cluster.nodes["one"].headers()[peer.LAST] == "1"


async def test_an_owner_that_names_others_again_and_again_is_passed_over() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    cluster.nodes["one"].replies = [named(), named("three")]
    assert await cluster.read(version) == content_of(cluster.bucket, version)
    assert cluster.asked() == {"one": 2, "two": 1}


async def test_the_bucket_is_asked_by_ration_until_the_answers_end() -> None:
    cluster = Cluster(fallback_requests=2)
    version = cluster.store("k", BLOCK)
    cluster.view.order = ()
    first, second = [await cluster.origin.send(pinned(version)) for _ in range(2)]
    third = asyncio.create_task(cluster.origin.send(pinned(version)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert cluster.from_bucket() == 2
    assert (await cluster.bucket.send(pinned(version, copy=""))).status == 206  # what is this node's own waits for none
    await first.aclose()
    await first.aclose()
    await (await third).aclose()
    await second.aclose()
    fourth, fifth = [await cluster.origin.send(pinned(version)) for _ in range(2)]
    await fourth.aclose()
    await fifth.aclose()


async def test_12_5_who_waits_for_long_for_a_part_of_the_ration_is_told_to_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_origin, "RATION_SECONDS_MAX", 0.01)
    cluster = Cluster(fallback_requests=1)
    version = cluster.store("k", BLOCK)
    cluster.view.order = ()
    async with await cluster.origin.send(pinned(version)):
        with pytest.raises(OriginBusy):
            await cluster.origin.send(pinned(version))
    assert await cluster.read(version) == content_of(cluster.bucket, version)


async def test_who_lets_an_answer_wait_keeps_nobody_from_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_origin, "UNREAD_SECONDS_MAX", 0.0)
    cluster = Cluster(fallback_requests=1)
    version = cluster.store("k", BLOCK)
    cluster.view.order = ()
    waiting = [await cluster.origin.send(pinned(version)) for _ in range(3)]
    bodies = [b"".join([bytes(piece) async for piece in one.stream()]) for one in waiting]
    assert bodies == [content_of(cluster.bucket, version)] * 3
    for one in waiting:
        await one.aclose()
    assert cluster.origin._ration._value == 1


async def test_what_is_this_nodes_own_goes_to_the_bucket() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    assert await cluster.read(version, copy="") == content_of(cluster.bucket, version)
    assert cluster.asked() == {}


async def test_the_owner_before_is_asked_for_what_it_has() -> None:
    cluster = Cluster()
    version = cluster.store("k", 3 * BLOCK)
    cluster.view.before = cluster.member("three")
    assert await cluster.read(version, copy="") == content_of(cluster.bucket, version)[:BLOCK]
    assert (cluster.asked(), cluster.from_bucket()) == ({"three": 1}, 0)
    assert cluster.nodes["three"].headers()[peer.ONLY] == "cached"
    cluster.nodes["three"].replies = [MemoryResponse(404)]
    assert await cluster.read(version, copy="") == content_of(cluster.bucket, version)[:BLOCK]
    assert (cluster.asked(), cluster.from_bucket()) == ({"three": 2}, 1)
    await cluster.read(version, 1000, 2000, copy="")  # off the grid
    await cluster.read(version, 0, 2 * BLOCK - 1, copy="")  # of several blocks
    cluster.nodes["three"].silent = True
    await cluster.read(version, copy="")
    assert (cluster.asked(), cluster.from_bucket()) == ({"three": 2}, 4)


async def test_12_6_the_owner_before_tells_the_version_too_where_an_answer_of_some_age_will_do() -> None:
    cluster = Cluster()
    cluster.store("k", BLOCK)
    cluster.view.before = cluster.member("three")
    asked = OriginRequest("GET", BUCKET, "k", headers={"range": f"bytes=0-{BLOCK - 1}"})
    for ages, from_bucket in ((ages_of(slot_of()), 0), (None, 1)):
        request = replace(asked, ages=ages)
        async with await cluster.origin.send(request) as response:
            assert response.status == 206
            assert (from_peer(response) is None) == (ages is None)
        assert (cluster.asked(), cluster.from_bucket()) == ({"three": 1}, from_bucket)


async def test_the_owner_before_may_name_others() -> None:
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    cluster.view.before = cluster.member("three")
    cluster.nodes["three"].replies = [named("two")]
    assert await cluster.read(version, copy="") == content_of(cluster.bucket, version)
    assert (cluster.asked(), cluster.from_bucket()) == ({"three": 1, "two": 1}, 0)


@pytest.mark.parametrize("first", ["one", "three"])
async def test_a_node_that_does_not_say_what_it_has_is_not_waited_for_for_long(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silent node is the owner before the last change, or one that an owner names."""
    monkeypatch.setattr(cluster_origin, "CACHED_SECONDS_MAX", 0.01)
    cluster = Cluster()
    version = cluster.store("k", BLOCK)
    cluster.view.before = cluster.member(first)
    if first == "one":
        cluster.nodes["one"].replies = [named("three")]
    cluster.nodes["three"].says_nothing = True
    assert await cluster.read(version, copy="") == content_of(cluster.bucket, version)
    assert (cluster.asked()["three"], cluster.from_bucket()) == (1, 1)


async def test_requests_without_a_wait_never_go_to_a_peer() -> None:
    cluster = Cluster()
    assert cluster.origin.begin_read(question(slot_of(), "GET"), lambda _: None) is None
    cluster.view.before = cluster.member("three")
    asked = OriginRequest("GET", BUCKET, "k", headers={"range": "bytes=0-65535"}, ages=ages_of(slot_of()))
    assert cluster.origin.begin_read(asked, lambda _: None) is None


async def test_roles_name_what_another_node_owns() -> None:
    cluster, key = Cluster(), ObjectKey(BUCKET, "k")
    assert cluster.roles.headers(key, 0, {}, "default") == {peer.COPY: "1"}
    assert cluster.roles.headers(key, 0, {"a": "b"}, "default") == {"a": "b", peer.COPY: "1"}
    cluster.view.order = (cluster.member("me"), cluster.member("one"))
    assert cluster.roles.headers(key, 0, {"a": "b"}, "default") == {"a": "b"}
    cluster.view.order = ()
    assert cluster.roles.headers(key, 0, {}, "default") == {}


@pytest.mark.parametrize("method", ["PUT", "GET"])
async def test_no_header_that_a_client_can_send_leads_to_a_peer(method: str) -> None:
    cluster = Cluster()
    cluster.store("k", BLOCK)
    assert not set(peer.COPY) <= set(string.ascii_lowercase + string.digits + "!#$%&'*+-.^_`|~"), "RFC 9110, 5.6.2"
    headers = dict.fromkeys(("x-forebay-copy", peer.SIZE, peer.ONLY, peer.MAX_AGE, peer.LAST), "1")
    async with await cluster.origin.send(OriginRequest(method, BUCKET, "k", headers=headers, body=b"")) as response:
        assert response.status == 200
    assert (cluster.asked(), cluster.from_bucket()) == ({}, 1)


# Ages


async def test_an_answer_about_an_object_says_how_old_it_is() -> None:
    cluster, slots = Cluster(), slot_of()
    cluster.store("k", BLOCK)
    node = cluster.nodes["one"]
    node.age_seconds, node.date = 59.5, "Sat, 28 Nov 2026 22:00:00 GMT"
    async with await cluster.origin.send(question(slots)) as response:
        assert (response.status, age_of(response)) == (200, 59.5)
        assert response.headers["date"] == "Sat, 28 Nov 2026 22:00:00 GMT"
    assert float(node.headers()[peer.MAX_AGE]) == 60
    assert peer.SIZE not in node.headers()
    node.date = None
    async with await cluster.origin.send(question(slots)) as response:
        assert "date" not in response.headers


@pytest.mark.parametrize("age_seconds", [60.5, None, -1.0, float("nan"), float("inf")])
async def test_what_is_too_old_or_of_no_age_is_no_answer(age_seconds: float | None) -> None:
    cluster, slots = Cluster(), slot_of()
    cluster.store("k", BLOCK)
    before = fallbacks()
    cluster.nodes["one"].age_seconds = cluster.nodes["two"].age_seconds = age_seconds
    for method, more in (("HEAD", {}), ("GET", {"range": f"bytes=0-{BLOCK - 1}"})):
        async with await cluster.origin.send(question(slots, method, **more)) as response:
            assert (response.status, from_peer(response)) == (200 if method == "HEAD" else 206, None)
    assert fallbacks()["old"] == before.get("old", 0) + 2


@pytest.mark.parametrize("status", [201, 206, 304, 412, 416])
async def test_what_nobody_has_asked_for_is_no_answer(status: int) -> None:
    cluster = Cluster()
    cluster.store("k", BLOCK)
    cluster.nodes["one"].replies = [MemoryResponse(status, {peer.AGE: "0"})]
    async with await cluster.origin.send(question(slot_of())) as response:
        assert response.status == 200
    assert (cluster.asked(), cluster.from_bucket()) == ({"one": 1, "two": 1}, 0)


ASKING = {
    304: {"if-modified-since": "Thu, 01 Jan 1970 00:00:00 GMT"},
    412: {"if-unmodified-since": "Fri, 01 Jan 2100 00:00:00 GMT"},
    416: {"range": "bytes=0-"},
}


@pytest.mark.parametrize("status", ASKING)
async def test_what_is_judged_by_an_old_version_is_no_answer(status: int) -> None:
    """An answer without a body is of a version, too."""
    cluster, slots = Cluster(), slot_of()
    cluster.store("k", BLOCK)
    asked = question(slots, **ASKING[status])
    for name in ("one", "two"):
        cluster.nodes[name].replies = [MemoryResponse(status, {peer.AGE: "60.5"})]
    async with await cluster.origin.send(asked) as response:
        assert response.status in (200, 206)
    cluster.nodes["one"].replies = [MemoryResponse(status, {peer.AGE: "59.5"})]
    async with await cluster.origin.send(asked) as response:
        assert (response.status, age_of(response)) == (status, 59.5)


async def test_an_absence_is_believed_for_as_long_as_the_slot_allows() -> None:
    cluster, slots = Cluster(), slot_of(negative_ttl_seconds=5)
    cluster.nodes["one"].age_seconds = 4.0
    async with await cluster.origin.send(question(slots)) as response:
        assert (response.status, age_of(response)) == (404, 4.0)
    cluster.nodes["one"].age_seconds = cluster.nodes["two"].age_seconds = 6.0
    cluster.store("k", BLOCK)
    del cluster.at_nodes.buckets[BUCKET].objects["k"]
    async with await cluster.origin.send(question(slots)) as response:
        assert (response.status, from_peer(response)) == (200, None)


async def test_an_immutable_object_may_be_known_for_any_time() -> None:
    cluster, slots = Cluster(), slot_of(stated_consistency="immutable")
    cluster.store("k", BLOCK)
    cluster.nodes["one"].age_seconds = 1e6
    async with await cluster.origin.send(question(slots)) as response:
        assert age_of(response) == 1e6


async def test_what_the_owner_asked_for_just_now_is_young_enough() -> None:
    """A slot without a bound for what is absent believes what was found out since it asked."""
    cluster, slots = Cluster(), slot_of(negative_ttl_seconds=0)
    cluster.at_nodes.create_bucket(BUCKET)
    cluster.nodes["one"].seconds, cluster.nodes["one"].age_seconds = 0.5, 0.4
    async with await cluster.origin.send(question(slots)) as response:
        assert response.status == 404
    assert cluster.from_bucket() == 0


# Damage


async def test_a_peer_is_told_of_damage_once() -> None:
    cluster = Cluster()
    version = cluster.store("k", 3 * BLOCK)
    before = metrics.CLUSTER_DAMAGED.value()
    async with await cluster.origin.send(pinned(version, BLOCK)) as response:
        told = from_peer(response)
        assert told is not None
        told.doubt()
    await cluster.settle()
    assert cluster.asked() == {"one": 2}
    doubt = cluster.nodes["one"].asked[-1]
    assert (doubt.method, doubt.headers["range"]) == ("HEAD", f"bytes={BLOCK}-{2 * BLOCK - 1}")
    assert (doubt.headers[peer.DOUBT], doubt.headers["if-match"]) == ("1", version.etag)
    assert doubt.headers[peer.SIZE] == str(3 * BLOCK)
    assert metrics.CLUSTER_DAMAGED.value() == before + 1
    assert SECRET not in repr(doubt).encode()

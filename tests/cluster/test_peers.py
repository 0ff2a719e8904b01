"""The clients for other nodes: made when needed, closed when idle, left out when slow or silent."""

from __future__ import annotations

import pytest

from gateway.cluster.peers import IDLE_SECONDS, LEFT_OUT_SECONDS, SAMPLES
from gateway.core.errors import OriginBodyError, OriginUnreachable
from gateway.origin.peer_protocol import BY, CRC32C, TO
from tests.cluster.nodes import Cluster, pinned
from tests.support.blocks import BLOCK
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.response import MemoryResponse
from tests.support.peers import checksums
from tests.support.waiting import until


async def hits(cluster: Cluster, name: str, count: int, seconds: float) -> None:
    version, node = cluster.store("k", BLOCK), cluster.nodes[name]
    node.seconds = seconds
    for _ in range(count):
        answer = await cluster.peers.ask(name, cluster.origin._to_peer(pinned(version, copy=""), {}))
        assert answer is not None
        await answer.aclose()


async def test_a_slow_peer_is_left_out_for_a_while() -> None:
    cluster = Cluster()
    await hits(cluster, "two", SAMPLES, 0.02)
    await hits(cluster, "one", SAMPLES - 1, 0.25)
    assert not cluster.peers.is_away(cluster.member("one"))
    await hits(cluster, "one", 1, 0.25)
    assert cluster.peers.is_away(cluster.member("one"))
    assert not cluster.peers.is_away(cluster.member("two"))
    cluster.clock.time += LEFT_OUT_SECONDS
    assert not cluster.peers.is_away(cluster.member("one"))


@pytest.mark.parametrize(("of_others", "of_it"), [(0.02, 0.15), (0.001, 0.09)])
async def test_a_peer_within_the_bounds_is_not_slow(of_others: float, of_it: float) -> None:
    cluster = Cluster()
    await hits(cluster, "two", SAMPLES, of_others)
    await hits(cluster, "one", 2 * SAMPLES, of_it)
    assert not cluster.peers.is_away(cluster.member("one"))


async def test_the_only_peer_is_never_too_slow() -> None:
    cluster = Cluster()
    await hits(cluster, "one", 2 * SAMPLES, 5.0)
    assert not cluster.peers.is_away(cluster.member("one"))


async def test_what_a_peer_must_get_from_the_bucket_does_not_make_it_slow() -> None:
    cluster = Cluster()
    await hits(cluster, "two", SAMPLES, 0.001)
    cluster.nodes["one"].cache = "miss"
    await hits(cluster, "one", 2 * SAMPLES, 5.0)
    assert not cluster.peers.is_away(cluster.member("one"))


async def test_requests_name_the_peer_as_it_calls_itself() -> None:
    """Not as the asker does: names, mapped ports, addresses of both versions. The last answer counts."""
    cluster = Cluster()
    node = cluster.nodes["one"]
    for name in ("first", "second"):
        node.replies.append(MemoryResponse(421, {BY: name}))
    for _ in range(3):
        await cluster.read(cluster.store("k", BLOCK))
    assert [one.headers.get(TO) for one in node.asked] == [None, "first", "second"]


async def test_a_silent_peer_is_away_once_it_was_asked() -> None:
    cluster = Cluster()
    await hits(cluster, "one", 1, 0.0)
    assert not cluster.peers.is_away(cluster.member("one"))
    cluster.nodes["one"].silent = True
    assert cluster.peers.is_away(cluster.member("one"))


async def test_idle_clients_are_closed() -> None:
    cluster = Cluster()
    await hits(cluster, "one", 1, 0.0)
    cluster.clock.time += IDLE_SECONDS + 1
    await hits(cluster, "two", 1, 0.0)
    await until(lambda: cluster.nodes["one"].is_closed)
    await hits(cluster, "one", 1, 0.0)
    assert cluster.connected == ["one", "two", "one"]
    await cluster.peers.aclose()
    assert cluster.nodes["two"].is_closed


async def test_a_hello_is_proved_and_bounded() -> None:
    cluster = Cluster()
    node = cluster.nodes["one"]
    told = {CRC32C: checksums(b"{}"), "content-length": "2"}
    node.replies = [MemoryResponse(200, told, BytesContent(body)) for body in (b"{}", b"{]")]
    node.replies += [MemoryResponse(404), MemoryResponse(200)]
    assert await cluster.peers.hello("one") == b"{}"
    with pytest.raises(OriginBodyError):
        await cluster.peers.hello("one")
    assert (node.asked[0].bucket, node.asked[0].key) == ("-", "hello")
    with pytest.raises(OriginUnreachable):
        await cluster.peers.hello("one")
    node.secret = b"another secret: of thirty-two characters"
    with pytest.raises(OriginUnreachable):
        await cluster.peers.hello("one")

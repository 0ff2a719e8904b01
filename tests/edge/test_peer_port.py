"""The peer port: whom it answers, what, and that each answer is complete, has its checksums and is proved."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.core.clock import SystemClock
from gateway.core.errors import BlockDamaged
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion, PinnedFileSpan
from gateway.edge.access import ConfiguredKeyring, Key
from gateway.origin import peer_protocol as peer
from gateway.policy.slots import EVERYTHING, Prefix
from gateway.s3.requests import Operation
from gateway.s3.signature_v4 import sign_headers
from gateway.shared.seen_nonces import SETS, WAYS, SeenNonces
from gateway.telemetry import metrics
from tests.support.asgi import HOST, SECRET_ACCESS_KEY, Answer, call, signed_headers
from tests.support.counting import by_label
from tests.support.gateway_app import within
from tests.support.memory_origin.faults import AlterHeaders, Effect, Hold, Unreachable, on
from tests.support.memory_origin.faults import Answer as OfOrigin
from tests.support.peers import (
    ADDRESS,
    HELLO,
    SECRET,
    PeerGateway,
    asked,
    is_proved,
    of_node,
    of_version,
    peer_gateway,
    signed,
)
from tests.support.slots import Slot

KIB = 1024
MIB = 1024 * KIB
BLOCK = 2 * MIB
TTL = Slot("t", Prefix.parse("s3://bucket/"), mode="read-only", consistency="ttl", negative_ttl_seconds=30.0)
KEY = ObjectKey("bucket", "key")

with_peers = within(peer_gateway, block_size_bytes=BLOCK)
with_ttl = within(peer_gateway, block_size_bytes=BLOCK, slots=[TTL])


class MovableClock(SystemClock):
    """The machine's clock, `wall` and `passed` seconds ahead."""

    wall = 0.0
    passed = 0.0

    def now(self) -> float:
        return super().now() + self.wall

    def monotonic(self) -> float:
        return super().monotonic() + self.passed


def some_bytes(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


async def send(
    peers: PeerGateway, headers: Mapping[str, str], method: str = "GET", target: str = "/bucket/key"
) -> Answer:
    """A request as it is, its signature included."""
    return await call(peers.app, method, target, headers, sign=False, by_client=False)


def assert_refused(answer: Answer) -> None:
    assert answer.status == 403
    assert peer.PROOF not in answer.headers  # a stranger learns nothing by which it could pass for this node


def http_scope(method: str, target: str, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "type": "http",
        "method": method,
        "raw_path": target.encode(),
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }


async def nothing_received() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


# Who may ask


@with_peers
async def test_hello_is_answered_and_proved(peers: PeerGateway) -> None:
    answer = await peers.ask(target="/-/hello")
    assert (answer.status, answer.body) == (200, HELLO)


@with_peers
async def test_12_12_who_has_no_key_or_a_clients_is_refused(peers: PeerGateway) -> None:
    """12.12 A client's key opens nothing at the peer port."""
    peers.gateway.origin.put("bucket", "key", b"secret")
    said = of_node()
    assert_refused(await send(peers, said))
    assert_refused(await send(peers, signed_headers("GET", "/bucket/key", said, b"")))
    assert_refused(await send(peers, signed("GET", "/bucket/key", said, secret=b"another secret, of 32 characters.")))
    assert_refused(await send(peers, signed("GET", "/bucket/key", said, name="other")))
    assert_refused(await send(peers, signed("GET", "/-/hello", {}), target="/-/hello"))  # without a nonce
    assert not peers.gateway.origin.calls


@with_peers
async def test_12_12_a_request_to_another_node_is_not_taken(peers: PeerGateway) -> None:
    """Though the cluster's secret signs it. The answer says who this node is: the asker may take it for another."""
    peers.gateway.origin.put("bucket", "key", b"content")
    answer = await peers.ask(headers={peer.TO: "10.0.0.2:9002"})
    assert (answer.status, answer.headers[peer.BY]) == (421, ADDRESS)
    assert not peers.gateway.origin.calls
    assert (await peers.ask(headers={peer.TO: answer.headers[peer.BY], "range": "bytes=0-6"})).status == 206


@with_peers
async def test_12_12_the_clusters_key_is_unknown_at_the_s3_port(peers: PeerGateway) -> None:
    """12.12 The cluster's key opens nothing at the S3 port."""
    peers.gateway.origin.put("bucket", "key", b"secret")
    answer = await call(peers.gateway.app, "GET", "/bucket/key", signed("GET", "/bucket/key", of_node()), sign=False)
    assert answer.status == 403
    assert b"<Code>InvalidAccessKeyId</Code>" in answer.body


@pytest.mark.parametrize(
    "changed",
    [
        {"range": "bytes=0-9"},
        {"if-match": '"another"'},
        {peer.SIZE: "7"},
        {peer.NONCE: "0" * 32},
        {peer.ONLY: "cached"},
        {peer.MAX_AGE: "1000"},
        {"x-forebay-unknown": "1"},
        {"x-amz-request-payer": "requester"},
    ],
)
def test_altered_and_unsigned_headers_are_refused(tmp_path: Path, changed: Mapping[str, str]) -> None:
    async def scenario() -> None:
        async with peer_gateway(tmp_path) as peers:
            etag = peers.gateway.origin.put("bucket", "key", b"secret")
            said = signed("GET", "/bucket/key", of_node(of_version(etag, 6, 0, 5)))
            assert_refused(await send(peers, {**said, **changed}))
            assert not peers.gateway.origin.calls
            assert (await send(peers, said)).body == b"secret"  # it was never accepted before

    asyncio.run(scenario())


@with_peers
async def test_another_method_path_or_a_body_is_refused(peers: PeerGateway) -> None:
    said = signed("GET", "/bucket/key", of_node())
    assert_refused(await send(peers, said, method="HEAD"))
    assert_refused(await send(peers, said, target="/bucket/other"))
    assert_refused(await send(peers, said, target="/bucket/key?versionId=1"))
    answer = await call(peers.app, "GET", "/bucket/key", said, b"a body", sign=False)
    assert answer.status == 501
    assert not peers.gateway.origin.calls


@with_peers
async def test_a_request_is_accepted_once(peers: PeerGateway) -> None:
    said = signed("GET", "/-/hello", of_node())
    assert (await send(peers, said, target="/-/hello")).status == 200
    assert_refused(await send(peers, said, target="/-/hello"))


def test_a_replay_to_another_worker_is_refused(tmp_path: Path) -> None:
    with closing(SeenNonces(tmp_path / "nonces")) as one, closing(SeenNonces(tmp_path / "nonces")) as other:
        nonce = os.urandom(16)
        assert one.accept(nonce, 1000, 940)
        assert not other.accept(nonce, 1000, 940)
        assert not other.accept(nonce, 1010, 950)
        assert other.accept(os.urandom(16), 1000, 940)


def test_a_full_set_of_nonces_forgets_no_nonce_that_it_would_accept_again(tmp_path: Path) -> None:
    with closing(SeenNonces(tmp_path / "nonces")) as nonces:
        of_one_set = [number.to_bytes(8, "little") + os.urandom(8) for number in range(SETS, SETS * (WAYS + 3), SETS)]
        times = range(1000, 1000 + len(of_one_set))
        for nonce, signed_at in zip(of_one_set, times, strict=True):
            assert nonces.accept(nonce, signed_at, 940)
        for nonce, signed_at in zip(of_one_set, times, strict=True):
            assert not nonces.accept(nonce, signed_at, 940)


def test_nonces_of_requests_too_old_to_be_accepted_make_room(tmp_path: Path) -> None:
    with closing(SeenNonces(tmp_path / "nonces")) as nonces:
        for number in range(1, WAYS + 1):
            assert nonces.accept((number * SETS).to_bytes(8, "little") + bytes(8), 1000, 940)
        assert nonces.accept((SETS * 100).to_bytes(8, "little") + bytes(8), 1000 + 61, 1001)
        assert nonces.accept((SETS * 101).to_bytes(8, "little") + bytes(8), 1001, 1001)  # no floor has risen


@pytest.mark.parametrize(("ahead_seconds", "status"), [(-70, 403), (-50, 200), (50, 200), (70, 403)])
def test_clocks_may_differ_by_a_minute(tmp_path: Path, ahead_seconds: float, status: int) -> None:
    async def scenario() -> None:
        clock = MovableClock()
        async with peer_gateway(tmp_path, clock=clock) as peers:
            clock.wall = ahead_seconds
            assert (await send(peers, signed("GET", "/-/hello", of_node()), target="/-/hello")).status == status

    asyncio.run(scenario())


@with_peers
async def test_what_a_gateway_signs_for_another_node_is_accepted(peers: PeerGateway) -> None:
    """The signature covers what nodes say to each other, and the conditions."""
    etag = peers.gateway.origin.put("bucket", "key", b"content")
    said = {"host": HOST, "x-forebay-hop": "0123", **of_node(of_version(etag, 7, 0, 6))}
    added, _ = sign_headers(
        "GET",
        "/bucket/key",
        (),
        said,
        payload_hash=hashlib.sha256().hexdigest(),
        access_key_id="forebay-train",
        secret=SECRET.decode(),
        session_token=None,
        region="us-east-1",
        now=time.time(),
    )
    sent = {**said, **added}
    del sent["host"]  # it is sent anyway
    for changed in ({peer.HOME: "4567"}, {"if-match": '"b"'}, {"cache-control": "no-cache"}):
        assert_refused(await send(peers, {**sent, **changed}))
    assert (await send(peers, sent)).body == b"content"


@with_peers
async def test_either_secret_is_accepted_and_the_answer_is_proved_with_it(peers: PeerGateway) -> None:
    other = b"the next secret of the cluster, 32 characters"
    peers.app.access.apply_settings("train", (other, SECRET))
    assert (await asked(peers.app, "GET", "/-/hello", secret=SECRET)).status == 200
    assert (await asked(peers.app, "GET", "/-/hello", secret=other)).status == 200
    peers.app.access.apply_settings("train", (other,))
    assert_refused(await send(peers, signed("GET", "/-/hello", of_node()), target="/-/hello"))


@with_peers
async def test_another_version_and_another_home_are_misdirected(peers: PeerGateway) -> None:
    for differing in ({peer.PEER: "0"}, {peer.HOME: peer.home_digest("https://elsewhere")}):
        answer = await peers.ask(headers=differing)
        assert answer.status == 421
    assert not peers.gateway.origin.calls


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [
        ("PUT", "/bucket/key", 405),
        ("DELETE", "/bucket/key", 405),
        ("GET", "/bucket", 501),
        ("GET", "/bucket/key?acl", 501),
        ("GET", "/-/other", 421),
        ("HEAD", "/bucket/key?versionId=1", 501),
    ],
)
def test_nothing_but_reads_of_objects_is_answered(tmp_path: Path, method: str, target: str, status: int) -> None:
    async def scenario() -> None:
        async with peer_gateway(tmp_path) as peers:
            headers = {peer.HOME: "x"} if status == 421 else {}
            answer = await peers.ask(method, target, headers)
            assert answer.status == status
            assert not peers.gateway.origin.calls

    asyncio.run(scenario())


# Versions that the asker names


@with_peers
async def test_a_missing_block_is_fetched_whole_and_then_sent_from_its_file(peers: PeerGateway) -> None:
    content = some_bytes(2 * BLOCK + 100_000)
    etag = peers.gateway.origin.put("bucket", "key", content)
    for number, cache in ((0, "miss"), (0, "hit"), (1, "miss"), (2, "miss"), (2, "hit")):
        first, last = number * BLOCK, min((number + 1) * BLOCK, len(content)) - 1
        answer = await peers.read(KEY, etag, len(content), first, last)
        await peers.gateway.blocks.settle()  # the last block is small: it comes from memory until the disk has it
        assert (answer.status, answer.headers["x-forebay-cache"]) == (206, cache)
        assert answer.headers["etag"] == etag
        assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(content)}"
        assert answer.body == content[first : last + 1]
    gets = [seen.headers["if-match"] for seen in peers.gateway.origin.calls]
    assert gets == [etag] * 3  # nobody asked which version is the current one


@with_peers
async def test_parts_of_blocks_have_checksums_of_their_own(peers: PeerGateway) -> None:
    content = some_bytes(BLOCK)
    etag = peers.gateway.origin.put("bucket", "key", content)
    await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)
    for first, last in ((0, 65_535), (65_536, 196_607), (655_360, BLOCK - 1)):
        answer = await peers.read(KEY, etag, BLOCK, first, last)
        assert (answer.status, answer.body) == (206, content[first : last + 1])
        assert answer.headers["x-forebay-cache"] == "hit"


@with_peers
async def test_a_small_part_of_a_missing_block_is_fetched_as_a_part(peers: PeerGateway) -> None:
    content = some_bytes(BLOCK)
    etag = peers.gateway.origin.put("bucket", "key", content)
    for purpose in ("live", "readahead"):
        first = 640 * KIB if purpose == "live" else 1280 * KIB
        answer = await peers.read(KEY, etag, BLOCK, first, first + 128 * KIB - 1, purpose=purpose)
        assert answer.body == content[first : first + 128 * KIB]
    await peers.gateway.blocks.settle()
    assert [seen.headers["range"] for seen in peers.gateway.origin.calls] == [
        "bytes=655360-786431",
        "bytes=1310720-1441791",
    ]
    again = await peers.read(KEY, etag, BLOCK, 640 * KIB, 704 * KIB - 1, only="cached")
    assert (again.status, again.body) == (206, content[640 * KIB : 704 * KIB])


@pytest.mark.parametrize(
    ("first", "last"),
    [(1, 65_535), (4096, BLOCK - 1), (0, 4095), (0, BLOCK - 2), (0, BLOCK), (BLOCK - 65_536, BLOCK + 65_535)],
)
def test_a_range_off_the_grid_or_of_two_blocks_is_refused(tmp_path: Path, first: int, last: int) -> None:
    async def scenario() -> None:
        async with peer_gateway(tmp_path, block_size_bytes=BLOCK) as peers:
            etag = peers.gateway.origin.put("bucket", "key", some_bytes(2 * BLOCK))
            assert (await peers.read(KEY, etag, 2 * BLOCK, first, last)).status == 400
            assert not peers.gateway.origin.calls

    asyncio.run(scenario())


@with_peers
async def test_what_names_no_version_or_range_is_refused(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", b"content")
    whole = of_version(etag, 7, 0, 6)
    for wrong in (
        {"if-match": "*"},
        {"if-match": 'W/"a"'},
        {"if-match": '"a", "b"'},
        {peer.SIZE: "-7"},
        {peer.SIZE: "0"},
        {peer.SIZE: "9" * 5000},
    ):
        assert (await peers.ask(headers={**whole, **wrong})).status == 400
    assert (await peers.ask(headers={"if-match": etag, peer.SIZE: "7"})).status == 400
    assert (await peers.ask(headers={**whole, "range": "bytes=65536-65540"})).status == 416


@with_peers
async def test_a_changed_object_is_told_with_proof(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", b"before")
    peers.gateway.origin.put("bucket", "key", b"behind")
    answer = await peers.read(KEY, etag, 6, 0, 5)
    assert answer.status == 412
    assert b"PreconditionFailed" in answer.body


@with_peers
async def test_only_cached_asks_nobody(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
    assert (await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1, only="cached")).status == 404
    assert (await peers.ask(headers={peer.ONLY: "cached", "range": "bytes=0-9"})).status == 404
    assert not peers.gateway.origin.calls


@with_peers
async def test_a_node_that_warms_the_cluster_has_a_block_kept_here(peers: PeerGateway) -> None:
    """No byte is sent; the answer tells whether the bucket was asked."""
    etag, size = peers.gateway.origin.put("bucket", "key", some_bytes(3 * MIB)), 3 * MIB
    first = of_version(etag, size, 0, BLOCK - 1) | {peer.PURPOSE: "warm"}
    assert [(await peers.ask("HEAD", headers=first)).status for _ in range(2)] == [201, 200]
    assert len(peers.gateway.origin.calls) == 1
    cached = await peers.read(KEY, etag, size, 0, BLOCK - 1, only="cached")
    assert cached.body == some_bytes(3 * MIB)[:BLOCK]
    peers.gateway.origin.put("bucket", "key", b"another")
    assert (await peers.ask("HEAD", headers=of_version(etag, size, BLOCK, size - 1))).status == 412


@with_peers
async def test_a_block_is_pinned_for_the_cluster_until_a_node_unpins_it(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
    block, blocks = of_version(etag, BLOCK, 0, BLOCK - 1), peers.gateway.blocks
    assert [(await peers.ask("HEAD", headers=block | {peer.PIN: "1"})).status for _ in range(2)] == [201, 200]
    assert (blocks.pins(), blocks.usage().slots["default"].pinned_bytes > BLOCK) == (["s3://bucket/k"], True)
    for length in ("4", "-1", "a"):
        assert (await peers.ask("HEAD", headers=block | {peer.PIN: length})).status == 400
    assert [(await peers.ask("HEAD", headers={peer.UNPIN: "1"})).status for _ in range(2)] == [200, 404]
    assert (blocks.pins(), blocks.usage().slots["default"].pinned_bytes) == ([], 0)


@with_peers
async def test_a_pin_that_cannot_be_is_refused(peers: PeerGateway) -> None:
    """And a pin of this node's own, which holds the block already, is left alone."""
    etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
    block, blocks = of_version(etag, BLOCK, 0, BLOCK - 1), peers.gateway.blocks
    await blocks.pin("s3://bucket/kk")
    assert (await peers.ask("HEAD", headers=block | {peer.PIN: "1"})).status == 409
    await blocks.unpin("s3://bucket/kk")
    await blocks.pin("s3://bucket/key")
    assert (await peers.ask("HEAD", headers=block | {peer.PIN: "1"})).status == 201
    assert (await peers.ask("HEAD", headers={peer.UNPIN: "1"})).status == 404
    assert blocks.pins() == ["s3://bucket/key"]


async def damage(peers: PeerGateway, tmp_path: Path) -> None:
    """Change a byte of the largest block file, and all that this process knows of it."""
    files = (path for path in tmp_path.rglob("*-*") if path.is_file() and path.name != "peer-nonces")
    file = max(files, key=lambda path: path.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\xff\x00\xff\x00")


@pytest.mark.parametrize("is_large", [True, False])
def test_damage_on_the_disk_is_found_and_no_copy_of_it_leaves(tmp_path: Path, *, is_large: bool) -> None:
    async def scenario() -> None:
        async with peer_gateway(tmp_path, block_size_bytes=BLOCK) as peers:
            content = some_bytes(BLOCK if is_large else 1200 * KIB)
            etag = peers.gateway.origin.put("bucket", "key", content)
            size = len(content)
            await peers.read(KEY, etag, size, 0, size - 1)
            await peers.gateway.blocks.settle()
            await damage(peers, tmp_path)
            assert (await peers.read(KEY, etag, size, 0, size - 1, only="cached")).status == 404
            again = await peers.read(KEY, etag, size, 0, size - 1)
            assert (again.status, again.body) == (206, content)
            assert by_label(metrics.CACHE_DAMAGED) == {"": 1}
            assert len(peers.gateway.origin.calls) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_doubted_block_is_verified_before_it_is_sent_again(tmp_path: Path, *, is_damaged: bool) -> None:
    async def scenario() -> None:
        async with peer_gateway(tmp_path, block_size_bytes=BLOCK) as peers:
            etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
            await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)
            await peers.gateway.blocks.settle()
            await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)
            version, whole = ObjectVersion(KEY, etag, BLOCK), ByteRange(0, BLOCK - 1)
            at_once = peers.app.reads._ranges.now(version, whole, slot="default")
            assert at_once is not None
            assert isinstance(at_once.body, PinnedFileSpan)
            at_once.body.close()
            if is_damaged:
                await damage(peers, tmp_path)
            doubt = {**of_version(etag, BLOCK, 65_536, 131_071), peer.DOUBT: "1"}
            assert (await peers.ask("HEAD", headers=doubt)).status == 204
            assert peers.app.reads._ranges.now(version, whole, slot="default") is None
            again = await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)
            assert again.body == some_bytes(BLOCK)
            assert len(peers.gateway.origin.calls) == 1 + is_damaged

    asyncio.run(scenario())


@with_peers
async def test_what_the_disk_does_not_take_comes_from_memory_if_it_is_small(peers: PeerGateway) -> None:
    content = some_bytes(BLOCK)
    etag = peers.gateway.origin.put("bucket", "key", content)
    peers.gateway.blocks.isolation.gone(OSError(28, "no space left"))
    small = await peers.read(KEY, etag, BLOCK, 0, MIB - 1)
    assert (small.status, small.body) == (206, content[:MIB])
    large = await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)
    assert (large.status, large.headers["retry-after"]) == (503, "1")


@with_peers
async def test_a_node_that_does_not_reach_the_bucket_says_so(peers: PeerGateway) -> None:
    """And is not taken for a busy one, which would be waited for."""
    etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
    for operation in (Operation.GET_OBJECT, Operation.HEAD_OBJECT):
        peers.gateway.origin.inject(on(operation), Unreachable(), times=None)
    assert (await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)).status == peer.BUCKET_AWAY
    assert (await peers.ask("HEAD")).status == peer.BUCKET_AWAY
    peers.gateway.origin.faults.clear()
    assert (await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)).status == 206


@with_peers
async def test_no_byte_leaves_before_all_of_the_range_is_there(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
    held, reached = asyncio.Event(), asyncio.Event()
    peers.gateway.origin.inject(on(Operation.GET_OBJECT), Hold(held, reached))
    askers = [asyncio.create_task(peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)) for _ in range(3)]
    await reached.wait()
    assert not any(asker.done() for asker in askers)
    held.set()
    assert {(await asker).status for asker in askers} == {206}
    assert len(peers.gateway.origin.calls) == 1  # 12.1: they share one fetch


@with_peers
async def test_a_request_that_is_ended_is_over(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
    held, reached = asyncio.Event(), asyncio.Event()
    peers.gateway.origin.inject(on(Operation.GET_OBJECT), Hold(held, reached))
    asker = asyncio.create_task(peers.read(KEY, etag, BLOCK, 0, BLOCK - 1))
    await reached.wait()
    asker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asker
    assert by_label(metrics.CLUSTER_PEER_REQUESTS, "outcome") == {"broken-off": 1}
    held.set()


@pytest.mark.parametrize(
    ("effect", "status"),
    [(Unreachable(), 504), (AlterHeaders({"content-range": "bytes 0-1/2"}), 504), (OfOrigin(503, "SlowDown"), 503)],
)
def test_12_5_a_bucket_that_does_not_answer_is_told_from_a_busy_node(
    tmp_path: Path, effect: Effect, status: int
) -> None:
    async def scenario() -> None:
        async with peer_gateway(tmp_path, block_size_bytes=BLOCK) as peers:
            etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
            peers.gateway.origin.inject(on(Operation.GET_OBJECT), effect, times=None)
            assert (await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)).status == status

    asyncio.run(scenario())


@with_peers
async def test_3_14_a_version_that_is_gone_leaves_its_blocks_here(peers: PeerGateway) -> None:
    """3.14 A node may have it frozen: what this one has of it is still given."""
    content = some_bytes(2 * BLOCK)
    etag = peers.gateway.origin.put("bucket", "key", content)
    await peers.read(KEY, etag, 2 * BLOCK, 0, BLOCK - 1)
    await peers.ask("HEAD", headers={peer.MAX_AGE: "60"})
    await peers.gateway.catalog.settle()
    peers.gateway.origin.put("bucket", "key", b"another")
    assert (await peers.read(KEY, etag, 2 * BLOCK, BLOCK, 2 * BLOCK - 1)).status == 412
    again = await peers.read(KEY, etag, 2 * BLOCK, 0, BLOCK - 1)
    assert (again.status, again.headers["x-forebay-cache"], again.body) == (206, "hit", content[:BLOCK])


# The current version


@with_ttl
async def test_12_3_a_head_tells_its_age_and_the_origins_date(peers: PeerGateway) -> None:
    """12.3 What a peer tells of an object is as old as the peer says it is."""
    etag = peers.gateway.origin.put("bucket", "key", b"content")
    first = await peers.ask("HEAD", headers={peer.MAX_AGE: "60"})
    assert (first.status, first.headers["etag"], first.headers["content-length"]) == (200, etag, "7")
    assert peer.DATE in first.headers
    await peers.gateway.catalog.settle()
    again = await peers.ask("HEAD", headers={peer.MAX_AGE: "60"})
    assert again.headers["x-forebay-cache"] == "hit"
    assert float(again.headers[peer.AGE]) >= 0
    assert len(peers.gateway.origin.calls) == 1
    strict = await peers.ask("HEAD", headers={peer.MAX_AGE: "0"})
    assert strict.headers["x-forebay-cache"] == "miss"
    assert len(peers.gateway.origin.calls) == 2


def test_12_3_nothing_older_than_the_asker_allows_is_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = MovableClock()
        async with peer_gateway(tmp_path, clock=clock, slots=[TTL]) as peers:
            peers.gateway.origin.put("bucket", "key", b"content")
            await peers.ask("HEAD", headers={peer.MAX_AGE: "60"})
            await peers.gateway.catalog.settle()
            clock.passed += 20
            known = await peers.ask("HEAD", headers={peer.MAX_AGE: "30"})
            assert 20 <= float(known.headers[peer.AGE]) < 30
            assert len(peers.gateway.origin.calls) == 1
            await peers.ask("HEAD", headers={peer.MAX_AGE: "19"})
            assert len(peers.gateway.origin.calls) == 2

    asyncio.run(scenario())


@with_ttl
async def test_an_absence_is_told_with_its_age(peers: PeerGateway) -> None:
    for method in ("HEAD", "GET"):
        answer = await peers.ask(method, headers={peer.MAX_AGE: "60", "range": "bytes=0-65535"})
        assert answer.status == 404
        assert peer.AGE in answer.headers


@with_ttl
async def test_an_absence_that_is_not_s3s_is_not_told(peers: PeerGateway) -> None:
    """The asker would take it for the bucket's: it asks for itself."""
    peers.gateway.origin.inject(on(), AlterHeaders({"x-amz-request-id": ""}), times=None)
    for method in ("HEAD", "GET"):
        answer = await peers.ask(method, headers={peer.MAX_AGE: "60", "range": "bytes=0-65535"})
        assert answer.status == 421


@with_ttl
async def test_a_first_get_has_all_headers_and_asks_the_origin_once(peers: PeerGateway) -> None:
    content = some_bytes(100_000)
    etag = peers.gateway.origin.put("bucket", "key", content)
    headers = {peer.MAX_AGE: "60", "range": f"bytes=0-{BLOCK - 1}"}
    for cache in ("miss", "hit"):
        answer = await peers.ask(headers=headers)
        assert (answer.status, answer.body, answer.headers["etag"]) == (206, content, etag)
        assert answer.headers["content-range"] == "bytes 0-99999/100000"
        assert answer.headers["x-forebay-cache"] == cache
        assert {"last-modified", "content-type", peer.AGE} <= answer.headers.keys()
        await peers.gateway.catalog.settle()
        await peers.gateway.blocks.settle()
    assert len(peers.gateway.origin.calls) == 1


@with_peers
async def test_a_first_get_of_a_fixed_version_asks_the_origin_once(peers: PeerGateway) -> None:
    """With its bytes if they are not here."""
    origin, content = peers.gateway.origin, some_bytes(100_000)
    etag = origin.put("bucket", "key", content)
    headers = {peer.MAX_AGE: "0", "range": f"bytes=0-{BLOCK - 1}"}
    assert (await peers.ask(headers={**headers, "if-match": '"another"'})).status == 412
    for _ in range(2):
        answer = await peers.ask(headers={**headers, "if-match": etag})
        assert (answer.status, answer.body) == (206, content)
        assert "content-type" in answer.headers
        await peers.gateway.blocks.settle()
    assert [call.method for call in origin.calls] == ["GET", "GET", "HEAD"]


@with_ttl
async def test_a_get_of_an_object_that_has_changed_is_answered_by_the_new_version(peers: PeerGateway) -> None:
    peers.gateway.origin.put("bucket", "key", b"before")
    await peers.ask("HEAD", headers={peer.MAX_AGE: "60"})
    await peers.gateway.catalog.settle()
    etag = peers.gateway.origin.put("bucket", "key", b"behind")
    answer = await peers.ask(headers={peer.MAX_AGE: "60", "range": "bytes=0-65535"})
    assert (answer.status, answer.body, answer.headers["etag"]) == (206, b"behind", etag)


@with_ttl
async def test_conditions_are_judged_with_proof(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", b"content")
    assert (await peers.ask("HEAD", headers={"if-none-match": etag})).status == 304
    assert (await peers.ask("HEAD", headers={"if-match": '"other"'})).status == 412


# Storms


class Sending:
    """Answers of the port that are on their way to so many nodes, and stay there."""

    def __init__(self, peers: PeerGateway, count: int, headers: Mapping[str, str]) -> None:
        self._peers, self._headers = peers, headers
        self.goes_on = asyncio.Event()
        self.begun = asyncio.Semaphore(0)
        self.tasks = [asyncio.create_task(self._ask(number)) for number in range(count)]

    async def _ask(self, number: int) -> None:
        said = of_node({**self._headers, peer.FROM: f"10.0.0.{number}:9002"})
        headers = signed("GET", "/bucket/key", said)

        async def take(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.begun.release()
                await self.goes_on.wait()

        await self._peers.app(http_scope("GET", "/bucket/key", headers), nothing_received, take)

    async def all_begun(self) -> None:
        for _ in self.tasks:
            await self.begun.acquire()

    async def end(self) -> None:
        self.goes_on.set()
        await asyncio.gather(*self.tasks)


async def names(peers: PeerGateway, headers: Mapping[str, str], **more: str) -> Sequence[str]:
    answer = await peers.ask(headers={**headers, **{f"x-forebay-{name}": value for name, value in more.items()}})
    if answer.status != 303:
        assert answer.status == 206
        return ()
    assert answer.body == b""
    return answer.headers[peer.ASK].split(", ")


@with_peers
async def test_the_fifth_who_asks_at_once_is_told_who_has_the_block(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
    asked_for = of_version(etag, BLOCK, 0, BLOCK - 1)
    for number in range(1, 6):
        await peers.ask(headers={**asked_for, peer.FROM: f"10.0.1.{number}:9002"})
    three = Sending(peers, 3, asked_for)
    await three.all_begun()
    assert not await names(peers, asked_for)
    one_more = Sending(peers, 1, asked_for)
    await one_more.all_begun()
    assert await names(peers, asked_for) == ["10.0.1.5:9002", "10.0.1.4:9002", "10.0.1.3:9002"]
    assert await names(peers, asked_for, **{"from": "10.0.1.5:9002"}) == [
        "10.0.1.4:9002",
        "10.0.1.3:9002",
        "10.0.1.2:9002",
    ]
    assert not await names(peers, asked_for, last="1")
    assert len(await names(peers, asked_for, only="cached")) == 3
    await three.end()
    assert not await names(peers, asked_for)
    await one_more.end()


@within(peer_gateway, block_size_bytes=BLOCK, slots=[Slot("passing", Prefix.parse("s3://bucket/"), copies="none")])
async def test_nobody_is_named_where_nodes_keep_nothing_of_others(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
    asked_for = of_version(etag, BLOCK, 0, BLOCK - 1)
    for number in range(1, 6):
        await peers.ask(headers={**asked_for, peer.FROM: f"10.0.1.{number}:9002"})
    four = Sending(peers, 4, asked_for)
    await four.all_begun()
    assert not await names(peers, asked_for)
    await four.end()


@with_peers
async def test_bytes_and_requests_are_counted(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
    await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)
    await peers.ask(headers={peer.PEER: "0"})
    assert by_label(metrics.CLUSTER_PEER_BYTES, "direction") == {"sent": BLOCK}
    assert by_label(metrics.CLUSTER_PEER_REQUESTS, "outcome") == {"served": 1, "misdirected": 1}


@with_peers
async def test_a_file_that_cannot_be_sent_is_trusted_no_more(peers: PeerGateway) -> None:
    etag = peers.gateway.origin.put("bucket", "key", some_bytes(BLOCK))
    await peers.read(KEY, etag, BLOCK, 0, BLOCK - 1)
    version, whole = ObjectVersion(KEY, etag, BLOCK), ByteRange(0, BLOCK - 1)
    assert peers.app.reads._ranges.now(version, whole, slot="default") is not None

    async def fail(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.body":
            raise BlockDamaged("the file is shorter than it was")

    headers = signed("GET", "/bucket/key", of_node(of_version(etag, BLOCK, 0, BLOCK - 1)))
    await peers.app(http_scope("GET", "/bucket/key", headers), nothing_received, fail)
    assert by_label(metrics.CLUSTER_PEER_REQUESTS, "outcome")["broken-off"] == 1
    assert peers.app.reads._ranges.now(version, whole, slot="default") is None


def test_a_client_with_a_key_like_the_clusters_is_none(tmp_path: Path) -> None:
    """A key of [[credentials]] that is named as the cluster's opens the S3 port alone."""

    async def scenario() -> None:
        keyring = ConfiguredKeyring([Key("forebay-train", SECRET_ACCESS_KEY, None, EVERYTHING)])
        async with peer_gateway(tmp_path, keyring=keyring) as peers:
            said = signed_headers("GET", "/bucket/key", of_node(), b"", access_key_id="forebay-train")
            assert_refused(await send(peers, said))

    asyncio.run(scenario())


def test_the_tests_judge_proofs() -> None:
    """A proof is of this nonce and status, and of all headers that tell of the object."""
    headers = {"etag": '"a"', "content-length": "1"}
    proved = Answer(200, {**headers, peer.PROOF: peer.proof(SECRET, "n", 200, headers)}, b"", complete=True)
    assert is_proved(proved, "n")
    assert not is_proved(proved, "m")
    assert not is_proved(Answer(206, proved.headers, b"", complete=True), "n")
    assert not is_proved(Answer(200, {**proved.headers, "x-amz-meta-a": "b"}, b"", complete=True), "n")
    assert is_proved(Answer(200, {**proved.headers, "x-amz-request-id": "b"}, b"", complete=True), "n")

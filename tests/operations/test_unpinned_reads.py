"""The first look at an object: one request for version and bytes, and the same answers as with a HEAD first.

All of it for bodies that come in pieces behind their heads, and for small ones that have come whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from gateway.core.clock import SystemClock
from gateway.core.model import ObjectKey
from gateway.metadata.catalog import SIZES_SEEN
from gateway.operations import read_object
from gateway.origin.client import Origin
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support import gateway_app as support
from tests.support.asgi import Answer, call
from tests.support.cache_label import cache_label
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, within
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.digests import encoded
from tests.support.memory_origin.faults import AlterHeaders, CutBody, Hold, Unreachable, on
from tests.support.memory_origin.faults import Answer as Refusal
from tests.support.slots import Slot
from tests.support.waiting import until
from tests.support.whole_answers import WholeAnswers

SMALL = bytes(range(256)) * 100
LARGE = bytes(range(251)) * 2000
"""Seven blocks and a bit."""

CHECKSUMS = {"x-amz-checksum-mode": "ENABLED"}
SLOTS = {
    "strict": (),
    "ttl": (Slot("t", Prefix.parse("s3://bucket/"), consistency="ttl"),),
    "immutable": (Slot("i", Prefix.parse("s3://bucket/"), consistency="immutable"),),
}


_front: Callable[[MemoryOrigin], Origin] = WholeAnswers


@pytest.fixture(params=[lambda origin: origin, WholeAnswers], ids=["in pieces", "whole"], autouse=True)
def _arrival(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "_front", request.param)


def gateway_app(directory: Path, *, slots: Sequence[Slot] = ()) -> AbstractAsyncContextManager[GatewayApp]:
    origin = MemoryOrigin(SystemClock())
    origin.create_bucket("bucket")
    return support.gateway_app(directory, origin=origin, through=_front(origin), slots=slots)


def asked(gateway: GatewayApp) -> list[str]:
    return [call.method for call in gateway.origin.calls]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@within(gateway_app)
async def test_what_says_later_is_handed_on(gateway: GatewayApp, status: int) -> None:
    """The client of the origin has asked as often as it may: no other question follows, cold or with a HEAD first."""
    gateway.origin.put("bucket", "k", SMALL)
    for known, methods in ((False, ["GET"]), (True, ["HEAD"])):
        if known:
            assert (await call(gateway.app, "GET", "/bucket/k")).status == 200
            await gateway.blocks.settle()
        later = Refusal(status, "SlowDown", {"retry-after": "60"})
        gateway.origin.inject(lambda request: True, later, times=None)
        before = len(asked(gateway))
        headers = {"If-None-Match": '"x"'} if known else {}
        answer = await call(gateway.app, "GET", "/bucket/k", headers)
        assert (answer.status, answer.headers["retry-after"]) == (status, "60")
        assert b"<Code>" in answer.body
        assert asked(gateway)[before:] == methods
        gateway.origin.faults.clear()


async def read_some(gateway: GatewayApp, content: bytes = SMALL) -> None:
    """Read as many objects as it takes to guess the size of others like them."""
    for number in range(SIZES_SEEN):
        gateway.origin.put("bucket", f"before-{number}", content)
        assert (await call(gateway.app, "GET", f"/bucket/before-{number}", CHECKSUMS)).body == content
    await gateway.blocks.settle()
    gateway.origin.calls.clear()


@pytest.mark.parametrize("consistency", SLOTS)
@pytest.mark.parametrize("headers", [{}, CHECKSUMS, {"Range": "bytes=100-199"}])
def test_a_cold_small_object_costs_one_request(tmp_path: Path, consistency: str, headers: dict[str, str]) -> None:
    """Whatever the slot, with checksums asked for or not: one GET, and the same answer as a second time. Where they are
    asked for, this is so when a few others were small."""

    async def scenario() -> None:
        async with gateway_app(tmp_path, slots=SLOTS[consistency]) as gateway:
            if headers == CHECKSUMS:
                await read_some(gateway)
            gateway.origin.put("bucket", "k", SMALL, {"x-amz-meta-label": "cat"})
            cold = await call(gateway.app, "GET", "/bucket/k", headers)
            assert asked(gateway) == ["GET"]
            await gateway.blocks.settle()
            await gateway.catalog.settle()
            warm = await call(gateway.app, "GET", "/bucket/k", headers)
            assert (cold.status, cold.body) == (warm.status, warm.body)
            assert cold.body == (SMALL[100:200] if "Range" in headers else SMALL)
            assert cache_label(cold) == "miss"
            assert warm.headers["x-forebay-cache"] == "hit"
            assert same(cold) == same(warm)
            assert asked(gateway).count("GET") == 1

    asyncio.run(scenario())


def same(answer: Answer) -> dict[str, str]:
    differing = {"x-amz-request-id", "x-amz-id-2", "x-forebay-cache", "x-forebay-origin-request-id", "date"}
    return {name: value for name, value in answer.headers.items() if name not in differing}


@pytest.mark.parametrize("headers", [{}, CHECKSUMS])
@within(gateway_app)
async def test_a_cold_large_object_is_whole(gateway: GatewayApp, headers: dict[str, str]) -> None:
    """Its first block comes with the first answer, the others pinned to the version that it named."""
    etag = gateway.origin.put("bucket", "k", LARGE)
    answer = await call(gateway.app, "GET", "/bucket/k", headers)
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, LARGE, str(len(LARGE)))
    gets = [call for call in gateway.origin.calls if call.method == "GET"]
    assert asked(gateway)[len(headers) :] == ["GET"] * 8, "a HEAD before them tells the checksums"
    assert all("range" in call.headers for call in gets)
    assert [call.headers.get("if-match") for call in gets] == [etag if headers else None] + [etag] * 7


@pytest.mark.parametrize("consistency", SLOTS)
def test_5_3_a_cold_object_of_several_blocks_is_asked_for_by_range(tmp_path: Path, consistency: str) -> None:
    """5.3 Its checksums come with a HEAD: no answer is broken off, and no byte comes twice, whatever the object before
    it was; after a few small ones only the first of its kind is mistaken for one."""

    async def scenario() -> None:
        async with gateway_app(tmp_path, slots=SLOTS[consistency]) as gateway:
            gateway.origin.put("bucket", "small", SMALL)
            assert (await call(gateway.app, "GET", "/bucket/small", CHECKSUMS)).body == SMALL
            sent = {"x-amz-checksum-sha256": encoded(hashlib.sha256(LARGE).digest())}
            for number in range(3):
                await call(gateway.app, "PUT", f"/bucket/large-{number}", sent, LARGE)
                gateway.origin.calls.clear()
                answer = await call(gateway.app, "GET", f"/bucket/large-{number}", CHECKSUMS)
                assert answer.body == LARGE
                assert answer.headers["x-amz-checksum-sha256"] == sent["x-amz-checksum-sha256"]
                ranges = [call.headers.get("range") for call in gateway.origin.calls if call.method == "GET"]
                assert len(set(ranges)) == len(ranges) == 8
                assert None not in ranges
            await read_some(gateway)
            for number, mistaken in enumerate([1, 0, 0]):
                gateway.origin.put("bucket", f"later-{number}", LARGE)
                gateway.origin.calls.clear()
                assert (await call(gateway.app, "GET", f"/bucket/later-{number}", CHECKSUMS)).body == LARGE
                gets = [call for call in gateway.origin.calls if call.method == "GET"]
                assert sum("range" not in call.headers for call in gets) == mistaken

    asyncio.run(scenario())


@within(gateway_app)
async def test_any_cold_range_is_one_request_where_it_lies_in_one_block(gateway: GatewayApp) -> None:
    """The block that the range begins in is fetched, and says how long the object is."""
    gateway.origin.put("bucket", "k", LARGE)
    first = 3 * BLOCK_SIZE_BYTES + 5
    answer = await call(gateway.app, "GET", "/bucket/k", {"Range": f"bytes={first}-{first + 9}"})
    assert (answer.status, answer.body) == (206, LARGE[first : first + 10])
    assert answer.headers["content-range"] == f"bytes {first}-{first + 9}/{len(LARGE)}"
    assert asked(gateway) == ["GET"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Range": "bytes=-10"},
        {"Range": "bytes=99999999999999999999-"},
        {"If-None-Match": '"x"'},
        {"If-Match": '"x"'},
        {"If-Modified-Since": "Fri, 01 Jan 2100 00:00:00 GMT"},
        {"If-Range": '"x"', "Range": "bytes=0-9"},
    ],
)
@within(gateway_app)
async def test_what_depends_on_the_version_asks_for_it_first(gateway: GatewayApp, headers: dict[str, str]) -> None:
    """A suffix range, and conditions: a HEAD decides, so that no body is fetched for a 304 or a 412."""
    gateway.origin.put("bucket", "k", SMALL)
    await call(gateway.app, "GET", "/bucket/k", headers)
    assert asked(gateway)[0] == "HEAD"


@pytest.mark.parametrize("target", ["/bucket/none", "/nowhere/k"])
@within(gateway_app)
async def test_errors_are_the_origins_own(gateway: GatewayApp, target: str) -> None:
    """What is not there is answered with the origin's document."""
    answer = await call(gateway.app, "GET", target)
    assert answer.status == 404
    assert (b"NoSuchKey" if target == "/bucket/none" else b"NoSuchBucket") in answer.body


@pytest.mark.parametrize("headers", [{}, CHECKSUMS, {"Range": "bytes=0-9"}, {"Range": "bytes=70000-"}])
@within(gateway_app)
async def test_an_empty_object_and_ranges_behind_the_end(gateway: GatewayApp, headers: dict[str, str]) -> None:
    """They are answered as with a HEAD first."""
    gateway.origin.put("bucket", "k", b"")
    answer = await call(gateway.app, "GET", "/bucket/k", headers)
    assert (answer.status, answer.body[:0]) == (416 if "Range" in headers else 200, b"")
    gateway.origin.put("bucket", "short", b"abc")
    answer = await call(gateway.app, "GET", "/bucket/short", headers)
    assert answer.status == {None: 200, "bytes=0-9": 206}.get(headers.get("Range"), 416)


@within(gateway_app)
async def test_what_has_no_bytes_is_not_looked_for_twice(gateway: GatewayApp) -> None:
    """An empty object has no blocks by which it would be known: from the second time on it costs one HEAD."""
    gateway.origin.put("bucket", "k", b"")
    for _ in range(3):
        assert (await call(gateway.app, "GET", "/bucket/k")).status == 200
    assert asked(gateway) == ["GET", "HEAD", "HEAD", "HEAD"]
    gateway.origin.put("bucket", "k", SMALL)
    assert (await call(gateway.app, "GET", "/bucket/k")).body == SMALL


@within(gateway_app)
async def test_a_dead_origin_is_told_once(gateway: GatewayApp) -> None:
    """No answer to the first look is no answer to the request."""
    gateway.origin.inject(on(), Unreachable(), times=None)
    assert (await call(gateway.app, "GET", "/bucket/k")).status == 503
    assert asked(gateway) == ["GET"]


@pytest.mark.parametrize("fault", [AlterHeaders({"content-length": "7"}), AlterHeaders({"content-range": "x"})])
@within(gateway_app)
async def test_an_answer_that_makes_no_sense_is_not_believed(gateway: GatewayApp, fault: AlterHeaders) -> None:
    """The usual way finds out: the answer is right, and nothing stays open."""
    gateway.origin.put("bucket", "k", SMALL)
    gateway.origin.inject(on(Operation.GET_OBJECT), fault, times=1)
    answer = await call(gateway.app, "GET", "/bucket/k")
    assert (answer.status, answer.body) == (200, SMALL)
    assert asked(gateway) == ["GET", "HEAD", "GET"]


@within(gateway_app)
async def test_a_first_answer_that_breaks_off_is_resumed_by_its_version(gateway: GatewayApp) -> None:
    """1.3 What is missing is asked for again, pinned; the client gets every byte."""
    etag = gateway.origin.put("bucket", "k", SMALL)
    gateway.origin.inject(on(Operation.GET_OBJECT), CutBody(1000), times=1)
    answer = await call(gateway.app, "GET", "/bucket/k")
    assert (answer.status, answer.body) == (200, SMALL)
    again = gateway.origin.calls[-1].headers
    assert (again["if-match"], again["range"]) == (etag, f"bytes=1000-{len(SMALL) - 1}")


@pytest.mark.parametrize("consistency", SLOTS)
def test_readers_at_the_same_time_share_the_first_look(tmp_path: Path, consistency: str) -> None:
    """5.3 The bytes cross once: who comes second asks for the version, waits for the look, and shares its fill."""

    async def scenario() -> None:
        async with gateway_app(tmp_path, slots=SLOTS[consistency]) as gateway:
            gateway.origin.put("bucket", "k", SMALL)
            held, reached = asyncio.Event(), asyncio.Event()
            gateway.origin.inject(on(Operation.GET_OBJECT), Hold(held, reached), times=1)
            readers = [asyncio.create_task(call(gateway.app, "GET", "/bucket/k"))]
            await reached.wait()
            readers += [asyncio.create_task(call(gateway.app, "GET", "/bucket/k")) for _ in range(5)]
            await until(lambda: gateway.origin.count(Operation.HEAD_OBJECT) > 0)
            held.set()
            assert [(await reader).body for reader in readers] == [SMALL] * 6
            assert gateway.origin.count(Operation.GET_OBJECT) == 1

    asyncio.run(scenario())


@within(gateway_app)
async def test_10_10_one_patience_is_for_all_turns_of_a_request(
    gateway: GatewayApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10.10 Who has waited for so long waits for no other turn; an answer that has begun may wait for each block."""
    monkeypatch.setattr(read_object, "TURN_SECONDS_MAX", -1.0)  # it is over when a request comes
    gateway.origin.put("bucket", "k", LARGE)
    turns = gateway.blocks._dependencies.fetches._own.turns
    while not turns.locked():
        await turns.acquire()
    answer = await call(gateway.app, "GET", "/bucket/k", CHECKSUMS)
    assert (answer.status, b"<Code>SlowDown<" in answer.body) == (503, True)
    turns.release()
    assert (await call(gateway.app, "GET", "/bucket/k", CHECKSUMS)).body == LARGE


@within(gateway_app)
async def test_a_first_look_that_is_given_up_holds_nobody_up(gateway: GatewayApp) -> None:
    """Those who waited for it go on by themselves, and the next first look is free to be had."""
    gateway.origin.put("bucket", "k", SMALL)
    held, reached = asyncio.Event(), asyncio.Event()
    gateway.origin.inject(on(Operation.GET_OBJECT), Hold(held, reached), times=1)
    first = asyncio.create_task(call(gateway.app, "GET", "/bucket/k"))
    await reached.wait()
    second = asyncio.create_task(call(gateway.app, "GET", "/bucket/k"))
    await until(lambda: gateway.origin.count(Operation.HEAD_OBJECT) == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (await second).body == SMALL
    await gateway.blocks.settle()
    await gateway.blocks.invalidate(ObjectKey("bucket", "k"))
    before = gateway.origin.count(Operation.HEAD_OBJECT)
    assert (await call(gateway.app, "GET", "/bucket/k")).body == SMALL
    assert gateway.origin.count(Operation.HEAD_OBJECT) == before


@within(gateway_app, slots=SLOTS["immutable"])
async def test_2_1_a_write_during_a_first_look_voids_what_it_learns(gateway: GatewayApp) -> None:
    """2.3 What a look that began before an own write has learned is not remembered after it."""
    gateway.origin.put("bucket", "k", SMALL)
    held, reached = asyncio.Event(), asyncio.Event()
    gateway.origin.inject(on(Operation.GET_OBJECT), Hold(held, reached), times=1)
    looking = asyncio.create_task(call(gateway.app, "GET", "/bucket/k"))
    await reached.wait()
    assert (await call(gateway.app, "PUT", "/bucket/k", body=b"new")).status == 200
    held.set()
    await looking
    await gateway.catalog.settle()
    assert (await call(gateway.app, "GET", "/bucket/k")).body == b"new"

"""Clauses 2 and 3 of docs/semantics.md, in slots that let the catalog answer."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import OriginAnswered
from gateway.core.model import ObjectKey
from gateway.metadata.catalog import Catalog, ObjectHead
from gateway.metadata.entries import IN_DOUBT_SECONDS, InvalidationEpochs
from gateway.operations.write_scope import WriteScope, invalidate
from gateway.origin.client import OriginRequest
from gateway.policy.slots import Prefix, Slots
from gateway.s3.requests import Operation
from tests.support.asgi import Answer, call
from tests.support.blocks import block_files
from tests.support.cache_label import cache_label
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import AlterHeaders, Hold, Unreachable, on
from tests.support.memory_origin.faults import Answer as Failure
from tests.support.rest_is_slow import rest_is_slow
from tests.support.slots import Slot

OLD = b"o" * (3 * BLOCK_SIZE_BYTES + 17)
NEW = b"n" * (3 * BLOCK_SIZE_BYTES + 17)

KEY = ObjectKey("bucket", "k")
PREFIX = Prefix.parse("s3://bucket/")
STRICT = Slot("s", PREFIX)
TTL = Slot("t", PREFIX, "read-write", "ttl", 60.0)
IMMUTABLE = Slot("i", PREFIX, "read-write", "immutable")
NEGATIVE = Slot("n", PREFIX, "read-write", "ttl", 60.0, negative_ttl_seconds=10.0)
PATIENT = Slot("p", PREFIX, "read-write", "ttl", 60.0, stale_if_unreachable_seconds=100.0)


@asynccontextmanager
async def playing(directory: Path, slot: Slot) -> AsyncIterator[tuple[GatewayApp, ManualClock]]:
    """A gateway with `k` at the origin. Requests are unsigned, for their clock is not the test's."""
    clock = ManualClock()
    async with gateway_app(directory, slots=[slot], clock=clock, allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", "k", OLD, {"content-type": "image/jpeg", "x-amz-meta-label": "cat"})
        yield gateway, clock


async def ask(gateway: GatewayApp, method: str, target: str = "/bucket/k", **more: Any) -> Answer:
    """One request, and whatever is learned from it written."""
    answer = await call(gateway.app, method, target, more.pop("headers", None), sign=False, **more)
    await gateway.catalog.settle()
    await gateway.blocks.settle()
    return answer


def heads(gateway: GatewayApp) -> int:
    return sum(one.method == "HEAD" for one in gateway.origin.calls)


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE])
async def test_3_2_head_and_get_are_answered_without_the_origin(tmp_path: Path, slot: Slot) -> None:
    """3.2, 3.3 Within the bound, HEAD and GET are answered from this node with every header that the origin gave."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        first = await ask(gateway, "HEAD")
        body = await ask(gateway, "GET")
        asked = len(gateway.origin.calls)
        second, warm = await ask(gateway, "HEAD"), await ask(gateway, "GET")
        assert len(gateway.origin.calls) == asked
        assert (cache_label(first), cache_label(second)) == ("miss", "hit")
        assert without_ids(first.headers) == without_ids(second.headers)
        assert (second.headers["x-amz-meta-label"], second.headers["content-type"]) == ("cat", "image/jpeg")
        assert (second.body, second.headers["content-length"]) == (b"", str(len(OLD)))
        assert without_ids(body.headers) == without_ids(warm.headers)
        assert body.body == warm.body == OLD


async def said(question: Awaitable[ObjectHead]) -> dict[str, str]:
    """The headers of an object, or a status."""
    try:
        return without_ids((await question).headers)
    except OriginAnswered as answer:
        return {"status": str(answer.status)}


def without_ids(headers: Mapping[str, str]) -> dict[str, str]:
    named = ("x-amz-request-id", "x-amz-id-2", "x-forebay-cache", "x-forebay-origin-request-id")
    return {name: value for name, value in headers.items() if name not in named}


async def test_3_1_strict_asks_each_time(tmp_path: Path) -> None:
    """3.1 Every GET asks: the first one by itself, those of what is cached by a HEAD. HEAD is always the origin's."""
    async with playing(tmp_path, STRICT) as (gateway, _clock):
        for _ in range(3):
            await ask(gateway, "GET")
            assert (await ask(gateway, "HEAD")).headers["x-forebay-cache"] == "forwarded"
        assert heads(gateway) == 5
        gateway.origin.inject(on(), Unreachable(), times=None)
        assert (await ask(gateway, "GET")).status == 503


async def test_3_2_others_writes_are_seen_when_the_ttl_is_over(tmp_path: Path) -> None:
    """3.2 An answer is never older than metadata_ttl, counted from the question to the origin."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        await ask(gateway, "GET")
        gateway.origin.put("bucket", "k", NEW)
        await clock.advance(59.9)
        assert (await ask(gateway, "GET")).body == OLD
        await clock.advance(0.2)
        assert (await ask(gateway, "GET")).body == NEW
        assert (await ask(gateway, "GET")).headers["x-forebay-cache"] == "hit"


async def test_3_3_immutable_objects_are_never_looked_for_again(tmp_path: Path) -> None:
    """3.3 Once learned, for good: long after any TTL, and with the origin away."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, clock):
        await ask(gateway, "GET")
        gateway.origin.inject(on(), Unreachable(), times=None)
        await clock.advance(1000.0)
        assert (await ask(gateway, "GET")).body == OLD
        assert (await ask(gateway, "HEAD")).status == 200


async def test_3_4_absence_is_believed_where_a_slot_says_how_long(tmp_path: Path) -> None:
    """3.4 For negative_ttl and no longer; GET has NoSuchKey as the origin has it; an own PUT ends it at once."""
    async with playing(tmp_path, NEGATIVE) as (gateway, clock):
        for _ in range(2):
            assert (await ask(gateway, "HEAD", "/bucket/none")).status == 404
            gone = await ask(gateway, "GET", "/bucket/none")
            assert (gone.status, b"<Code>NoSuchKey</Code>" in gone.body) == (404, True)
        asked = len(gateway.origin.calls)
        gateway.origin.put("bucket", "none", NEW)
        assert (await ask(gateway, "GET", "/bucket/none")).status == 404
        assert (await ask(gateway, "HEAD", "/bucket/none")).status == 404
        assert len(gateway.origin.calls) == asked
        await clock.advance(10.0)
        assert (await ask(gateway, "GET", "/bucket/none")).body == NEW
        assert (await ask(gateway, "GET", "/bucket/other")).status == 404
        assert (await ask(gateway, "PUT", "/bucket/other", body=b"mine")).status == 200
        assert (await ask(gateway, "GET", "/bucket/other")).body == b"mine"


async def test_3_4_an_absence_is_s3s_to_tell(tmp_path: Path) -> None:
    """3.4 A proxy that answers in its stead has no request id of S3, and no document of it."""
    async with playing(tmp_path, NEGATIVE) as (gateway, _):
        proxy = gateway.origin.inject(on(), Failure(404, "NoSuchKey", body=b"<html>not found</html>"), times=None)
        unnamed = gateway.origin.inject(on(), AlterHeaders({"x-amz-request-id": ""}), times=None)
        for method in ("HEAD", "GET"):
            assert (await ask(gateway, method)).status == 404
        proxy.times = unnamed.times = 0
        assert (await ask(gateway, "HEAD")).status == 200
        assert (await ask(gateway, "GET")).body == OLD


@pytest.mark.parametrize("slot", [STRICT, TTL, IMMUTABLE])
async def test_3_4_absence_is_not_believed_elsewhere(tmp_path: Path, slot: Slot) -> None:
    """3.4 Where negative_ttl is 0, what was absent a moment ago is asked for again."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        assert (await ask(gateway, "GET", "/bucket/none")).status == 404
        assert (await ask(gateway, "HEAD", "/bucket/none")).status == 404
        gateway.origin.put("bucket", "none", NEW)
        assert (await ask(gateway, "HEAD", "/bucket/none")).status == 200
        assert (await ask(gateway, "GET", "/bucket/none")).body == NEW


@pytest.mark.parametrize("failure", [Unreachable(), Failure(503, "ServiceUnavailable")])
async def test_3_5_older_answers_only_where_the_slot_allows_them(
    tmp_path: Path, failure: Unreachable | Failure
) -> None:
    """3.5 With the origin down, `ttl` goes on for stale_if_unreachable and no longer."""
    async with playing(tmp_path, PATIENT) as (gateway, clock):
        await ask(gateway, "GET")
        gateway.origin.inject(on(), failure, times=None)
        await clock.advance(159.0)
        assert (await ask(gateway, "GET")).body == OLD
        await clock.advance(2.0)
        assert (await ask(gateway, "GET")).status == 503


async def test_3_5_without_the_setting_an_old_answer_is_none(tmp_path: Path) -> None:
    """3.5 The default of stale_if_unreachable is 0."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        await ask(gateway, "GET")
        gateway.origin.inject(on(), Unreachable(), times=None)
        await clock.advance(60.0)
        assert (await ask(gateway, "HEAD")).status == 503


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE])
async def test_3_6_no_cache_asks_the_origin_and_refreshes(tmp_path: Path, slot: Slot) -> None:
    """3.6 `Cache-Control: no-cache` of a caller that signs sees the present; so does everybody afterwards."""
    async with gateway_app(tmp_path, slots=[slot]) as gateway:
        gateway.origin.put("bucket", "k", OLD)
        await call(gateway.app, "GET", "/bucket/k")
        await gateway.catalog.settle()
        etag = gateway.origin.put("bucket", "k", NEW)
        assert (await call(gateway.app, "HEAD", "/bucket/k")).headers["etag"] != etag
        fresh = await call(gateway.app, "GET", "/bucket/k", {"Cache-Control": "no-cache"})
        assert fresh.body == NEW
        assert (await call(gateway.app, "GET", "/bucket/k")).body == NEW  # before anything has landed
        await gateway.catalog.settle()
        assert (await call(gateway.app, "GET", "/bucket/k")).body == NEW
        async with await gateway.origin.send(OriginRequest("DELETE", "bucket", "k")):
            pass
        assert (await call(gateway.app, "GET", "/bucket/k", {"Cache-Control": "no-cache"})).status == 404
        assert (await call(gateway.app, "GET", "/bucket/k")).status == 404


async def test_3_6_no_cache_of_callers_that_do_not_sign_is_not_heard(tmp_path: Path) -> None:
    """3.6 Whom nobody knows cannot turn the cache off."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway, "HEAD")
        assert (await ask(gateway, "HEAD", headers={"Cache-Control": "no-cache"})).headers["x-forebay-cache"] == "hit"


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE])
async def test_3_7_a_version_that_is_gone_is_looked_up_again(tmp_path: Path, slot: Slot) -> None:
    """3.7 Where blocks are missing and the origin has another version, that one is served, whole."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        await ask(gateway, "HEAD")
        etag = gateway.origin.put("bucket", "k", NEW)
        answer = await ask(gateway, "GET")
        assert (answer.body, answer.headers["etag"]) == (NEW, etag)
        gateway.origin.put("bucket", "gone", OLD)
        await ask(gateway, "HEAD", "/bucket/gone")
        async with await gateway.origin.send(OriginRequest("DELETE", "bucket", "gone")) as deleted:
            assert deleted.status == 204
        assert (await ask(gateway, "GET", "/bucket/gone")).status == 404


async def test_3_7_a_change_found_in_the_midst_of_a_body_is_seen_by_the_next_try(tmp_path: Path) -> None:
    """3.7 An answer that breaks off because the object changed does not break off again and again."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway, "GET", headers={"Range": "bytes=0-9"})
        gateway.origin.put("bucket", "k", NEW)
        broken = await ask(gateway, "GET")
        assert broken.complete is False or broken.body == NEW
        assert (await ask(gateway, "GET")).body == NEW


QUESTIONS_FOR_THE_ORIGIN = [
    {"x-amz-expected-bucket-owner": "111122223333"},
    {"x-amz-request-payer": "requester"},
    {"x-amz-checksum-mode": "unheard of"},
]


@pytest.mark.parametrize("headers", QUESTIONS_FOR_THE_ORIGIN)
async def test_3_8_what_the_origin_must_judge_it_is_asked_each_time(tmp_path: Path, headers: dict[str, str]) -> None:
    """3.8 Requests that name an owner or a payer are never answered by memory, nor remembered."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        for method in ("HEAD", "GET", "HEAD", "GET"):
            before = gateway.origin.count()
            assert (await ask(gateway, method, headers=headers)).status == 200
            assert gateway.origin.count() > before
        assert cache_label(await ask(gateway, "HEAD")) == "miss"


@pytest.mark.parametrize("slot", [IMMUTABLE, STRICT])
async def test_3_8_an_offer_need_not_be_taken_up(tmp_path: Path, slot: Slot) -> None:
    """3.8 Who could do with more than the object is answered from the cache as everybody else; nothing of the offer
    reaches the origin, whose answer might be for this client only. LIST and GetBucketLocation, too."""
    headers = {"x-amz-te": "append-md5"}
    async with playing(tmp_path, slot) as (gateway, _clock):
        plain = await ask(gateway, "GET")
        await gateway.blocks.settle()
        gets = gateway.origin.count(Operation.GET_OBJECT)
        for asked in ({}, {"Range": "bytes=0-1"}):
            answer = await ask(gateway, "GET", headers={**headers, **asked})
            assert (answer.headers["x-forebay-cache"], answer.headers["etag"]) == ("hit", plain.headers["etag"])
            assert answer.body == (plain.body[:2] if asked else plain.body)
        assert gateway.origin.count(Operation.GET_OBJECT) == gets
        assert not [call for call in gateway.origin.calls if headers.keys() & call.headers.keys()]
        if slot is IMMUTABLE:
            for target in ("/bucket?list-type=2", "/bucket?location"):
                await ask(gateway, "GET", target, headers=headers)
                again = await ask(gateway, "GET", target, headers=headers)
                assert again.headers["x-forebay-cache"] == "hit"


async def test_3_8_checksums_come_to_those_who_asked_for_them_and_to_nobody_else(tmp_path: Path) -> None:
    """3.8 A look-up with x-amz-checksum-mode is answered by one that was made with it."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway, "PUT", headers={"x-amz-checksum-crc32": "NSRBwg=="}, body=b"abc")
        mode = {"x-amz-checksum-mode": "ENABLED"}
        assert "x-amz-checksum-crc32" not in (await ask(gateway, "HEAD")).headers
        first = await ask(gateway, "HEAD", headers=mode)
        second = await ask(gateway, "HEAD", headers=mode)
        plain = await ask(gateway, "HEAD")
        assert first.headers["x-amz-checksum-crc32"] == second.headers["x-amz-checksum-crc32"] == "NSRBwg=="
        assert "x-amz-checksum-crc32" not in plain.headers
        assert [cache_label(one) for one in (first, second, plain)] == ["miss", "hit", "hit"]


OWN_WRITES: list[tuple[str, str, dict[str, str], bytes]] = [
    ("PUT", "/bucket/k", {}, b"new"),
    ("PUT", "/bucket/k", {"x-amz-copy-source": "/bucket/source"}, b""),
    ("DELETE", "/bucket/k", {}, b""),
    ("POST", "/bucket?delete", {}, b"<Delete><Object><Key>k</Key></Object></Delete>"),
    ("PUT", "/bucket/k?tagging", {}, b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"),
]


@pytest.mark.parametrize(("method", "target", "headers", "body"), OWN_WRITES)
async def test_2_1_own_writes_are_seen_at_once_on_every_worker(
    tmp_path: Path, method: str, target: str, headers: dict[str, str], body: bytes
) -> None:
    """2.1, 2.2 Whatever the slot allows to remember, an own write voids it before its 200."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, clock):
        gateway.origin.put("bucket", "source", b"source")
        other = another_worker(gateway, clock)
        before = await ask(gateway, "HEAD")
        assert (await other.current(KEY, IMMUTABLE, headers={})).remembered
        if "delete" in target:
            headers["content-md5"] = md5_of(body)
        answer = await call(gateway.app, method, target, headers, body, sign=False)
        assert answer.status in (200, 204)
        assert without_ids(before.headers) != await said(other.current(KEY, IMMUTABLE, headers={}))
        assert await said(other.current(KEY, IMMUTABLE, headers={})) == await said(
            other.ask(KEY, IMMUTABLE, headers={})
        )
        await other.settle()  # it writes to records that the gateway is about to close


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE])
async def test_2_3_a_look_that_began_before_an_own_write_is_not_remembered_after_it(tmp_path: Path, slot: Slot) -> None:
    """2.3 However late its answer comes: on another worker, during the write, or after it."""
    async with playing(tmp_path, slot) as (gateway, clock):
        other = another_worker(gateway, clock)
        held, reached = asyncio.Event(), asyncio.Event()
        # The answer of the state before the write is on its way while the write is made: held behind the reading.
        original = other._origin

        class Slow:
            async def send(self, request: Any) -> Any:
                response = await original.send(request)
                reached.set()
                await held.wait()
                return response

        other._origin = Slow()  # type: ignore[assignment]
        looking = asyncio.create_task(other.current(KEY, slot, headers={}))
        await reached.wait()
        assert (await ask(gateway, "PUT", body=b"new")).status == 200
        held.set()
        assert (await looking).version.size_bytes == len(OLD)
        await other.settle()
        assert (await ask(gateway, "GET")).body == b"new"


async def test_2_3_a_look_during_an_own_write_is_void_when_the_write_is_answered(tmp_path: Path) -> None:
    """2.3 It may land, and be believed, until the write has its answer; not from then on."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        held, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(Operation.PUT_OBJECT), Hold(held, reached))
        writing = asyncio.create_task(ask(gateway, "PUT", body=b"new"))
        await reached.wait()
        assert (await ask(gateway, "GET")).body == OLD
        held.set()
        assert (await writing).status == 200
        assert (await ask(gateway, "GET")).body == b"new"


async def test_2_1_a_write_whose_answer_is_lost_voids_too(tmp_path: Path) -> None:
    """2.1 The origin may have carried it out: nothing older is believed."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway, "GET")
        gateway.origin.inject(on(Operation.PUT_OBJECT), Unreachable(late=True))
        assert (await ask(gateway, "PUT", body=b"new")).status == 503
        assert (await ask(gateway, "GET")).body == b"new"


@pytest.mark.parametrize(
    ("method", "target", "failure"),
    [
        ("PUT", "/bucket/k", Unreachable()),
        ("PUT", "/bucket/k", Failure(500, "InternalError")),
        ("DELETE", "/bucket/k", Failure(504, "GatewayTimeout")),
        ("PUT", "/bucket?policy", Unreachable()),
    ],
)
async def test_2_3_a_write_in_doubt_is_not_forgotten_when_the_origin_carries_it_out_later(
    tmp_path: Path, method: str, target: str, failure: Unreachable | Failure
) -> None:
    """2.3 What was learned of the key until the doubt is over is not believed behind it, by GET, HEAD and LIST."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, clock):
        gateway.origin.inject(lambda call: call.method == method, failure)
        assert (await ask(gateway, method, target, body=b"new" if method == "PUT" else b"")).status >= 500
        assert (await ask(gateway, "GET")).body == OLD
        assert b"<Key>k</Key>" in (await ask(gateway, "GET", "/bucket?list-type=2")).body
        gateway.origin.put("bucket", "k", NEW)
        gateway.origin.put("bucket", "k2", NEW)
        await clock.advance(IN_DOUBT_SECONDS + 1)
        assert (await ask(gateway, "GET")).body == NEW
        assert (await ask(gateway, "HEAD")).headers["etag"] == f'"{hashlib.md5(NEW).hexdigest()}"'
        listed = (await ask(gateway, "GET", "/bucket?list-type=2")).body
        assert hashlib.md5(NEW).hexdigest().encode() in listed


async def test_2_3_what_is_no_write_of_this_gateway_leaves_nothing_behind(tmp_path: Path) -> None:
    """2.3 An invalidation that is cancelled in its midst, too: its successor must not void a bucket for it."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        scope = WriteScope(gateway.catalog, Slots([IMMUTABLE]), "bucket", ["k"] * 20)
        invalidating = asyncio.create_task(invalidate(scope))
        await asyncio.sleep(0)
        assert InvalidationEpochs(tmp_path / "catalog" / "epochs").left_behind == []
        invalidating.cancel()
        await asyncio.gather(invalidating, return_exceptions=True)
        assert InvalidationEpochs(tmp_path / "catalog" / "epochs").left_behind == []


@pytest.mark.parametrize("refusal", [Failure(403, "AccessDenied"), Failure(503, "SlowDown")])
async def test_2_3_a_write_that_is_refused_leaves_no_doubt(tmp_path: Path, refusal: Failure) -> None:
    """2.3 What the origin has said it will not do is over: what is learned afterwards stays remembered."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, clock):
        gateway.origin.inject(on(Operation.PUT_OBJECT), refusal)
        assert (await ask(gateway, "PUT", body=b"new")).status == refusal.status
        await ask(gateway, "GET")
        asked = len(gateway.origin.calls)
        await clock.advance(IN_DOUBT_SECONDS + 1)
        assert (await ask(gateway, "GET")).body == OLD
        assert len(gateway.origin.calls) == asked


@pytest.mark.parametrize("target", ["/bucket/k", "/bucket/small"])
@pytest.mark.parametrize("away", [False, True])
async def test_1_1_a_damaged_block_of_a_version_that_is_gone_is_no_internal_error(
    tmp_path: Path, target: str, away: bool
) -> None:
    """1.1, 8.1 Found out before the first byte: the new version is looked up; 503 where the origin is away."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        gateway.origin.put("bucket", "small", b"old")
        for _ in range(2):
            await ask(gateway, "GET", target)
        gateway.origin.put("bucket", target.removeprefix("/bucket/"), NEW)
        for file in block_files(tmp_path):
            file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
        if away:
            gateway.origin.inject(on(), Unreachable(), times=None)
        answer = await ask(gateway, "GET", target)
        assert (answer.status, answer.complete) == (503 if away else 200, True)
        assert answer.body == NEW or away


def another_worker(gateway: GatewayApp, clock: ManualClock) -> Catalog:
    """A second process's catalog, as far as one process can have one: the same records, a queue of its own."""
    return Catalog(gateway.origin, gateway.catalog._opened, clock)


def md5_of(body: bytes) -> str:
    return base64.b64encode(hashlib.md5(body).digest()).decode()


@pytest.mark.parametrize("seed", rest_is_slow(range(30), *range(8)))
async def test_10_11_no_reader_goes_back_in_time_when_a_slot_was_strict(tmp_path: Path, seed: int) -> None:
    """10.11 Who has seen a change while the slot was strict, by GET or HEAD, sees nothing older afterwards,
    whatever becomes of the slot."""
    dice = random.Random(seed)
    remembering = (TTL, IMMUTABLE, NEGATIVE, PATIENT)
    clock, directory = ManualClock(), tmp_path
    origin = MemoryOrigin(clock)
    origin.create_bucket("bucket")
    async with gateway_app(directory, origin=origin, clock=clock, allow_unsigned=True) as gateway:
        states: list[bytes | None] = [None]
        seen = 0

        def change() -> None:
            if dice.random() < 0.3:
                origin.buckets["bucket"].remove("k")
                states.append(None)
            else:
                body = b"%06d" % len(states) * dice.choice([1, BLOCK_SIZE_BYTES])
                states.append(body)
                origin.put("bucket", "k", body)

        async def read() -> None:
            nonlocal seen
            method = dice.choice(["GET", "GET", "HEAD"])
            headers = {"range": "bytes=0-5"} if method == "GET" and dice.random() < 0.3 else {}
            answer = await ask(gateway, method, headers=headers)
            if answer.status == 404:
                found = max(number for number, state in enumerate(states) if state is None)
            elif method == "HEAD":
                etags = [hashlib.md5(state, usedforsecurity=False).hexdigest() if state else "" for state in states]
                found = etags.index(answer.headers["etag"].strip('"'))
            else:
                found = int(answer.body[:6])
            assert found >= seen, f"{method} shows state {found} after {seen}"
            seen = found

        for _ in range(40):
            step = dice.random()
            if step < 0.15:
                change()
            elif step < 0.35:
                slot = STRICT if dice.random() < 0.5 else dice.choice(remembering)
                gateway.app.services.slots.apply_settings([slot] if slot is not STRICT or dice.random() < 0.5 else [])
            elif step < 0.4:
                await clock.advance(dice.choice([1.0, 30.0, 100.0]))
            else:
                await read()

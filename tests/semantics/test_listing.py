"""Clauses 3.5 to 3.9, 7.2 and 8.3 of docs/semantics.md, for LIST."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from gateway.metadata.catalog import Catalog
from gateway.origin.client import OriginRequest
from gateway.policy.slots import Prefix
from tests.origin.origins import xml
from tests.support.asgi import call
from tests.support.gateway_app import gateway_app
from tests.support.listing_scenarios import (
    IMMUTABLE,
    LIST,
    PATIENT,
    SHORT_PART,
    STRICT_PART,
    TTL,
    ask,
    keys,
    names,
    playing,
    source,
    token_of,
    write,
)
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import Answer as Failure
from tests.support.memory_origin.faults import Hold, Unreachable, on
from tests.support.slots import Slot


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE])
async def test_3_9_what_was_listed_is_listed_without_the_origin(tmp_path: Path, slot: Slot) -> None:
    """3.9 Whatever part of it is asked for, in either version, with any delimiter."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        assert source(await ask(gateway, "/bucket")) == "miss"
        asked = len(gateway.origin.calls)
        for query in ("list-type=2", "list-type=2&prefix=a/", "delimiter=/", "list-type=2&start-after=b&max-keys=1"):
            answer = await ask(gateway, f"/bucket?{query}")
            assert source(answer) == "hit"
        assert await keys(gateway, "/bucket?delimiter=/") == ["a/", "b", "c/"]
        nothing = await ask(gateway, "/bucket?list-type=2&max-keys=0")
        assert (source(nothing), names(nothing)) == ("hit", [])
        assert xml(nothing.body).findtext("IsTruncated") == "false"
        assert len(gateway.origin.calls) == asked


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE])
@pytest.mark.parametrize("query", ["list-type=2", "list-type=2&encoding-type=url", "encoding-type=url"])
async def test_3_9_keys_are_listed_as_the_origin_has_them(tmp_path: Path, slot: Slot, query: str) -> None:
    """3.9 An origin that knows no `encoding-type` does not name it in its answer: its keys are not decoded."""
    odd = ["a%20b", "a+b.txt", "\u00e4.txt", "a&b", "100%", "dir+x/%2F"]
    async with playing(tmp_path, slot) as (gateway, _clock):
        for key in odd:
            gateway.origin.put("bucket", f"odd/{key}", b"x")
        listed: dict[bool, list[bytes]] = {True: [], False: []}
        for encodes, found in listed.items():
            gateway.origin.dialect.encodes_keys = encodes
            for _ in range(2):
                answer = await ask(gateway, f"/bucket?{query}&prefix=odd/")
                found.append(answer.body)
            gateway.catalog.forget_bucket("bucket")
        assert source(answer) == "hit"
        assert len(set(listed[True] + listed[False])) == 1
        assert await keys(gateway, "/bucket?list-type=2&prefix=odd/&delimiter=%2B") == sorted(
            ["odd/a%20b", "odd/a+", "odd/\u00e4.txt", "odd/a&b", "odd/100%", "odd/dir+"], key=str.encode
        )


async def test_3_9_a_page_of_nothing_teaches_nothing(tmp_path: Path) -> None:
    """3.9 That there are no keys in an answer to `max-keys=0` does not say that there are none."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        assert await keys(gateway, "/bucket?list-type=2&max-keys=0") == []
        assert len(await keys(gateway)) == 4


async def test_3_9_a_listing_with_a_strict_part_is_the_origins_own_answer(tmp_path: Path) -> None:
    """3.9 Forwarded, tokens included; a prefix that has nothing strict in it is not."""
    async with playing(tmp_path, IMMUTABLE, STRICT_PART) as (gateway, _clock):
        for target in (LIST, f"{LIST}&prefix=str", f"{LIST}&prefix=strict/x", "/bucket?prefix=strict/"):
            for _ in range(2):
                assert source(await ask(gateway, target)) == "forwarded"
        await ask(gateway, f"{LIST}&prefix=a")
        assert source(await ask(gateway, f"{LIST}&prefix=a")) == "hit"


async def test_3_9_no_page_is_older_than_the_strictest_slot_allows(tmp_path: Path) -> None:
    """3.9 What others wrote is listed when metadata_ttl is over, counted from the question; earlier where a part has
    a shorter one.
    """
    async with playing(tmp_path, TTL, SHORT_PART) as (gateway, clock):
        await ask(gateway)
        gateway.origin.put("bucket", "new", b"")
        await clock.advance(9.9)
        assert "new" not in await keys(gateway)
        await clock.advance(0.2)
        assert source(await ask(gateway, f"{LIST}&prefix=a")) == "hit"
        assert "new" in await keys(gateway)
        gateway.origin.put("bucket", "a/new", b"")
        await clock.advance(59.9)
        assert "a/new" not in await keys(gateway, f"{LIST}&prefix=a")
        await clock.advance(0.2)
        assert "a/new" in await keys(gateway, f"{LIST}&prefix=a")


async def test_3_9_what_others_deleted_leaves_the_listing(tmp_path: Path) -> None:
    """3.9 A page of the origin takes keys out of the index that it does not have."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        await ask(gateway)
        async with await gateway.origin.send(OriginRequest("DELETE", "bucket", "a/2")) as deleted:
            assert deleted.status == 204
        await clock.advance(61.0)
        for expected in ("miss", "hit"):
            answer = await ask(gateway)
            assert (source(answer), names(answer)) == (expected, ["a/1", "b", "c/1"])


@pytest.mark.parametrize("failure", [Unreachable(), Failure(500), Failure(503, "SlowDown")])
async def test_3_5_an_older_page_stands_in_for_an_origin_that_is_down(
    tmp_path: Path, failure: Unreachable | Failure
) -> None:
    """3.5 As long as stale_if_unreachable allows; then its error."""
    async with playing(tmp_path, PATIENT) as (gateway, clock):
        await ask(gateway)
        gateway.origin.inject(on(), failure, times=None)
        await clock.advance(159.0)
        assert await keys(gateway) == ["a/1", "a/2", "b", "c/1"]
        await clock.advance(2.0)
        assert (await ask(gateway)).status in (500, 503)


async def test_3_5_what_was_written_is_not_left_out_of_an_older_page(tmp_path: Path) -> None:
    """2.1 Rather an error than a listing without an own write."""
    async with playing(tmp_path, PATIENT) as (gateway, clock):
        await ask(gateway)
        await write(gateway, "PUT", "/bucket/new", b"new")
        gateway.origin.inject(on(), Unreachable(), times=None)
        await clock.advance(100.0)
        assert (await ask(gateway)).status == 503
        assert (await ask(gateway, f"{LIST}&prefix=a/")).status == 200


async def test_3_6_no_cache_asks_the_origin_and_refreshes(tmp_path: Path) -> None:
    """3.6 Signed, `Cache-Control: no-cache` sees the present, and so does everybody afterwards."""
    async with gateway_app(tmp_path, slots=[IMMUTABLE]) as gateway:
        for key, no_cache, expected in (("a", False, ["a"]), ("b", False, ["a"]), ("c", True, ["a", "b", "c"])):
            gateway.origin.put("bucket", key, b"")
            headers = {"Cache-Control": "no-cache"} if no_cache else {}
            assert names(await call(gateway.app, "GET", LIST, headers)) == expected
            if no_cache:  # before anything has landed
                assert names(await call(gateway.app, "GET", LIST)) == expected
            await gateway.catalog.settle()
        after = await call(gateway.app, "GET", LIST)
        assert (source(after), names(after)) == ("hit", ["a", "b", "c"])


@pytest.mark.parametrize("slot", [PATIENT, IMMUTABLE])
async def test_3_6_no_older_page_stands_in_for_the_present(tmp_path: Path, slot: Slot) -> None:
    """3.6 As of GET and HEAD: with the origin down, `Cache-Control: no-cache` gets an error."""
    async with gateway_app(tmp_path, slots=[slot]) as gateway:
        gateway.origin.put("bucket", "a", b"")
        assert names(await call(gateway.app, "GET", LIST)) == ["a"]
        await gateway.catalog.settle()
        gateway.origin.inject(on(), Unreachable(), times=None)
        assert (await call(gateway.app, "GET", LIST, {"Cache-Control": "no-cache"})).status == 503
        assert names(await call(gateway.app, "GET", LIST)) == ["a"]


async def test_3_7_a_version_that_is_found_to_be_gone_leaves_the_listing(tmp_path: Path) -> None:
    """3.7 What a GET finds out, LIST knows too."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway)
        await call(gateway.app, "HEAD", "/bucket/b", sign=False)
        await gateway.catalog.settle()
        etag = gateway.origin.put("bucket", "b", b"another version")
        assert etag.strip('"').encode() not in (await ask(gateway)).body
        assert (await call(gateway.app, "GET", "/bucket/b", sign=False)).body == b"another version"
        assert etag.strip('"').encode() in (await ask(gateway)).body


@pytest.mark.parametrize(
    "headers", [{"x-amz-request-payer": "requester"}, {"x-amz-expected-bucket-owner": "1"}, {"origin": "https://a.b"}]
)
async def test_3_8_what_the_origin_must_judge_it_is_asked_each_time(tmp_path: Path, headers: dict[str, str]) -> None:
    """3.8 Forwarded, whatever is known."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        await ask(gateway)
        for _ in range(2):
            assert source(await ask(gateway, LIST, headers)) == "forwarded"


async def test_8_3_without_the_directory_listings_go_on(tmp_path: Path) -> None:
    """8.3, 9.3 Every page is the origin's, tokens that were given before are good, and own writes are there."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, clock):
        first = await ask(gateway, f"{LIST}&max-keys=2")
        closed = Catalog.switched_off(gateway.origin, clock)
        app = dataclasses.replace(gateway.app, services=dataclasses.replace(gateway.app.services, catalog=closed))
        for _ in range(2):
            rest = await ask(gateway, f"{LIST}&max-keys=2&continuation-token={token_of(first)}", app=app)
            assert (source(rest), names(first) + names(rest)) == ("miss", ["a/1", "a/2", "b", "c/1"])
        assert (await call(app, "PUT", "/bucket/new", body=b"", sign=False)).status == 200
        assert "new" in await keys(gateway, app=app)
        await closed.close()


async def test_7_2_errors_of_the_origin_reach_the_client(tmp_path: Path) -> None:
    """7.2 With status, code and message; and nothing is learned from them."""
    async with playing(tmp_path, IMMUTABLE, Slot("n", Prefix.parse("s3://nobucket/"), "read-write", "immutable")) as (
        gateway,
        _clock,
    ):
        for _ in range(2):
            answer = await ask(gateway, "/nobucket?list-type=2")
            assert answer.status == 404
            assert b"<Code>NoSuchBucket</Code>" in answer.body
        gateway.origin.inject(on(), Failure(403, "AccessDenied"))
        assert (await ask(gateway)).status == 403
        assert source(await ask(gateway)) == "miss"


async def test_3_9_all_who_ask_the_same_at_once_are_one_question(tmp_path: Path) -> None:
    """3.9 Ranks of a job list the same prefix when it starts: the origin is asked once, also by one that leaves."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        held, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(), Hold(held, reached), times=None)
        listings = [asyncio.create_task(call(gateway.app, "GET", LIST, sign=False)) for _ in range(20)]
        other = asyncio.create_task(call(gateway.app, "GET", f"{LIST}&prefix=a", sign=False))
        await reached.wait()
        listings[0].cancel()
        held.set()
        for listing in listings[1:]:
            assert names(await listing) == ["a/1", "a/2", "b", "c/1"]
        assert names(await other) == ["a/1", "a/2"]
        assert len(gateway.origin.calls) == 2
        await gateway.catalog.settle()
        assert source(await ask(gateway)) == "hit"


async def test_7_2_an_error_is_told_to_all_who_wait_for_the_answer(tmp_path: Path) -> None:
    """7.2 And the next one asks again."""
    async with playing(tmp_path, IMMUTABLE) as (gateway, _clock):
        held, reached = asyncio.Event(), asyncio.Event()
        gateway.origin.inject(on(), Hold(held, reached))
        gateway.origin.inject(on(), Failure(403, "AccessDenied"))
        listings = [asyncio.create_task(ask(gateway)) for _ in range(3)]
        await reached.wait()
        held.set()
        for listing in listings:
            answer = await listing
            assert (answer.status, b"<Code>AccessDenied</Code>" in answer.body) == (403, True)
        assert (await ask(gateway)).status == 200


async def test_3_9_what_becomes_strict_is_forgotten(tmp_path: Path) -> None:
    """3.9 Own writes in strict slots leave no mark, so that nothing known of them may come back later."""
    clock = ManualClock()
    async with gateway_app(tmp_path, slots=[IMMUTABLE], clock=clock, allow_unsigned=True) as gateway:
        origin = gateway.origin
        origin.put("bucket", "strict/a", b"")
        await ask(gateway)
    later = IMMUTABLE, STRICT_PART
    async with gateway_app(tmp_path, origin=origin, slots=later, clock=clock, allow_unsigned=True) as gateway:
        await write(gateway, "PUT", "/bucket/strict/b", b"")
    async with gateway_app(tmp_path, origin=origin, slots=[IMMUTABLE], clock=clock, allow_unsigned=True) as gateway:
        assert await keys(gateway) == ["strict/a", "strict/b"]

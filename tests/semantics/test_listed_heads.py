"""Clause 3.11 of docs/semantics.md: what a listing says of objects whose headers are remembered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.origin.client import OriginRequest
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support.asgi import Answer, call
from tests.support.cache_label import cache_label
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin.faults import AlterBody, Fault, Hold, on
from tests.support.memory_origin.faults import Answer as Fixed
from tests.support.slots import Slot, slot_with

PREFIX = Prefix.parse("s3://bucket/")
TTL = Slot("t", PREFIX, "read-write", "ttl", 60.0)
STRICT = Slot("s", PREFIX)
LONG = 1000.0


@asynccontextmanager
async def playing(directory: Path, slot: Slot) -> AsyncIterator[tuple[GatewayApp, ManualClock]]:
    """A gateway with `k` at the origin since long ago."""
    clock = ManualClock()
    async with gateway_app(directory, slots=[slot], clock=clock, allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", "k", b"old", {"x-amz-meta-label": "cat"})
        await clock.advance(LONG)
        yield gateway, clock


async def ask(gateway: GatewayApp, method: str, target: str = "/bucket/k", body: bytes = b"") -> Answer:
    answer = await call(gateway.app, method, target, body=body, sign=False)
    await gateway.catalog.settle()
    await gateway.blocks.settle()
    return answer


async def list_bucket(gateway: GatewayApp, query: str = "list-type=2") -> Answer:
    return await ask(gateway, "GET", f"/bucket?{query}")


async def test_3_11_a_listing_keeps_what_is_remembered_fresh(tmp_path: Path) -> None:
    """3.11 After a LIST, HEAD and GET go on as of that LIST, with every header, without the origin; then they ask."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        first = await ask(gateway, "HEAD")
        await ask(gateway, "GET")
        await clock.advance(LONG)
        await list_bucket(gateway)
        await clock.advance(59.0)
        asked = len(gateway.origin.calls)
        head, body = await ask(gateway, "HEAD"), await ask(gateway, "GET")
        assert len(gateway.origin.calls) == asked
        assert (head.headers["x-forebay-cache"], body.headers["x-forebay-cache"], body.body) == ("hit", "hit", b"old")
        assert (head.headers["x-amz-meta-label"], head.headers["etag"]) == ("cat", first.headers["etag"])
        await clock.advance(1.0)
        assert cache_label(await ask(gateway, "HEAD")) == "miss"


IMMUTABLE = Slot("i", PREFIX, "read-write", "immutable")
NEGATIVE = Slot("n", PREFIX, "read-write", "ttl", 60.0, negative_ttl_seconds=10.0)
PART = Slot("p", Prefix.parse("s3://bucket/k"), "read-write", "ttl", 60.0)
"""Beside which the bucket is strict."""

LISTS = [
    ("list-type=2", {}),
    ("list-type=2&delimiter=/", {}),
    ("encoding-type=url&max-keys=1", {}),
    ("list-type=2", {"Cache-Control": "no-cache"}),
    ("list-type=2", {"Origin": "http://page"}),
]


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE, NEGATIVE, PART], ids=lambda slot: slot.name)
@pytest.mark.parametrize(("query", "headers"), LISTS)
@pytest.mark.parametrize("listed_before", [False, True])
async def test_3_11_what_a_listing_shows_is_what_is_read(
    tmp_path: Path, slot: Slot, query: str, headers: dict[str, str], listed_before: bool
) -> None:
    """3.11 When a client has been shown another version, or an object that was absent, HEAD and GET are not answered by
    what was remembered: a range behind the end that the object had is read."""
    async with playing(tmp_path, slot) as (gateway, clock):
        gateway.origin.put("bucket", "k", b"1" * 100)
        gateway.origin.put("bucket", "k" * 600, b"1" * 100)
        if listed_before:
            await call(gateway.app, "GET", f"/bucket?{query}", headers, sign=False)
            await gateway.catalog.settle()
        for key in ("k", "k" * 600, "k-absent"):
            await ask(gateway, "GET", f"/bucket/{key}")
        await clock.advance(1.0)
        for key in ("k", "k" * 600, "k-absent"):
            gateway.origin.put("bucket", key, b"2" * 1000)
        gateway.origin.put("bucket", "a", b"")
        place = "marker=j" if query.startswith("encoding") else "start-after=j"
        listed = await call(gateway.app, "GET", f"/bucket?{query}&{place}", headers, sign=False)
        shown = re.findall(rb"<Key>([^<]*)</Key>.*?<Size>(\d+)</Size>", listed.body)
        for key in [raw.decode() for raw, size in shown if size == b"1000"]:
            answer = await call(gateway.app, "GET", f"/bucket/{key}", {"Range": "bytes=950-"}, sign=False)
            head = await call(gateway.app, "HEAD", f"/bucket/{key}", sign=False)
            assert (answer.status, answer.body) == (206, b"2" * 50), key[:10]
            assert head.headers["content-length"] == "1000"
        assert shown


VERSIONS = """<?xml version="1.0"?><ListVersionsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{}
<Version><Key>k</Key><IsLatest>false</IsLatest><ETag>"0"</ETag><Size>3</Size></Version></ListVersionsResult>"""
LATEST = "<Version><Key>k</Key><IsLatest>true</IsLatest><ETag>&quot;{}&quot;</ETag><Size>3</Size></Version>"
DELETED = "<DeleteMarker><Key>k</Key><IsLatest>true</IsLatest></DeleteMarker>"
LISTED = "<ListBucketResult><Contents><Key>k</Key><ETag>{}</ETag><Size>3</Size></Contents></ListBucketResult>"
UNORDERED = LISTED.replace("<Contents>", "<Contents><Key>z</Key><ETag>1</ETag><Size>1</Size></Contents><Contents>", 1)
ATTRIBUTES = "<GetObjectAttributesResponse><ETag>{}</ETag></GetObjectAttributesResponse>"


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE], ids=lambda slot: slot.name)
@pytest.mark.parametrize(
    ("target", "document"),
    [
        ("/bucket?versions", VERSIONS.format(LATEST)),
        ("/bucket?versions&prefix=k", VERSIONS.format(DELETED)),
        ("/bucket?list-type=2&unheard-of=1", LISTED),
        ("/bucket?allow-unordered=true", UNORDERED),
        ("/bucket?list-type=1", LISTED),
        ("/bucket/k?attributes", ATTRIBUTES),
    ],
)
async def test_3_11_what_any_answer_shows_of_a_key_is_what_is_read(
    tmp_path: Path, slot: Slot, target: str, document: str
) -> None:
    """3.11 Answers of the origin that Forebay hands on unchanged void what they show otherwise, and nothing else."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        etag = (await ask(gateway, "HEAD")).headers["etag"].strip('"')
        for shown in (etag, "f" * 32):
            body = document.replace("{}", shown).encode()
            gateway.origin.faults = [
                Fault(on(Operation.FORWARD), Fixed(200, headers={"content-type": "application/xml"}, body=body))
            ]
            if shown != etag:
                gateway.origin.put("bucket", "k", b"new")
            assert (await ask(gateway, "GET", target)).body == body
            is_known = shown == etag and "DeleteMarker" not in document
            assert cache_label(await ask(gateway, "HEAD")) == ("hit" if is_known else "miss")


@pytest.mark.parametrize("slot", [TTL, IMMUTABLE], ids=lambda slot: slot.name)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("change", ["overwritten", "deleted"])
@pytest.mark.parametrize(
    ("query", "headers"), [("", {"x-amz-expected-bucket-owner": "123456789012"}), ("?partNumber=1", {})]
)
async def test_3_11_an_answer_past_the_cache_is_what_is_read_next(
    tmp_path: Path, slot: Slot, method: str, change: str, query: str, headers: dict[str, str]
) -> None:
    """3.11 The origin's own answer to a GET or HEAD leads no reader back to the version before it."""
    async with playing(tmp_path, slot) as (gateway, _clock):
        assert (await ask(gateway, "GET")).body == b"old"
        if change == "deleted":
            del gateway.origin.buckets["bucket"].objects["k"]
        else:
            gateway.origin.put("bucket", "k", b"newer")
        shown = await call(gateway.app, method, f"/bucket/k{query}", headers, sign=False)
        read = await ask(gateway, "GET")
        assert shown.status == (404 if change == "deleted" else 206 if query else 200)
        assert (read.status, read.body) == (200, b"newer") if change != "deleted" else read.status == 404


async def test_3_11_a_listing_that_shows_the_same_voids_nothing(tmp_path: Path) -> None:
    """3.11 Neither one that writes the ETag without quotes, twice in quotes, or in capitals, nor one that has none. The
    listing confirms what is remembered all the same, where it has an ETag."""
    etag = re.compile(rb"(?<=<ETag>).*?(?=</ETag>)")
    changes: list[Callable[[bytes], bytes]] = [
        lambda body: body,
        lambda body: body.replace(b"&quot;", b""),
        lambda body: body.replace(b"&quot;", b"&quot;&quot;"),
        lambda body: etag.sub(lambda found: found[0].upper().replace(b"&QUOT;", b"&quot;"), body),
        lambda body: etag.sub(lambda found: b"W/" + found[0], body),
        lambda body: etag.sub(b"", body),
    ]
    async with playing(tmp_path, TTL) as (gateway, clock):
        await ask(gateway, "GET")
        for number, change in enumerate(changes, 1):
            await clock.advance(50.0 if number < len(changes) else 1.0)
            gateway.origin.inject(on(Operation.LIST_OBJECTS_V2), AlterBody(change))
            answer = await call(gateway.app, "GET", "/bucket?list-type=2", {"Cache-Control": "no-cache"}, sign=False)
            assert answer.status == 200
            await gateway.catalog.settle()
            asked = len(gateway.origin.calls)
            assert (await ask(gateway, "HEAD")).headers["x-forebay-cache"] == "hit"
            assert len(gateway.origin.calls) == asked


@pytest.mark.parametrize("change", ["overwritten", "copied in place", "deleted", "tagged"])
async def test_3_11_what_is_listed_otherwise_is_asked_for(tmp_path: Path, change: str) -> None:
    """3.11 A listing that shows another version, or none, confirms nothing; nor does one of an object with tags."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        if change == "tagged":
            gateway.origin.put("bucket", "k", b"old")
            await clock.advance(LONG)
            await outside(gateway, OriginRequest("PUT", "bucket", "k", (("tagging", None),), body=TAGS))
        await ask(gateway, "HEAD")
        await clock.advance(LONG)
        if change == "overwritten":
            gateway.origin.put("bucket", "k", b"newer")
        elif change == "copied in place":
            gateway.origin.put("bucket", "k", b"old", {"x-amz-meta-label": "dog"})
        elif change == "deleted":
            await outside(gateway, OriginRequest("DELETE", "bucket", "k"))
        await list_bucket(gateway)
        asked = len(gateway.origin.calls)
        answer = await ask(gateway, "HEAD")
        assert len(gateway.origin.calls) == asked + 1
        assert answer.status == (404 if change == "deleted" else 200)
        assert answer.headers.get("x-amz-meta-label") == ("dog" if change == "copied in place" else None)


TAGS = b"<Tagging><TagSet><Tag><Key>a</Key><Value>b</Value></Tag></TagSet></Tagging>"


async def outside(gateway: GatewayApp, request: OriginRequest) -> None:
    async with await gateway.origin.send(request) as response:
        assert response.status in (200, 204)


async def test_3_11_a_copy_in_the_same_second_is_never_taken_for_the_same(tmp_path: Path) -> None:
    """3.11 What was asked within a minute of its date is confirmed by no listing: ETag, size and date may lie."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        gateway.origin.put("bucket", "k", b"same", {"x-amz-meta-label": "cat"})
        await clock.advance(0.25)
        await ask(gateway, "HEAD")
        gateway.origin.put("bucket", "k", b"same", {"x-amz-meta-label": "dog"})
        await clock.advance(60.0)
        await list_bucket(gateway)
        assert (await ask(gateway, "HEAD")).headers["x-amz-meta-label"] == "dog"


@pytest.mark.parametrize("change", ["overwritten", "deleted"])
async def test_3_11_what_a_listing_finds_changed_is_forgotten(tmp_path: Path, change: str) -> None:
    """3.11 A listing that finds another version than the one before it ends what is remembered, before the TTL does."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        await list_bucket(gateway)
        await clock.advance(50.0)
        await ask(gateway, "GET")
        if change == "overwritten":
            gateway.origin.put("bucket", "k", b"newer")
        else:
            await outside(gateway, OriginRequest("DELETE", "bucket", "k"))
        await clock.advance(20.0)
        assert (await ask(gateway, "GET")).body == b"old"
        await list_bucket(gateway)
        answer = await ask(gateway, "GET")
        assert (answer.status, answer.body == b"newer") == ((200, True) if change == "overwritten" else (404, False))


async def test_3_11_own_writes_are_not_confirmed_by_older_listings(tmp_path: Path) -> None:
    """2.1, 3.11 A page that was asked for before an own write, and comes after it, confirms nothing."""
    async with playing(tmp_path, TTL) as (gateway, clock):
        await ask(gateway, "HEAD")
        await clock.advance(LONG)
        until = asyncio.Event()
        reached = asyncio.Event()
        gateway.origin.inject(on(operation=Operation.LIST_OBJECTS_V2), Hold(until, reached))
        listing = asyncio.create_task(list_bucket(gateway))
        await reached.wait()
        await ask(gateway, "PUT", body=b"own")
        until.set()
        await listing
        head = await ask(gateway, "HEAD")
        assert (head.headers["content-length"], "x-amz-meta-label" in head.headers) == ("3", False)
        assert (await ask(gateway, "GET")).body == b"own"


async def test_3_11_strict_takes_no_listings_word(tmp_path: Path) -> None:
    """3.1, 3.11 In a strict slot, HEAD and GET ask whatever was listed; what is remembered there is nothing."""
    async with playing(tmp_path, STRICT) as (gateway, _clock):
        await ask(gateway, "HEAD")
        await list_bucket(gateway)
        assert (await ask(gateway, "HEAD")).headers["x-forebay-cache"] == "forwarded"


async def test_3_11_another_slots_listing_counts_by_this_slots_bound(tmp_path: Path) -> None:
    """3.11 However a range came to be known, a key's own slot says how old that may be."""
    clock = ManualClock()
    short = slot_with(TTL, name="short", prefix=Prefix.parse("s3://bucket/k"), metadata_ttl_seconds=5.0)
    async with gateway_app(tmp_path, slots=[TTL, short], clock=clock, allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", "k", b"old")
        gateway.origin.put("bucket", "a", b"old")
        await clock.advance(LONG)
        for key in "ak":
            await ask(gateway, "HEAD", f"/bucket/{key}")
        await clock.advance(LONG)
        await list_bucket(gateway)
        await clock.advance(4.9)
        assert (await ask(gateway, "HEAD", "/bucket/k")).headers["x-forebay-cache"] == "hit"
        await clock.advance(0.2)
        assert (await ask(gateway, "HEAD", "/bucket/a")).headers["x-forebay-cache"] == "hit"
        assert cache_label(await ask(gateway, "HEAD", "/bucket/k")) == "miss"

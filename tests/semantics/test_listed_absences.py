"""Clause 3.4 of docs/semantics.md: what the listing index says of objects that are not there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.policy.slots import Prefix
from gateway.telemetry import metrics
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.slots import Slot, slot_with

SLOT = Slot("t", Prefix.parse("s3://bucket/"), "read-write", "ttl", 60.0, negative_ttl_seconds=30.0)
FAR = {"origin": "http://far"}


@asynccontextmanager
async def listed(directory: Path, slot: Slot = SLOT) -> AsyncIterator[tuple[GatewayApp, ManualClock]]:
    """A gateway that has just listed its bucket, of one object."""
    clock = ManualClock()
    async with gateway_app(directory, slots=[slot], clock=clock, allow_unsigned=True) as gateway:
        gateway.origin.put("bucket", "there", b"x")
        await ask(gateway, "GET", "?list-type=2")
        yield gateway, clock


async def ask(gateway: GatewayApp, method: str, key: str = "/gone", body: bytes = b"", **headers: str) -> Answer:
    answer = await call(gateway.app, method, f"/bucket{key}", headers, body, sign=False)
    await gateway.catalog.settle()
    return answer


async def is_asked(gateway: GatewayApp, method: str = "HEAD", key: str = "/gone", status: int = 404) -> bool:
    before = len(gateway.origin.calls)
    answer = await ask(gateway, method, key)
    assert answer.status == status
    return len(gateway.origin.calls) > before


@pytest.mark.parametrize("consistency", ["ttl", "immutable"])
async def test_3_4_what_a_listing_leaves_out_is_answered_from_here(tmp_path: Path, consistency: str) -> None:
    """3.4 HEAD and GET, with S3's document, counted as a remembered absence, and no longer than `negative_ttl`."""
    async with listed(tmp_path, slot_with(SLOT, consistency=consistency)) as (gateway, clock):
        before = metrics.CATALOG_LOOKUPS.value(SLOT.name, "absent")
        assert not await is_asked(gateway)
        assert not await is_asked(gateway, "GET")
        assert metrics.CATALOG_LOOKUPS.value(SLOT.name, "absent") == before + 2
        answer = await ask(gateway, "GET")
        assert b"<Code>NoSuchKey</Code>" in answer.body
        assert b"<Key>gone</Key>" in answer.body
        await clock.advance(29.0)
        assert not await is_asked(gateway)
        await clock.advance(2.0)
        assert await is_asked(gateway)


async def test_3_4_it_holds_no_longer_than_an_answer_may_be_old(tmp_path: Path) -> None:
    """3.4 With a `negative_ttl` that is longer than `metadata_ttl`, the latter bounds it."""
    async with listed(tmp_path, slot_with(SLOT, negative_ttl_seconds=1000.0)) as (gateway, clock):
        await clock.advance(59.0)
        assert not await is_asked(gateway)
        await clock.advance(2.0)
        assert await is_asked(gateway)


@pytest.mark.parametrize(
    "slot", [slot_with(SLOT, consistency="strict"), slot_with(SLOT, negative_ttl_seconds=0.0)], ids=["strict", "0s"]
)
async def test_3_4_it_is_not_believed_elsewhere(tmp_path: Path, slot: Slot) -> None:
    """3.4 A strict slot asks, and so does one without `negative_ttl`."""
    async with listed(tmp_path, slot) as (gateway, _):
        assert await is_asked(gateway)


async def test_3_4_what_no_listing_covers_is_asked_for(tmp_path: Path) -> None:
    """3.4 A page of another prefix says nothing of a key."""
    async with gateway_app(tmp_path, slots=[SLOT], clock=ManualClock(), allow_unsigned=True) as gateway:
        await ask(gateway, "GET", "?list-type=2&prefix=other%2F")
        assert not await is_asked(gateway, key="/other/gone")
        assert await is_asked(gateway)


async def test_3_4_an_own_write_ends_it(tmp_path: Path) -> None:
    """3.4 At once; after a deletion through this gateway, the origin is asked."""
    async with listed(tmp_path) as (gateway, _):
        await ask(gateway, "PUT", body=b"now")
        assert await is_asked(gateway, status=200)
        await ask(gateway, "DELETE")
        assert await is_asked(gateway)


@pytest.mark.parametrize("headers", [FAR, {"x-amz-request-payer": "requester"}], ids=["CORS", "payer"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_3_11_an_answer_that_shows_the_object_ends_it(
    tmp_path: Path, method: str, headers: dict[str, str]
) -> None:
    """3.11 Whoever has seen an object that others have made does not see it gone again by an older listing."""
    async with listed(tmp_path) as (gateway, _):
        gateway.origin.put("bucket", "gone", b"theirs")
        assert not await is_asked(gateway)
        assert (await call(gateway.app, method, "/bucket/gone", headers, b"", sign=False)).status == 200
        assert (await ask(gateway, method)).status == 200
        assert (await ask(gateway, "HEAD")).status == 200


async def test_3_4_a_forwarded_listing_that_shows_an_object_ends_its_absence(tmp_path: Path) -> None:
    """3.4 As a GET of it does: for GET and HEAD, and in later pages."""
    async with listed(tmp_path) as (gateway, _):
        gateway.origin.put("bucket", "gone", b"of others")
        assert not await is_asked(gateway)
        page = await ask(gateway, "GET", "?list-type=2", b"", **{"x-amz-expected-bucket-owner": "1"})
        assert b"<Key>gone</Key>" in page.body
        assert await is_asked(gateway, "GET", status=200)
        assert b"<Key>gone</Key>" in (await ask(gateway, "GET", "?list-type=2")).body

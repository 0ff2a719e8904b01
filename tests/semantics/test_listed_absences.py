"""Clause 3.4 of docs/semantics.md: what the listing index says of objects that are not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.origin.client import OriginRequest
from gateway.policy.slots import Prefix
from gateway.s3.xml import text_of
from gateway.telemetry import metrics
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Answer as Answered
from tests.support.memory_origin.response import MemoryResponse
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
    """3.4 As a GET of it does: for GET and HEAD."""
    async with listed(tmp_path) as (gateway, _):
        gateway.origin.put("bucket", "gone", b"of others")
        assert not await is_asked(gateway)
        page = await ask(gateway, "GET", "?list-type=2", b"", **{"x-amz-expected-bucket-owner": "1"})
        assert b"<Key>gone</Key>" in page.body
        assert await is_asked(gateway, "GET", status=200)


PROOFS = {
    "version": ("GET", "/gone?versionId=null", {}),
    "version by HEAD": ("HEAD", "/gone?versionId=null", {}),
    "tags": ("GET", "/gone?tagging", {}),
    "ACL": ("GET", "/gone?acl", {}),
    "attributes": ("GET", "/gone?attributes", {"x-amz-object-attributes": "ETag"}),
    "not modified": ("GET", "/gone", {**FAR, "if-none-match": "*"}),
    "precondition": ("GET", "/gone", {**FAR, "if-match": '"other"'}),
    "copy": ("PUT", "/copy", {"x-amz-copy-source": "bucket/gone"}),
    "version of a copy": ("PUT", "/copy", {"x-amz-copy-source": "/bucket/gone?versionId=null"}),
    "versions": ("GET", "?versions", {}),
    "part": ("HEAD", "/gone?partNumber=1", {}),
    "LIST": ("GET", "?list-type=2", {"x-amz-expected-bucket-owner": "1"}),
}


DOCUMENTS = {
    "attributes": b"<GetObjectAttributesResponse><ETag>e</ETag></GetObjectAttributesResponse>",
    "versions": b"<ListVersionsResult><IsTruncated>false</IsTruncated><Version><Key>gone</Key>"
    b"<IsLatest>true</IsLatest><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;e&quot;</ETag>"
    b"<Size>6</Size><StorageClass>STANDARD</StorageClass></Version></ListVersionsResult>",
}


async def prove(gateway: GatewayApp, proof: str) -> None:
    """Have a client see the object `gone`."""
    method, target, headers = PROOFS[proof]
    if proof in DOCUMENTS:  # the origin of the tests has none of its own
        gateway.origin.inject(lambda call: (proof, None) in call.query, Answered(200, body=DOCUMENTS[proof]))
    answer = await call(gateway.app, method, f"/bucket{target}", headers, b"", sign=False)
    assert answer.status in (200, 206, 304, 412), answer.body


@pytest.mark.parametrize("remembered", ["listed", "answered"])
@pytest.mark.parametrize("proof", PROOFS)
async def test_3_4_each_answer_that_shows_the_object_ends_it(tmp_path: Path, proof: str, remembered: str) -> None:
    """3.4 Whether it was learned from a listing or from an answer: what is told of it, or copied, is there."""
    async with listed(tmp_path, slot_with(SLOT, metadata_ttl_seconds=600.0)) as (gateway, clock):
        if remembered == "answered":
            await clock.advance(31.0)
            assert await is_asked(gateway)
        gateway.origin.put("bucket", "gone", b"theirs")
        assert not await is_asked(gateway)
        await prove(gateway, proof)
        assert (await ask(gateway, "HEAD")).status == 200
        assert (await ask(gateway, "GET")).status == 200


async def test_3_4_a_copied_part_ends_it(tmp_path: Path) -> None:
    """3.4 UploadPartCopy shows its source as CopyObject does."""
    async with listed(tmp_path) as (gateway, _):
        upload_id = text_of((await ask(gateway, "POST", "/copy?uploads")).body, "UploadId")
        gateway.origin.put("bucket", "gone", b"theirs")
        assert not await is_asked(gateway)
        target, source = f"/copy?partNumber=1&uploadId={upload_id}", {"x-amz-copy-source": "bucket/gone"}
        assert (await ask(gateway, "PUT", target, b"", **source)).status == 200
        assert await is_asked(gateway, status=200)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_3_4_what_shows_no_object_ends_nothing(tmp_path: Path, method: str) -> None:
    """3.4 An answer that denies the object, a copy that the origin refuses, a LIST that shows its deletion."""
    async with listed(tmp_path) as (gateway, clock):
        assert not await is_asked(gateway)
        await clock.advance(1.0)
        assert (await ask(gateway, method, "/gone", b"", **FAR)).status == 404
        assert (await ask(gateway, "GET", "/gone?tagging")).status == 404
        assert (await ask(gateway, "PUT", "/copy", b"", **{"x-amz-copy-source": "bucket/gone"})).status == 404
        deleted = DOCUMENTS["versions"].replace(b"Version>", b"DeleteMarker>")
        gateway.origin.inject(lambda call: ("versions", None) in call.query, Answered(200, body=deleted))
        assert b"<Key>gone</Key>" in (await ask(gateway, "GET", "?versions")).body
        assert not await is_asked(gateway, method)


class LateOrigin(MemoryOrigin):
    """An origin whose first answer is on its way until it is released."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.is_given, self.is_released = asyncio.Event(), asyncio.Event()

    async def send(self, request: OriginRequest) -> MemoryResponse:
        response = await super().send(request)
        if not self.is_given.is_set():
            self.is_given.set()
            await self.is_released.wait()
        return response


@pytest.mark.parametrize("late", ["LIST", "HEAD"])
@pytest.mark.parametrize("proof", PROOFS)
async def test_3_4_an_answer_that_comes_late_does_not_restore_it(tmp_path: Path, proof: str, late: str) -> None:
    """3.4 Neither a page nor a 404 that was under way when a client saw the object."""
    clock = ManualClock()
    origin = LateOrigin(clock)
    async with gateway_app(tmp_path, origin=origin, slots=[SLOT], clock=clock, allow_unsigned=True) as gateway:
        origin.put("bucket", "there", b"x")
        method, target = ("GET", "?list-type=2") if late == "LIST" else ("HEAD", "/gone")
        asking = asyncio.create_task(ask(gateway, method, target))
        await origin.is_given.wait()
        await clock.advance(1.0)
        origin.put("bucket", "gone", b"theirs")
        await prove(gateway, proof)
        origin.is_released.set()
        assert (await asking).status == (200 if late == "LIST" else 404)
        await clock.advance(1.0)
        assert (await ask(gateway, "HEAD")).status == 200
        assert (await ask(gateway, "GET")).status == 200


async def test_3_4_what_is_asked_after_a_proof_counts_again(tmp_path: Path) -> None:
    """3.4 A listing that was asked for after the object was seen, and leaves it out, is believed."""
    async with listed(tmp_path, slot_with(SLOT, metadata_ttl_seconds=10.0)) as (gateway, clock):
        gateway.origin.put("bucket", "gone", b"theirs")
        await prove(gateway, "tags")
        gateway.origin.buckets["bucket"].remove("gone")
        await clock.advance(11.0)
        await ask(gateway, "GET", "?list-type=2")
        assert not await is_asked(gateway)


async def test_3_4_a_proof_outlives_the_process(tmp_path: Path) -> None:
    """3.4 A gateway that starts again on the same node believes the absence no more than the one before."""
    async with listed(tmp_path) as (gateway, clock):
        gateway.origin.put("bucket", "gone", b"theirs")
        await prove(gateway, "tags")
        origin = gateway.origin
    async with gateway_app(tmp_path, origin=origin, slots=[SLOT], clock=clock, allow_unsigned=True) as gateway:
        assert not await is_asked(gateway, key="/another")
        assert await is_asked(gateway, status=200)

"""LIST where something is pending: what an entry says, tokens, and what the origin alone can answer."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import zlib
from pathlib import Path

from gateway.policy.slots import Prefix, Slots
from gateway.s3.headers import format_http_date, parse_iso_date
from gateway.writeback.journal.records import ExpectedVersion, Write, WriteSpec
from tests.origin.origins import xml
from tests.support.asgi import Answer, call
from tests.support.listing_scenarios import names, token_of
from tests.support.memory_origin.faults import Unreachable
from tests.support.slots import Slot, slot_with
from tests.support.snapshots import freeze
from tests.support.write_back_gateway import Client, with_a_client, with_client
from tests.support.writeback import key

EVERYWHERE = Slot("back", Prefix(""), write="back")
BACK = Slot("back", Prefix.parse("s3://bucket/back/"), write="back")
LIST = "?list-type=2"


def entry(answer: Answer, name: str) -> dict[str, str]:
    node = next(node for node in xml(answer.body).iter("Contents") if node.findtext("Key") == name)
    return {child.tag: "".join(child.itertext()) for child in node}


@with_a_client()
async def test_a_pending_object_is_listed_as_the_origin_will_list_it(client: Client) -> None:
    """But for the date, which may move at the flush: ETag, size, storage class, owner; in both versions."""
    await client.learn()
    await client.learn_storage_class("STANDARD_IA")
    await client.ask("PUT", "back/k", b"body", {"x-amz-storage-class": "STANDARD_IA"})
    upload_id = await client.create("back/m")
    await client.complete("back/m", upload_id, {1: await client.part("back/m", upload_id, 1, b"part")})
    pending = {
        query: await client.ask("GET", query)
        for query in (f"{LIST}&prefix=back%2F&fetch-owner=true", f"{LIST}&prefix=back%2F", "?prefix=back%2F")
    }
    await client.flush()
    for query, before in pending.items():
        after = await client.ask("GET", query)
        assert names(before) == names(after) == ["back/first", "back/k", "back/m"]
        for name in names(after):
            was, now = entry(before, name), entry(after, name)
            assert len(was.pop("LastModified")) == len(now.pop("LastModified")) == len("2009-10-12T17:50:30.000Z")
            assert was == now


@with_a_client()
async def test_the_date_listed_is_that_of_head(client: Client) -> None:
    """Whole seconds, written with milliseconds as S3 does."""
    await client.learn()
    await client.ask("PUT", "back/k", b"body")
    stored = client.pending("back/k")
    assert stored is not None
    listed = parse_iso_date(entry(await client.ask("GET", LIST), "back/k")["LastModified"])
    assert listed == int(stored.acknowledged_at)
    head = await client.ask("HEAD", "back/k")
    assert head.headers["last-modified"] == format_http_date(listed)


@with_a_client()
async def test_a_declared_checksum_is_listed(client: Client) -> None:
    """Its algorithm and type, where PutObject or CreateMultipartUpload has named one; none is made up."""
    await client.learn()
    value = base64.b64encode(zlib.crc32(b"body").to_bytes(4, "big")).decode()
    await client.ask("PUT", "back/k", b"body", {"x-amz-checksum-crc32": value})
    await client.ask("PUT", "back/plain", b"body")
    upload_id = await client.create("back/m", {"x-amz-checksum-algorithm": "SHA256"})
    digest = base64.b64encode(hashlib.sha256(b"part").digest()).decode()
    etag = await client.part("back/m", upload_id, 1, b"part", x_amz_checksum_sha256=digest)
    await client.complete("back/m", upload_id, {1: etag})
    answer = await client.ask("GET", LIST)
    said = {name: entry(answer, name) for name in ("back/k", "back/m", "back/plain")}
    assert (said["back/k"]["ChecksumAlgorithm"], said["back/k"]["ChecksumType"]) == ("CRC32", "FULL_OBJECT")
    assert (said["back/m"]["ChecksumAlgorithm"], said["back/m"]["ChecksumType"]) == ("SHA256", "COMPOSITE")
    assert "ChecksumAlgorithm" not in said["back/plain"]


@with_a_client()
async def test_the_owner_is_that_of_the_buckets_other_objects(client: Client) -> None:
    """Asked of the origin where the page has none of its; left out where the bucket is empty or nobody answers."""
    await client.learn()
    await client.ask("PUT", "back/k", b"body")
    query = f"{LIST}&prefix=back%2Fk&fetch-owner=true"
    assert entry(await client.ask("GET", query), "back/k")["Owner"] == "originorigin"
    asks_for_one = lambda call: ("max-keys", "1") in call.query  # noqa: E731
    client.origin.inject(asks_for_one, Unreachable(), times=None)
    assert "Owner" not in entry(await client.ask("GET", query), "back/k")


@with_a_client([BACK])
async def test_tokens_are_good_whatever_is_flushed(client: Client) -> None:
    """Also when nothing is pending any more, and where the slot is none of write-back's by then; others are refused."""
    await client.learn()
    for name in ("back/a", "back/b"):
        await client.ask("PUT", name, b"x")
    first = await client.ask("GET", f"{LIST}&max-keys=1")
    assert names(first) == ["back/a"]
    await client.flush()
    slots = Slots([slot_with(BACK, write="through")])
    services = dataclasses.replace(client.gateway.app.services, slots=slots)
    app = dataclasses.replace(client.gateway.app, services=services)
    second = await call(app, "GET", f"/bucket{LIST}&continuation-token={token_of(first)}")
    assert names(second) == ["back/b", "back/first"]
    unconcerned = await call(app, "GET", f"/bucket{LIST}")
    assert unconcerned.headers["x-forebay-cache"] == "forwarded"
    await client.ask("GET", f"{LIST}&continuation-token=other", status=400)


@with_a_client()
async def test_a_listing_of_other_prefixes_is_the_origins_own(client: Client) -> None:
    """Nothing can be pending there; with something pending under another slot's prefix it is merged all the same."""
    await client.learn()
    answer = await client.ask("GET", f"{LIST}&prefix=other%2F")
    assert answer.headers["x-forebay-cache"] == "forwarded"
    now = client.gateway.app.services.clock.now()
    expected = ExpectedVersion(known=False, asked_at=now)
    write = Write(WriteSpec(key("other/x"), {}, "gone"), expected, now, etag='"e"', acknowledged_at=now)
    await client.buffer.acknowledge(write)
    assert names(await client.ask("GET", f"{LIST}&prefix=other%2F")) == ["other/x"]


@with_a_client()
async def test_what_only_the_origin_can_list_waits_for_the_flush(client: Client) -> None:
    """ListObjectVersions, DeleteBucket, and a LIST with a header that it must judge."""
    await client.learn()
    async with client.flushing():
        for number, (method, query, headers, status) in enumerate(
            [
                ("GET", "?prefix=back%2F&versions=", {}, 501),
                ("GET", f"{LIST}&prefix=back%2F", {"x-amz-expected-bucket-owner": "me"}, 200),
                ("DELETE", "", {}, 409),
            ]
        ):
            await client.ask("PUT", f"back/{number}", b"x")
            await client.ask(method, query, headers=headers, status=status)
            assert client.pending(f"back/{number}") is None
            assert client.origin.data("bucket", f"back/{number}") == b"x"


@with_a_client()
async def test_a_rename_waits_for_the_flush(client: Client) -> None:
    """Its source may be pending, and is the origin's to find."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x")
    async with client.flushing():
        await client.ask("PUT", "back/b?renameObject=", headers={"x-amz-rename-source": "/bucket/back/a"})
    assert names(await client.ask("GET", LIST)) == ["back/b", "back/first"]


@with_a_client()
async def test_only_what_is_pending_under_the_prefix_is_waited_for(client: Client) -> None:
    """A conflict elsewhere holds nobody up; one under the prefix must be decided first."""
    await client.learn()
    await client.ask("PUT", "back/k", b"x")
    stored = client.pending("back/k")
    assert stored is not None
    await client.buffer.journal.change(lambda tx: tx.writes.keep(stored.id, "others have changed it"))
    await client.ask("GET", "?prefix=back%2Fl&versions=", status=501)
    for query, method in (("?prefix=back%2F&versions=", "GET"), ("", "DELETE")):
        assert b"OperationAborted" in (await client.ask(method, query, status=409)).body
    assert b"<Location" in (await client.ask("GET", "?location=")).body


def test_pending_and_frozen_objects_are_listed_together(tmp_path: Path) -> None:
    """Each slot's as they are: what a snapshot froze, what is pending, and the rest as the origin has it."""
    frozen = Slot("frozen", Prefix.parse("s3://bucket/data/"), "read-only", "snapshot", snapshot="v1")

    async def scenario(client: Client) -> None:
        await client.learn()
        for name in ("a", "data/1", "z"):
            client.origin.put("bucket", name, b"old")
        await freeze(client.gateway, "v1", "s3://bucket/data/")
        for name in ("data/2", "zz"):
            client.origin.put("bucket", name, b"later")
        await client.ask("PUT", "back/k", b"pending")
        expected = ["a", "back/first", "back/k", "data/1", "z", "zz"]
        listed, following = list[str](), ""
        while True:
            page = await client.ask("GET", f"{LIST}&max-keys=2{following}")
            listed += names(page)
            if xml(page.body).findtext("IsTruncated") == "false":
                break
            following = f"&continuation-token={token_of(page)}"
        assert listed == expected
        assert names(await client.ask("GET", "?delimiter=%2F")) == ["a", "back/", "data/", "z", "zz"]

    with_client(tmp_path, scenario, [BACK, frozen])


@with_a_client()
async def test_errors_of_the_origin_are_its_own(client: Client) -> None:
    """A bucket that is not there, and one that does not answer."""
    slots = Slots([EVERYWHERE])
    services = dataclasses.replace(client.gateway.app.services, slots=slots)
    app = dataclasses.replace(client.gateway.app, services=services)
    for query in (LIST, f"{LIST}&max-keys=0"):
        answer = await call(app, "GET", f"/missing{query}")
        assert (answer.status, b"NoSuchBucket" in answer.body) == (404, True)
    client.origin.inject(lambda _: True, Unreachable(), times=None)
    assert (await call(app, "GET", f"/bucket{LIST}")).status == 503

"""A copy of a pending object shares its bytes, and both end at the origin as the client was told."""

from __future__ import annotations

import asyncio
import os

import pytest

from gateway.s3.requests import Operation
from gateway.s3.xml import text_of
from tests.support.memory_origin.faults import Hold, on
from tests.support.write_back_gateway import PART_BYTES, Client, with_a_client

SOURCE = {"x-amz-copy-source": "/bucket/back/a"}
METADATA = {"x-amz-meta-step": "1", "Content-Type": "a/b"}


@with_a_client()
async def test_a_copy_is_there_at_once_and_at_the_origin_later(client: Client) -> None:
    """With the ETag that was answered and the source's metadata; the source may go meanwhile."""
    await client.learn()
    await client.ask("PUT", "back/a", b"content", METADATA)
    answer = await client.ask("PUT", "back/b", headers=SOURCE)
    assert answer.headers["x-forebay-cache"] == "absorbed"
    await client.ask("PUT", "back/a", b"overwritten")
    assert (await client.ask("GET", "back/b")).body == b"content"
    await client.flush()
    stored = client.origin.buckets["bucket"].object("back/b")
    assert client.origin.data("bucket", "back/b") == b"content"
    assert (stored.etag, stored.headers["x-amz-meta-step"]) == (text_of(answer.body, "ETag"), "1")
    assert client.origin.data("bucket", "back/a") == b"overwritten"
    assert client.origin.count(Operation.COPY_OBJECT) == 0


@with_a_client()
async def test_a_copy_whose_source_reaches_the_origin_meanwhile_is_made_there(client: Client) -> None:
    """2.4 Before, while and after it is flushed a copy sees it."""
    await client.learn()
    await client.ask("PUT", "back/a", b"content", METADATA)
    resume, reached = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(Operation.HEAD_OBJECT, key="back/b"), Hold(resume, reached))
    copying = asyncio.create_task(client.ask("PUT", "back/b", headers=SOURCE))
    await reached.wait()
    await client.flush()
    resume.set()
    assert (await copying).headers["x-forebay-cache"] == "forwarded"
    assert client.origin.data("bucket", "back/b") == b"content"
    assert (await client.ask("GET", "back/b")).body == b"content"


@with_a_client()
async def test_a_copy_of_an_upload_is_made_of_its_parts(client: Client) -> None:
    """No byte is staged again; what the origin has of the source's upload is not taken for the copy's."""
    upload_id = await client.create("back/a", METADATA)
    bodies = {number: os.urandom(PART_BYTES + number) for number in (1, 2)}
    etags = {number: await client.part("back/a", upload_id, number, body) for number, body in bodies.items()}
    await client.complete("back/a", upload_id, etags)
    answer = await client.ask("PUT", "back/b", headers=SOURCE)
    assert len(list(client.buffer.staging.names())) == 2
    await client.flush()
    bucket = client.origin.buckets["bucket"]
    assert bucket.object("back/b").etag == bucket.object("back/a").etag == text_of(answer.body, "ETag")
    assert client.origin.data("bucket", "back/b") == bodies[1] + bodies[2]
    assert not bucket.uploads


@with_a_client()
async def test_metadata_is_copied_or_replaced(client: Client) -> None:
    """As the directive says; a copy onto itself must change something."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x", METADATA)
    replaced = {**SOURCE, "x-amz-metadata-directive": "REPLACE", "x-amz-meta-step": "2"}
    await client.ask("PUT", "back/b", headers=replaced)
    assert (await client.ask("HEAD", "back/b")).headers["x-amz-meta-step"] == "2"
    assert (await client.ask("HEAD", "back/b")).headers["content-type"] == "binary/octet-stream"
    assert b"InvalidRequest" in (await client.ask("PUT", "back/a", headers=SOURCE, status=400)).body
    await client.ask("PUT", "back/a", headers={**replaced, "x-amz-meta-step": "3"})
    assert (await client.ask("HEAD", "back/a")).headers["x-amz-meta-step"] == "3"
    wrong = {**SOURCE, "x-amz-metadata-directive": "PERHAPS"}
    assert b"InvalidArgument" in (await client.ask("PUT", "back/b", headers=wrong, status=400)).body
    await client.flush()
    assert client.origin.data("bucket", "back/a") == client.origin.data("bucket", "back/b") == b"x"


@pytest.mark.parametrize("directive", ["COPY", "REPLACE"])
@with_a_client()
async def test_tags_are_copied_whatever_becomes_of_the_metadata(client: Client, directive: str) -> None:
    """They have a directive of their own."""
    upload_id = await client.create("back/a", {"x-amz-tagging": "a=1&b=2"})
    etags = {1: await client.part("back/a", upload_id, 1, b"x")}
    await client.complete("back/a", upload_id, etags)
    await client.ask("PUT", "back/b", headers={**SOURCE, "x-amz-metadata-directive": directive})
    copy = client.pending("back/b")
    assert copy is not None
    assert copy.spec.headers["x-amz-tagging"] == "a=1&b=2"
    assert (await client.ask("HEAD", "back/b")).headers["x-amz-tagging-count"] == "2"


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        ({"x-amz-copy-source-if-match": '"other"'}, 412),
        ({"x-amz-copy-source-if-none-match": "*"}, 412),
        ({"x-amz-copy-source-if-modified-since": "Thu, 01 Jan 2015 00:00:00 GMT"}, 200),
    ],
    ids=str,
)
@with_a_client()
async def test_conditions_on_the_source_are_judged_here(client: Client, condition: dict[str, str], status: int) -> None:
    """By the state that was acknowledged last."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x")
    await client.ask("PUT", "back/b", headers={**SOURCE, **condition}, status=status)
    assert (client.pending("back/b") is not None) == (status == 200)


@pytest.mark.parametrize("more", [{"x-amz-acl": "private"}, {"x-amz-tagging-directive": "REPLACE"}], ids=str)
@with_a_client()
async def test_what_the_origin_must_judge_waits_for_the_source(client: Client, more: dict[str, str]) -> None:
    """Rights and tags: the source is flushed, and the origin copies."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x")
    async with client.flushing():
        answer = await client.ask("PUT", "back/b", headers={**SOURCE, **more})
    assert answer.headers["x-forebay-cache"] == "forwarded"
    assert client.origin.data("bucket", "back/b") == b"x"


@with_a_client()
async def test_a_deleted_source_is_no_source(client: Client) -> None:
    """The tombstone is settled first: then the origin answers 404."""
    await client.learn()
    await client.ask("PUT", "back/a", b"x")
    async with client.flushing():
        await client.ask("DELETE", "back/a", status=204)
        await client.ask("PUT", "back/b", headers=SOURCE, status=404)

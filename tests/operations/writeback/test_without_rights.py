"""S3 answers 403 to a HEAD where nothing is, when the key pair may not list the bucket: nobody could tell what a flush
would overwrite."""

from __future__ import annotations

import pytest

from gateway.operations.payload import BUFFERED_SIZE_BYTES_MAX
from gateway.s3.requests import Operation
from tests.support.asgi import Answer as Got
from tests.support.memory_origin.faults import Answer, Call, on
from tests.support.write_back_gateway import PART_BYTES, Client, with_a_client

UNREADABLE = ("forwarded", "bucket-unreadable")


def how(answer: Got) -> tuple[str, str | None]:
    return answer.headers["x-forebay-cache"], answer.headers.get("x-forebay-not-absorbed")


def hide_what_is_absent(client: Client) -> None:
    """From now on, as without s3:ListBucket."""

    def is_absent(call: Call) -> bool:
        return call.operation is Operation.HEAD_OBJECT and call.key not in client.origin.buckets["bucket"].objects

    client.origin.inject(is_absent, Answer(403, "AccessDenied"), times=None)


@pytest.mark.parametrize("first", ["PUT", "POST"])
@with_a_client()
async def test_an_object_that_is_there_does_not_tell_that_the_bucket_may_be_listed(client: Client, first: str) -> None:
    """4.7 The first write to the bucket replaces an object. Those of new keys go through."""
    client.origin.put("bucket", "back/old", b"old")
    hide_what_is_absent(client)
    await client.ask(first, "back/old" if first == "PUT" else "back/old?uploads")
    for name in ("new", "newer"):
        answer = await client.ask("PUT", f"back/{name}", b"new")
        assert answer.headers["x-forebay-cache"] == "forwarded"
        assert client.origin.data("bucket", f"back/{name}") == b"new"
    assert how(answer) == UNREADABLE


@pytest.mark.parametrize("size_bytes", [0, 5, BUFFERED_SIZE_BYTES_MAX + 1], ids=["empty", "whole", "streamed"])
@with_a_client()
async def test_a_put_goes_through_whose_place_the_gateway_may_not_look_at(client: Client, size_bytes: int) -> None:
    """5.6 The right was withdrawn since the bucket became known. The body has come already: none stays here."""
    await client.learn()
    hide_what_is_absent(client)
    body = b"x" * size_bytes
    sent = {"x-amz-meta-a": "b", "x-amz-checksum-crc32": CRC32[size_bytes]} if size_bytes in CRC32 else {}
    for name in ("back/k", "back/l"):
        assert how(await client.ask("PUT", name, body, sent)) == UNREADABLE
        assert client.origin.data("bucket", name) == body
        assert client.origin.buckets["bucket"].objects[name].headers.get("x-amz-meta-a") == sent.get("x-amz-meta-a")
    assert client.pending("back/k") is None
    assert list(client.buffer.staging.names()) == []


CRC32 = {0: "AAAAAA==", 5: "QtHneA=="}


@with_a_client()
async def test_a_copy_of_what_is_pending_is_left_to_the_origin(client: Client) -> None:
    """4.7 When that has its source."""
    await client.learn()
    await client.ask("PUT", "back/source", b"pending")
    hide_what_is_absent(client)
    async with client.flushing():
        answer = await client.ask("PUT", "back/copy", headers={"x-amz-copy-source": "/bucket/back/source"})
    assert how(answer) == UNREADABLE
    assert client.origin.data("bucket", "back/copy") == b"pending"


@with_a_client()
async def test_a_complete_is_left_to_the_origin(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """4.7 What lay under the key when the upload began is too old to be believed, and the right was withdrawn since."""
    monkeypatch.setattr("gateway.operations.writeback.put_object.LAST_OWN_WRITE_KEPT_SECONDS", 0.0)
    await client.learn()
    upload_id = await client.create("back/m")
    etags = {1: await client.part("back/m", upload_id, 1, b"x" * PART_BYTES)}
    hide_what_is_absent(client)
    assert how(await client.complete("back/m", upload_id, etags)) == UNREADABLE
    assert client.origin.data("bucket", "back/m") == b"x" * PART_BYTES
    await client.flush()


@pytest.mark.parametrize(("status", "of_this_key"), [(429, "absorbed"), (400, "forwarded")])
@with_a_client()
async def test_other_refusals_tell_nothing_of_the_bucket(client: Client, status: int, of_this_key: str) -> None:
    """The origin has too much to do, or what lies there has a customer key: the next write is absorbed."""
    await client.learn()
    client.origin.inject(on(Operation.HEAD_OBJECT, key="back/k"), Answer(status, "InvalidRequest"), times=None)
    assert how(await client.ask("PUT", "back/k", b"x"))[0] == of_this_key
    assert how(await client.ask("PUT", "back/l", b"x")) == ("absorbed", None)

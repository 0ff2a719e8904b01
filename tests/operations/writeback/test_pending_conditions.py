"""A condition that what is pending fails is judged here: the origin, which does not have it yet, could not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from tests.support.asgi import Answer as Got
from tests.support.asgi import call
from tests.support.memory_origin.faults import Unreachable
from tests.support.write_back_gateway import PART_BYTES, Client, eventually, with_a_client

IF_ABSENT = {"If-None-Match": "*"}
OTHER = {"If-Match": '"0123456789abcdef0123456789abcdef"'}

Write = Callable[[Client, Mapping[str, str], int], Awaitable[Got]]


async def put(client: Client, headers: Mapping[str, str], status: int) -> Got:
    return await client.ask("PUT", "back/k", b"new", headers, status)


async def copy(client: Client, headers: Mapping[str, str], status: int) -> Got:
    await client.ask("PUT", "back/source", b"new")
    source = {"x-amz-copy-source": "/bucket/back/source"}
    return await client.ask("PUT", "back/k", headers={**source, **headers}, status=status)


async def complete(client: Client, headers: Mapping[str, str], status: int) -> Got:
    upload_id = await client.create("back/k")
    etags = {1: await client.part("back/k", upload_id, 1, b"new")}
    answer = await client.complete("back/k", upload_id, etags, status, headers)
    assert (client.buffer.look(lambda tx: tx.uploads.upload(upload_id)) is not None) == (status != 200)
    return answer


WRITES = pytest.mark.parametrize("write", [put, copy, complete])


def away(client: Client) -> None:
    client.origin.inject(lambda _: True, Unreachable(), times=None)


@WRITES
@pytest.mark.parametrize("condition", [IF_ABSENT, OTHER], ids=["if-none-match", "if-match"])
@with_a_client()
async def test_what_is_pending_fails_it_at_once(client: Client, write: Write, condition: Mapping[str, str]) -> None:
    """412, with the origin away, and nothing is changed."""
    await client.learn()
    await client.ask("PUT", "back/k", b"pending")
    away(client)
    refused = await write(client, condition, 412)
    name = next(iter(condition))
    assert b"<Code>PreconditionFailed</Code>" in refused.body
    assert f"<Condition>{name}</Condition>".encode() in refused.body
    assert (await client.ask("GET", "back/k")).body == b"pending"


@WRITES
@with_a_client()
async def test_what_is_deleted_is_not_there_to_match(client: Client, write: Write) -> None:
    """404 NoSuchKey as S3 says it, while the origin, which is away, has the object still."""
    await client.learn()
    there = (await client.ask("PUT", "back/k", b"there")).headers["etag"]
    await client.flush()
    await client.ask("PUT", "back/k", b"pending")
    away(client)
    deleting = asyncio.create_task(call(client.gateway.app, "DELETE", "/bucket/back/k"))
    await eventually(lambda: (last := client.pending("back/k")) is not None and last.deleted)
    refused = await write(client, {"If-Match": there}, 404)
    assert b"<Code>NoSuchKey</Code>" in refused.body
    deleting.cancel()
    await asyncio.gather(deleting, return_exceptions=True)


@WRITES
@with_a_client()
async def test_what_is_pending_does_not_fail_is_the_origins_to_judge(client: Client, write: Write) -> None:
    """Once it has what is pending: others may have written the key."""
    await client.learn()
    etag = (await client.ask("PUT", "back/k", b"pending")).headers["etag"]
    async with client.flushing():
        answer = await write(client, {"If-Match": etag}, 200)
        assert answer.headers["x-forebay-not-absorbed"] == "condition"
        assert client.origin.data("bucket", "back/k") == b"new"
        refused = await write(client, IF_ABSENT, 412)
    assert refused.headers["x-forebay-not-absorbed"] == "condition"


@with_a_client()
async def test_no_byte_of_the_body_is_read(client: Client) -> None:
    """So `100 Continue` is not said, either, and who waits for it need not send."""
    await client.learn()
    await client.ask("PUT", "back/k", b"pending")

    async def asked() -> None:
        raise AssertionError("the body was asked for")

    body = bytes(PART_BYTES)
    refused = await call(client.gateway.app, "PUT", "/bucket/back/k", IF_ABSENT, body, before_piece=asked)
    assert (refused.status, refused.headers["connection"]) == (412, "close")


@with_a_client()
async def test_a_named_owner_is_the_origins_to_judge_first(client: Client) -> None:
    """Whoever names another one is not told what is there."""
    await client.learn()
    await client.ask("PUT", "back/k", b"pending")
    headers = {**IF_ABSENT, "x-amz-expected-bucket-owner": "111122223333"}
    async with client.flushing():
        refused = await client.ask("PUT", "back/k", b"new", headers, 412)
    assert refused.headers["x-forebay-not-absorbed"] == "condition"
    assert client.pending("back/k") is None


@with_a_client()
async def test_a_complete_that_is_repeated_is_answered_as_the_first(client: Client) -> None:
    """What is pending by now was written after it."""
    await client.learn()
    upload_id = await client.create("back/k")
    etags = {1: await client.part("back/k", upload_id, 1, b"new")}
    first = await client.complete("back/k", upload_id, etags, headers=IF_ABSENT)
    await client.ask("PUT", "back/k", b"pending")
    away(client)
    again = await client.complete("back/k", upload_id, etags, headers=IF_ABSENT)
    assert again.body == first.body

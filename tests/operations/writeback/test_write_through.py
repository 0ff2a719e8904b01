"""What a write that went through has put under its key is known: a later write expects to find it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from gateway.origin.client import OriginRequest
from gateway.s3.requests import Operation
from gateway.s3.xml import RESULT_SIZE_BYTES_MAX
from gateway.writeback.journal.buckets import LastOwnWrite
from tests.support.asgi import call
from tests.support.memory_origin.faults import AlterBody, AlterHeaders, CutBody, Hold, Unreachable, on
from tests.support.write_back_gateway import PART_BYTES, Client, with_a_client
from tests.support.writeback import key

AT = key("back/k")
COPY, COMPLETE = Operation.COPY_OBJECT, Operation.COMPLETE_MULTIPART_UPLOAD
SOURCE = {"x-amz-copy-source": "/bucket/source"}

Write = Callable[[Client], Awaitable[None]]


async def begun_at_origin(client: Client) -> str:
    """An upload of the origin's own: its id."""
    async with await client.origin.send(OriginRequest("POST", "bucket", AT.key, [("uploads", None)])):
        return next(reversed(client.origin.buckets["bucket"].uploads))


async def copied(client: Client) -> None:
    client.origin.put("bucket", "source", b"copied")
    answer = await client.ask("PUT", AT.key, headers=SOURCE)
    assert b"<ETag>" in answer.body


async def completed(client: Client) -> None:
    upload_id = await begun_at_origin(client)
    answer = await client.complete(AT.key, upload_id, {1: await client.part(AT.key, upload_id, 1, b"completed")})
    assert (answer.headers["x-forebay-cache"], b"<ETag>" in answer.body) == ("forwarded", True)


async def completed_under_a_condition(client: Client) -> None:
    upload_id = await client.create(AT.key)
    etags = {1: await client.part(AT.key, upload_id, 1, b"completed")}
    await client.complete(AT.key, upload_id, etags, headers={"If-None-Match": "*"})


WRITES = pytest.mark.parametrize("write", [copied, completed, completed_under_a_condition])
WITH_DOCUMENT = pytest.mark.parametrize(("operation", "write"), [(COPY, copied), (COMPLETE, completed)])


def own(client: Client) -> LastOwnWrite | None:
    return client.buffer.look(lambda tx: tx.buckets.last_own_write(AT))


def at_origin(client: Client) -> str:
    return client.origin.buckets["bucket"].object(AT.key).etag


async def absorbed_while_away(client: Client) -> None:
    """A write whose base the origin could not tell."""
    away = client.origin.inject(lambda _: True, Unreachable(), times=None)
    answer = await client.ask("PUT", AT.key, b"next")
    assert answer.headers["x-forebay-cache"] == "absorbed"
    away.times = 0


@WRITES
@with_a_client()
async def test_the_next_write_is_no_conflict_though_the_origin_was_away(client: Client, write: Write) -> None:
    """What it finds there was made seconds before, by this gateway and nobody else."""
    await client.learn()
    await write(client)
    await absorbed_while_away(client)
    await client.flush()
    assert client.origin.data("bucket", AT.key) == b"next"


@WRITES
@pytest.mark.parametrize("late", [False, True])
@with_a_client()
async def test_somebody_elses_write_behind_it_is_a_conflict(client: Client, write: Write, *, late: bool) -> None:
    """Before the write that was absorbed, and after it."""
    await client.learn()
    await write(client)
    if not late:
        client.origin.put("bucket", AT.key, b"theirs")
    await absorbed_while_away(client)
    if late:
        client.origin.put("bucket", AT.key, b"theirs")
    await client.flush_until_conflict(AT.key)
    assert client.origin.data("bucket", AT.key) == b"theirs"


@WITH_DOCUMENT
@pytest.mark.parametrize(
    "change",
    [
        lambda body: b'<?xml version="1.0" encoding="UTF-8"?>' + b" \n" * 9 + body.partition(b"?>")[2],
        lambda body: b" \r\n" * 9 + body,
        lambda body: body.replace(b"&quot;", b""),
    ],
    ids=["after white space behind the prolog", "after white space", "without quotes"],
)
@pytest.mark.parametrize("with_length", [True, False])
@with_a_client()
async def test_however_the_document_comes(
    client: Client, operation: Operation, write: Write, change: Callable[[bytes], bytes], *, with_length: bool
) -> None:
    """White space that keeps the client waiting is passed on; the ETag is HEAD's."""
    if operation is COMPLETE and with_length:
        change = bytes.strip  # a short answer is read at once
    await client.learn()
    client.origin.inject(on(operation), AlterBody(change))
    if not with_length:
        client.origin.inject(on(operation), AlterHeaders({"content-length": None}))
    await write(client)
    found = own(client)
    assert found is not None
    assert (found.known, found.etag) == (True, at_origin(client))


@WITH_DOCUMENT
@pytest.mark.parametrize("with_length", [True, False])
@with_a_client()
async def test_an_error_behind_a_200_says_nothing_of_the_key(
    client: Client, operation: Operation, write: Write, *, with_length: bool
) -> None:
    """It may name an ETag, too, as InvalidPart does."""
    error = b'<Error><Code>InternalError</Code><ETag>"00000000000000000000000000000000"</ETag></Error>'
    await client.learn()
    client.origin.inject(on(operation), AlterBody(lambda _: error))
    if not with_length:
        client.origin.inject(on(operation), AlterHeaders({"content-length": None}))
    await write(client)
    found = own(client)
    assert found is not None
    assert (found.known, found.etag) == (False, None)


@with_a_client()
async def test_an_answer_that_is_no_result_is_none(client: Client) -> None:
    """No more of it is kept than a result may take: what the origin has done nobody knows."""
    client.origin.put("bucket", "source", b"copied")
    client.origin.inject(on(COPY), AlterBody(lambda _: b"x" * (3 * RESULT_SIZE_BYTES_MAX)))
    await client.ask("PUT", AT.key, headers=SOURCE, status=503)
    found = own(client)
    assert found is not None
    assert not found.known


@WITH_DOCUMENT
@with_a_client()
async def test_a_document_that_breaks_off_leaves_the_key_unknown(
    client: Client, operation: Operation, write: Write
) -> None:
    """The origin is asked, then, and what lies there is expected."""
    await client.learn()
    upload_id = await client.create(AT.key)
    etags = {1: await client.part(AT.key, upload_id, 1, b"last")}
    client.origin.inject(on(operation), AlterHeaders({"content-length": None}))
    client.origin.inject(on(operation), CutBody(50))
    with pytest.raises(AssertionError):
        await write(client)
    found = own(client)
    assert found is not None
    assert not found.known
    await client.complete(AT.key, upload_id, etags)
    await client.flush()
    assert client.origin.data("bucket", AT.key) == b"last"


@pytest.mark.parametrize(("headers", "status"), [({}, 503), ({"If-None-Match": "*"}, 424)])
@with_a_client()
async def test_a_result_that_breaks_off_is_repeated_where_that_does_no_harm(
    client: Client, headers: Mapping[str, str], status: int
) -> None:
    """A second copy with the condition would be refused because of the first: 424, and no SDK repeats it."""
    await client.learn()
    client.origin.put("bucket", "source", b"copied")
    client.origin.inject(on(COPY), AlterHeaders({"content-length": None}))
    client.origin.inject(on(COPY), CutBody(50))
    await client.ask("PUT", "back/new", headers={**SOURCE, **headers}, status=status)


@with_a_client()
async def test_parts_of_the_origins_own_uploads_change_nothing(client: Client) -> None:
    """What is known of the key stays known, whatever is uploaded, copied and given up meanwhile."""
    await client.learn()
    await copied(client)
    before = own(client)
    upload_id = await begun_at_origin(client)
    await client.part(AT.key, upload_id, 1, b"part")
    await client.ask("PUT", f"{AT.key}?partNumber=2&uploadId={upload_id}", headers=SOURCE)
    await client.ask("DELETE", f"{AT.key}?uploadId={upload_id}", status=204)
    assert own(client) == before


@with_a_client()
async def test_what_a_complete_makes_is_of_the_time_when_it_is_made(client: Client) -> None:
    """An upload that is begun while the origin carries out a conditional Complete expects what that makes."""
    await client.learn()
    first = await client.create(AT.key)
    etags = {1: await client.part(AT.key, first, 1, b"x" * PART_BYTES)}
    reached, resume = asyncio.Event(), asyncio.Event()
    client.origin.inject(on(COMPLETE), Hold(resume, reached))
    completing = asyncio.create_task(client.complete(AT.key, first, etags, headers={"If-None-Match": "*"}))
    await reached.wait()
    second = await client.create(AT.key)
    resume.set()
    await completing
    await client.complete(AT.key, second, {1: await client.part(AT.key, second, 1, b"last")})
    await client.flush()
    answer = await call(client.gateway.app, "GET", "/bucket/back/k")
    assert answer.body == client.origin.data("bucket", AT.key) == b"last"


@with_a_client()
async def test_a_flush_knows_the_origins_etag_with_and_without_quotes(client: Client) -> None:
    """What Complete answers without them HEAD shows with them: the next write expects that."""
    await client.learn()
    upload_id = await client.create(AT.key)
    await client.complete(AT.key, upload_id, {1: await client.part(AT.key, upload_id, 1, b"first")})
    client.origin.inject(on(COMPLETE), AlterBody(lambda body: body.replace(b"&quot;", b"")))
    await client.flush()
    found = own(client)
    assert found is not None
    assert found.etag == at_origin(client)

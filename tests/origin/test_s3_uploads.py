"""Uploads through `S3Origin` that fail store nothing."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest

from gateway.core.errors import OriginBusy, S3Error
from gateway.origin.client import ACCOUNT, StreamedBody
from gateway.origin.request_body import EXPECT_CONTINUE_MIN_BYTES
from gateway.s3.requests import Operation
from tests.origin.clients import MEBIBYTE, Client, pieces, playing
from tests.origin.origins import ask
from tests.support.memory_origin.faults import Answer, on
from tests.support.strict_origin import StrictOrigin

GET = Operation.GET_OBJECT
PUT = Operation.PUT_OBJECT


FAILURE = S3Error("BadDigest", "the client's bytes are wrong", 400)


@pytest.mark.parametrize(
    ("chunks", "length"),
    [((b"abc",), 6), ((b"abc", b"def"), 6), ((b"abc",), None), ((b"x" * MEBIBYTE,), 2 * MEBIBYTE)],
    ids=["in the middle", "at the very end", "unknown length", "large"],
)
async def test_a_source_that_fails_stores_nothing(
    strict: StrictOrigin, chunks: tuple[bytes, ...], length: int | None
) -> None:
    """The source's own error reaches the caller, even after its last byte; the origin never sees a whole request."""
    strict.accepts_unknown_length = True
    async with playing(strict) as client:
        body = StreamedBody(pieces(*chunks, failure=FAILURE), length)
        with pytest.raises(S3Error) as caught:
            await ask(client.origin, "PUT", "bucket", "new", body=body)
        assert caught.value is FAILURE
        assert (await ask(client.origin, "GET", "bucket", "key")).status == 200
    assert "new" not in strict.model.buckets["bucket"].objects


async def test_a_source_that_fails_is_told_to_the_caller_alone(strict: StrictOrigin) -> None:
    """Clients leave in the midst of uploads all the time: asyncio logs nothing of it."""
    logged: list[str] = []

    async def send(client: Client) -> None:
        body = StreamedBody(pieces(b"abc", failure=S3Error("BadDigest", "wrong", 400)), 6)
        with suppress(S3Error):
            await ask(client.origin, "PUT", "bucket", "new", body=body)

    async with playing(strict) as client:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context["message"]))
        await send(client)
        gc.collect()
    assert logged == []


async def test_a_failing_source_with_a_trailer_stores_nothing(strict: StrictOrigin) -> None:
    """The same with the checksum behind the body."""
    async with playing(strict) as client:
        chunks = pieces(b"abc", failure=FAILURE)
        body = StreamedBody(chunks, 3, trailer_name="x-amz-checksum-crc32", trailer_value=lambda: "AAAAAA==")
        with pytest.raises(S3Error, match="BadDigest"):
            await ask(client.origin, "PUT", "bucket", "new", body=body)
    assert "new" not in strict.model.buckets["bucket"].objects


@pytest.mark.parametrize("length", [2, 4])
async def test_a_body_of_the_wrong_length_stores_nothing(strict: StrictOrigin, length: int) -> None:
    """Neither cut to its declared length nor left hanging: IncompleteBody."""
    async with playing(strict) as client:
        with pytest.raises(S3Error, match="IncompleteBody"):
            await ask(client.origin, "PUT", "bucket", "new", body=StreamedBody(pieces(b"ab", b"c"), length))
    assert "new" not in strict.model.buckets["bucket"].objects


@pytest.mark.parametrize("size", [200_000, 4 * MEBIBYTE], ids=["without 100", "waiting for 100"])
async def test_an_early_refusal_is_returned_and_the_source_left_alone(strict: StrictOrigin, size: int) -> None:
    """The origin answers 403 before the body is over: that is the answer, and nobody reads the source any more."""
    strict.model.inject(on(PUT), Answer(403, "AccessDenied"))
    asked = asyncio.Event()
    never = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        yield b"x" * 100_000
        asked.set()
        await never.wait()

    async with playing(strict) as client:
        source = endless()
        answer = await ask(client.origin, "PUT", "bucket", "new", body=StreamedBody(source, size))
        assert answer.status == 403
        assert b"AccessDenied" in answer.body
        await source.aclose()  # RuntimeError if it were still running
        assert asked.is_set() == (size < EXPECT_CONTINUE_MIN_BYTES)
    assert "new" not in strict.model.buckets["bucket"].objects


async def test_a_cancelled_upload_stores_nothing(strict: StrictOrigin) -> None:
    """A caller who leaves takes the upload along."""
    async with playing(strict) as client:
        waiting, never = asyncio.Event(), asyncio.Event()

        async def source() -> AsyncGenerator[bytes, None]:
            yield b"x" * 1000
            waiting.set()
            await never.wait()

        chunks = source()
        sending = asyncio.create_task(ask(client.origin, "PUT", "bucket", "new", body=StreamedBody(chunks, 2000)))
        await waiting.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await chunks.aclose()
    assert "new" not in strict.model.buckets["bucket"].objects


async def test_slow_uploads_leave_connections_to_readers(strict: StrictOrigin) -> None:
    """However many clients upload, and however slowly: a quarter of the connections is not for them."""
    async with playing(strict, max_connections=4) as client:
        begun, resume = asyncio.Semaphore(0), asyncio.Event()

        async def slow() -> AsyncGenerator[bytes, None]:
            begun.release()
            yield b"a"
            await resume.wait()
            yield b"b"

        uploads = [
            asyncio.create_task(ask(client.origin, "PUT", "bucket", f"slow-{number}", body=StreamedBody(slow(), 2)))
            for number in range(6)
        ]
        async with asyncio.timeout(20):
            for _ in range(3):
                await begun.acquire()
            assert (await ask(client.origin, "GET", "bucket", "key")).status == 200
        resume.set()
        assert [(await upload).status for upload in uploads] == [200] * 6


async def test_trickling_uploads_of_one_hold_up_nobody_else(strict: StrictOrigin) -> None:
    """Four connections: who uploads slowly gets two of them, another account's PUT and GET are served at once, and the
    next slow upload is told to slow down."""
    async with playing(strict, max_connections=4, connection_wait_seconds=0.5) as client:
        begun, resume = asyncio.Semaphore(0), asyncio.Event()

        async def slow() -> AsyncGenerator[bytes, None]:
            begun.release()
            yield b"a"
            await resume.wait()
            yield b"b"

        ACCOUNT.set("greedy")
        uploads = [
            asyncio.create_task(ask(client.origin, "PUT", "bucket", f"slow-{number}", body=StreamedBody(slow(), 2)))
            for number in range(3)
        ]
        for _ in range(3):
            await begun.acquire()
        ACCOUNT.set("other")
        async with asyncio.timeout(2):
            assert (await ask(client.origin, "PUT", "bucket", "new", body=StreamedBody(pieces(b"a"), 1))).status == 200
            assert (await ask(client.origin, "GET", "bucket", "key")).status == 200
        await asyncio.wait(uploads, return_when=asyncio.FIRST_COMPLETED)
        [refused] = [upload for upload in uploads if upload.done()]
        assert isinstance(refused.exception(), OriginBusy)
        resume.set()
        await asyncio.wait(uploads)
        assert [upload.result().status for upload in uploads if upload is not refused] == [200, 200]


async def test_an_upload_whose_bytes_do_not_come_holds_no_connection(strict: StrictOrigin) -> None:
    """It takes its connection with its first bytes."""
    async with playing(strict, max_connections=1) as client:
        never = asyncio.Event()

        async def idle() -> AsyncGenerator[bytes, None]:
            await never.wait()
            yield b"a"

        sending = asyncio.create_task(ask(client.origin, "PUT", "bucket", "new", body=StreamedBody(idle(), 1)))
        assert (await ask(client.origin, "GET", "bucket", "key")).status == 200
        assert client.origin._client._pool._shares.granted == 0
        sending.cancel()
        await asyncio.wait([sending])

"""What `S3Origin` sends and takes, byte for byte."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator

import pytest

from gateway.core.errors import OriginBodyError, OriginUnreachable, S3Error
from gateway.origin.client import KeyPair, OriginRequest, OriginSettings, StreamedBody
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials
from gateway.s3.requests import Operation
from tests.origin.clients import MEBIBYTE, playing
from tests.origin.clocks import JumpingClock
from tests.origin.origins import STRICT_PAIR, ask
from tests.support.memory_origin.faults import AlterBody, Answer, CutBody, Unreachable, on
from tests.support.strict_origin import SECRET_ACCESS_KEY, StrictOrigin

GET = Operation.GET_OBJECT
PUT = Operation.PUT_OBJECT


@pytest.mark.parametrize("reset", [False, True])
async def test_a_short_body_is_an_error(strict: StrictOrigin, reset: bool) -> None:
    """Whether the connection was closed or reset: never fewer bytes than were announced."""
    strict.model.put("bucket", "big", bytes(3 * MEBIBYTE))
    strict.model.inject(on(GET), CutBody(MEBIBYTE, reset=reset))
    async with (
        playing(strict) as client,
        await client.origin.send(OriginRequest("GET", "bucket", "big")) as response,
    ):
        assert response.status == 200
        with pytest.raises(OriginBodyError):
            async for _ in response.stream():
                pass


async def test_an_answer_longer_than_the_limit_is_an_error(strict: StrictOrigin) -> None:
    """Whoever reads a document into memory says how much that may be."""
    async with (
        playing(strict) as client,
        await client.origin.send(OriginRequest("GET", "bucket", "key")) as response,
    ):
        with pytest.raises(OriginBodyError):
            await response.read(9)


async def test_a_large_error_document_is_passed_on_whole(strict: StrictOrigin) -> None:
    """Looking for the error code takes nothing away."""
    document = b"<Error><Code>Odd</Code>" + b"x" * MEBIBYTE + b"</Error>"
    strict.model.inject(on(GET), Answer(400, body=document))
    async with playing(strict) as client:
        assert (await ask(client.origin, "GET", "bucket", "key")).body == document


async def test_wrong_bytes_are_passed_on(strict: StrictOrigin) -> None:
    """The client of the origin judges no bytes: that is for those who know what they should be."""
    strict.model.inject(on(GET), AlterBody(lambda body: body[::-1]))
    async with playing(strict) as client:
        assert (await ask(client.origin, "GET", "bucket", "key")).body == b"9876543210"


async def test_connections_are_used_again_only_after_whole_answers(strict: StrictOrigin) -> None:
    """Ten requests take one connection, errors included; a body left unread costs its connection."""
    strict.model.put("bucket", "big", bytes(4 * MEBIBYTE))
    async with playing(strict) as client:
        for key in ("key", "none") * 5:
            await ask(client.origin, "GET", "bucket", key)
        assert len(strict.clients) == 1
        async with await client.origin.send(OriginRequest("GET", "bucket", "big")):
            pass
        await ask(client.origin, "GET", "bucket", "key")
        assert len(strict.clients) == 2


async def test_requests_carry_nothing_but_what_was_given(strict: StrictOrigin) -> None:
    """No headers of the HTTP library's own; no framing where there is no body; the hop header names this gateway."""
    async with playing(strict) as client:
        await ask(client.origin, "GET", "bucket", "key", headers={"x-forebay-hop": "other", "range": "bytes=0-1"})
    headers = {name.decode(): value.decode() for name, value in strict.request_headers[0]}
    assert headers.keys() == {
        "host",
        "x-forebay-hop",
        "range",
        "x-amz-date",
        "x-amz-content-sha256",
        "authorization",
    }
    assert headers["x-forebay-hop"] == "other, gateway-1"


@pytest.mark.parametrize("text", ["naïve", "voilà", "日本", "a  b", "tab\there"])
async def test_header_values_pass_byte_for_byte(strict: StrictOrigin, text: str) -> None:
    """A value is bytes: UTF-8 arrives as it was sent, and the signature covers it."""
    value = text.encode().decode("latin-1")
    async with playing(strict) as client:
        put = await ask(client.origin, "PUT", "bucket", "new", headers={"x-amz-meta-a": value}, body=b"x")
        assert put.status == 200, put.body
        assert (await ask(client.origin, "HEAD", "bucket", "new")).headers["x-amz-meta-a"] == value


@pytest.mark.parametrize("value", ["\xff", "a\r\nx-evil: 1", "\x00"])
async def test_header_values_that_cannot_be_sent_are_refused(strict: StrictOrigin, value: str) -> None:
    """Bytes that are no UTF-8, and control characters, are the client's error; nothing is sent."""
    async with playing(strict) as client:
        with pytest.raises(S3Error, match="InvalidArgument"):
            await ask(client.origin, "PUT", "bucket", "new", headers={"x-amz-meta-a": value}, body=b"x")
    assert strict.request_lines == []


async def test_a_proxy_gets_the_whole_address(strict: StrictOrigin) -> None:
    """Over a proxy the request line is absolute and the signature still covers the origin's host."""
    async with playing(strict, endpoint_url="http://origin.invalid", proxy=strict.endpoint_url) as client:
        answer = await ask(client.origin, "GET", "bucket", "key")
        assert answer.body == b"0123456789"
    assert (b"host", b"origin.invalid") in strict.request_headers[0]


async def test_a_wrong_secret_is_refused_by_the_origin(strict: StrictOrigin) -> None:
    """The strict origin believes no signature; its refusal is the answer."""
    settings = OriginSettings(endpoint_url=strict.endpoint_url)
    pair = KeyPair(STRICT_PAIR.access_key_id, "wrong")
    origin = S3Origin(settings, StaticCredentials(pair), JumpingClock(), instance_id="x")
    try:
        assert b"SignatureDoesNotMatch" in (await ask(origin, "GET", "bucket", "key")).body
    finally:
        await origin.aclose()


async def test_secrets_stay_out_of_logs_and_errors(strict: StrictOrigin, caplog: pytest.LogCaptureFixture) -> None:
    """Not in a repr, not in an error, not in a log line of any library, whatever the level."""
    strict.model.inject(on(GET), Unreachable(), times=None)
    texts = [repr(STRICT_PAIR), repr(OriginSettings(proxy="http://user:pass@proxy"))]

    with caplog.at_level(logging.DEBUG):
        async with playing(strict) as client:
            texts.append(repr(client.origin))
            with pytest.raises(OriginUnreachable) as caught:
                await ask(client.origin, "GET", "bucket", "key")
            texts.append(repr(caught.value) + repr(caught.value.__cause__))
    texts.append(caplog.text)
    assert SECRET_ACCESS_KEY not in "".join(texts)
    assert "pass@" not in "".join(texts)


async def test_the_pool_bounds_connections(strict: StrictOrigin) -> None:
    """Twenty requests at once go over at most three connections."""
    async with playing(strict, max_connections=3) as client:
        await asyncio.gather(*(ask(client.origin, "GET", "bucket", "key") for _ in range(20)))
        assert len(strict.clients) <= 3


async def test_a_view_of_a_reused_buffer_is_not_sent_twice(strict: StrictOrigin) -> None:
    """A source may fill its buffer anew as soon as it is asked for the next piece, however slow the origin is."""
    strict.bytes_per_second = 40 * MEBIBYTE
    data = hashlib.shake_128(b"x").digest(4 * MEBIBYTE)

    async def views() -> AsyncIterator[bytes | memoryview]:
        buffer = bytearray(MEBIBYTE)
        for offset in range(0, len(data), MEBIBYTE):
            buffer[:] = data[offset : offset + MEBIBYTE]
            yield memoryview(buffer)

    try:
        async with playing(strict) as client:
            body = StreamedBody(views(), len(data), hashlib.sha256(data).hexdigest())
            assert (await ask(client.origin, "PUT", "bucket", "new", body=body)).status == 200
    finally:
        strict.bytes_per_second = None

"""`S3Origin` against a strict origin that misbehaves: what is tried again, what is not, what the wire looks like."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator

import pytest

from gateway.errors import OriginBodyError, OriginUnreachable, S3Error
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.origin.credentials import KeyPair, StaticCredentials
from gateway.origin.memory_faults import AlterBody, Answer, CutBody, Unreachable, on
from gateway.origin.s3 import Attempt, S3Origin
from gateway.origin.settings import OriginSettings
from gateway.s3.requests import Operation
from tests.origin.clocks import JumpingClock
from tests.origin.origins import STRICT_PAIR, ask
from tests.support.strict_origin import SECRET_ACCESS_KEY, StrictOrigin

MEBIBYTE = 1024 * 1024
GET = Operation.GET_OBJECT
PUT = Operation.PUT_OBJECT


@pytest.fixture(scope="module")
def server() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        yield origin


@pytest.fixture
def strict(server: StrictOrigin) -> Iterator[StrictOrigin]:
    """The strict origin with one object, nothing recorded, no faults."""
    server.model.buckets.clear()
    server.model.put("bucket", "key", b"0123456789")
    server.model.calls.clear()
    server.model.faults.clear()
    server.request_lines.clear()
    server.request_headers.clear()
    server.clients.clear()
    yield server
    server.region = "us-east-1"
    server.accepts_unknown_length = False


class Client:
    """An `S3Origin` with a clock that never waits."""

    def __init__(self, strict: StrictOrigin, **settings: object) -> None:
        self.clock = JumpingClock()
        self.attempts: list[Attempt] = []
        given: dict[str, object] = {"endpoint_url": strict.endpoint_url, **settings}
        self.origin = S3Origin(
            OriginSettings(**given),  # type: ignore[arg-type]
            StaticCredentials(STRICT_PAIR),
            self.clock,
            instance_id="gateway-1",
            on_attempt=self.attempts.append,
        )


def play(strict: StrictOrigin, scenario: Callable[[Client], Awaitable[None]], **settings: object) -> None:
    """Run a scenario with a client of its own; when this returns, the origin is done with all its requests."""

    async def main() -> None:
        client = Client(strict, **settings)
        try:
            await scenario(client)
        finally:
            await client.origin.aclose()

    asyncio.run(main())
    strict.settle()


async def pieces(*chunks: bytes, failure: Exception | None = None) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if failure is not None:
        raise failure


# --- what is tried again


def test_overload_is_tried_again_after_a_growing_pause(strict: StrictOrigin) -> None:
    """Two 503 cost two pauses within full jitter's bounds; the third attempt's answer is the answer."""
    strict.model.inject(on(GET), Answer(503, "SlowDown"), times=2)

    async def scenario(client: Client) -> None:
        assert (await ask(client.origin, "GET", "bucket", "key")).body == b"0123456789"
        assert len(client.clock.slept) == 2
        assert all(0 <= pause <= 0.05 * 2 ** (number + 1) for number, pause in enumerate(client.clock.slept))
        assert [attempt.status for attempt in client.attempts] == [503, 503, 200]

    play(strict, scenario)
    assert strict.model.count(GET) == 3


def test_the_last_refusal_is_the_answer_when_attempts_run_out(strict: StrictOrigin) -> None:
    """The client sees the origin's own error document."""
    strict.model.inject(on(GET), Answer(503, "SlowDown"), times=None)

    async def scenario(client: Client) -> None:
        answer = await ask(client.origin, "GET", "bucket", "key")
        assert answer.status == 503
        assert b"<Code>SlowDown</Code>" in answer.body

    play(strict, scenario, max_attempts=3)
    assert strict.model.count(GET) == 3


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (404, "NoSuchKey"), (400, "InvalidArgument")])
def test_refusals_are_asked_for_once(strict: StrictOrigin, status: int, code: str) -> None:
    """A 4xx is an answer, not a failure; its document is complete."""
    strict.model.inject(on(GET), Answer(status, code), times=None)

    async def scenario(client: Client) -> None:
        answer = await ask(client.origin, "GET", "bucket", "key")
        assert (answer.status, f"<Code>{code}</Code>".encode() in answer.body) == (status, True)

    play(strict, scenario)
    assert strict.model.count(GET) == 1


def test_retry_after_is_slept(strict: StrictOrigin) -> None:
    """The origin's own figure replaces a shorter pause."""
    strict.model.inject(on(GET), Answer(503, "SlowDown", {"retry-after": "7"}))

    async def scenario(client: Client) -> None:
        assert (await ask(client.origin, "GET", "bucket", "key")).status == 200
        assert client.clock.slept == [7.0]

    play(strict, scenario)


def test_the_retry_budget_is_shared_by_all_requests(strict: StrictOrigin) -> None:
    """When the origin refuses everything, soon every request is sent once only."""
    strict.model.inject(on(GET), Answer(500), times=None)

    async def scenario(client: Client) -> None:
        for _ in range(60):
            await ask(client.origin, "GET", "bucket", "key")
        assert strict.model.count(GET) == 160  # 60 requests and the 100 retries that the budget of 500 pays for

    play(strict, scenario)


def test_a_lost_connection_is_tried_again(strict: StrictOrigin) -> None:
    """A reset before the answer costs a retry, not the request."""
    strict.model.inject(on(GET), Unreachable())

    async def scenario(client: Client) -> None:
        assert (await ask(client.origin, "GET", "bucket", "key")).status == 200

    play(strict, scenario)
    assert strict.model.count(GET) == 2


def test_a_streamed_body_is_sent_once(strict: StrictOrigin) -> None:
    """What has been read from the client cannot be read again: the 503 is the answer."""
    strict.model.inject(on(PUT), Answer(503, "SlowDown", late=True), times=None)

    async def scenario(client: Client) -> None:
        answer = await ask(client.origin, "PUT", "bucket", "new", body=StreamedBody(pieces(b"abc"), 3))
        assert answer.status == 503

    play(strict, scenario)
    assert strict.model.count(PUT) == 1


def test_a_large_stream_waits_for_the_100_and_may_be_tried_again_until_then(strict: StrictOrigin) -> None:
    """A refusal before the 100 costs no byte of the body, so overload is tried again like any other request."""
    strict.model.inject(on(PUT), Answer(503, "SlowDown"))
    data = b"x" * (2 * MEBIBYTE)

    async def scenario(client: Client) -> None:
        body = StreamedBody(pieces(data[:MEBIBYTE], data[MEBIBYTE:]), len(data))
        assert (await ask(client.origin, "PUT", "bucket", "new", body=body)).status == 200

    play(strict, scenario)
    assert strict.model.count(PUT) == 2
    assert strict.model.data("bucket", "new") == data


# --- what is learned from refusals


def test_the_region_is_learned_once_per_bucket(strict: StrictOrigin) -> None:
    """AuthorizationHeaderMalformed names the region; from then on requests are signed for it."""
    strict.region = "eu-central-1"

    async def scenario(client: Client) -> None:
        for _ in range(3):
            assert (await ask(client.origin, "GET", "bucket", "key")).status == 200
        assert [attempt.status for attempt in client.attempts] == [400, 200, 200, 200]
        assert client.clock.slept == []

    play(strict, scenario)


def test_the_origins_time_is_learned(strict: StrictOrigin) -> None:
    """RequestTimeTooSkewed: the Date header corrects our clock, once, for HEAD as well."""

    async def scenario(client: Client) -> None:
        client.clock.jump(3600)
        for method in ("HEAD", "GET", "HEAD"):
            assert (await ask(client.origin, method, "bucket", "key")).status == 200
        assert [attempt.status for attempt in client.attempts] == [403, 200, 200, 200]

    play(strict, scenario)


def test_redirects_are_answers(strict: StrictOrigin) -> None:
    """Not even a signed request follows a Location to another host."""
    with StrictOrigin() as elsewhere:
        strict.model.inject(
            on(GET), Answer(307, "TemporaryRedirect", {"location": f"{elsewhere.endpoint_url}/bucket/key"})
        )

        async def scenario(client: Client) -> None:
            answer = await ask(client.origin, "GET", "bucket", "key")
            assert answer.status == 307
            assert answer.headers["location"].startswith(elsewhere.endpoint_url)

        play(strict, scenario)
        assert elsewhere.request_lines == []


# --- a dead origin


def test_a_refusing_origin_is_reported_fast_and_found_again() -> None:
    """Nobody listens: OriginUnreachable at once, soon without even trying; a probe finds the origin when it is back."""
    with StrictOrigin() as strict:
        strict.model.put("bucket", "key", b"data")

        async def scenario(client: Client) -> None:
            loop = asyncio.get_running_loop()
            stopped = strict.refused()
            await loop.run_in_executor(None, stopped.__enter__)
            try:
                started = loop.time()
                for _ in range(5):
                    with pytest.raises(OriginUnreachable):
                        await ask(client.origin, "GET", "bucket", "key")
                assert loop.time() - started < 2
                tried = len(client.attempts)
                with pytest.raises(OriginUnreachable, match="not answered lately"):
                    await ask(client.origin, "GET", "bucket", "key")
                assert len(client.attempts) == tried
            finally:
                await loop.run_in_executor(None, stopped.__exit__, None, None, None)
            client.clock.jump(10)
            assert (await ask(client.origin, "GET", "bucket", "key")).body == b"data"

        play(strict, scenario)


def test_an_origin_that_accepts_and_never_answers_is_given_up(strict: StrictOrigin) -> None:
    """The read timeout ends each attempt."""

    async def scenario(client: Client) -> None:
        writers: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda _reader, writer: writers.append(writer), "127.0.0.1", 0)
        async with silent:
            port = silent.sockets[0].getsockname()[1]
            mute = Client(strict, endpoint_url=f"http://127.0.0.1:{port}", read_timeout_seconds=0.1, max_attempts=2)
            try:
                with pytest.raises(OriginUnreachable):
                    await ask(mute.origin, "GET", "bucket", "key")
            finally:
                await mute.origin.aclose()
            assert [attempt.status for attempt in mute.attempts] == [None, None]
            for writer in writers:
                writer.close()
                await writer.wait_closed()

    play(strict, scenario)


# --- uploads that fail


FAILURE = S3Error("BadDigest", "the client's bytes are wrong", 400)


@pytest.mark.parametrize(
    ("chunks", "length"),
    [((b"abc",), 6), ((b"abc", b"def"), 6), ((b"abc",), None), ((b"x" * MEBIBYTE,), 2 * MEBIBYTE)],
    ids=["in the middle", "at the very end", "unknown length", "large"],
)
def test_a_source_that_fails_stores_nothing(
    strict: StrictOrigin, chunks: tuple[bytes, ...], length: int | None
) -> None:
    """The source's own error reaches the caller, even after its last byte; the origin never sees a whole request."""
    strict.accepts_unknown_length = True

    async def scenario(client: Client) -> None:
        body = StreamedBody(pieces(*chunks, failure=FAILURE), length)
        with pytest.raises(S3Error) as caught:
            await ask(client.origin, "PUT", "bucket", "new", body=body)
        assert caught.value is FAILURE
        assert (await ask(client.origin, "GET", "bucket", "key")).status == 200

    play(strict, scenario)
    assert "new" not in strict.model.buckets["bucket"].objects


def test_a_failing_source_with_a_trailer_stores_nothing(strict: StrictOrigin) -> None:
    """The same with the checksum behind the body."""

    async def scenario(client: Client) -> None:
        chunks = pieces(b"abc", failure=FAILURE)
        body = StreamedBody(chunks, 3, trailer_name="x-amz-checksum-crc32", trailer_value=lambda: "AAAAAA==")
        with pytest.raises(S3Error, match="BadDigest"):
            await ask(client.origin, "PUT", "bucket", "new", body=body)

    play(strict, scenario)
    assert "new" not in strict.model.buckets["bucket"].objects


@pytest.mark.parametrize("length", [2, 4])
def test_a_body_of_the_wrong_length_stores_nothing(strict: StrictOrigin, length: int) -> None:
    """Neither cut to its declared length nor left hanging: IncompleteBody."""

    async def scenario(client: Client) -> None:
        with pytest.raises(S3Error, match="IncompleteBody"):
            await ask(client.origin, "PUT", "bucket", "new", body=StreamedBody(pieces(b"ab", b"c"), length))

    play(strict, scenario)
    assert "new" not in strict.model.buckets["bucket"].objects


@pytest.mark.parametrize("size", [300_000, 4 * MEBIBYTE], ids=["without 100", "waiting for 100"])
def test_an_early_refusal_is_returned_and_the_source_left_alone(strict: StrictOrigin, size: int) -> None:
    """The origin answers 403 before the body is over: that is the answer, and nobody reads the source any more."""
    strict.model.inject(on(PUT), Answer(403, "AccessDenied"))
    asked = asyncio.Event()
    never = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        yield b"x" * 100_000
        asked.set()
        await never.wait()

    async def scenario(client: Client) -> None:
        source = endless()
        answer = await ask(client.origin, "PUT", "bucket", "new", body=StreamedBody(source, size))
        assert answer.status == 403
        assert b"AccessDenied" in answer.body
        await source.aclose()  # RuntimeError if it were still running
        assert asked.is_set() == (size < MEBIBYTE)

    play(strict, scenario)
    assert "new" not in strict.model.buckets["bucket"].objects


def test_a_cancelled_upload_stores_nothing(strict: StrictOrigin) -> None:
    """A caller who leaves takes the upload along."""

    async def scenario(client: Client) -> None:
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

    play(strict, scenario)
    assert "new" not in strict.model.buckets["bucket"].objects


# --- answers that are not whole


@pytest.mark.parametrize("reset", [False, True])
def test_a_short_body_is_an_error(strict: StrictOrigin, reset: bool) -> None:
    """Whether the connection was closed or reset: never fewer bytes than were announced."""
    strict.model.put("bucket", "big", bytes(3 * MEBIBYTE))
    strict.model.inject(on(GET), CutBody(MEBIBYTE, reset=reset))

    async def scenario(client: Client) -> None:
        async with await client.origin.send(OriginRequest("GET", "bucket", "big")) as response:
            assert response.status == 200
            with pytest.raises(OriginBodyError):
                async for _ in response.stream():
                    pass

    play(strict, scenario)


def test_an_answer_longer_than_the_limit_is_an_error(strict: StrictOrigin) -> None:
    """Whoever reads a document into memory says how much that may be."""

    async def scenario(client: Client) -> None:
        async with await client.origin.send(OriginRequest("GET", "bucket", "key")) as response:
            with pytest.raises(OriginBodyError):
                await response.read(9)

    play(strict, scenario)


def test_a_large_error_document_is_passed_on_whole(strict: StrictOrigin) -> None:
    """Looking for the error code takes nothing away."""
    document = b"<Error><Code>Odd</Code>" + b"x" * MEBIBYTE + b"</Error>"
    strict.model.inject(on(GET), Answer(400, body=document))

    async def scenario(client: Client) -> None:
        assert (await ask(client.origin, "GET", "bucket", "key")).body == document

    play(strict, scenario)


def test_wrong_bytes_are_passed_on(strict: StrictOrigin) -> None:
    """The client of the origin judges no bytes: that is for those who know what they should be."""
    strict.model.inject(on(GET), AlterBody(lambda body: body[::-1]))

    async def scenario(client: Client) -> None:
        assert (await ask(client.origin, "GET", "bucket", "key")).body == b"9876543210"

    play(strict, scenario)


def test_connections_are_used_again_only_after_whole_answers(strict: StrictOrigin) -> None:
    """Ten requests take one connection, errors included; a body left unread costs its connection."""
    strict.model.put("bucket", "big", bytes(4 * MEBIBYTE))

    async def scenario(client: Client) -> None:
        for key in ("key", "none") * 5:
            await ask(client.origin, "GET", "bucket", key)
        assert len(strict.clients) == 1
        async with await client.origin.send(OriginRequest("GET", "bucket", "big")):
            pass
        await ask(client.origin, "GET", "bucket", "key")
        assert len(strict.clients) == 2

    play(strict, scenario)


# --- the wire


def test_requests_carry_nothing_but_what_was_given(strict: StrictOrigin) -> None:
    """No headers of the HTTP library's own; no framing where there is no body; the hop header names this gateway."""

    async def scenario(client: Client) -> None:
        await ask(client.origin, "GET", "bucket", "key", headers={"x-forebay-hop": "other", "range": "bytes=0-1"})

    play(strict, scenario)
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


@pytest.mark.parametrize("text", ["naïve", "日本", "a  b", "tab\there"])
def test_header_values_pass_byte_for_byte(strict: StrictOrigin, text: str) -> None:
    """A value is bytes: UTF-8 arrives as it was sent, and the signature covers it."""
    value = text.encode().decode("latin-1")

    async def scenario(client: Client) -> None:
        put = await ask(client.origin, "PUT", "bucket", "new", headers={"x-amz-meta-a": value}, body=b"x")
        assert put.status == 200, put.body
        assert (await ask(client.origin, "HEAD", "bucket", "new")).headers["x-amz-meta-a"] == value

    play(strict, scenario)


@pytest.mark.parametrize("value", ["\xff", "a\r\nx-evil: 1", "\x00"])
def test_header_values_that_cannot_be_sent_are_refused(strict: StrictOrigin, value: str) -> None:
    """Bytes that are no UTF-8, and control characters, are the client's error; nothing is sent."""

    async def scenario(client: Client) -> None:
        with pytest.raises(S3Error, match="InvalidArgument"):
            await ask(client.origin, "PUT", "bucket", "new", headers={"x-amz-meta-a": value}, body=b"x")

    play(strict, scenario)
    assert strict.request_lines == []


def test_a_proxy_gets_the_whole_address(strict: StrictOrigin) -> None:
    """Over a proxy the request line is absolute and the signature still covers the origin's host."""

    async def scenario(client: Client) -> None:
        answer = await ask(client.origin, "GET", "bucket", "key")
        assert answer.body == b"0123456789"

    play(strict, scenario, endpoint_url="http://origin.invalid", proxy=strict.endpoint_url)
    assert (b"host", b"origin.invalid") in strict.request_headers[0]


def test_a_wrong_secret_is_refused_by_the_origin(strict: StrictOrigin) -> None:
    """The strict origin believes no signature; its refusal is the answer."""

    async def main() -> None:
        settings = OriginSettings(endpoint_url=strict.endpoint_url)
        pair = KeyPair(STRICT_PAIR.access_key_id, "wrong")
        origin = S3Origin(settings, StaticCredentials(pair), JumpingClock(), instance_id="x")
        try:
            assert b"SignatureDoesNotMatch" in (await ask(origin, "GET", "bucket", "key")).body
        finally:
            await origin.aclose()

    asyncio.run(main())


def test_secrets_stay_out_of_logs_and_errors(strict: StrictOrigin, caplog: pytest.LogCaptureFixture) -> None:
    """Not in a repr, not in an error, not in a log line of any library, whatever the level."""
    strict.model.inject(on(GET), Unreachable(), times=None)
    texts = [repr(STRICT_PAIR), repr(OriginSettings(proxy="http://user:pass@proxy"))]

    async def scenario(client: Client) -> None:
        texts.append(repr(client.origin))
        with pytest.raises(OriginUnreachable) as caught:
            await ask(client.origin, "GET", "bucket", "key")
        texts.append(repr(caught.value) + repr(caught.value.__cause__))

    with caplog.at_level(logging.DEBUG):
        play(strict, scenario)
    texts.append(caplog.text)
    assert SECRET_ACCESS_KEY not in "".join(texts)
    assert "pass@" not in "".join(texts)


def test_the_pool_bounds_connections(strict: StrictOrigin) -> None:
    """Twenty requests at once go over at most three connections."""

    async def scenario(client: Client) -> None:
        await asyncio.gather(*(ask(client.origin, "GET", "bucket", "key") for _ in range(20)))
        assert len(strict.clients) <= 3

    play(strict, scenario, max_connections=3)


def test_a_view_of_a_reused_buffer_is_not_sent_twice(strict: StrictOrigin) -> None:
    """A source may fill its buffer anew as soon as it is asked for the next piece, however slow the origin is."""
    strict.bytes_per_second = 40 * MEBIBYTE
    data = hashlib.shake_128(b"x").digest(4 * MEBIBYTE)

    async def views() -> AsyncIterator[bytes | memoryview]:
        buffer = bytearray(MEBIBYTE)
        for offset in range(0, len(data), MEBIBYTE):
            buffer[:] = data[offset : offset + MEBIBYTE]
            yield memoryview(buffer)

    async def scenario(client: Client) -> None:
        body = StreamedBody(views(), len(data), hashlib.sha256(data).hexdigest())
        assert (await ask(client.origin, "PUT", "bucket", "new", body=body)).status == 200

    try:
        play(strict, scenario)
    finally:
        strict.bytes_per_second = None

"""What `S3Origin` tries again, what it learns from refusals, and how it reports a dead origin."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from gateway.core.errors import OriginUnreachable
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.s3.requests import Operation
from tests.origin.clients import MEBIBYTE, Client, pieces, playing
from tests.origin.origins import ask
from tests.origin.told_origin import forever
from tests.support.connections import answering
from tests.support.memory_origin.faults import Answer, Unreachable, on
from tests.support.strict_origin import StrictOrigin

GET = Operation.GET_OBJECT
PUT = Operation.PUT_OBJECT


async def test_overload_is_tried_again_after_a_growing_pause(strict: StrictOrigin) -> None:
    """Two 503 cost two pauses within full jitter's bounds; the third attempt's answer is the answer."""
    strict.model.inject(on(GET), Answer(503, "SlowDown"), times=2)
    async with playing(strict) as client:
        assert (await ask(client.origin, "GET", "bucket", "key")).body == b"0123456789"
        assert len(client.clock.slept) == 2
        assert all(0 <= pause <= 0.05 * 2 ** (number + 1) for number, pause in enumerate(client.clock.slept))
        assert [attempt.status for attempt in client.attempts] == [503, 503, 200]
    assert strict.model.count(GET) == 3


async def test_the_last_refusal_is_the_answer_when_attempts_run_out(strict: StrictOrigin) -> None:
    """The client sees the origin's own error document."""
    strict.model.inject(on(GET), Answer(503, "SlowDown"), times=None)
    async with playing(strict, max_attempts=3) as client:
        answer = await ask(client.origin, "GET", "bucket", "key")
        assert answer.status == 503
        assert b"<Code>SlowDown</Code>" in answer.body
    assert strict.model.count(GET) == 3


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (404, "NoSuchKey"), (400, "InvalidArgument")])
async def test_refusals_are_asked_for_once(strict: StrictOrigin, status: int, code: str) -> None:
    """A 4xx is an answer, not a failure; its document is complete."""
    strict.model.inject(on(GET), Answer(status, code), times=None)
    async with playing(strict) as client:
        answer = await ask(client.origin, "GET", "bucket", "key")
        assert (answer.status, f"<Code>{code}</Code>".encode() in answer.body) == (status, True)
    assert strict.model.count(GET) == 1


async def test_retry_after_is_slept(strict: StrictOrigin) -> None:
    """The origin's own figure replaces a shorter pause."""
    strict.model.inject(on(GET), Answer(503, "SlowDown", {"retry-after": "7"}))
    async with playing(strict) as client:
        assert (await ask(client.origin, "GET", "bucket", "key")).status == 200
        assert client.clock.slept == [7.0]


async def test_the_retry_budget_is_shared_by_all_requests(strict: StrictOrigin) -> None:
    """When the origin refuses everything, soon every request is sent once only."""
    strict.model.inject(on(GET), Answer(500), times=None)
    async with playing(strict) as client:
        for _ in range(60):
            await ask(client.origin, "GET", "bucket", "key")
        assert strict.model.count(GET) == 160  # 60 requests and the 100 retries that the budget of 500 pays for


async def test_a_lost_connection_is_tried_again(strict: StrictOrigin) -> None:
    """A reset before the answer costs a retry, not the request."""
    strict.model.inject(on(GET), Unreachable())
    async with playing(strict) as client:
        assert (await ask(client.origin, "GET", "bucket", "key")).status == 200
    assert strict.model.count(GET) == 2


@pytest.mark.parametrize(
    ("effect", "attempts"),
    [
        (Unreachable(), 1),
        (Unreachable(late=True), 1),
        (Answer(500, late=True), 1),
        (Answer(503, "SlowDown"), 2),
        (Answer(429, "SlowDown"), 2),
    ],
    ids=str,
)
async def test_what_is_to_be_carried_out_once_is_not_tried_again_where_it_may_be_done(
    strict: StrictOrigin, effect: Answer | Unreachable, attempts: int
) -> None:
    """A second CreateMultipartUpload would leave an upload that nobody knows; one that was sent away may come back."""
    strict.model.inject(on(Operation.CREATE_MULTIPART_UPLOAD), effect)
    async with playing(strict) as client:
        request = OriginRequest("POST", "bucket", "new", [("uploads", None)])
        with suppress(OriginUnreachable):
            async with await client.origin.send(request):
                pass
    assert strict.model.count(Operation.CREATE_MULTIPART_UPLOAD) == attempts


async def test_a_streamed_body_is_sent_once(strict: StrictOrigin) -> None:
    """What has been read from the client cannot be read again: the 503 is the answer."""
    strict.model.inject(on(PUT), Answer(503, "SlowDown", late=True), times=None)
    async with playing(strict) as client:
        answer = await ask(client.origin, "PUT", "bucket", "new", body=StreamedBody(pieces(b"abc"), 3))
        assert answer.status == 503
    assert strict.model.count(PUT) == 1


async def test_a_large_stream_waits_for_the_100_and_may_be_tried_again_until_then(strict: StrictOrigin) -> None:
    """A refusal before the 100 costs no byte of the body, so overload is tried again like any other request."""
    strict.model.inject(on(PUT), Answer(503, "SlowDown"))
    data = b"x" * (2 * MEBIBYTE)
    async with playing(strict) as client:
        body = StreamedBody(pieces(data[:MEBIBYTE], data[MEBIBYTE:]), len(data))
        assert (await ask(client.origin, "PUT", "bucket", "new", body=body)).status == 200
    assert strict.model.count(PUT) == 2
    assert strict.model.data("bucket", "new") == data


async def test_the_region_is_learned_once_per_bucket(strict: StrictOrigin) -> None:
    """AuthorizationHeaderMalformed names the region; from then on requests are signed for it."""
    strict.region = "eu-central-1"
    async with playing(strict) as client:
        for _ in range(3):
            assert (await ask(client.origin, "GET", "bucket", "key")).status == 200
        assert [attempt.status for attempt in client.attempts] == [400, 200, 200, 200]
        assert client.clock.slept == []


async def test_the_origins_time_is_learned(strict: StrictOrigin) -> None:
    """RequestTimeTooSkewed: the Date header corrects our clock, once, for HEAD as well."""
    async with playing(strict) as client:
        client.clock.jump(3600)
        for method in ("HEAD", "GET", "HEAD"):
            assert (await ask(client.origin, method, "bucket", "key")).status == 200
        assert [attempt.status for attempt in client.attempts] == [403, 200, 200, 200]


async def test_redirects_are_answers(strict: StrictOrigin) -> None:
    """Not even a signed request follows a Location to another host."""
    with StrictOrigin() as elsewhere:
        strict.model.inject(
            on(GET), Answer(307, "TemporaryRedirect", {"location": f"{elsewhere.endpoint_url}/bucket/key"})
        )

        async def scenario(client: Client) -> None:
            answer = await ask(client.origin, "GET", "bucket", "key")
            assert answer.status == 307
            assert answer.headers["location"].startswith(elsewhere.endpoint_url)

        async with playing(strict) as client:
            await scenario(client)
        assert elsewhere.request_lines == []


async def test_a_refusing_origin_is_reported_fast_and_found_again() -> None:
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

        async with playing(strict) as client:
            await scenario(client)


async def test_an_origin_that_accepts_and_never_answers_is_given_up(strict: StrictOrigin) -> None:
    """Once: while one waited, nobody else was answered, so that the next are told at once."""
    async with playing(strict), answering(forever) as port:
        mute = Client(strict, endpoint_url=f"http://127.0.0.1:{port}", read_timeout_seconds=0.1, max_attempts=2)
        try:
            for _ in range(3):
                with pytest.raises(OriginUnreachable):
                    await ask(mute.origin, "GET", "bucket", "key")
        finally:
            await mute.origin.aclose()
        assert [attempt.status for attempt in mute.attempts] == [None]

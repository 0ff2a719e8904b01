"""A Complete that takes long keeps its client waiting with white space, and ends as it would have without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from xml.etree import ElementTree

import pytest

from gateway.core.errors import BufferUnavailable, ForebayError, OriginAnswered, OutcomeUnknown
from gateway.operations.context import Response
from gateway.operations.writeback.past_the_buffer import QUIET_SECONDS, with_retries
from gateway.s3.error_codes import s3_error
from gateway.s3.xml_writer import PROLOG, document, element
from tests.support.manual_clock import ManualClock

RESULT = document("CompleteMultipartUploadResult", element("ETag", '"e-2"'))


async def slow(clock: ManualClock, seconds: float, outcome: bytes | ForebayError) -> Response:
    await clock.sleep(seconds)
    if isinstance(outcome, ForebayError):
        raise outcome
    return Response(200, [], outcome, "forwarded")


async def answered(seconds: float, outcome: bytes | ForebayError) -> tuple[Response, list[bytes]]:
    """The reply, and the pieces of its body."""
    clock = ManualClock()
    asking = asyncio.create_task(with_retries(slow(clock, seconds, outcome), clock))
    await clock.advance(0.0)
    await clock.advance(QUIET_SECONDS)
    reply = await asking
    if isinstance(reply.body, bytes):
        return reply, [reply.body]
    assert isinstance(reply.body, AsyncIterator)
    pieces: list[bytes] = []

    async def collect(body: Any) -> None:
        pieces.extend([bytes(piece) async for piece in body])

    collecting = asyncio.create_task(collect(reply.body))
    while not collecting.done():
        await clock.advance(QUIET_SECONDS)
    await collecting
    await reply.aclose()
    return reply, pieces


def test_a_quick_answer_is_given_as_it_is() -> None:
    """Nothing is streamed that need not be; an error has its own status."""
    reply, pieces = asyncio.run(answered(QUIET_SECONDS - 1, RESULT))
    assert (reply.status, pieces) == (200, [RESULT])
    with pytest.raises(ForebayError, match="InvalidPart"):
        asyncio.run(answered(QUIET_SECONDS - 1, s3_error("InvalidPart")))


@pytest.mark.parametrize("prolog", [PROLOG.encode(), b'<?xml version="1.0"?>', b' <?xml version="1.0"?>\n', b""])
def test_a_slow_answer_begins_with_white_space(prolog: bytes) -> None:
    """A byte in every ten seconds; the document is well-formed, prolog first, whichever the origin's is."""
    reply, pieces = asyncio.run(answered(5.5 * QUIET_SECONDS, prolog + RESULT.removeprefix(PROLOG.encode())))
    assert reply.status == 200
    assert pieces[1:-1] == [b" "] * len(pieces[1:-1])
    assert len(pieces) >= 5
    root = ElementTree.fromstring(b"".join(pieces))
    assert root.findtext("{http://s3.amazonaws.com/doc/2006-03-01/}ETag") == '"e-2"'


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (s3_error("InvalidPart"), "InvalidPart"),
        (BufferUnavailable("no"), "ServiceUnavailable"),
        (OutcomeUnknown("lost"), "OutcomeUnknown"),
        (OriginAnswered(404, [], b"<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>"), "NoSuchBucket"),
        (OriginAnswered(403, [], b""), "AccessDenied"),
    ],
    ids=["s3", "buffer", "unknown", "origin", "origin's-head"],
)
def test_a_slow_error_is_an_error_document(error: ForebayError, code: str) -> None:
    """As S3 answers it, and SDKs expect it: with the code that it has when it comes soon."""
    _, pieces = asyncio.run(answered(3 * QUIET_SECONDS, error))
    root = ElementTree.fromstring(b"".join(pieces))
    assert (root.tag, root.findtext("Code")) == ("Error", code)


def test_who_leaves_ends_the_work() -> None:
    """Nothing runs on behind a client that is gone: what was done by then is in the journal."""

    async def scenario() -> None:
        clock, ended = ManualClock(), asyncio.Event()

        async def work() -> Response:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            raise AssertionError

        asking = asyncio.create_task(with_retries(work(), clock))
        await clock.advance(0.0)
        await clock.advance(QUIET_SECONDS)
        await (await asking).aclose()
        assert ended.is_set()
        ended.clear()
        cancelled = asyncio.create_task(with_retries(work(), clock))
        await clock.advance(1.0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert ended.is_set()

    asyncio.run(scenario())

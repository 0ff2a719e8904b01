"""Requests past the buffer: how long they wait, what is noted of a write, and long answers that keep their client."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BufferUnavailable, ForebayError, OriginAnswered, OriginBodyError, OutcomeUnknown
from gateway.core.model import BodyStream
from gateway.operations.context import Response
from gateway.operations.writeback.past_the_buffer import (
    LOOK_SECONDS,
    LOOK_SECONDS_MAX,
    PATIENCE_SECONDS,
    QUIET_SECONDS,
    retried_until_final_document,
    until_next_look,
    with_retries,
)
from gateway.s3.error_codes import s3_error
from gateway.s3.xml import RESULT_SIZE_BYTES_MAX
from gateway.s3.xml_writer import PROLOG, document, element
from tests.support.manual_clock import ManualClock


class QuickClock(ManualClock):
    """Time passes for whoever sleeps, at once."""

    async def sleep(self, seconds: float) -> None:
        await self.advance(seconds)


def test_who_waits_for_long_looks_seldom_and_hears_soon() -> None:
    """The first looks come as soon as they can; each later one a tenth of the wait later at most, and 0.1 s."""
    clock, looks = QuickClock(), [0.0]

    async def wait() -> None:
        while clock.monotonic() < PATIENCE_SECONDS:
            await until_next_look(clock, 0.0)
            looks.append(clock.monotonic())

    asyncio.run(wait())
    pauses = [after - before for before, after in itertools.pairwise(looks)]
    slack = 1e-9
    assert all(LOOK_SECONDS - slack <= pause <= LOOK_SECONDS_MAX + slack for pause in pauses)
    assert all(
        pause <= max(LOOK_SECONDS, waited / 10) + slack for waited, pause in zip(looks[:-1], pauses, strict=True)
    )
    assert len(looks) < PATIENCE_SECONDS / LOOK_SECONDS_MAX + 50


DECLARED = b'<?xml version="1.0"?>'
RESULT = b"<CopyObjectResult><LastModified>2026</LastModified><ETag>&quot;abc&quot;</ETag></CopyObjectResult>"
KNOWN, UNKNOWN = ('"abc"', True), (None, False)


class Told:
    """An answer that comes in these pieces, each `seconds` after the one before."""

    def __init__(self, pieces: Sequence[bytes], seconds: float = 0.0) -> None:
        self.pieces, self.seconds = pieces, seconds
        self.clock = ManualClock()
        self.noted: list[tuple[str | None, bool]] = []
        self.got: list[tuple[bytes, int]] = []
        """What the client got, with how much was noted by then."""

    async def note(self, etag: str | None, *, known: bool) -> None:
        self.noted.append((etag, known))

    async def _body(self) -> BodyStream:
        for piece in self.pieces:
            if self.seconds:
                await self.clock.sleep(self.seconds)
            yield piece

    async def answer(self) -> Response:
        reply = Response(200, [("x-amz-version-id", "7"), ("content-length", "9")], self._body())
        telling = asyncio.create_task(retried_until_final_document(reply, self.note, self.clock))
        while not telling.done():
            await self.clock.advance(QUIET_SECONDS / 2)
        return await telling

    async def _read(self, answer: Response) -> None:
        if isinstance(answer.body, bytes):
            self.got.append((answer.body, len(self.noted)))
            return
        assert isinstance(answer.body, AsyncGenerator)
        async for piece in answer.body:
            assert isinstance(piece, bytes)
            self.got.append((piece, len(self.noted)))

    async def read(self) -> Response:
        answer = await self.answer()
        reading = asyncio.create_task(self._read(answer))
        while not reading.done():
            await self.clock.advance(QUIET_SECONDS / 2)
        await reading
        await answer.aclose()
        return answer

    @property
    def whole(self) -> bytes:
        return b"".join(piece for piece, _ in self.got)


@given(
    prolog=st.booleans(),
    spaces=st.integers(0, 30),
    cuts=st.lists(st.integers(0, 160)),
    end=st.sampled_from([b"", b"\n"]),
)
def test_however_it_is_cut_into_pieces(*, prolog: bool, spaces: int, cuts: list[int], end: bytes) -> None:
    """All of the document comes, and none of it before its ETag is noted."""
    document = (DECLARED if prolog else b"") + b" " * spaces + RESULT + end
    ends = sorted({0, len(document), *(min(cut, len(document)) for cut in cuts)})
    told = Told([document[start:stop] for start, stop in pairwise(ends)])
    asyncio.run(told.read())
    assert told.whole.endswith(RESULT + end)
    assert told.noted == [KNOWN]
    assert all(noted == 1 for _, noted in told.got)


def test_one_that_takes_long_keeps_its_client_waiting() -> None:
    """With the origin's headers, white space in every ten seconds, and one prolog, whichever the origin's is."""
    told = Told([DECLARED, *([b" "] * 10), RESULT], seconds=QUIET_SECONDS)
    answer = asyncio.run(told.read())
    assert dict(answer.headers) == {"x-amz-version-id": "7"}
    assert told.whole.count(b"<?xml") == 1
    assert told.whole.startswith(b"<?xml")
    assert told.whole.endswith(RESULT)
    assert len(told.got) > 10
    assert all(noted == 0 for _, noted in told.got[:-1])
    assert told.noted == [KNOWN]


def test_what_is_too_long_for_a_result_is_none() -> None:
    """No more of it is held than a result may take, and the key is unknown."""
    told = Told([b"<x>" * (RESULT_SIZE_BYTES_MAX // 3), b"12", b"345", b"6"])
    try:
        asyncio.run(told.read())
    except OriginBodyError:
        assert told.noted == [UNKNOWN]
    else:
        raise AssertionError("it was passed on")


def test_an_answer_that_is_closed_before_its_end_leaves_the_key_unknown() -> None:
    """The origin may have done it."""

    async def scenario(told: Told) -> None:
        await (await told.answer()).aclose()
        assert told.noted == [UNKNOWN]

    asyncio.run(scenario(Told([b" ", RESULT], seconds=10 * QUIET_SECONDS)))


COMPLETED = document("CompleteMultipartUploadResult", element("ETag", '"e-2"'))


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
    reply, pieces = asyncio.run(answered(QUIET_SECONDS - 1, COMPLETED))
    assert (reply.status, pieces) == (200, [COMPLETED])
    with pytest.raises(ForebayError, match="InvalidPart"):
        asyncio.run(answered(QUIET_SECONDS - 1, s3_error("InvalidPart")))


@pytest.mark.parametrize("prolog", [PROLOG.encode(), b'<?xml version="1.0"?>', b' <?xml version="1.0"?>\n', b""])
def test_a_slow_answer_begins_with_white_space(prolog: bytes) -> None:
    """A byte in every ten seconds; the document is well-formed, prolog first, whichever the origin's is."""
    reply, pieces = asyncio.run(answered(5.5 * QUIET_SECONDS, prolog + COMPLETED.removeprefix(PROLOG.encode())))
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

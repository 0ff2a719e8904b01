"""The document of a write's answer: its ETag is noted before the client has any of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError
from gateway.core.model import BodyStream
from gateway.operations.context import Response
from gateway.operations.writeback.past_the_buffer import QUIET_SECONDS, retried_until_final_document
from gateway.s3.xml import RESULT_SIZE_BYTES_MAX
from tests.support.manual_clock import ManualClock

PROLOG = b'<?xml version="1.0"?>'
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
    document = (PROLOG if prolog else b"") + b" " * spaces + RESULT + end
    ends = sorted({0, len(document), *(min(cut, len(document)) for cut in cuts)})
    told = Told([document[start:stop] for start, stop in pairwise(ends)])
    asyncio.run(told.read())
    assert told.whole.endswith(RESULT + end)
    assert told.noted == [KNOWN]
    assert all(noted == 1 for _, noted in told.got)


def test_one_that_takes_long_keeps_its_client_waiting() -> None:
    """With the origin's headers, white space in every ten seconds, and one prolog, whichever the origin's is."""
    told = Told([PROLOG, *([b" "] * 10), RESULT], seconds=QUIET_SECONDS)
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

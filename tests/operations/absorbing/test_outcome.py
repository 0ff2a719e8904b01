"""The document of a write's answer: passed on as it came, and its ETag noted before the client has the end of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from gateway.clock import SystemClock
from gateway.objects import BodyStream, ObjectKey
from gateway.operations.absorbing.through import Outcome, told_by_document
from gateway.operations.context import Response
from gateway.s3.results import RESULT_SIZE_BYTES_MAX
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.journal.records import OwnDoing

PROLOG = b'<?xml version="1.0"?>'
RESULT = b"<CopyObjectResult><LastModified>2026</LastModified><ETag>&quot;abc&quot;</ETag></CopyObjectResult>"
AT = ObjectKey("bucket", "k")


class Noted:
    """A buffer, as far as it is told what went past it."""

    def __init__(self) -> None:
        self.noted: list[tuple[str | None, bool]] = []

    async def did(self, _key: ObjectKey, own: OwnDoing) -> None:
        self.noted.append((own.etag, own.known))


class Read:
    """What a client got: each piece, with what was noted by then."""

    def __init__(self, pieces: Sequence[bytes], *, until: int | None = None) -> None:
        self.buffer, self.pieces = Noted(), pieces
        self.got: list[tuple[bytes, int]] = []
        self.waited_for: list[int] = []
        asyncio.run(self._read(until))

    async def _read(self, until: int | None) -> None:
        outcome = Outcome(AT, cast(WritebackBuffer, self.buffer), SystemClock())
        reply = await told_by_document(Response(200, body=self._body()), outcome)
        body = cast(BodyStream, reply.body)
        while until is None or len(self.got) < until:
            piece = await anext(body, None)
            if piece is None:
                break
            self.got.append((bytes(cast(bytes, piece)), len(self.buffer.noted)))
        await reply.aclose()

    async def _body(self) -> BodyStream:
        for piece in self.pieces:
            self.waited_for.append(len(self.got))
            yield piece

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
    """All of it comes, and nothing of the document itself before its ETag is noted."""
    document = (PROLOG if prolog else b"") + b" " * spaces + RESULT + end
    ends = sorted({0, len(document), *(min(cut, len(document)) for cut in cuts)})
    read = Read([document[start:stop] for start, stop in pairwise(ends)])
    assert read.whole == document
    assert read.buffer.noted == [('"abc"', True)]
    assert all(b"<CopyObjectResult" not in piece for piece, noted in read.got if not noted)


def test_white_space_is_not_held_back() -> None:
    """The client gets each piece of it before the next is waited for, however much comes."""
    read = Read([PROLOG, *([b" " * 1024] * 100), RESULT])
    assert read.waited_for == list(range(102))
    assert read.buffer.noted == [('"abc"', True)]


def test_what_is_too_long_is_passed_on_as_it_comes() -> None:
    """From then on nothing is held back."""
    pieces = [b"<x>" * (RESULT_SIZE_BYTES_MAX // 3), b"12", b"345", b"6"]
    read = Read(pieces)
    assert [len(piece) for piece, _ in read.got] == [RESULT_SIZE_BYTES_MAX + 1, 3, 1]
    assert read.buffer.noted == [(None, False)]


def test_an_answer_that_is_closed_before_its_end_leaves_the_key_unknown() -> None:
    """Never begun, or left in the middle: the origin may have done it."""
    for until in (0, 1):
        assert Read([b" ", RESULT], until=until).buffer.noted == [(None, False)]
    assert Read([b" ", RESULT], until=2).buffer.noted == [('"abc"', True)]

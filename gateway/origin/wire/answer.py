"""The answer to one request, as it comes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.origin.landing import GATHERING_SECONDS_MAX, Landing
from gateway.origin.wire.bodies import LandedBody, PiecedBody, WholeBody
from gateway.origin.wire.heads import HEAD_BYTES_MAX, HEAD_END, AnswerHead, AnswerParser, MalformedAnswer

if TYPE_CHECKING:
    from gateway.origin.wire.connection import Connection

WHOLE_BYTES_MAX = 256 * 1024
"""Bodies up to this size are received in one piece, and awaited with their head."""

WHOLE_SECONDS_MAX = 0.1
"""A head waits no longer than this for its small body."""


class Broken(Exception):
    """The connection ended, or made no sense, before the answer was complete; the message says how."""


class Answer:
    """`head` is there once `begun` has returned. Who has it made closes it in the end, also where that fails."""

    __slots__ = (
        "_begun",
        "_bodiless",
        "_body",
        "_connection",
        "_failure",
        "_loop",
        "_start",
        "_timer",
        "_waiter",
        "head",
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop, *, bodiless: bool) -> None:
        self.head: AnswerHead
        self._connection: Connection | None = connection
        self._loop = loop
        self._bodiless = bodiless
        self._begun: asyncio.Future[None] = loop.create_future()
        self._start = bytearray()
        self._body: WholeBody | PiecedBody | LandedBody | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._failure = ""

    # For whoever asked.

    async def begun(self) -> None:
        """Wait for the head, and a while for a small body. Broken when there is none."""
        await self._begun

    def whole(self) -> memoryview | None:
        """The body, where it is small, all of it is here and none of it was taken."""
        return self._body.whole() if isinstance(self._body, WholeBody) else None

    async def piece(self) -> bytes:
        """The next bytes of the body, empty at its end. Broken when it ended early."""
        while True:
            if isinstance(self._body, WholeBody | PiecedBody) and (piece := self._body.take()):
                if self._connection is not None:
                    self._connection.go_on()
                return piece
            if self._failure:
                raise Broken(self._failure)
            if self._connection is None:
                return b""
            self._waiter = self._loop.create_future()
            await self._waiter

    @property
    def can_land(self) -> bool:
        """Whether the rest of the body can be received in landings; it comes in no other way then."""
        if isinstance(self._body, PiecedBody) and (body := self._body.landing()) is not None:
            self._body = body
        return isinstance(self._body, LandedBody)

    async def land(self, landing: Landing) -> memoryview:
        """The next piece of a body that can land, empty at its end. Broken when it ended early, behind what came.

        Between two pieces nothing is received. Who is cancelled has lost bytes, and closes the answer.
        """
        assert isinstance(self._body, LandedBody)  # noqa: S101 - it can land
        self._body.want(landing)
        if not self._body.has_enough and self._connection is not None:
            await self._land(self._body, self._connection)
        piece = self._body.take()
        if self._connection is not None:
            self._connection.hold()
        if self._failure and not piece:
            raise Broken(self._failure)
        return piece

    async def _land(self, body: LandedBody, connection: Connection) -> None:
        self._waiter = self._loop.create_future()
        late = self._loop.call_later(GATHERING_SECONDS_MAX, self._hurry, body)
        connection.go_on()
        try:
            await self._waiter
        finally:
            late.cancel()

    def _hurry(self, body: LandedBody) -> None:
        body.hurry()
        if body.has_enough:
            self._tell()

    def close(self) -> None:
        """Want no more of it: a connection with the rest of a body on it is of no use. Idempotent."""
        self._stop_waiting_for_body()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # For the connection.

    @property
    def landing(self) -> memoryview | None:
        """Where the next bytes are to be received, if anywhere in particular."""
        return self._body.rest if isinstance(self._body, WholeBody | LandedBody) else None

    @property
    def is_much(self) -> bool:
        """Whether enough lies here unread."""
        if isinstance(self._body, LandedBody):
            return self._body.has_enough
        return isinstance(self._body, PiecedBody) and self._body.is_much

    @property
    def is_little(self) -> bool:
        if isinstance(self._body, LandedBody):
            return not self._body.has_enough
        return not isinstance(self._body, PiecedBody) or self._body.is_little

    def landed(self, count: int) -> None:
        """Bytes were received at `landing`."""
        assert isinstance(self._body, WholeBody | LandedBody)  # noqa: S101 - it has said where
        self._body.landed(count)
        self._has_come(0)

    def received(self, buffer: bytearray, count: int) -> None:
        """The first `count` bytes of a buffer have come. MalformedAnswer."""
        if isinstance(self._body, PiecedBody):
            self._has_come(self._body.put(memoryview(buffer)[:count]))
            return
        if self._start:
            buffer = self._start + buffer[:count]
            count = len(buffer)
        at, parser = self._take_heads(buffer, count)
        if parser is not None:
            self._begin_body(parser, memoryview(buffer)[at:count])
            return
        self._start = buffer[at:count]
        if len(self._start) > HEAD_BYTES_MAX:
            raise MalformedAnswer("the origin's answer has a head without an end")

    def _take_heads(self, buffer: bytearray, count: int) -> tuple[int, AnswerParser | None]:
        """The answer's head, and interim ones before it (RFC 9110, 15.2), as far as they are there.

        Where they end, and who has read the answer's own.
        """
        at = 0
        while (end := buffer.find(HEAD_END, at, count)) >= 0:
            parser, begin, at = AnswerParser(), at, end + len(HEAD_END)
            self.head = parser.head(bytes(buffer[begin:at]), bodiless=self._bodiless)
            if self.head.status >= 200:
                return at, parser
        return at, None

    def _begin_body(self, parser: AnswerParser, data: memoryview) -> None:
        length = self.head.length_bytes
        if length is not None and length <= WHOLE_BYTES_MAX:
            self._body = WholeBody(length, data)
            self._has_come(max(0, len(data) - length))
        else:
            self._body = body = PiecedBody(length, parser)
            self._has_come(body.put(data))

    def ended(self, reason: str, *, orderly: bool) -> None:
        """The connection has ended, or is of no use any more; `orderly`: the origin has closed it."""
        self._connection = None
        if not (orderly and isinstance(self._body, PiecedBody) and self._body.ends_with_connection):
            self._failure = reason
        self._tell()

    def _has_come(self, excess_bytes: int) -> None:
        """More of the body is here, and so much behind its end."""
        body, connection = self._body, self._connection
        if body is not None and body.complete:
            self._connection = None
            self._tell()
            if connection is not None:
                connection.answered(keep_alive=self.head.keep_alive and not excess_bytes)
        elif isinstance(body, WholeBody) and not self._begun.done():
            if self._timer is None:
                self._timer = self._loop.call_later(WHOLE_SECONDS_MAX, self._tell)
        elif not isinstance(body, LandedBody) or body.has_enough:
            self._tell()

    def _tell(self) -> None:
        """Wake up whoever waits."""
        self._stop_waiting_for_body()
        if not self._begun.done():
            if self._body is not None:
                self._begun.set_result(None)
            else:
                self._begun.set_exception(Broken(self._failure))
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _stop_waiting_for_body(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

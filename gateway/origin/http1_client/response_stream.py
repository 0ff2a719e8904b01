"""The answer to one request, as it comes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.origin.http1_client.bodies import DirectBody, QueuedBody, WholeBody
from gateway.origin.http1_client.heads import HEAD_BYTES_MAX, HEAD_END, MalformedResponse, ResponseHead, ResponseParser
from gateway.origin.receive_buffer import GATHERING_SECONDS_MAX, ReceiveBuffer

if TYPE_CHECKING:
    from gateway.origin.http1_client.connection import Connection

WHOLE_BYTES_MAX = 256 * 1024
"""Bodies up to this size are received in one piece, and awaited with their head."""

WHOLE_SECONDS_MAX = 0.1
"""A head waits no longer than this for its small body."""


class ResponseBroken(Exception):
    """The connection ended, or made no sense, before the answer was complete; the message says how.

    `silent`: the origin has kept the connection, and said nothing.
    """

    def __init__(self, reason: str, *, silent: bool = False) -> None:
        super().__init__(reason)
        self.silent = silent


class ResponseStream:
    """`head` is there once `begun` has returned. Who has it made closes it in the end, also where that fails."""

    __slots__ = (
        "_asked_at",
        "_begun",
        "_bodiless",
        "_body",
        "_connection",
        "_continue",
        "_failure",
        "_is_silent",
        "_loop",
        "_start",
        "_timer",
        "_waiter",
        "has_head",
        "head",
        "head_seconds",
        "longest_gap_seconds",
        "received_bytes",
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop, *, bodiless: bool) -> None:
        self.head: ResponseHead
        self.has_head = False
        self.received_bytes = 0
        self.head_seconds = 0.0
        self.longest_gap_seconds = 0.0
        self._asked_at = loop.time()
        self._connection: Connection | None = connection
        self._loop = loop
        self._bodiless = bodiless
        self._begun: asyncio.Future[None] = loop.create_future()
        self._start = bytearray()
        self._body: WholeBody | QueuedBody | DirectBody | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._continue: asyncio.Future[None] | None = None
        self._failure = ""
        self._is_silent = False

    # For whoever asked.

    @property
    def arrival(self) -> asyncio.Future[None]:
        """Done when `begun` would return or raise."""
        return self._begun

    @property
    def is_complete(self) -> bool:
        """Whether all of it has come."""
        return self._body is not None and self._body.complete

    async def go_ahead(self, seconds_max: float) -> None:
        """Wait for an interim 100, as long as curl does: not every server knows `Expect` (RFC 9110, 10.1.1)."""
        if self._continue is None:
            self._continue = self._loop.create_future()
        await asyncio.wait([self._continue], timeout=seconds_max)

    async def begun(self) -> None:
        """Wait for the head, and a while for a small body. ResponseBroken when there is none."""
        await self._begun

    def whole(self) -> memoryview | None:
        """The body, where it is small, all of it is here and none of it was taken."""
        return self._body.whole() if isinstance(self._body, WholeBody) else None

    async def piece(self) -> bytes:
        """The next bytes of the body, empty at its end. ResponseBroken when it ended early."""
        while True:
            if isinstance(self._body, WholeBody | QueuedBody) and (piece := self._body.take()):
                if self._connection is not None:
                    self._connection.go_on()
                return piece
            if self._failure:
                raise self._broken()
            if self._connection is None:
                return b""
            self._waiter = self._loop.create_future()
            await self._waiter

    @property
    def is_direct(self) -> bool:
        """Whether the rest of the body can be received in buffers of the reader; it comes in no other way then."""
        if isinstance(self._body, QueuedBody) and (body := self._body.direct()) is not None:
            self._body = body
        return isinstance(self._body, DirectBody)

    async def receive_into(self, buffer: ReceiveBuffer) -> memoryview:
        """The next piece of a direct body, empty at its end. ResponseBroken when it ended early, behind what came.

        Between two pieces nothing is received. Who is cancelled has lost bytes, and closes the answer.
        """
        assert isinstance(self._body, DirectBody)  # noqa: S101 - it is direct
        self._body.want(buffer)
        if not self._body.has_enough and self._connection is not None:
            await self._receive(self._body, self._connection)
        piece = self._body.take()
        if self._connection is not None:
            self._connection.hold()
        if self._failure and not piece:
            raise self._broken()
        return piece

    async def _receive(self, body: DirectBody, connection: Connection) -> None:
        self._waiter = self._loop.create_future()
        late = self._loop.call_later(GATHERING_SECONDS_MAX, self._hurry, body)
        connection.go_on()
        try:
            await self._waiter
        finally:
            late.cancel()

    def _hurry(self, body: DirectBody) -> None:
        body.hurry()
        if body.has_enough:
            self._tell()

    def close(self) -> None:
        """Want no more of it: a connection with the rest of a body on it is of no use. Idempotent."""
        self._stop_waiting_for_body()
        self._begun.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def give_up(self, reason: str, *, silent: bool = False) -> None:
        """Take it for broken: whoever reads it is told so."""
        if self._connection is not None:
            self._connection.give_up(reason, silent=silent)

    # For the connection.

    @property
    def destination(self) -> memoryview | None:
        """Where the next bytes are to be received, if anywhere in particular."""
        return self._body.rest if isinstance(self._body, WholeBody | DirectBody) else None

    @property
    def is_much(self) -> bool:
        """Whether enough lies here unread."""
        if isinstance(self._body, DirectBody):
            return self._body.has_enough
        return isinstance(self._body, QueuedBody) and self._body.is_much

    @property
    def is_little(self) -> bool:
        if isinstance(self._body, DirectBody):
            return not self._body.has_enough
        return not isinstance(self._body, QueuedBody) or self._body.is_little

    def received_there(self, count: int) -> None:
        """Bytes were received at `destination`."""
        assert isinstance(self._body, WholeBody | DirectBody)  # noqa: S101 - it has said where
        self._body.received(count)
        self.received_bytes += count
        self._has_come(0)

    def received(self, buffer: bytearray, count: int) -> None:
        """The first `count` bytes of a buffer have come. MalformedResponse."""
        if isinstance(self._body, QueuedBody):
            excess = self._body.put(memoryview(buffer)[:count])
            self.received_bytes += count - excess
            self._has_come(excess)
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
            raise MalformedResponse("the origin's answer has a head without an end")

    def _take_heads(self, buffer: bytearray, count: int) -> tuple[int, ResponseParser | None]:
        """The answer's head, and interim ones before it (RFC 9110, 15.2), as far as they are there.

        Where they end, and who has read the answer's own.
        """
        at = 0
        while (end := buffer.find(HEAD_END, at, count)) >= 0:
            parser, begin, at = ResponseParser(), at, end + len(HEAD_END)
            self.head = parser.head(bytes(buffer[begin:at]), bodiless=self._bodiless)
            if self.head.status >= 200:
                self.has_head = True
                self.head_seconds = self._loop.time() - self._asked_at
                return at, parser
            if self._continue is not None and not self._continue.done():
                self._continue.set_result(None)
        return at, None

    def _begin_body(self, parser: ResponseParser, data: memoryview) -> None:
        length = self.head.length_bytes
        if length is not None and length <= WHOLE_BYTES_MAX:
            self._body = WholeBody(length, data)
            excess = max(0, len(data) - length)
        else:
            self._body = body = QueuedBody(length, parser)
            excess = body.put(data)
        self.received_bytes = len(data) - excess
        self._has_come(excess)

    def ended(self, reason: str, *, orderly: bool, silent: bool) -> None:
        """The connection has ended, or is of no use any more; `orderly`: the origin has closed it."""
        self._connection, self._is_silent = None, silent
        if not (orderly and isinstance(self._body, QueuedBody) and self._body.ends_with_connection):
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
        elif not isinstance(body, DirectBody) or body.has_enough:
            self._tell()

    def _tell(self) -> None:
        """Wake up whoever waits."""
        self._stop_waiting_for_body()
        if not self._begun.done():
            if self._body is not None:
                self._begun.set_result(None)
            else:
                self._begun.set_exception(self._broken())
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _broken(self) -> ResponseBroken:
        return ResponseBroken(self._failure, silent=self._is_silent)

    def _stop_waiting_for_body(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

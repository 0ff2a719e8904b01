"""The answer to one request, as it arrives: its head, and its body.

httptools parses lines of the head, this module finds the end of the body (RFC 9112). The body is held in memory until
it is taken, or received into its destination. `HttpResponse` presents it to the rest of the gateway: an
`OriginResponse` that continues over another connection if this one breaks off, and that reads refusals (S3 error code,
wanted region).
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import httptools

from gateway.core.errors import OriginBodyError
from gateway.disk.file_lease import FileLease, SharedFile, with_lease
from gateway.origin.client import ClosedAtExit
from gateway.origin.receive_buffer import GATHERING_SECONDS_MAX, ReceiveBuffer, SocketReceiver, TakenBytes, gathered
from gateway.s3.headers import HOP_BY_HOP

HEAD_BYTES_MAX = 64 * 1024
"""Limit of an answer's head, with the interim ones before it."""

_INTERIM_HEAD_BYTES = 512
"""Added to the size of each interim head, as each costs work."""

HEAD_END = b"\r\n\r\n"


class MalformedResponse(Exception):
    """The bytes that came are no HTTP/1.1 answer."""


@dataclass(slots=True)
class ResponseHead:
    """`headers` are those from end to end: lower-case names, latin-1 values, repeated ones joined.

    `length_bytes` is that of the body; None where the body says itself where it ends, or the end of the connection
    does.
    """

    status: int
    headers: dict[str, str]
    length_bytes: int | None
    keep_alive: bool


class ResponseParser:
    """One answer: its head, and a body of no known length. Its `on_…` methods are httptools' callbacks."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._fields: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._keep_alive = False
        self.complete = False
        self.ends_with_connection = False

    def head(self, head: bytes, *, bodiless: bool) -> ResponseHead:
        """`head` ends with its empty line; MalformedResponse. `bodiless`: it answers a HEAD (RFC 9112, 6.3)."""
        self._feed(head)
        status, headers = self._parser.get_status_code(), _end_to_end(self._fields)
        length: int | None = None
        if bodiless or status in (204, 304) or status < 200:
            length = 0
        elif "content-length" in headers:  # checked by httptools: digits, and no Transfer-Encoding beside it
            length = int(headers["content-length"])
        else:
            self.ends_with_connection = not any(name.lower() == b"transfer-encoding" for name, _ in self._fields)
        return ResponseHead(status, headers, length, self._keep_alive)

    def body(self, data: bytes) -> list[bytes]:
        """Return the parts of the body in `data`; raise MalformedResponse. `complete` tells its end."""
        try:
            self._feed(data)
        except MalformedResponse:
            if not self.complete:
                raise
        pieces, self._pieces = self._pieces, []
        return pieces

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise MalformedResponse(f"the origin's answer is no HTTP: {error}") from error

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        self._keep_alive = self._parser.should_keep_alive()  # it forgets with the end of the answer

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


@lru_cache(maxsize=1024)
def _field_name(name: bytes) -> str:
    """Lower case, and the same object for all answers."""
    return name.decode("latin-1").lower()


_ONCE = frozenset({"date", "etag", "last-modified"})
"""Fields that occur once and contain commas: if a proxy has added another, the first counts."""


def _end_to_end(fields: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Without what concerns this connection only."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in fields:
        name, value = _field_name(raw_name), raw_value.decode("latin-1").rstrip(" \t")
        if name not in headers:
            headers[name] = value
        elif name not in _ONCE:
            headers[name] = f"{headers[name]}, {value}"
    if HOP_BY_HOP.isdisjoint(headers):
        return headers
    dropped = {name.strip().lower() for name in headers.get("connection", "").split(",")} | HOP_BY_HOP
    return {name: value for name, value in headers.items() if name not in dropped}


UNREAD_BYTES_MAX = 512 * 1024
"""A body that comes in pieces is not received any further while so much of it waits; half of that makes it go on."""


_NOTHING = memoryview(b"")


class WholeBody:
    """A small body of known length, received where it stays. `rest` is where its next bytes belong."""

    __slots__ = ("_taken_bytes", "content", "rest")

    def __init__(self, length_bytes: int, begin: memoryview) -> None:
        """`begin` holds its first bytes, and perhaps more than its own."""
        if len(begin) >= length_bytes:
            self.content, self.rest = memoryview(bytes(begin[:length_bytes])), _NOTHING
        else:
            self.content = memoryview(bytearray(length_bytes))
            self.content[: len(begin)] = begin
            self.rest = self.content[len(begin) :]
        self._taken_bytes = 0

    @property
    def complete(self) -> bool:
        return not self.rest

    def received(self, count: int) -> None:
        self.rest = self.rest[count:]

    def whole(self) -> memoryview | None:
        """All of it, if all is here and none of it was taken yet."""
        return None if self._taken_bytes or self.rest else self.content

    def take(self) -> bytes:
        arrived_bytes = len(self.content) - len(self.rest)
        piece = self.content[self._taken_bytes : arrived_bytes]
        self._taken_bytes = arrived_bytes
        return bytes(piece)


class QueuedBody:
    """Any other body. Its end is where its length says, where `parser` finds it, or where the connection ends."""

    __slots__ = ("_has_reader", "_left_bytes", "_parser", "_pieces", "_unread_bytes", "complete")

    def __init__(self, length_bytes: int | None, parser: ResponseParser) -> None:
        self._left_bytes = length_bytes
        self._parser = parser
        self._pieces: deque[bytes] = deque()
        self._unread_bytes = 0
        self._has_reader = False
        self.complete = False

    @property
    def is_much(self) -> bool:
        """Before the first read any byte is much, as the reader may have a better place for the next ones."""
        return self._unread_bytes >= (UNREAD_BYTES_MAX if self._has_reader else 1)

    @property
    def is_little(self) -> bool:
        return self._unread_bytes <= UNREAD_BYTES_MAX // 2

    def put(self, data: memoryview) -> int:
        """Bytes have come; how many of them are too many. MalformedResponse."""
        if self._left_bytes is None:
            for piece in self._parser.body(bytes(data)):
                self._add(piece)
            self.complete = self._parser.complete
            return 0
        count = min(len(data), self._left_bytes)
        if count:
            self._add(bytes(data[:count]))
        self._left_bytes -= count
        self.complete = not self._left_bytes
        return len(data) - count

    @property
    def ends_with_connection(self) -> bool:
        return self._parser.ends_with_connection

    def take(self) -> bytes:
        """Return the next bytes; empty when none are here."""
        self._has_reader = True
        if not self._pieces:
            return b""
        piece = self._pieces.popleft()
        self._unread_bytes -= len(piece)
        return piece

    def direct(self) -> DirectBody | None:
        """Return a body that continues in buffers of its reader; None if its length is not known."""
        return None if self._left_bytes is None else DirectBody(self._pieces, self._left_bytes)

    def _add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self._unread_bytes += len(piece)


class DirectBody:
    """A large body of known length, received in buffers of its reader: piece by piece, when that is wanted."""

    __slots__ = ("_begun", "_begun_bytes", "_buffer", "_enough_bytes", "_filled_bytes", "_is_taken", "_left_bytes")

    def __init__(self, begun: deque[bytes], left_bytes: int) -> None:
        """`begun` has come already, behind it come `left_bytes`."""
        self._begun = begun
        self._begun_bytes = sum(map(len, begun))
        self._left_bytes = left_bytes
        self._buffer: ReceiveBuffer | None = None
        self._filled_bytes = 0
        self._enough_bytes = 0
        self._is_taken = False

    @property
    def complete(self) -> bool:
        return not self._left_bytes

    @property
    def has_enough(self) -> bool:
        return self._buffer is None or self._begun_bytes + self._filled_bytes >= self._enough_bytes

    @property
    def rest(self) -> memoryview:
        if self._buffer is None:
            return _NOTHING
        return self._buffer.buffer[self._filled_bytes : self._filled_bytes + self._left_bytes]

    def received(self, count: int) -> None:
        self._filled_bytes += count
        self._left_bytes -= count

    def want(self, buffer: ReceiveBuffer) -> None:
        self._buffer, self._filled_bytes, self._is_taken = buffer, 0, False
        self._enough_bytes = min(buffer.enough_bytes, buffer.size_bytes)

    def gather(self) -> None:
        """Move what came before into the buffer, as much as fits."""
        assert self._buffer is not None  # noqa: S101 - it was wanted
        while self._begun and (room := self._buffer.size_bytes - self._filled_bytes):
            piece = self._begun.popleft()
            if len(piece) > room:
                self._begun.appendleft(piece[room:])
                piece = piece[:room]
            self._buffer.buffer[self._filled_bytes : self._filled_bytes + len(piece)] = piece
            self._filled_bytes += len(piece)
            self._begun_bytes -= len(piece)

    def receiver(self) -> SocketReceiver:
        """Return what receives this piece on a thread, and has it taken."""
        assert self._buffer is not None  # noqa: S101 - it was wanted
        begun, self._begun = self._begun, deque()
        self._filled_bytes, self._begun_bytes, self._is_taken = self._begun_bytes, 0, True
        return SocketReceiver(tuple(begun), min(self._buffer.trip_bytes, self._left_bytes))

    @property
    def missing_bytes(self) -> int:
        """Bytes that this piece needs, of those that come."""
        return min(self._enough_bytes - self._begun_bytes - self._filled_bytes, self._left_bytes)

    def hurry(self) -> None:
        """Any byte is enough."""
        self._enough_bytes = 1

    def take(self) -> memoryview | TakenBytes:
        if self._is_taken:
            self._buffer = None
            return TakenBytes(self._filled_bytes)
        self.gather()
        buffer, self._buffer = self._buffer, None
        return buffer.buffer[: self._filled_bytes] if buffer is not None and self._filled_bytes else _NOTHING


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


class ResponseConnection(Protocol):
    """The connection that a response comes on, as its reader uses it."""

    def resume(self) -> None: ...
    def hold(self) -> None: ...
    def give_up(self, reason: str, *, silent: bool) -> None: ...
    def answered(self, *, keep_alive: bool) -> None: ...
    def wire(self) -> FileLease[SharedFile] | None: ...
    def await_bytes(self, count: int) -> bool: ...
    def landed(self, count: int) -> None: ...
    def close(self) -> None: ...


class ResponseStream:
    """`head` is there once `begun` has returned. The caller closes it in the end, also if it fails."""

    __slots__ = (
        "_asked_at",
        "_begun",
        "_bodiless",
        "_body",
        "_connection",
        "_continue",
        "_failure",
        "_interim_bytes",
        "_is_silent",
        "_loop",
        "_receiver",
        "_start",
        "_timer",
        "_waiter",
        "has_head",
        "head",
        "head_seconds",
        "longest_gap_seconds",
        "received_bytes",
    )

    def __init__(
        self,
        connection: ResponseConnection,
        loop: asyncio.AbstractEventLoop,
        *,
        bodiless: bool,
        asked_at: float | None = None,
    ) -> None:
        self.head: ResponseHead
        self.has_head = False
        self.received_bytes = 0
        self.head_seconds = 0.0
        self.longest_gap_seconds = 0.0
        self._asked_at = loop.time() if asked_at is None else asked_at
        self._receiver: SocketReceiver | None = None
        self._connection: ResponseConnection | None = connection
        self._loop = loop
        self._bodiless = bodiless
        self._begun: asyncio.Future[None] = loop.create_future()
        self._start = bytearray()
        self._interim_bytes = 0
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
        """Return the body, where it is small, all of it is here and none of it was taken."""
        return self._body.whole() if isinstance(self._body, WholeBody) else None

    async def piece(self) -> bytes:
        """Return the next bytes of the body, empty at its end. ResponseBroken when it ended early."""
        while True:
            if isinstance(self._body, WholeBody | QueuedBody) and (piece := self._body.take()):
                if self._connection is not None:
                    self._connection.resume()
                return piece
            if self._failure:
                raise self._broken()
            if self._connection is None:
                return b""
            self._waiter = self._loop.create_future()
            await self._waiter

    @property
    def is_direct(self) -> bool:
        """True if the rest of the body can be received in buffers of the reader; it then arrives there alone."""
        if isinstance(self._body, QueuedBody) and (body := self._body.direct()) is not None:
            self._body = body
        return isinstance(self._body, DirectBody)

    async def receive_into(self, buffer: ReceiveBuffer) -> memoryview | TakenBytes:
        """Return the next piece of a direct body, empty at its end. ResponseBroken: ended early, behind what came.

        Between two pieces nothing is received. A cancelled caller has lost bytes, and closes the answer.
        """
        assert isinstance(self._body, DirectBody)  # noqa: S101 - it is direct
        self._body.want(buffer)
        if not self._body.has_enough and (connection := self._connection) is not None:
            wire = connection.wire() if buffer.on_thread is not None else None
            if wire is None:
                await self._receive(self._body, connection)
            else:
                with wire:
                    await self._land(self._body, connection, buffer, wire)
        piece = self._body.take()
        if self._connection is not None:
            self._connection.hold()
        if self._failure and not piece:
            raise self._broken()
        return piece

    async def _receive(self, body: DirectBody, connection: ResponseConnection) -> None:
        body.gather()
        self._waiter = self._loop.create_future()
        late = self._loop.call_later(GATHERING_SECONDS_MAX, self._hurry, body)
        connection.resume()
        try:
            await self._waiter
        finally:
            late.cancel()

    async def _land(
        self, body: DirectBody, connection: ResponseConnection, buffer: ReceiveBuffer, wire: FileLease[SharedFile]
    ) -> None:
        """Receive the piece on a thread, once enough of it waits in the socket."""
        assert buffer.on_thread is not None  # noqa: S101 - the caller has looked
        receiver = None
        while receiver is None or not (receiver.received_bytes or receiver.ended):
            await self._bytes(body, connection)
            if self._connection is not connection or body.has_enough:
                return
            self._receiver = receiver = receiver or body.receiver()
            try:
                await buffer.on_thread(with_lease(wire.share(), receiver.receive))
            finally:
                self._receiver = None
                connection.landed(receiver.received_bytes)
        self.received_there(receiver.received_bytes)
        if receiver.ended and self._connection is connection:
            connection.give_up(receiver.ended, silent=False)

    async def _bytes(self, body: DirectBody, connection: ResponseConnection) -> None:
        if connection.await_bytes(body.missing_bytes):
            return
        self._waiter = self._loop.create_future()
        late = self._loop.call_later(GATHERING_SECONDS_MAX, self._hurry, body, connection)
        try:
            await self._waiter
        finally:
            late.cancel()

    def _hurry(self, body: DirectBody, connection: ResponseConnection | None = None) -> None:
        body.hurry()
        if body.has_enough:
            self._tell()
        elif connection is not None:
            connection.await_bytes(1)

    def close(self) -> None:
        """Want no more of it: a connection with the rest of a body on it is of no use. Idempotent."""
        self._stop_waiting_for_body()
        if not self._begun.cancel() and not self._begun.cancelled():
            self._begun.exception()  # retrieved: it may have been passed on to none
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def give_up(self, reason: str, *, silent: bool = False) -> None:
        if self._connection is not None:
            self._connection.give_up(reason, silent=silent)

    # For the connection.

    def asked(self) -> None:
        """Note that the request is complete only now."""
        self._asked_at = self._loop.time()

    @property
    def is_landing(self) -> bool:
        """True while a thread receives bytes that are not counted yet."""
        return self._receiver is not None

    @property
    def landing_bytes(self) -> int:
        return self._receiver.received_bytes if self._receiver is not None else 0

    @property
    def destination(self) -> memoryview | None:
        return self._body.rest if isinstance(self._body, WholeBody | DirectBody) else None

    @property
    def is_much(self) -> bool:
        if isinstance(self._body, DirectBody):
            return self._body.has_enough
        return isinstance(self._body, QueuedBody) and self._body.is_much

    @property
    def is_little(self) -> bool:
        if isinstance(self._body, DirectBody):
            return not self._body.has_enough
        return not isinstance(self._body, QueuedBody) or self._body.is_little

    def bytes_wait(self) -> None:
        """Bytes for which the connection was asked wait in the socket."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def received_there(self, count: int) -> None:
        """Bytes were received at `destination`."""
        assert isinstance(self._body, WholeBody | DirectBody)  # noqa: S101 - it has said where
        self._body.received(count)
        self.received_bytes += count
        self._has_come(0)

    def received(self, buffer: bytearray, count: int) -> None:
        """Take the first `count` bytes of a buffer. MalformedResponse."""
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
        """Take the answer's head, and interim ones before it (RFC 9110, 15.2), as far as they have come.

        Return where they end, and the parser that has read the answer's own.
        """
        at = 0
        while (end := buffer.find(HEAD_END, at, count)) >= 0:
            parser, begin, at = ResponseParser(), at, end + len(HEAD_END)
            if self._interim_bytes + at - begin > HEAD_BYTES_MAX:
                raise MalformedResponse("the origin's answer has a head that is too long")
            self.head = parser.head(bytes(buffer[begin:at]), bodiless=self._bodiless)
            if self.head.status >= 200:
                self.has_head = True
                self.head_seconds = self._loop.time() - self._asked_at
                return at, parser
            self._interim_bytes += at - begin + _INTERIM_HEAD_BYTES
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
        """End: the connection has ended, or is of no use any more; `orderly`: the origin has closed it."""
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


_PEEK_BYTES = 16 * 1024
_ELEMENT = {name: re.compile(rf"<{name}>\s*+([^<]{{1,200}}?)\s*+</{name}>") for name in ("Code", "Region")}
_REGION = re.compile(r"[a-z0-9-]{1,64}")

Successor = Callable[[], Coroutine[Any, Any, ResponseStream | None]]
"""Gives what the rest of a body comes by, if it broke off and there is anything."""


class HttpResponse(ClosedAtExit):
    """`OriginResponse` over a connection, which it holds until its body is over or it is closed."""

    def __init__(
        self, stream: ResponseStream, *, successor: Successor | None = None, on_close: Callable[[], None] | None = None
    ) -> None:
        """`successor` is asked when the body breaks off, `on_close` told of the end."""
        self._stream = stream
        self.status = stream.head.status
        self.headers: Mapping[str, str] = stream.head.headers
        self._prefix = b""
        self._successor = successor
        self._on_close = on_close

    def stream(self, buffer: ReceiveBuffer | None = None) -> AsyncIterator[bytes | memoryview]:
        return self._pieces() if buffer is None else self._into(buffer)

    def whole(self) -> memoryview | None:
        return None if self._prefix else self._stream.whole()

    async def read(self, limit_bytes: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async for piece in self._pieces():
            size += len(piece)
            if size > limit_bytes:
                raise OriginBodyError(f"the origin's answer is longer than {limit_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    async def error_document(self) -> str:
        """Return the beginning of an error answer's body; the answer can still be read in full."""
        return (await self.begin(_PEEK_BYTES)).decode("utf-8", "replace")

    async def begin(self, size_bytes: int) -> bytes:
        """Wait for so much of the body, or all of it; the answer can still be read in full."""
        pieces = [self._prefix]
        size = len(self._prefix)
        while size < size_bytes and (piece := await self._next()):
            pieces.append(piece)
            size += len(piece)
        self._prefix = b"".join(pieces)
        return self._prefix

    async def aclose(self) -> None:
        self._stream.close()
        if self._on_close is not None:
            self._on_close()

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self._prefix:
            prefix, self._prefix = self._prefix, b""
            yield prefix
        while piece := await self._next():
            yield piece

    async def _into(self, buffer: ReceiveBuffer) -> AsyncIterator[memoryview | bytes]:
        if self._prefix or not self._stream.is_direct:
            async for view in gathered(self._pieces(), buffer):
                yield view
            return
        while True:
            try:
                piece = await self._stream.receive_into(buffer)
            except ResponseBroken as error:
                await self._succeed(error)
                if self._stream.is_direct:
                    continue
                async for view in gathered(self._pieces(), buffer):  # a short rest, which has come as a whole
                    yield view
                return
            if not piece:
                return
            yield piece

    async def _next(self) -> bytes:
        while True:
            try:
                return await self._stream.piece()
            except ResponseBroken as error:
                await self._succeed(error)

    async def _succeed(self, error: ResponseBroken) -> None:
        """Go on with the rest of the body from elsewhere; OriginBodyError when there is none."""
        following = await self._successor() if self._successor is not None else None
        if following is None:
            raise OriginBodyError(f"the origin's answer broke off: {error}") from error
        self._stream = following


def error_code(document: str) -> str | None:
    """Return the S3 error code (S3 API, "Error responses"); None when there is none, as in the answer to a HEAD."""
    found = _ELEMENT["Code"].search(document)
    return found.group(1) if found else None


def wanted_region(document: str, response: HttpResponse) -> str | None:
    """Return the region that the origin expects in the signature, by the document or, without a body, a header."""
    found = _ELEMENT["Region"].search(document)
    region = found.group(1) if found else response.headers.get("x-amz-bucket-region", "")
    return region if _REGION.fullmatch(region) else None

"""Between the application and its server: `PlainSend` for other servers than ours, `PacedSend` for limited callers.

A request of a limited caller waits for room before anything is done, and its bodies are paced. Nothing is held
meanwhile but the connection and the request's head: no byte of a body is read. A client that has sent
`Expect: 100-continue` has its 100 at once, for after a second without one it would begin to send all the same
(botocore, Go), and take the 100 that comes then for another answer; what it sends waits in the connection, as that of
others does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from gateway.core.model import BorrowedBuffer, FileSpan
from gateway.edge.cycle import LENT, RESPONSE, SPAN, WAITED
from gateway.edge.response import EncodedResponse, copy_of
from gateway.policy.callers import Admission, CallerLimits, CallerRefused, Direction
from gateway.s3.error_codes import s3_error

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


def direction_of(body_length_bytes: int | None) -> Direction:
    """Return the direction whose debt holds a request back: "write" where the client sends a body."""
    return "read" if body_length_bytes == 0 else "write"


def expected_bytes(method: str, direction: Direction, body_length_bytes: int | None) -> int | None:
    """Return the first body's known length: that of an upload, 0 for a HEAD, None for other answers."""
    if direction == "write":
        return body_length_bytes
    return 0 if method == "HEAD" else None


async def enter(
    limits: CallerLimits,
    direction: Direction,
    expected: int | None,
    send_continue: Callable[[], None] | None,
) -> Admission:
    """Wait for room; S3Error SlowDown if there is none in time. `send_continue` is set if the client expects a 100."""
    if send_continue is not None:
        send_continue()
    try:
        return await limits.enter(direction, expected)
    except CallerRefused as refused:
        raise s3_error(
            "SlowDown",
            f"Please reduce your request rate. {str(refused)[0].upper()}{str(refused)[1:]}.",
            headers={"Retry-After": str(refused.retry_after_seconds)},
        ) from None


class PacedSend:
    """Sends an answer's body in pieces, each when there is room for it."""

    def __init__(self, send: Send, admission: Admission, piece_bytes: int) -> None:
        self._send = send
        self._admission = admission
        self._piece_bytes = piece_bytes

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == SPAN:
            await self._send_span(message, message["span"])
        elif kind == LENT:
            await self._send_lent(message, message["bytes"])
        elif kind == "http.response.body" and message.get("body"):
            await self._send_bytes(message, memoryview(message["body"]))
        else:
            await self._send(message)

    async def _send_lent(self, message: Message, lent: BorrowedBuffer) -> None:
        """As much of it as a piece has; the rest comes again."""
        count = min(self._piece_bytes, len(lent.content))
        await self._admission.pass_bytes("read", count)
        piece = BorrowedBuffer(lent.content[:count])
        lent.content.release()  # a sender releases its piece before it waits
        await self._send({**message, "bytes": piece})
        lent.taken = piece.taken
        self._admission.release("read", count - piece.taken)

    async def _send_span(self, message: Message, span: FileSpan) -> None:
        done = 0
        while True:
            count = min(self._piece_bytes, span.count - done)
            has_waited = bool(count) and await self._admission.pass_bytes("read", count)
            piece = replace(span, offset=span.offset + done, count=count)
            done += count
            more = message.get("more_body", False) or done < span.count
            fields = {"span": piece, WAITED: has_waited or done > count}
            await self._send({**message, **fields, "more_body": more})
            if done >= span.count:
                return

    async def _send_bytes(self, message: Message, body: memoryview) -> None:
        for start in range(0, len(body), self._piece_bytes):
            piece = body[start : start + self._piece_bytes]
            await self._admission.pass_bytes("read", len(piece))
            more = message.get("more_body", False) or start + len(piece) < len(body)
            await self._send({**message, "body": piece, "more_body": more})


class PlainSend:
    """Says in plain ASGI messages what the application says to the gateway's own server (cycle.py)."""

    def __init__(self, send: Send, method: str) -> None:
        self._send = send
        self._is_head = method == "HEAD"
        self._is_begun = False

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind == RESPONSE:
            await self._begin(message["response"])
        elif kind == SPAN:
            await self._send_span(message["span"])
        elif kind == LENT:
            await self._send({"type": "http.response.body", "body": copy_of(message["bytes"]), "more_body": True})
        else:
            await self._send(message)

    async def _begin(self, response: EncodedResponse) -> None:
        if self._is_begun:
            raise RuntimeError("a part of the response is out")
        self._is_begun = True
        lines = [line.partition(b": ") for line in response.lines.split(b"\r\n")[:-1]]
        headers = [*response.headers, *((name, value) for name, _, value in lines)]
        if response.length_bytes is not None:
            headers.append((b"content-length", b"%d" % response.length_bytes))
        await self._send({"type": "http.response.start", "status": response.status, "headers": headers})
        if isinstance(response.body, FileSpan):
            await self._send_span(response.body)
            response.sent_bytes = response.body.count
            await self._send({"type": "http.response.body", "body": b""})
        elif response.body is not None:
            body = b"" if self._is_head else response.body
            await self._send({"type": "http.response.body", "body": body})
            response.sent_bytes = len(body)

    async def _send_span(self, span: FileSpan) -> None:
        async with aclosing(span.read()) as pieces:
            async for data in pieces:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})

"""The admin port's server: the S3 port's, with its limits, in a process that must go on flushing whatever comes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import unquote

from gateway.admin.operations import problem
from gateway.config import ServerSettings
from gateway.core import cancellation
from gateway.core.errors import S3Error
from gateway.edge.cycle import in_task
from gateway.edge.response import Refusal
from gateway.edge.s3_server import ASGIApp, Message, Receive, S3Server, Scope, Send
from gateway.serve.worker import server_limits

CONNECTIONS_MAX = 256
"""Connections of the admin port; above it those that wait for a request make room, the longest first."""

AT_WORK_MAX = 16
"""Requests that the admin port works on at a time, so that a turn of the event loop stays short for the flush."""

WAIT_SECONDS_MAX = 10.0
"""Seconds for which a request waits for its turn; then it gets 503."""

BODY_BYTES_MAX = 4 * 1024**3
"""Longest body: a snapshot or a manifest of ten million objects fits."""

_NOT_COUNTED = frozenset({"/healthz", "/readyz"})
"""Cheap, and asked for by those who restart what does not answer."""


def admin_server(app: ASGIApp, sockets: Sequence[socket.socket], settings: ServerSettings) -> S3Server:
    """Return the admin port's server. It owns the sockets, and takes its timeouts and sizes from `[server]`."""
    limits = replace(server_limits(settings), max_connections=CONNECTIONS_MAX)
    return S3Server(_FewAtATime(app), sockets=sockets, limits=limits, refusal=_refusal)


def _refusal(error: S3Error) -> Refusal:
    answer = problem(error.status, error.message, {"connection": "close"})
    return answer.status_code, answer.raw_headers, bytes(answer.body)


class _FewAtATime:
    """Hands `app` AT_WORK_MAX requests at a time.

    A request that waits for its client, or whose answer has begun, does not count: a slow client delays no other.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._places = asyncio.Semaphore(AT_WORK_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await in_task()
        cancellation.register_request(anywhere=scope["method"] in ("GET", "HEAD"))
        scope["path"] = unquote(scope["path"])
        if scope["path"] in _NOT_COUNTED:
            await self._app(scope, receive, send)
            return
        request = _Request(self._places, receive, send)
        try:
            await request.take_place()
        except S3Error as error:
            await problem(error.status, error.message, {"retry-after": "1"})(scope, receive, send)
            return
        try:
            await self._app(scope, request.receive, request.send)
        finally:
            request.leave_place()


class _Request:
    """One request and its place among those at work."""

    def __init__(self, places: asyncio.Semaphore, receive: Receive, send: Send) -> None:
        self._places = places
        self._receive, self._send = receive, send
        self._has_place = False
        self._left_bytes = BODY_BYTES_MAX

    async def take_place(self) -> None:
        """Raise SlowDown when there is none for WAIT_SECONDS_MAX, ClientDisconnected when the client leaves before."""
        try:
            with cancellation.turn():
                async with asyncio.timeout(WAIT_SECONDS_MAX):
                    await self._places.acquire()
        except TimeoutError:
            raise S3Error("SlowDown", "the admin port has too much to do: try again later", 503) from None
        self._has_place = True

    def leave_place(self) -> None:
        """Leave the place; may be repeated."""
        if self._has_place:
            self._has_place = False
            self._places.release()

    async def receive(self) -> Message:
        """Return the next piece of the body. Raise S3Error when the body is late, malformed or too long."""
        had_place = self._has_place
        self.leave_place()
        message = await self._receive()
        self._left_bytes -= len(message.get("body", b""))
        if self._left_bytes < 0:
            raise S3Error("EntityTooLarge", f"the body is longer than {BODY_BYTES_MAX} bytes", 413)
        if had_place:
            await self.take_place()
        return message

    async def send(self, message: Message) -> None:
        """Hand a message of the answer on; with its head the work is done."""
        self.leave_place()
        await self._send(message)

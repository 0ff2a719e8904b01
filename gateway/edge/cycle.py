"""One request and its response: the `receive` and `send` that the application is given.

They are ASGI's, and differ from uvicorn's in what S3 needs:

- `send` raises ClientDisconnected once the client is gone, so that streams stop;
- the head leaves together with the first bytes of the body (ASGI asks for that), in one packet where they fit;
- `receive` gives pieces as they came and raises S3Error when a body is late (RequestTimeout) or malformed;
- a response that starts before its request is complete says `connection: close`.

Beyond ASGI there are (docs/decisions/0024-one-application-protocol.md):

- `RESPONSE`, a message with a whole `EncodedResponse`, or with its head; a second one is sent in place of the first as
  long as nothing of that is out, else RuntimeError is raised;
- `SPAN`, a message with a `span` of a file, sent without a copy where the connection is not encrypted; `WAITED` beside
  it: time has passed since its bytes were checked;
- `LENT`, a message with `bytes` that are a BorrowedBuffer: the connection takes as many as go out at once, and more
  follows;
- `RECEIVE_INTO`, in the scope (request_body.py), and `forebay.authority` (connection.py).

Most of what a cache answers, it can answer at once, and a task with its turn of the event loop costs as much as half of
such an answer. So the server takes the first step of the application itself (`step`), in the call that brought the
request. An application must not do there what needs a task (`asyncio.timeout`, `asyncio.current_task`): it awaits
`in_task` before. In any other server that does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from types import coroutine as awaitable_generator
from typing import Any, Protocol

from gateway.core import cancellation
from gateway.core.errors import ClientDisconnected
from gateway.core.model import FileSpan, PinnedFileSpan
from gateway.edge.request_parsing import BodyQueue
from gateway.edge.response import (
    EncodedResponse,
    ResponseFraming,
    ResponseWriter,
    Sender,
    response_head,
)
from gateway.edge.server_state import InputFlow, S3ServerState, ServerLimits
from gateway.s3.error_codes import s3_error

_TASK_WANTED: Any = object()


@awaitable_generator
def in_task() -> Generator[Any, None, None]:
    if asyncio.current_task() is None:
        yield _TASK_WANTED


def step(running: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Take the first step; the rest of it, for a task, where it is not over. It raises what the step raises."""
    try:
        return _Rest(running, running.send(None))
    except StopIteration:
        return None
    except Exception as error:  # noqa: BLE001 - the rest's awaiter gets it
        return _raised(error)


async def _raised(error: Exception) -> None:
    raise error


class _Rest:
    """A coroutine from where it waits for something; `await` does not take one that has begun."""

    def __init__(self, running: Coroutine[Any, Any, None], waited_for: Any) -> None:
        self._running = running
        self._waited_for = waited_for

    def __await__(self) -> Generator[Any, Any, None]:
        waited_for, running = self._waited_for, self._running
        go_on: Callable[[Any], Any]
        while True:
            value: Any = None
            go_on = running.send
            try:
                if waited_for is not _TASK_WANTED:
                    value = yield waited_for
            except BaseException as error:  # noqa: BLE001 - it is the coroutine's
                value, go_on = error, running.throw
            try:
                waited_for = go_on(value)
            except StopIteration:
                return


Message = MutableMapping[str, Any]

RESPONSE = "forebay.response"
"""Also the extension of ASGI by which a server says that it takes all of these."""

SPAN = "forebay.span"
WAITED = "forebay.waited"
LENT = "forebay.lent_bytes"
CONTINUE = "forebay.send_continue"
"""In the scope of a request that waits for its 100: sends it, though the body is not asked for yet."""

LEARN = "forebay.learn_head"
"""In the scope: takes (request, caller) of a head that was parsed (prepared.py)."""

TOLD = "forebay.told"
"""In the scope: `Told`, where the origin has been asked for the request already."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_REFUSALS = 400
"""The statuses from here on."""

_logger = logging.getLogger(__name__)


class CycleConnection(Protocol):
    """A connection as its request sees it. `wire` is the transport's own socket, None if it is encrypted."""

    transport: asyncio.Transport
    flow: InputFlow
    wire: socket.socket | None
    limits: ServerLimits
    shared: S3ServerState

    def now(self) -> float: ...
    def is_refusal_unsent(self) -> bool: ...
    def on_response_complete(self) -> None: ...


class RequestCycle:
    """See the module. `disconnected`, `response_complete` and `message_event` are uvicorn's protocol's, too."""

    disconnected = False
    response_started = False
    response_complete = False
    task: asyncio.Task[None] | None = None
    """None while it is answered in the call that brought it."""

    on_left: Callable[[], None] | None = None
    """Called when the client leaves before the response is complete, while no task waits."""

    _event: asyncio.Event | None = None
    _is_over = False
    """The application has returned: what happens to the response now is no beginning of another request."""

    probes = 0
    """Number of probes sent to the client."""

    _end_told = False
    _waiting_since: float | None = None
    _waited_seconds = 0.0
    _has_waited = False
    """True if the response has waited for the connection since it began, or since the last bytes of a file."""

    def __init__(
        self,
        scope: MutableMapping[str, Any],
        connection: CycleConnection,
        request_body: BodyQueue,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        self.scope = scope
        self.connection = connection
        self.request_body = request_body
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = expects_continue
        self.transport = connection.transport
        self.flow = connection.flow
        self.writer = ResponseWriter(connection.transport, connection.flow, connection.wire)

    @property
    def message_event(self) -> asyncio.Event:
        if self._event is None:
            self._event = asyncio.Event()
        return self._event

    # The application

    async def run(self, application: Awaitable[None]) -> None:
        """Run the application for this request; whatever it does, the client is left with an honest connection."""
        try:
            await application
        except ClientDisconnected as error:
            _logger.debug("request ended early: %s", error)
            self._break_off()
        except asyncio.CancelledError:
            self._break_off()
            raise
        except Exception:
            _logger.exception("the application failed")
            await self._fail()
        else:
            if not self.response_complete and not self._gone:
                _logger.debug("the application left without completing its response")
                await self._fail()
        finally:
            self._is_over = True

    async def _fail(self) -> None:
        """End after an application error: InternalError while that can still be said, else a broken connection."""
        if self.response_complete or self._gone:
            return
        if self.writer.on_the_wire:
            self._break_off()
            return
        status, headers, body = self.connection.shared.refusal(s3_error("InternalError"))
        try:
            await self.send({"type": RESPONSE, "response": EncodedResponse(status, headers, b"", body)})
        except ClientDisconnected:
            _logger.debug("the client left before it could be told of the failure")

    def _break_off(self) -> None:
        """Close in a way that no client takes for the end of the response."""
        if self.response_complete or self.transport.is_closing():
            return
        if self.writer.ends_with_connection:
            # Only a reset tells a body that ends with its connection from one that was cut.
            reset = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        self.transport.abort()

    # Request

    async def receive(self) -> Any:
        """Return the next `http.request` or `http.disconnect`.

        Raises S3Error when the body is malformed, or comes too slowly while this call waits for it.
        """
        self.send_continue()
        body = self.request_body
        while not (self.disconnected or self.response_complete):
            if body:
                return self._piece(body)
            if body.failure is not None:
                raise body.failure
            if body.complete and not self._end_told:
                self._end_told = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self.wait_for_client()
        return {"type": "http.disconnect"}

    def send_continue(self) -> None:
        """Tell a client that waits for it that its body is wanted."""
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.waiting_for_100_continue = False
            if not self.request_body.received_bytes:
                self.transport.write(_CONTINUE)

    def _piece(self, body: BodyQueue) -> Message:
        piece = body.take()
        if (
            self.flow.read_paused
            and not body.complete
            and body.queued_bytes <= self.connection.limits.receive_buffer_bytes // 2
        ):
            self.flow.resume_reading()
        self._end_told = body.complete and not body
        return {"type": "http.request", "body": piece, "more_body": not self._end_told}

    async def wait_for_client(self) -> None:
        """Until something happens to the connection; may return early. The time is the client's."""
        with self.clients_time():
            await self.something_happens()

    @contextmanager
    def clients_time(self) -> Iterator[None]:
        """Count the time inside as silence of the client, until its body is complete."""
        self._waiting_since = started = None if self.request_body.complete else self.connection.now()
        try:
            yield
        finally:
            self._waiting_since = None
            if started is not None:
                self._waited_seconds += self.connection.now() - started

    async def something_happens(self, descriptor: int | None = None, seconds: float | None = None) -> None:
        """To the connection; or `descriptor` is readable, or `seconds` have passed. May return early."""
        loop, event = asyncio.get_running_loop(), self.message_event
        event.clear()
        timer = loop.call_later(seconds, event.set) if seconds is not None else None
        if descriptor is not None:
            loop.add_reader(descriptor, event.set)
        try:
            await event.wait()
        finally:
            if descriptor is not None:
                loop.remove_reader(descriptor)
            if timer is not None:
                timer.cancel()

    def check_body(self, now: float) -> None:
        """Fail the body if it is too slow, whatever the application does just now. Called now and then."""
        body = self.request_body
        if body.complete or body.failure is not None:
            return
        silence = now - self._waiting_since if self._waiting_since is not None else 0.0
        judged_seconds = self._waited_seconds + silence - self.connection.limits.body_timeout_seconds
        if (
            silence >= self.connection.limits.body_timeout_seconds
            or body.received_bytes < judged_seconds * self.connection.limits.min_body_rate_bytes_per_second
        ):
            body.failure = s3_error("RequestTimeout")
            self.message_event.set()

    # EncodedResponse

    async def send(self, message: Any) -> None:
        """Take a message of the response; return when the connection can take more.

        Raises ClientDisconnected when the client is gone, RuntimeError when the message is out of order or does not
        agree with the Content-Length.
        """
        if self.flow.write_paused and not self.disconnected:
            self._has_waited = True
            await self.flow.drain()
        kind = message["type"]
        if self.response_complete:
            raise RuntimeError(f"{kind} behind the end of the response")
        if self._gone:
            raise ClientDisconnected("the client left before its answer was complete")
        if kind == RESPONSE:
            response: EncodedResponse = message["response"]
            rest = self._begin_response(response)
            if rest is not None:
                await in_task()
                try:
                    await self.writer.finish(rest)
                finally:
                    response.sent_bytes = self.writer.sent_bytes
            if response.body is not None:
                self.complete()
            return
        if kind == "http.response.start":
            if self.response_started:
                raise RuntimeError("a response starts once")
            self._start(EncodedResponse(message["status"], message.get("headers", ()), b"", None))
            return
        more_body = message.get("more_body", False)
        if kind == "http.response.body":
            self.writer.write_bytes(message.get("body", b""), more_body=more_body)
        elif kind == SPAN:
            is_fresh, self._has_waited = not (self._has_waited or message.get(WAITED)), False
            await self.writer.write_file(message["span"], more_body=more_body, is_fresh=is_fresh)
        elif kind == LENT:
            more_body = True
            await self.writer.write_lent(message["bytes"])
        else:
            raise RuntimeError(f"unknown message {kind}")
        if not more_body:
            self.complete()

    async def go_on(self, head: bytes, file: PinnedFileSpan | None, sent_bytes: int) -> None:
        """Send the rest of a response begun elsewhere: head, and file from `sent_bytes` on. Raises as `send`."""
        if self._gone:
            raise ClientDisconnected("the client left before its answer was complete")
        self.response_started = True
        count = file.span.count - sent_bytes if file is not None else None
        self.writer.start(head, ResponseFraming(count, False, file is None, True))
        if file is None or count is None:
            self.writer.write_whole(b"")
        else:
            rest = replace(file.span, offset=file.span.offset + sent_bytes, count=count)
            await self.writer.write_file(rest, more_body=False, is_fresh=False)
        self.complete()

    @property
    def abandoned(self) -> bool:
        return self._gone or self.response_complete

    @property
    def _gone(self) -> bool:
        return self.disconnected or self.transport.is_closing()

    def _begin_response(self, response: EncodedResponse) -> Sender | None:
        if self.response_started:
            if self.writer.on_the_wire:
                raise RuntimeError("a part of the response is out")
            self.writer = ResponseWriter(self.transport, self.flow, self.connection.wire)
        self._start(response)
        body, rest = response.body, None
        if body is None:
            return None
        try:
            if isinstance(body, FileSpan):
                rest = self.writer.begin_file(body, more_body=False, is_fresh=not self._has_waited)
            else:
                self.writer.write_whole(body)
                if response.status >= _REFUSALS and self.connection.is_refusal_unsent():
                    self.keep_alive = False  # nothing else is done for one who does not read it
        finally:
            response.sent_bytes = self.writer.sent_bytes
        return rest

    def _start(self, response: EncodedResponse) -> None:
        if self.waiting_for_100_continue and self.request_body.complete:
            # An empty body is never read. The AWS CLI misreads the connection's next answer when the 100 is left out.
            self.send_continue()
        head, framing = response_head(
            response.status,
            response.headers,
            method=self.scope["method"],
            http_version=self.scope["http_version"],
            keep_alive=self.keep_alive and self.request_body.complete,
            lines=response.lines + self.connection.shared.default_lines,
            length_bytes=response.length_bytes,
        )
        self.writer.start(head, framing)
        self.keep_alive = framing.keep_alive
        self.waiting_for_100_continue = False
        self.response_started = True

    def complete(self) -> None:
        """All of the response is sent."""
        self.response_complete = True
        if self._event is not None:
            self._event.set()
        if not self._is_over:
            self.connection.on_response_complete()

    # Connection

    def connection_lost(self) -> None:
        if not self.response_complete:
            self.disconnected = True
        self.writer.abandon()
        if self._event is not None:
            self._event.set()
        if self.on_left is not None:
            self.on_left()
        if self.task is not None and not self.response_complete:
            cancellation.abandon(self.task)

    def probe_client(self) -> None:
        """Probe a silent or unread client; it may still wait for the response.

        A client that has left looks the same until something is sent to it, and then resets the connection. So it gets
        an interim response, which every client of HTTP/1.1 must take at any time (RFC 9110, 15.2).
        """
        self.probes += 1
        if not self.response_started and self.scope["http_version"] == "1.1":
            self.transport.write(_CONTINUE)

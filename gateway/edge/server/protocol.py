"""One connection of the S3 port: bytes in, requests to the application, responses out, and when to hang up.

A subclass of uvicorn's httptools protocol. uvicorn keeps the plumbing (flow control, tasks, connection sets); what a
client may send, and what happens when it sends something else, is decided here:

- httptools sees request heads only, one at a time and whole: a body is counted or unchunked by `BodyQueue`, so that
  large bodies are neither parsed nor copied, and the end of every message is known exactly;
- bytes behind a request wait unparsed until its response is complete (pipelining), so that a bad successor never
  disturbs an answer;
- after an answer that the client may not have expected yet, the connection lingers: what still arrives is thrown away
  for a while, because closing at once would reset the connection and with it the answer.

`scope["path"]` is the path as it was on the wire, like `raw_path`: decoding it would cost every request time, and S3
keys are decoded once, elsewhere. `scope["forebay.authority"]` is there for targets in absolute form; the Host header
among the headers is then replaced by it (RFC 9112, 3.2.2).
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.clock import Clock, SystemClock
from gateway.edge.server.body_queue import BodyQueue
from gateway.edge.server.cycle import HEADER_LINES_EXTENSION, LENT_EXTENSION, ZERO_COPY_EXTENSION, S3Cycle
from gateway.edge.server.head_parser import HeadParser, RequestHead
from gateway.edge.server.immediate import BEGUN, ImmediateApp, ImmediateResponse, immediate_app
from gateway.edge.server.limits import ServerLimits
from gateway.edge.server.refusals import refusal_bytes
from gateway.edge.server.request_head import HEAD_END, check_incomplete_head
from gateway.edge.server.response_head import ResponseFraming, response_head
from gateway.edge.server.response_writer import ResponseWriter
from gateway.edge.server.sending import Sender
from gateway.errors import ClientDisconnected, S3Error
from gateway.s3.error_codes import s3_error

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

_PIPELINED_BYTES = 64 * 1024
_FIRST_BYTE_SECONDS = 1.0
"""While the server drains: how long a connection that has just been opened may take for its first byte."""

_logger = logging.getLogger(__name__)


class _Input(Enum):
    """What the bytes that arrive belong to."""

    HEAD = auto()
    BODY = auto()
    SUCCESSOR = auto()
    """A request is complete, its response is not: the bytes are the next request's."""
    NOTHING = auto()
    """The connection is over; bytes are thrown away."""


class S3ServerState(ServerState):
    """What the connections of one server share."""

    def __init__(self) -> None:
        super().__init__()
        self.draining = False
        self.nothing_open = asyncio.Event()
        self.nothing_open.set()


class S3Protocol(HttpToolsProtocol):
    """See the module."""

    cycle: S3Cycle | None  # type: ignore[assignment]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ServerLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits or ServerLimits()
        self._now = (clock or SystemClock()).monotonic
        self._input = _Input.HEAD
        self._received = b""
        self._fresh = True
        self._deadline: float | None = None
        self._head_deadline_set = False
        self._discard_left = 0
        self._write_progress: tuple[int, int] | None = None
        self._write_progress_at = 0.0
        self._wire: socket.socket | None = None
        self._extensions: dict[str, dict[object, object]] = {HEADER_LINES_EXTENSION: {}}
        self._immediate = immediate_app(self.app)
        self._heads = HeadParser(max_bytes=self._limits.max_header_bytes, max_headers=self._limits.max_headers)
        self.parser = None

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.scheme == "http":
            # Nothing is queued behind the kernel's own buffer, so "not paused" means that a file may be sent now.
            transport.set_write_buffer_limits(high=0)
            self._extensions |= {ZERO_COPY_EXTENSION: {}, LENT_EXTENSION: {}}
            shown = transport.get_extra_info("socket")
            self._wire = socket.socket(shown.family, shown.type, shown.proto, shown.fileno())
        self._deadline = self._now() + self._limits.head_timeout_seconds
        if isinstance(self.server_state, S3ServerState):
            self.server_state.nothing_open.clear()
            if self.server_state.draining:
                self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._deadline = None
        self._received = b""
        if self.cycle is not None:
            self.cycle.connection_lost()
        if self._wire is not None:
            self._wire.detach()  # the transport closes it
            self._wire = None
        if isinstance(self.server_state, S3ServerState) and not self.connections:
            self.server_state.nothing_open.set()

    def shutdown(self) -> None:
        """The server drains: what has begun is finished, what is idle closed."""
        if self._input is not _Input.HEAD:
            if self.cycle is not None:
                self.cycle.keep_alive = False
        elif self._received:
            return
        elif self._fresh or self._input_waits():
            self._deadline = self._now() + _FIRST_BYTE_SECONDS
        else:
            self.transport.close()

    def _input_waits(self) -> bool:
        """Has the kernel bytes for us that the loop has not seen yet?"""
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    @property
    def _draining(self) -> bool:
        return isinstance(self.server_state, S3ServerState) and self.server_state.draining

    # Bytes in

    def data_received(self, data: bytes) -> None:
        if self._input is _Input.BODY:
            self._feed_body(data)
        elif self._input is _Input.NOTHING:
            self._discard(data)
        else:
            self._received = self._received + data if self._received else data
            self._look_at_received()

    def _look_at_received(self) -> None:
        if self._input is _Input.HEAD:
            self._try_head()
        elif len(self._received) > _PIPELINED_BYTES:
            self.flow.pause_reading()

    def _try_head(self) -> None:
        received = self._received
        if received.startswith(b"\r\n"):  # tolerated before a request line, once (RFC 9112, 2.2)
            received = received[2:]
        end = received.find(HEAD_END)
        self._received = received[end + 4 :] if end >= 0 else received
        try:
            if end >= 0:
                self._begin_request(received[: end + 4])
            elif received:
                self._await_rest_of_head(received)
        except S3Error as error:
            self._refuse(error, to_head=received.startswith(b"HEAD "))

    def _await_rest_of_head(self, received: bytes) -> None:
        check_incomplete_head(received, self._limits.max_header_bytes)
        self._fresh = False
        if not self._head_deadline_set:
            self._head_deadline_set = True
            self._deadline = self._now() + self._limits.head_timeout_seconds

    def _begin_request(self, head: bytes) -> None:
        parsed, begun = self._heads.parse(head), None
        self._fresh = self._head_deadline_set = False
        self._deadline = None
        if self._immediate is not None and self._can_answer_now(parsed):
            begun = self._immediate.begin(
                parsed.method, parsed.target.raw_path, parsed.target.raw_query, parsed.headers
            )
            response = self._immediate.immediate(begun)
            if response is not None:
                self._answer_now(parsed, begun, response)
                return
        self._start_cycle(parsed, begun)

    def _can_answer_now(self, head: RequestHead) -> bool:
        """Whether nothing has to be waited for on the connection's side: no body, no successor, nothing unsent."""
        return (
            head.body_length == 0
            and not head.expects_continue
            and not self._received
            and not self.flow.write_paused
            and self._wire is not None
        )

    def _start_cycle(self, head: RequestHead, begun: object) -> None:
        self.cycle = cycle = self._cycle_for(head)
        if begun is not None:
            cast("dict[str, object]", cycle.scope)[BEGUN] = begun
        self._start_asgi_task(cycle, self.app)
        if cycle.request_body.complete:
            self._input = _Input.SUCCESSOR
            self._look_at_received()
            return
        self._input = _Input.BODY
        begun, self._received = self._received, b""
        if begun:
            self._feed_body(begun)

    # Answers without a task (immediate.py)

    def _answer_now(self, head: RequestHead, begun: object, response: ImmediateResponse) -> None:
        app, body = cast("ImmediateApp", self._immediate), response.body
        writer = ResponseWriter(self.transport, self.flow, self._wire)
        rest = None
        try:
            framing = self._start_response(writer, head, response)
            if framing.bodiless:
                writer.write_head()
            elif isinstance(body, bytes):
                writer.write_bytes(body, more_body=False)
            else:
                rest = writer.begin_file(body.descriptor, body.offset, body.count, more_body=False)
        except Exception as error:  # noqa: BLE001 - the application hears of it, and the client of what it can
            app.end(begun, writer.sent_bytes, error)
            self._give_up(head, writer)
            return
        if rest is not None:
            self._finish_in_task(head, begun, writer, rest, framing)
            return
        app.end(begun, writer.sent_bytes)
        self._after_response(framing.keep_alive)

    def _start_response(
        self, writer: ResponseWriter, head: RequestHead, response: ImmediateResponse
    ) -> ResponseFraming:
        start, framing = response_head(
            response.status,
            [*self.server_state.default_headers, *response.headers],
            method=head.method,
            http_version=head.version,
            keep_alive=head.keep_alive and not self._draining,
            lines=response.lines,
        )
        writer.start(start, framing)
        return framing

    def _give_up(self, head: RequestHead, writer: ResponseWriter) -> None:
        """An answer failed: InternalError while that can still be said, else a broken connection."""
        if writer.on_the_wire:
            self.transport.abort()
        else:
            self._refuse(s3_error("InternalError"), to_head=head.method == "HEAD")

    def _finish_in_task(
        self, head: RequestHead, begun: object, writer: ResponseWriter, rest: Sender, framing: ResponseFraming
    ) -> None:
        """The client takes no more for now."""
        app = cast("ImmediateApp", self._immediate)
        self.cycle = cycle = self._cycle_for(head)
        cycle.take_over(writer, framing)

        async def finish(*_: object) -> None:
            failure: Exception | None = ClientDisconnected("the request was cut off")
            try:
                await cycle.finish_file(rest)
                failure = None
            except ClientDisconnected:
                raise
            except Exception as error:  # noqa: BLE001 - the application reports it
                failure = error  # and `run_asgi` ends the connection, as the response is not complete
            finally:
                app.end(begun, writer.sent_bytes, failure)

        self._start_asgi_task(cycle, finish)
        self._input = _Input.SUCCESSOR

    def _cycle_for(self, head: RequestHead) -> S3Cycle:
        return S3Cycle(
            self._scope_for(head),
            self.transport,
            self.flow,
            wire=self._wire,
            default_headers=self.server_state.default_headers,
            request_body=BodyQueue(head.body_length),
            limits=self._limits,
            now=self._now,
            expect_100_continue=head.expects_continue,
            keep_alive=head.keep_alive and not self._draining,
            on_response=self.on_response_complete,
        )

    def _scope_for(self, head: RequestHead) -> HTTPScope:
        scope: dict[str, object] = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": head.version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": head.method,
            "root_path": "",
            "path": head.target.raw_path.decode("ascii"),
            "raw_path": head.target.raw_path,
            "query_string": head.target.raw_query,
            "headers": head.headers,
            "state": self.app_state.copy(),
            "extensions": self._extensions,
        }
        if head.target.authority is not None:
            scope["forebay.authority"] = head.target.authority
        return cast("HTTPScope", scope)

    def _feed_body(self, data: bytes) -> None:
        cycle = self._current()
        body = cycle.request_body
        try:
            rest = body.feed(data)
        except S3Error:
            # The application hears of it from `receive`; where this body ends nobody can say any more.
            self._discard_from_now_on()
        else:
            self._after_body_bytes(body, rest)
        cycle.message_event.set()

    def _after_body_bytes(self, body: BodyQueue, rest: bytes) -> None:
        if body.complete:
            self._input = _Input.SUCCESSOR
            self._received = rest
            self._look_at_received()
        elif body.queued_bytes > self._limits.receive_buffer_of_one(len(self.connections)):
            self.flow.pause_reading()

    def _current(self) -> S3Cycle:
        if self.cycle is None:
            raise RuntimeError("there is no request yet")
        return self.cycle

    # The end of a response, of a connection

    def on_response_complete(self) -> None:
        cycle = self._current()
        self._after_response(cycle.keep_alive, body_complete=cycle.request_body.complete)

    def _after_response(self, keep_alive: bool, *, body_complete: bool = True) -> None:
        if self.transport.is_closing():
            return
        if keep_alive:
            self._next_request()
        elif body_complete and not self._received:
            self.transport.close()
        else:
            self._linger()

    def _next_request(self) -> None:
        self._input = _Input.HEAD
        self._deadline = self._now() + self._limits.keep_alive_timeout_seconds
        self.flow.resume_reading()
        if self._received:
            self._try_head()

    def _refuse(self, error: S3Error, *, to_head: bool = False) -> None:
        _logger.debug("refused a request: %s", error)
        self.transport.write(refusal_bytes(error, self.server_state.default_headers, without_body=to_head))
        self._linger()

    def _linger(self) -> None:
        """Everything is said: let the client read it before the connection goes."""
        self._discard_from_now_on()
        self._deadline = self._now() + self._limits.linger_seconds
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:
            self.transport.abort()  # the client has reset the connection already

    def _discard_from_now_on(self) -> None:
        self._input = _Input.NOTHING
        self._received = b""
        self._discard_left = self._limits.linger_bytes
        self.flow.resume_reading()

    def _discard(self, data: bytes) -> None:
        self._discard_left -= len(data)
        if self._discard_left < 0:
            self.transport.abort()

    # Time

    def sweep(self, now: float) -> None:
        """Called now and then by the server: enforce the timeouts."""
        if self._write_stalled(now):
            _logger.debug("dropped a client that takes nothing")
            self.transport.abort()
        elif self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._on_deadline()
        elif self.cycle is not None:
            self.cycle.check_body(now)

    def _on_deadline(self) -> None:
        if self._input is _Input.NOTHING:
            self.transport.abort()
        elif self._received:
            self._refuse(s3_error("RequestTimeout"), to_head=self._received.startswith(b"HEAD "))
        elif self._input_waits():
            self._deadline = self._now() + self._limits.head_timeout_seconds
        else:
            self.transport.close()

    def _write_stalled(self, now: float) -> bool:
        writer = self.cycle.writer if self.cycle is not None else None
        unsent_bytes = self.transport.get_write_buffer_size()
        if not unsent_bytes and (writer is None or not writer.sending):
            self._write_progress = None
            return False
        progress = (unsent_bytes, writer.sent_bytes if writer is not None else 0)
        if progress != self._write_progress:
            self._write_progress, self._write_progress_at = progress, now
        return now - self._write_progress_at >= self._limits.write_timeout_seconds

"""The requests of one connection of the S3 port: bytes in, requests to the application, responses out.

A subclass of uvicorn's httptools protocol. uvicorn keeps the plumbing (flow control, tasks, connection sets); what a
client may send, and what happens when it sends something else, is decided here and in `connection`:

- httptools sees request heads only, one at a time and whole: a body is counted or unchunked by `BodyQueue`, so that
  large bodies are neither parsed nor copied, and the end of every message is known exactly;
- a large body goes past all of it, from the socket to a thread, where the application asks for that (`receiving`);
- bytes behind a request wait unparsed until its response is complete (pipelining), so that a bad successor never
  disturbs an answer.

`scope["path"]` is the path as it was on the wire, like `raw_path`: decoding it would cost every request time, and S3
keys are decoded once, elsewhere. `scope["forebay.authority"]` is there for targets in absolute form; the Host header
among the headers is then replaced by it (RFC 9112, 3.2.2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from uvicorn.config import Config
from uvicorn.server import ServerState

from gateway.clock import Clock
from gateway.edge.server.body_queue import NO_BODY, BodyQueue
from gateway.edge.server.connection import Input, S3Connection
from gateway.edge.server.cycle import RequestCycle
from gateway.edge.server.first_step import step
from gateway.edge.server.head_parser import HeadParser, RequestHead
from gateway.edge.server.limits import ServerLimits
from gateway.edge.server.receive_threads import ReceiveThreads
from gateway.edge.server.receiving import RECEIVE_INTO, Receiving
from gateway.edge.server.request_head import HEAD_END, check_incomplete_head
from gateway.edge.server.scope import request_scope
from gateway.errors import S3Error

_PIPELINED_BYTES = 64 * 1024

_HEAD, _BODY, _SUCCESSOR, _NOTHING = Input
"""By these names, as Python 3.11 takes its time over a member of an enumeration."""


class S3Protocol(S3Connection):
    """See the module."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ServerLimits | None = None,
        clock: Clock | None = None,
        receive_threads: ReceiveThreads | None = None,
        only_answer: S3Error | None = None,
    ) -> None:
        """`only_answer`: what the first request gets, whatever it is."""
        super().__init__(config, server_state, app_state, _loop, limits=limits, clock=clock, only_answer=only_answer)
        self._receive_threads = receive_threads
        self._head_deadline_set = False
        self._heads = HeadParser(max_bytes=self.limits.max_header_bytes, max_headers=self.limits.max_headers)

    # Bytes in

    def data_received(self, data: bytes) -> None:
        if self._input is _BODY:
            self._feed_body(data)
        elif self._input is _NOTHING:
            self._discard(data)
        else:
            self._received = self._received + data if self._received else data
            self._look_at_received()

    def _look_at_received(self) -> None:
        if self._input is _HEAD:
            self._try_head()
        elif len(self._received) > _PIPELINED_BYTES:
            self.flow.pause_reading()

    def _try_head(self) -> None:
        received = self._received
        if received[:2] == b"\r\n":  # tolerated before a request line, once (RFC 9112, 2.2)
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
        check_incomplete_head(received, self.limits.max_header_bytes)
        self._fresh = False
        if not self._head_deadline_set:
            self._head_deadline_set = True
            self._deadline = self.now() + self.limits.head_timeout_seconds

    def _begin_request(self, head: bytes) -> None:
        if self._only_answer is not None:
            raise self._only_answer
        parsed = self._heads.parse(head)
        self._fresh = self._head_deadline_set = False
        self._deadline = None
        self._start_cycle(parsed)

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
            self._input = _SUCCESSOR
            self._received = rest
            self._look_at_received()
        elif body.queued_bytes > self.limits.receive_buffer_of_one(len(self.connections)):
            self.flow.pause_reading()

    def _on_body_complete(self) -> None:
        """The rest of a body was received past the transport."""
        self._input = _SUCCESSOR

    def _start_cycle(self, head: RequestHead) -> None:
        body = BodyQueue(head.body_length) if head.body_length != 0 else NO_BODY
        scope = request_scope(self._connection_scope, head)
        keep_alive = head.keep_alive and not self.shared.draining
        self.cycle = cycle = RequestCycle(scope, self, body, keep_alive, head.expects_continue)
        if body.complete:
            application = self.app(scope, cycle.receive, cycle.send)
            self._input = _SUCCESSOR
            if self._received or self.flow.write_paused:
                self._start_task(cycle, application)
                self._look_at_received()
                return
            rest = step(application)
            if rest is not None:
                self._start_task(cycle, rest)
            elif not cycle.response_complete:
                self._start_task(cycle, _nothing())
            return
        if self._receive_threads is not None:
            receiving = Receiving(cycle, self.wire, self._receive_threads, self._on_body_complete)
            scope[RECEIVE_INTO] = receiving.receive_into
        self._start_task(cycle, self.app(scope, cycle.receive, cycle.send))
        self._input = _BODY
        arrived, self._received = self._received, b""
        if arrived:
            self._feed_body(arrived)

    def _start_task(self, cycle: RequestCycle, application: Awaitable[None]) -> None:
        cycle.task = task = self.loop.create_task(cycle.run(application))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _current(self) -> RequestCycle:
        if self.cycle is None:
            raise RuntimeError("there is no request yet")
        return self.cycle

    # Behind a response

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
        self._input = _HEAD
        self.waits_since = self.now()
        self._deadline = self.waits_since + self.limits.keep_alive_timeout_seconds
        self.flow.resume_reading()
        if self._received:
            self._try_head()
        if self._is_half_closed and self._input in (_HEAD, _BODY):
            self.transport.close()  # the rest of a request will never come


async def _nothing() -> None:
    """What is left of an application that has returned."""

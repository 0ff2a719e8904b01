"""One connection of the S3 port: bytes in, requests to the application, responses out; how long it may take.

A subclass of uvicorn's httptools protocol. uvicorn keeps the plumbing (flow control, connection sets); what a client
may send, and what happens when it sends something else, is decided here:

- httptools sees request heads only, one at a time and whole: a body is counted or unchunked by `BodyQueue`, so that
  large bodies are neither parsed nor copied, and the end of every message is known exactly;
- a large body goes past all of it, from the socket to a thread, where the application asks for that (`receiving`);
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
import socket
import time
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from functools import partial
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.core.clock import Clock, SystemClock
from gateway.core.errors import BlockDamaged, S3Error
from gateway.core.model import PinnedFileSpan
from gateway.edge.cycle import CONTINUE, LEARN, RESPONSE, TOLD, RequestCycle, step
from gateway.edge.prepared import ColdRequest, ConnectionHeads, PreparedRequests, Question
from gateway.edge.receiving import RECEIVE_INTO, ReceiveThreads, Receiving, readable
from gateway.edge.request_parsing import (
    HEAD_END,
    NO_BODY,
    BodyQueue,
    HeadParser,
    IncompleteHead,
    RequestHead,
    request_scope,
)
from gateway.edge.response import (
    WriteWatch,
    next_request_id,
    plain_head,
    refusal_bytes,
    send_span,
    too_many_connections,
)
from gateway.edge.server_state import InputFlow, S3ServerState, ServerLimits
from gateway.operations.context import Told
from gateway.operations.prepared_reads import PreparedAnswer
from gateway.s3.error_codes import s3_error

IDLE_SECONDS = 1.0
"""A connection that has waited longer for a request is not at work."""

FIRST_BYTE_SECONDS = 1.0
"""While the server drains: how long a connection that has just been opened may take for its first byte."""

PROBE_SECONDS = (2.0, 8.0, 32.0)
"""Seconds without a read from a client whose request is not answered yet, after which it is probed. The end of its side
may stand behind more than the kernel takes. Go's client takes five interim responses at most."""

RECEIVED_AT_ONCE_BYTES = 64 * 1024
"""asyncio asks for 256 KiB at each `recv`, however little there is. Until the process has freed a piece as large, the C
library maps that anew each time: 23 µs for a request head, instead of 5. Large bodies go past the transport."""

_logger = logging.getLogger(__name__)


class Input(Enum):
    """Destination of the bytes that arrive."""

    HEAD = auto()
    BODY = auto()
    SUCCESSOR = auto()
    """A request is complete, its response is not: the bytes are the next request's."""
    NOTHING = auto()
    """The connection is over; bytes are thrown away."""


_HEAD, _BODY, _SUCCESSOR, _NOTHING = Input
"""By these names, as Python 3.11 takes its time over a member of an enumeration."""

_PIPELINED_BYTES = 64 * 1024


class S3Protocol(HttpToolsProtocol):
    """uvicorn's protocol with deadlines, a drain and an end that loses no answer; its requests come one by one."""

    cycle: RequestCycle | None  # type: ignore[assignment]
    flow: InputFlow

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
        prepared: PreparedRequests | None = None,
    ) -> None:
        """`only_answer`: what the first request gets, whatever it is. `prepared`: what need not go the whole way."""
        super().__init__(config, server_state, app_state, _loop)
        self.limits = limits or ServerLimits()
        self.now = (clock or SystemClock()).monotonic
        self.shared = server_state if isinstance(server_state, S3ServerState) else S3ServerState()
        self._input = _HEAD
        self._received: bytes | bytearray = b""
        self._held_bytes = 0
        """Bytes of it that count in the total of all connections."""
        self._unread_since: float | None = None
        self._refusal_deadline: float | None = None
        self._fresh = True
        self._deadline: float | None = None
        self._discard_left = 0
        self._write_watch = WriteWatch(self.limits.write_timeout_seconds)
        self.wire: socket.socket | None = None
        self._is_half_closed = False
        self._only_answer = only_answer
        self._began = self.waits_since = self.now()
        """When it began to wait for the request that it waits for now, or has waited for last."""
        self._connection_scope: dict[str, object] = {}
        self.parser = None
        self._receive_threads = receive_threads
        self._head_deadline_set = False
        self._is_looked_at = False
        """True if the head that has begun is known not to be prepared."""
        self._incomplete: IncompleteHead | None = None
        self._prepared_heads = ConnectionHeads(prepared) if prepared is not None else None
        self._heads = HeadParser(max_bytes=self.limits.max_header_bytes, max_headers=self.limits.max_headers)

    # Beginning and end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = InputFlow(transport, self._on_unread, self._on_read)
        if self.scheme == "http":
            # Nothing is queued behind the kernel's own buffer, so "not paused" means that a file may be sent now.
            transport.set_write_buffer_limits(high=0)
            transport.max_size = RECEIVED_AT_ONCE_BYTES  # type: ignore[attr-defined]
            shown = transport.get_extra_info("socket")
            self.wire = socket.socket(shown.family, shown.type, shown.proto, shown.fileno())
        self._connection_scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "extensions": {RESPONSE: {}},
        }
        self._deadline = self.now() + self.limits.head_timeout_seconds
        self.shared.nothing_open.clear()
        if self.shared.draining:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._deadline = None
        self._received = b""
        self._hold(0)
        self._release_refusal()
        self.shared.client_watch.forget(self)
        if self.cycle is not None:
            self.cycle.connection_lost()
        if self.wire is not None:
            self.wire.detach()  # the transport closes it
            self.wire = None
        now = self.now()
        self.shared.on_closed(now - self._began, self.is_idle(now))
        if not self.connections:
            self.shared.nothing_open.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Note that the client sends no more. True: it may still wait for its answer, so the connection stays open.

        TLS has no such state in practice: asyncio closes the connection whatever this says.
        """
        if self.wire is None or self.cycle is None or self._input is not _SUCCESSOR or self._is_half_closed:
            return False
        self.cycle.probe_client()
        self.shared.client_watch.watch(self, self.wire.fileno(), self.transport.abort)
        self._is_half_closed = True
        return True

    # Where nothing is read

    def _on_unread(self) -> None:
        self._unread_since = self.now()
        descriptor = self.transport.get_extra_info("socket").fileno()
        self.shared.client_watch.watch(self, descriptor, self.transport.abort, self._on_end_ahead)

    def _on_read(self) -> None:
        self._unread_since = None
        if not self._is_half_closed:
            self.shared.client_watch.forget(self)

    def _on_end_ahead(self) -> None:
        if self.cycle is None:
            return
        if self.wire is None:
            self.transport.abort()
        elif self.cycle.probes < len(PROBE_SECONDS):
            self.cycle.probe_client()

    def _probe_unread(self, cycle: RequestCycle, now: float) -> None:
        since, probes = self._unread_since, cycle.probes
        if since is not None and probes < len(PROBE_SECONDS) and now - since >= PROBE_SECONDS[probes]:
            cycle.probe_client()

    # What is held for strangers

    def _hold(self, size_bytes: int) -> None:
        if size_bytes or self._held_bytes:
            self._held_bytes = size_bytes
            self.shared.unparsed.hold(self._give_way, size_bytes)

    def _give_way(self) -> None:
        """All that connections have received and not parsed is too much, and this one has held some the longest."""
        self._held_bytes = 0
        _logger.debug("dropped bytes that were no whole request")
        if self.waits_for_request:
            self._refuse(s3_error("SlowDown"), to_head=self._received.startswith(b"HEAD "))
            self.transport.close()
        else:
            self.transport.abort()

    def is_refusal_unsent(self) -> bool:
        """Tell whether some of a refusal is still here: then it counts, and has to go soon."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes and not self.transport.is_closing():
            self._refusal_deadline = self.now() + self.limits.refusal_timeout_seconds
            self.shared.unsent_refusals.hold(self.transport.abort, unsent_bytes)
        return unsent_bytes > 0

    def _release_refusal(self) -> None:
        if self._refusal_deadline is not None:
            self._refusal_deadline = None
            self.shared.unsent_refusals.hold(self.transport.abort, 0)

    def _check_refusal(self, deadline: float, now: float) -> None:
        if not self.transport.get_write_buffer_size():
            self._release_refusal()
        elif now >= deadline:
            _logger.debug("dropped a client that does not take its refusal")
            self.transport.abort()

    def shutdown(self) -> None:
        """Drain: finish requests that have begun, close idle connections."""
        if self._input is not _HEAD:
            if self.cycle is not None:
                self.cycle.keep_alive = False
        elif self._received:
            return
        elif self._fresh or self._input_waits():
            self._deadline = self.now() + FIRST_BYTE_SECONDS
        else:
            self.transport.close()

    def _input_waits(self) -> bool:
        return readable(self.transport.get_extra_info("socket").fileno())

    def _refuse(self, error: S3Error, *, to_head: bool = False) -> None:
        _logger.debug("refused a request: %s", error)
        self.shared.on_refused(error.status)
        refused = self.shared.refusal(error)
        self.transport.write(refusal_bytes(refused, self.server_state.default_headers, without_body=to_head))
        self.is_refusal_unsent()
        self._linger()

    def _linger(self) -> None:
        """Everything is said: let the client read it before the connection goes."""
        if self._is_half_closed:
            self.transport.close()  # nothing will come that would have to be thrown away
            return
        self._discard_from_now_on()
        self.waits_since = self.now()
        self._deadline = self.waits_since + self.limits.linger_seconds
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:
            self.transport.abort()  # the client has reset the connection already

    def _discard_from_now_on(self) -> None:
        self._input = _NOTHING
        self._received = b""
        self._hold(0)
        self._discard_left = self.limits.linger_bytes
        self.flow.resume_reading()

    @property
    def waits_for_request(self) -> bool:
        """True if the connection is idle, or its request is not complete yet."""
        return self._input is _HEAD

    def is_idle(self, now: float) -> bool:
        return self._input is _HEAD and not self._received and now - self.waits_since > IDLE_SECONDS

    @property
    def lingers(self) -> bool:
        """True if everything is sent, and bytes that still arrive are thrown away."""
        return self._input is _NOTHING and self.cycle is None

    def make_room(self) -> bool:
        """Give way to a new connection; False when a request is just coming."""
        if not self.waits_for_request or (not self._received and self._input_waits()):
            return False
        if self._received:
            self._refuse(too_many_connections(), to_head=self._received.startswith(b"HEAD "))
        self.transport.close()
        return True

    # Time

    def sweep(self, now: float) -> None:
        """Enforce the timeouts. The server calls this now and then."""
        if self._refusal_deadline is not None:
            self._check_refusal(self._refusal_deadline, now)
        writer = self.cycle.writer if self.cycle is not None else None
        if self._write_watch.stalled(self.transport, writer, now):
            _logger.debug("dropped a client that takes nothing")
            self.transport.abort()
        elif self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._on_deadline()
        elif self.cycle is not None:
            self.cycle.check_body(now)
            self._probe_unread(self.cycle, now)

    def _on_deadline(self) -> None:
        if self._input is _NOTHING:
            self.transport.abort()
        elif self._received:
            self._refuse(s3_error("RequestTimeout"), to_head=self._received.startswith(b"HEAD "))
        elif self._input_waits():
            self._deadline = self.now() + self.limits.head_timeout_seconds
        else:
            self.transport.close()

    # Bytes in

    def data_received(self, data: bytes) -> None:
        if self._prepared_heads is not None and self._input is _HEAD and not self._received and data.endswith(HEAD_END):
            if self._only_answer is None and self._is_prepared(data):
                return
            self._is_looked_at = True
        if self._input is _BODY:
            self._feed_body(data)
        elif self._input is _NOTHING:
            self._discard_left -= len(data)
            if self._discard_left < 0:
                self.transport.abort()
        elif self._received:
            self._gather(data)
        else:
            self._received = data
            self._look_at_received()

    def _gather(self, data: bytes) -> None:
        if len(self._received) == 1:  # of an empty line, perhaps
            self._received = bytes(self._received) + data
            self._look_at_received()
            return
        if isinstance(self._received, bytes):
            self._received = bytearray(self._received)
        self._received += data
        if self._input is _HEAD and self._incomplete is not None:
            self._go_on_with_head(self._incomplete, self._received)
        else:
            self._look_at_received()

    def _go_on_with_head(self, incomplete: IncompleteHead, received: bytearray) -> None:
        try:
            end = incomplete.find_end(received)
            if end < 0:
                self._hold(len(received))
            else:
                self._received = bytes(received[end:])
                self._begin_request(bytes(received[:end]))
        except S3Error as error:
            self._refuse(error, to_head=received.startswith(b"HEAD "))

    def _look_at_received(self) -> None:
        if self._input is _HEAD:
            self._try_head()
        elif self._received:
            self._hold(len(self._received))
            if len(self._received) > _PIPELINED_BYTES:
                self.flow.pause_reading()

    def _try_head(self) -> None:
        received = self._received
        if received[:2] == b"\r\n":  # tolerated before a request line, once (RFC 9112, 2.2)
            received = received[2:]
        end = received.find(HEAD_END)
        self._received = received[end + 4 :] if end >= 0 else received
        try:
            if end >= 0:
                self._begin_request(received[: end + 4])  # type: ignore[arg-type]  # no bytearray was gathered yet
            elif received:
                self._await_rest_of_head(received)
            else:
                self._hold(0)
        except S3Error as error:
            self._refuse(error, to_head=received.startswith(b"HEAD "))

    def _await_rest_of_head(self, received: bytes | bytearray) -> None:
        self._incomplete = IncompleteHead(self.limits.max_header_bytes)
        self._incomplete.find_end(received)
        self._hold(len(received))
        self._fresh = False
        if not self._head_deadline_set:
            self._head_deadline_set = True
            self._deadline = self.now() + self.limits.head_timeout_seconds

    def _begin_request(self, head: bytes) -> None:
        if self._only_answer is not None:
            raise self._only_answer
        is_looked_at, self._is_looked_at = self._is_looked_at, False
        if not is_looked_at and self._is_prepared(head):
            return
        parsed = self._heads.parse(head)
        self._forget_head()
        self._deadline = None
        self._start_cycle(parsed, head)

    def _count_read(self) -> None:
        if self._receive_threads is not None:
            self._receive_threads.reads.begun += 1

    def _forget_head(self) -> None:
        if self._held_bytes:
            self._incomplete = None
            self._hold(0)
        self._fresh = self._head_deadline_set = False

    # What need not go the whole way

    def _is_prepared(self, head: bytes) -> bool:
        """Return True if a request was answered as prepared, or will be.

        That is once the origin has answered a question about it, or by a task that sends the rest of a file that the
        kernel does not take at once.
        """
        heads = self._prepared_heads
        if heads is None or self._received or self.flow.write_paused:
            return False
        if self.shared.draining or len(head) > self.limits.max_header_bytes:
            return False
        began = time.perf_counter()
        try:
            answer = heads.answer(head)
        except Exception:  # the whole way says what is wrong, and answers it
            _logger.exception("a prepared answer failed")
            return False
        prepared, tracer = heads.prepared, heads.prepared.app.tracer
        if answer is None:
            return tracer is None and self._begin_cold(heads, head, began)
        if tracer is not None and tracer.draws(head):
            answer.close()
            return False
        self._forget_head()
        self._count_read()
        if isinstance(answer, Question):
            cycle = self._prepared_cycle("GET")
            if prepared.begin_ask(answer, partial(self._end_ask, prepared, answer, head, began)):
                cycle.on_left = partial(prepared.left, answer, began, self.client)
            else:
                self._start_task(cycle, self._ask(cycle, prepared, answer, head, began))
            return True
        rest = self._send_prepared(prepared, answer, began)
        if rest is None:
            self._next_request()
        else:
            cycle = self._prepared_cycle("HEAD" if answer.span is None else "GET")
            cycle.response_started = True  # nothing else is said meanwhile
            self._start_task(cycle, rest(cycle))
        return True

    def _begin_cold(self, heads: ConnectionHeads, head: bytes, began: float) -> bool:
        """Return True if the origin was asked for an unknown object; `_end_cold` goes on."""
        try:
            cold = heads.begin_cold(began, partial(self._end_cold, head))
        except Exception:  # the whole way says what is wrong, and answers it
            _logger.exception("a cold request failed")
            return False
        if cold is None:
            return False
        self._forget_head()
        self._count_read()
        self._prepared_cycle("GET").on_left = partial(cold.left, self.client)
        return True

    def _end_cold(self, head: bytes, cold: ColdRequest) -> None:
        """Answer a cold request, or have the whole way do it."""
        cycle = self.cycle
        if cycle is None or cycle.disconnected:
            return
        cycle.on_left = None
        answer = cold.answer(may_send=cycle.keep_alive and not self.flow.write_paused)
        if answer is None:
            cold.read.hand_over()
            told = Told(None, cold.began, cold.read.question)
            self._start_task(cycle, self._take_whole_way(cycle, head, told, cold.read.close))
            return
        request_id, body = next_request_id(), answer.body
        cycle.response_started = True
        cycle.writer.write(cold.head(answer, request_id, self.shared.default_lines), body)
        cold.sent(answer, request_id, self.client)
        cycle.complete()

    async def _take_whole_way(self, cycle: RequestCycle, head: bytes, told: Told, close: Callable[[], None]) -> None:
        """Run the application, with the answer of the origin so far."""
        try:
            cycle.scope = {**request_scope(self._connection_scope, self._heads.parse(head)), TOLD: told}
            await self.app(cycle.scope, cycle.receive, cycle.send)
        finally:
            close()

    def _prepared_cycle(self, method: str) -> RequestCycle:
        self._deadline, self._input = None, _SUCCESSOR
        scope = {**self._connection_scope, "http_version": "1.1", "method": method}
        self.cycle = cycle = RequestCycle(scope, self, NO_BODY, True, False)
        return cycle

    def _send_prepared(
        self, prepared: PreparedRequests, answer: PreparedAnswer, began: float
    ) -> Callable[[RequestCycle], Awaitable[None]] | None:
        """Send what the kernel takes at once; what sends the rest, None where there is none."""
        request_id, lines = prepared.begin(answer)
        head = plain_head(answer.head.status, lines + self.shared.default_lines, answer.head.length_bytes)
        wire, span, head_sent, sent_bytes = self.wire, answer.span, 0, 0
        if wire is not None:
            head_sent, sent_bytes = _send_now(wire, head, span)
        elif span is None and not self.transport.is_closing():
            self.transport.write(head)
            head_sent = len(head)
        if head_sent == len(head) and (span is None or sent_bytes == span.span.count):
            prepared.sent(answer, request_id, began, sent_bytes, self.client)
            return None

        def go_on(cycle: RequestCycle) -> Awaitable[None]:
            rest = partial(cycle.go_on, head[head_sent:], span, sent_bytes)
            total = lambda: sent_bytes + cycle.writer.sent_bytes  # noqa: E731
            return prepared.go_on(answer, request_id, began, rest, total, self.client)

        return go_on

    def _end_ask(
        self,
        prepared: PreparedRequests,
        question: Question,
        head: bytes,
        began: float,
        answer: PreparedAnswer | None,
    ) -> None:
        """Answer by what the origin has said, or have a task wait for more."""
        cycle = self.cycle
        if cycle is None or cycle.disconnected:
            return
        cycle.on_left = None
        if answer is None or not cycle.keep_alive or self.flow.write_paused:
            if answer is not None:
                answer.close()
            self._start_task(cycle, self._ask(cycle, prepared, question, head, began))
            return
        rest = self._send_prepared(prepared, answer, began)
        cycle.response_started = True
        if rest is not None:
            self._start_task(cycle, rest(cycle))
        else:
            cycle.complete()

    async def _ask(
        self, cycle: RequestCycle, prepared: PreparedRequests, question: Question, head: bytes, began: float
    ) -> None:
        """Wait for the answer. Unprepared requests then go the full way.

        So do those whose connection must end since, or takes nothing: the origin is not asked again there.
        """
        answer = await prepared.ask(question, began, self.client)
        if answer is not None and cycle.keep_alive and not self.flow.write_paused:
            cycle.response_started = True
            rest = self._send_prepared(prepared, answer, began)
            if rest is not None:
                await rest(cycle)
            else:
                cycle.complete()
            return
        question.close()
        await self._take_whole_way(cycle, head, Told(question.pending.told, began), question.close)

    def _feed_body(self, data: bytes) -> None:
        cycle = self.cycle
        if cycle is None:
            raise RuntimeError("there is no request yet")
        body = cycle.request_body
        try:
            rest = body.feed(data)
        except S3Error:
            # The application hears of it from `receive`; the end of this body is unknown now.
            self._discard_from_now_on()
        else:
            if body.complete:
                self._input = _SUCCESSOR
                self._received = rest
                self._look_at_received()
            elif body.queued_bytes > self.limits.receive_buffer_of_one(len(self.connections)):
                self.flow.pause_reading()
        cycle.message_event.set()

    def _on_body_complete(self) -> None:
        """End a body whose rest was received past the transport."""
        self._input = _SUCCESSOR

    def _start_cycle(self, head: RequestHead, raw: bytes) -> None:
        body = BodyQueue(head.body_length) if head.body_length != 0 else NO_BODY
        scope = request_scope(self._connection_scope, head)
        keep_alive = head.keep_alive and not self.shared.draining
        self.cycle = cycle = RequestCycle(scope, self, body, keep_alive, head.expects_continue)
        if body.complete:
            if head.method in ("GET", "HEAD"):
                self._count_read()
            if self._prepared_heads is not None and self._prepared_heads.may_learn:
                scope[LEARN] = partial(self._prepared_heads.learn, raw, keep_alive=keep_alive)
            application = self.app(scope, cycle.receive, cycle.send)
            self._input = _SUCCESSOR
            # The task that has just sent its response may run here: it is not this request's.
            if self._received or self.flow.write_paused or asyncio.current_task(self.loop) is not None:
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
        if head.expects_continue:
            scope[CONTINUE] = cycle.send_continue
        self._start_task(cycle, self._begin_upload(cycle, scope))
        self._input = _BODY
        arrived, self._received = bytes(self._received), b""
        if arrived:
            self._feed_body(arrived)

    async def _begin_upload(self, cycle: RequestCycle, scope: dict[str, Any]) -> None:
        """When its turn comes."""
        if self._receive_threads is not None:
            await self._receive_threads.begin.turn()
        await self.app(scope, cycle.receive, cycle.send)

    def _start_task(self, cycle: RequestCycle, application: Awaitable[None]) -> None:
        cycle.task = task = self.loop.create_task(cycle.run(application))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    # Behind a response

    def on_response_complete(self) -> None:
        cycle = self.cycle
        if cycle is None or self.transport.is_closing():
            return
        self.cycle = None  # a connection that waits keeps nothing of the request
        if cycle.keep_alive:
            self._next_request()
        elif cycle.request_body.complete and not self._received:
            self.transport.close()
        else:
            self._linger()

    def _next_request(self) -> None:
        self._input = _HEAD
        self.waits_since = self.now()
        self._deadline = self.waits_since + self.limits.keep_alive_timeout_seconds
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self._received:
            self._received = bytes(self._received)
            self._try_head()
        if self._is_half_closed and self._input in (_HEAD, _BODY):
            self.transport.close()  # the rest of a request will never come


def _send_now(wire: socket.socket, lines: bytes, file: PinnedFileSpan | None) -> tuple[int, int]:
    try:
        lines_sent = wire.send(lines, socket.MSG_MORE if file is not None else 0)
    except OSError:
        return 0, 0  # the next step finds out
    if file is None or lines_sent < len(lines):
        return lines_sent, 0
    span = file.span
    try:
        return lines_sent, send_span(wire.fileno(), span, span.offset, span.count) or 0
    except (OSError, BlockDamaged):
        return lines_sent, 0


async def _nothing() -> None:
    """Stand in for an application that has returned."""

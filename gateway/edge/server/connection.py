"""One connection of the S3 port as such: when it begins, how long it may take, how it ends.

After an answer that the client may not have expected yet, the connection lingers: what still arrives is thrown away for
a while, because closing at once would reset the connection and with it the answer.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from enum import Enum, auto
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.clock import Clock, SystemClock
from gateway.edge.server.cycle import LENT, RESPONSE, ZERO_COPY, RequestCycle
from gateway.edge.server.limits import ServerLimits
from gateway.edge.server.readable import readable
from gateway.edge.server.refusals import refusal_bytes, too_many_connections
from gateway.edge.server.scope import connection_scope
from gateway.edge.server.server_state import S3ServerState
from gateway.edge.server.write_watch import WriteWatch
from gateway.errors import S3Error
from gateway.s3.error_codes import s3_error

FIRST_BYTE_SECONDS = 1.0
"""While the server drains: how long a connection that has just been opened may take for its first byte."""

_logger = logging.getLogger(__name__)


class Input(Enum):
    """What the bytes that arrive belong to."""

    HEAD = auto()
    BODY = auto()
    SUCCESSOR = auto()
    """A request is complete, its response is not: the bytes are the next request's."""
    NOTHING = auto()
    """The connection is over; bytes are thrown away."""


class S3Connection(HttpToolsProtocol):
    """uvicorn's protocol with deadlines, a drain and an end that loses no answer; requests are `S3Protocol`'s."""

    cycle: RequestCycle | None  # type: ignore[assignment]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ServerLimits | None = None,
        clock: Clock | None = None,
        only_answer: S3Error | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = limits or ServerLimits()
        self.now = (clock or SystemClock()).monotonic
        self.shared = server_state if isinstance(server_state, S3ServerState) else S3ServerState()
        self._input = Input.HEAD
        self._received = b""
        self._fresh = True
        self._deadline: float | None = None
        self._discard_left = 0
        self._write_watch = WriteWatch(self.limits.write_timeout_seconds)
        self.wire: socket.socket | None = None
        self._is_half_closed = False
        self._only_answer = only_answer
        self.waits_since = self.now()
        """When it began to wait for the request that it waits for now, or has waited for last."""
        self._connection_scope: dict[str, object] = {}
        self.parser = None

    # Beginning and end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        extensions: dict[str, object] = {RESPONSE: {}}
        if self.scheme == "http":
            # Nothing is queued behind the kernel's own buffer, so "not paused" means that a file may be sent now.
            transport.set_write_buffer_limits(high=0)
            extensions |= {ZERO_COPY: {}, LENT: {}}
            shown = transport.get_extra_info("socket")
            self.wire = socket.socket(shown.family, shown.type, shown.proto, shown.fileno())
        self._connection_scope = connection_scope(self.asgi_version, self.scheme, self.server, self.client, extensions)
        self._deadline = self.now() + self.limits.head_timeout_seconds
        self.shared.nothing_open.clear()
        if self.shared.draining:
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._deadline = None
        self._received = b""
        if self.cycle is not None:
            self.cycle.connection_lost()
        if self.wire is not None:
            self.shared.half_closed.forget(self.wire.fileno())
            self.wire.detach()  # the transport closes it
            self.wire = None
        if not self.connections:
            self.shared.nothing_open.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True: it may still wait for its answer, so the connection stays open.

        TLS has no such state in practice: asyncio closes the connection whatever this says.
        """
        if self.wire is None or self.cycle is None or self._input is not Input.SUCCESSOR or self._is_half_closed:
            return False
        self.cycle.probe_client()
        self.shared.half_closed.watch(self.wire.fileno(), self.transport.abort)
        self._is_half_closed = True
        return True

    def shutdown(self) -> None:
        """The server drains: what has begun is finished, what is idle closed."""
        if self._input is not Input.HEAD:
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
        self.transport.write(refusal_bytes(error, self.server_state.default_headers, without_body=to_head))
        self._linger()

    def _linger(self) -> None:
        """Everything is said: let the client read it before the connection goes."""
        if self._is_half_closed:
            self.transport.close()  # nothing will come that would have to be thrown away
            return
        self._discard_from_now_on()
        self._deadline = self.now() + self.limits.linger_seconds
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:
            self.transport.abort()  # the client has reset the connection already

    def _discard_from_now_on(self) -> None:
        self._input = Input.NOTHING
        self._received = b""
        self._discard_left = self.limits.linger_bytes
        self.flow.resume_reading()

    def _discard(self, data: bytes) -> None:
        self._discard_left -= len(data)
        if self._discard_left < 0:
            self.transport.abort()

    @property
    def waits_for_request(self) -> bool:
        """Whether nothing is being done for it: it is idle, or its request is not whole yet."""
        return self._input is Input.HEAD

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
        """Called now and then by the server: enforce the timeouts."""
        writer = self.cycle.writer if self.cycle is not None else None
        if self._write_watch.stalled(self.transport, writer, now):
            _logger.debug("dropped a client that takes nothing")
            self.transport.abort()
        elif self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._on_deadline()
        elif self.cycle is not None:
            self.cycle.check_body(now)

    def _on_deadline(self) -> None:
        if self._input is Input.NOTHING:
            self.transport.abort()
        elif self._received:
            self._refuse(s3_error("RequestTimeout"), to_head=self._received.startswith(b"HEAD "))
        elif self._input_waits():
            self._deadline = self.now() + self.limits.head_timeout_seconds
        else:
            self.transport.close()

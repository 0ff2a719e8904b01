"""The S3 port, and the admin port: listeners, connections, the sweep that enforces timeouts, and the drain at the end.

uvicorn's own `Server` is not used: it takes over signals, polls ten times a second, and has no timeouts for slow
clients. Its protocol is (see `connection`), on asyncio's own loop: uvloop was measured slower for large zero-copy
answers.
"""

from __future__ import annotations

import asyncio
import errno
import heapq
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any, cast

from uvicorn.config import Config

from gateway.core.clock import Clock, SystemClock
from gateway.core.errors import S3Error, StartupError
from gateway.disk.atomic_write import map_shared
from gateway.disk.pem import PemFile
from gateway.edge.connection import S3Protocol
from gateway.edge.prepared import PreparedRequests
from gateway.edge.receiving import ReceiveThreads
from gateway.edge.response import Refusal, not_encrypted, refusal, too_many_connections
from gateway.edge.server_state import S3ServerState, ServerLimits
from gateway.shared.heartbeats import PROCESSES_MAX, Heartbeats

PASSING_SECONDS = 0.0005
"""Seconds for which a process leaves a connection to those that have fewer; then it takes it itself. An idle process
wakes up sooner, and a busy one is not waited for."""

_ANOTHER_SECONDS = 0.0002
"""A listener that passes a connection on is called at each turn of the loop. After a longer pause it is another one, or
the loop was busy."""

_PASSED_ON_MAX = 16
"""Limit of connections passed on in a row, as each may have been the same one."""

_COUNT_BYTES = 8

_logger = logging.getLogger(__name__)

_GONE_ALREADY = (BlockingIOError, InterruptedError, ConnectionAbortedError)
_TCP_FAMILIES = frozenset((socket.AF_INET, socket.AF_INET6))
_OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class ConnectionCounts:
    """Number of connections at work in each process that accepts from the same sockets, in shared memory."""

    def __init__(self, path: Path, process: int, processes: int, heartbeats: Heartbeats) -> None:
        """Open the counts, made if missing, as `process` of `processes`; OSError. `close` closes `heartbeats`, too."""
        self._map = map_shared(path, PROCESSES_MAX * _COUNT_BYTES)
        self._counts = memoryview(self._map).cast("Q")  # one more than there are; 0: it does not accept
        self._process = process
        self._others = [number for number in range(processes) if number != process]
        self._heartbeats = heartbeats
        self.leave()

    def tell(self, count: int) -> None:
        """Tell the others that this process accepts, and has `count` connections."""
        self._counts[self._process] = count + 1

    def leave(self) -> None:
        """Tell the others that this process does not accept."""
        self._counts[self._process] = 0

    def others_have_fewer(self, count: int) -> bool:
        counts = self._counts
        return any(0 < counts[other] <= count and not self._heartbeats.is_hung(other) for other in self._others)

    def close(self) -> None:
        """Close the counts; may be repeated."""
        self._counts.release()
        self._map.close()
        self._heartbeats.close()


class Listener:
    """Takes one connection per turn of the event loop, so that the processes that share the socket share the work.

    (`loop.create_server` would take up to its whole backlog at once.)
    The kernel wakes all of them, and often the same one is the first. `is_others_turn` is asked before each connection:
    others then get a moment to take it, in which this loop turns on. Clients keep their connections for long, so what
    was shared out unevenly stays so: without it one of two processes gets 15 of 16.
    The socket belongs to the listener: `close` closes this process's descriptor and leaves those of others open.
    """

    def __init__(
        self,
        listening: socket.socket,
        on_connection: Callable[[socket.socket], None],
        is_others_turn: Callable[[], bool] = lambda: False,
    ) -> None:
        self._socket = listening
        self._on_connection = on_connection
        self._is_others_turn = is_others_turn
        self._accepting = False
        self._passing_until = self._passed_on_at = 0.0
        self._passed_on = 0
        listening.setblocking(False)

    def resume(self) -> None:
        """Accept from now on. Idempotent."""
        if not self._accepting:
            asyncio.get_running_loop().add_reader(self._socket.fileno(), self._accept)
            self._accepting = True

    def pause(self) -> None:
        """Leave connections in the kernel's queue. Idempotent."""
        if self._accepting:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._accepting = False

    def close(self) -> None:
        self.pause()
        self._socket.close()

    def _is_passed_on(self) -> bool:
        if not self._is_others_turn():
            return False
        now = asyncio.get_running_loop().time()
        if now >= self._passed_on_at + _ANOTHER_SECONDS and self._passed_on < _PASSED_ON_MAX:
            self._passed_on += 1
            self._passing_until = now + PASSING_SECONDS
        self._passed_on_at = now
        return now < self._passing_until

    def _accept(self) -> None:
        if self._is_passed_on():
            return
        self._passed_on = 0
        try:
            connection, _ = self._socket.accept()
        except _GONE_ALREADY:
            return
        except OSError as error:
            if error.errno not in _OUT_OF_RESOURCES:
                raise
            _logger.error("cannot accept connections for now: %s", error)
            self.pause()
            return
        if connection.family in _TCP_FAMILIES:
            # asyncio does this only for sockets made with an explicit protocol number, and a listener seldom is.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._on_connection(connection)


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_CANCELLED_TASKS_SECONDS = 5.0
"""Seconds for the clean-up of requests that were cancelled at the end of the grace time."""

_LASTING_SECONDS = 1.0
_LASTING_PART_MIN = 0.5
"""Share of lasting connections below which processes stop sharing them out: where a client opens one for each request,
that costs more than it brings, and the process that wakes up first takes the next."""

_OF_LATE = 0.1
"""Weight of the last connection in the average."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    certificate: PemFile
    key: PemFile

    def context(self) -> ssl.SSLContext:
        """Return a server context for TLS 1.2 and later; StartupError when the files cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.load_into(context)
        return context

    def load_into(self, context: ssl.SSLContext) -> None:
        """Give new connections this certificate; raise StartupError when it cannot be used."""
        try:
            with self.certificate.in_memory() as certificate, self.key.in_memory() as key:
                context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(
                f"cannot use the certificate {self.certificate.path} with the key {self.key.path}: {error}"
            ) from error


class S3Server:
    """Serves an ASGI application on listening sockets, which it owns: they are closed when it stops.

    Other processes may accept from the same sockets. `serve` runs once, and lets `receive_threads` go at its end.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        sockets: Sequence[socket.socket],
        limits: ServerLimits | None = None,
        tls: TlsFiles | None = None,
        clock: Clock | None = None,
        receive_threads: ReceiveThreads | None = None,
        prepared: PreparedRequests | None = None,
        on_refused: Callable[[int], None] = lambda _: None,
        counts: ConnectionCounts | None = None,
        refusal: Callable[[S3Error], Refusal] = refusal,
    ) -> None:
        """Serve `sockets`. `counts` are shared with those that accept from the same sockets; None: there are none.

        `refusal` words what the application does not get to see.
        """
        self._prepared = prepared
        self._limits = limits or ServerLimits()
        self._clock = clock or SystemClock()
        self._tls = tls.context() if tls is not None else None
        self._state = S3ServerState(self._limits, on_refused)
        self._config = _uvicorn_config(app)
        self._state.on_closed, self._state.refusal = self._on_closed, refusal
        self._counts = counts
        self._idle_connections = 0
        """Number of idle connections at the last sweep, without those that have ended since."""
        self._lasting_part = 1.0
        """Share of recently ended connections that were lasting."""
        self._listeners = [Listener(listening, self._on_connection, self._is_others_turn) for listening in sockets]
        self._openings: dict[asyncio.Task[None], None] = {}
        self._connections_max = self._limits.connections_max(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._all_at_work = False
        """No connection waits for a request; looked up again at the next sweep."""
        self._receive_threads = receive_threads or ReceiveThreads()

    def apply_settings(self, tls: TlsFiles | None) -> None:
        """Load a renewed certificate; StartupError when it cannot be used, and the one before stays."""
        if tls is not None and self._tls is not None:
            tls.context()  # one that does not fit its key leaves what is loaded as it is
            tls.load_into(self._tls)

    @property
    def open_connections(self) -> int:
        return len(self._state.connections) + len(self._openings)

    @property
    def requests_in_flight(self) -> int:
        return len(self._state.tasks)

    @property
    def draining(self) -> bool:
        """True once it was told to stop: it accepts no connection any more."""
        return self._state.draining

    async def serve(self, stop: asyncio.Event, *, grace_seconds: float, on_ready: Callable[[], None]) -> None:
        """Serve until `stop` is set, then drain for at most `grace_seconds`.

        `on_ready` is called once connections are accepted. Whatever ends this call, nothing is left open behind it.
        """
        self._config.load()
        self._refresh_date()
        self._state.client_watch.open()
        sweeper = asyncio.create_task(self._sweep_forever())
        try:
            self._accept_again()
            on_ready()
            await self._until(stop, sweeper)
            await self._drain(grace_seconds)
        finally:
            self._stop_accepting()
            sweeper.cancel()
            await self._cut_off()
            self._state.client_watch.close()
            self._receive_threads.shut_down()

    async def _until(self, stop: asyncio.Event, sweeper: asyncio.Task[None]) -> None:
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((stopped, sweeper), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
        if sweeper.done():
            sweeper.result()  # without timeouts the port must not go on

    # Connections

    def _on_connection(self, connection: socket.socket) -> None:
        refused = self.open_connections >= self._connections_max and not self._make_room()
        opening = asyncio.create_task(self._open(connection, too_many_connections() if refused else None))
        self._openings[opening] = None
        opening.add_done_callback(self._openings.__delitem__)
        self._tell_count()
        if self.open_connections >= self._connections_max + self._limits.refused_connections:
            _logger.warning("%d connections are open: no more are accepted for now", self.open_connections)
            for listener in self._listeners:
                listener.pause()

    @property
    def _connections_at_work(self) -> int:
        return max(0, self.open_connections - self._idle_connections)

    def _tell_count(self) -> None:
        if self._counts is not None and not self._state.draining:
            self._counts.tell(self._connections_at_work)

    def _on_closed(self, seconds: float, is_idle: bool) -> None:
        self._lasting_part += _OF_LATE * ((seconds >= _LASTING_SECONDS) - self._lasting_part)
        if is_idle and self._idle_connections:
            self._idle_connections -= 1
        self._tell_count()

    def _is_others_turn(self) -> bool:
        if self._counts is None or self._lasting_part < _LASTING_PART_MIN:
            return False
        self._tell_count()
        return self._counts.others_have_fewer(self._connections_at_work)

    def _make_room(self) -> bool:
        """Close the connections idle the longest, some at once, else lingering ones. Return False if there are none."""
        if self._all_at_work:
            return False
        connections = cast("Iterable[S3Protocol]", self._state.connections)
        made = [one.make_room() for one in _oldest(one for one in connections if one.waits_for_request)]
        if not any(made):
            lingering = _oldest(one for one in connections if one.lingers)
            for one in lingering:
                one.transport.abort()
            made = [True] * len(lingering)
        if not any(made) and self._tls is not None and self._openings:
            next(iter(self._openings)).cancel()  # its handshake has taken longer than that of any other
            return True
        self._all_at_work = not any(made)
        return any(made)

    async def _open(self, connection: socket.socket, only_answer: S3Error | None) -> None:
        loop = asyncio.get_running_loop()
        tls, timeouts = self._tls, dict[str, float]()
        try:
            if tls is not None and await self._begins_in_plain_text(connection):
                tls, only_answer = None, not_encrypted()
            if tls is not None:
                timeouts = {
                    "ssl_handshake_timeout": self._limits.head_timeout_seconds,
                    "ssl_shutdown_timeout": self._limits.linger_seconds,
                }
            protocol = partial(
                S3Protocol,
                self._config,
                self._state,
                {},
                loop,
                limits=self._limits,
                clock=self._clock,
                receive_threads=self._receive_threads,
                only_answer=only_answer,
                prepared=self._prepared,
            )
            await loop.connect_accepted_socket(protocol, connection, ssl=tls, **timeouts)
        except OSError as error:  # ssl.SSLError and timeouts too
            connection.close()
            _logger.debug("a connection came to nothing: %s", error)
        except asyncio.CancelledError:
            connection.close()
            raise

    async def _begins_in_plain_text(self, connection: socket.socket) -> bool:
        """Return True if the first byte is a method's and not a TLS record's. OSError when none comes in time."""
        loop, first = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(connection.fileno(), first.set)
        try:
            async with asyncio.timeout(self._limits.head_timeout_seconds):
                await first.wait()
        finally:
            loop.remove_reader(connection.fileno())
        return connection.recv(1, socket.MSG_PEEK).isalpha()

    def _accept_again(self) -> None:
        self._all_at_work = False
        limit = self._connections_max + self._limits.refused_connections
        if not self._state.draining and self.open_connections < limit:
            for listener in self._listeners:
                listener.resume()

    def _stop_accepting(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        if self._counts is not None:
            self._counts.leave()

    # Time

    async def _sweep_forever(self) -> None:
        while True:
            await self._clock.sleep(self._limits.sweep_seconds())
            self._refresh_date()
            now = self._clock.monotonic()
            idle_connections = 0
            for connection in cast("tuple[S3Protocol, ...]", tuple(self._state.connections)):
                connection.sweep(now)
                idle_connections += connection.is_idle(now)
            self._idle_connections = idle_connections
            self._tell_count()
            self._accept_again()

    def _refresh_date(self) -> None:
        date = formatdate(self._clock.now(), usegmt=True).encode()
        self._state.default_headers = [(b"date", date)]
        self._state.default_lines = b"date: %b\r\n" % date

    # The end

    async def _drain(self, grace_seconds: float) -> None:
        self._state.draining = True
        self._stop_accepting()
        for connection in tuple(self._state.connections):
            connection.shutdown()
        everything_done = asyncio.create_task(self._everything_done())
        grace = asyncio.create_task(self._clock.sleep(grace_seconds))
        try:
            await asyncio.wait((everything_done, grace), return_when=asyncio.FIRST_COMPLETED)
        finally:
            everything_done.cancel()
            grace.cancel()

    async def _everything_done(self) -> None:
        while self._openings:
            await asyncio.wait(self._openings)
        await self._state.nothing_open.wait()
        while self._state.tasks:
            await asyncio.wait(self._state.tasks)

    async def _cut_off(self) -> None:
        await asyncio.sleep(0)  # a task cancelled before its first step would leave its connection unclosed
        unfinished = self._state.tasks | set(self._openings)
        if unfinished:
            _logger.warning("%d requests are cut off", len(unfinished))
        for task in unfinished:
            task.cancel()
        if unfinished:
            _, stuck = await asyncio.wait(unfinished, timeout=_CANCELLED_TASKS_SECONDS)
            if stuck:
                _logger.error("%d requests do not end although they were cancelled", len(stuck))
        for connection in tuple(self._state.connections):
            cast("S3Protocol", connection).transport.abort()
        await self._state.nothing_open.wait()


def _oldest(connections: Iterable[S3Protocol]) -> list[S3Protocol]:
    waiting = list(connections)
    return heapq.nsmallest(1 + len(waiting) // 100, waiting, key=lambda one: one.waits_since)


def _uvicorn_config(app: ASGIApp) -> Config:
    return Config(
        cast("Any", app),
        http=S3Protocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=True,
    )

"""Connections to origins, used again as long as they last. So many carry a request at a time, the others wait."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

from aiohappyeyeballs import start_connection

from gateway.origin.wire.connection import RECEIVED_AT_ONCE_BYTES, Connection
from gateway.origin.wire.names import Names

IDLE_SECONDS_MAX = 15.0
"""Origins close idle connections, some after 20 seconds, and a request that meets that has to be sent again."""

_NEXT_ADDRESS_AFTER_SECONDS = 0.25
"""Source: RFC 8305, 8."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Whom a connection is to; `tls` where it is encrypted."""

    host: str
    port: int
    tls: bool


class Pool:
    """At most `connections_max` at work, and as many open. Event loop only."""

    def __init__(
        self, connections_max: int, trust: ssl.SSLContext, *, connect_seconds_max: float, silence_seconds_max: float
    ) -> None:
        self._connections_max = connections_max
        self._trust = trust
        self._connect_seconds_max = connect_seconds_max
        self._silence_seconds_max = silence_seconds_max
        self._loop = asyncio.get_running_loop()
        self._turns = asyncio.Semaphore(connections_max)
        self._names = Names()
        self._buffer = bytearray(RECEIVED_AT_ONCE_BYTES)
        self._open: dict[Connection, Endpoint] = {}
        self._busy: set[Connection] = set()
        self._idle: dict[Endpoint, deque[Connection]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._all_lost = asyncio.Event()
        self._closing = False

    async def take(self, endpoint: Endpoint) -> Connection:
        """A connection, in one's turn: the one used last, or a new one. OSError and TimeoutError when none is to be
        had. It comes back by itself, when an answer was complete, or is no more.
        """
        await self._turns.acquire()
        try:
            connection = self._idle_one(endpoint) or await self._connect(endpoint)
        except BaseException:
            self._turns.release()
            raise
        self._busy.add(connection)
        return connection

    async def aclose(self) -> None:
        """Close every connection, at work or not."""
        self._closing = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self._open):
            connection.close()
        while self._open:
            self._all_lost.clear()
            await self._all_lost.wait()

    def _idle_one(self, endpoint: Endpoint) -> Connection | None:
        idle, now = self._idle.get(endpoint), self._loop.time()
        while idle:
            connection = idle.pop()
            if connection.usable and now - connection.idle_since < IDLE_SECONDS_MAX:
                return connection
            connection.close()
        return None

    async def _connect(self, endpoint: Endpoint) -> Connection:
        if len(self._open) >= self._connections_max:
            self._close_one_idle()
        async with asyncio.timeout(self._connect_seconds_max):
            addresses = await self._names.addresses(endpoint.host, endpoint.port)
            wire = await start_connection(
                addresses, happy_eyeballs_delay=_NEXT_ADDRESS_AFTER_SECONDS, interleave=1, loop=self._loop
            )
            try:
                _, connection = await self._loop.create_connection(
                    self._new,
                    sock=wire,
                    ssl=self._trust if endpoint.tls else None,
                    server_hostname=endpoint.host if endpoint.tls else None,
                )
            except BaseException:
                wire.close()
                raise
        self._open[connection] = endpoint
        if self._closing or not connection.usable:
            connection.close()
            raise ConnectionAbortedError("the connection is closed again")
        return connection

    def _new(self) -> Connection:
        return Connection(self._buffer, self._silence_seconds_max, self._freed, self._lost)

    def _freed(self, connection: Connection) -> None:
        self._busy.discard(connection)
        self._idle.setdefault(self._open[connection], deque()).append(connection)
        self._turns.release()
        if self._sweeping is None and not self._closing:
            self._sweeping = self._loop.call_later(IDLE_SECONDS_MAX, self._sweep)

    def _lost(self, connection: Connection) -> None:
        endpoint = self._open.pop(connection, None)
        if connection in self._busy:
            self._busy.discard(connection)
            self._turns.release()
        elif endpoint is not None and endpoint in self._idle:
            with suppress(ValueError):
                self._idle[endpoint].remove(connection)
        if not self._open:
            self._all_lost.set()

    def _close_one_idle(self) -> None:
        """Other origins have connections that nobody uses now."""
        for idle in self._idle.values():
            if idle:
                idle.popleft().close()
                return

    def _sweep(self) -> None:
        self._sweeping = None
        due = self._loop.time() - IDLE_SECONDS_MAX
        for endpoint, idle in list(self._idle.items()):
            while idle and idle[0].idle_since <= due:
                idle.popleft().close()
            if not idle:
                del self._idle[endpoint]
        if self._idle:
            self._sweeping = self._loop.call_later(IDLE_SECONDS_MAX / 2, self._sweep)

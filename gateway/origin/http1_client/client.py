"""Requests and their answers over the pool: one exchange, no retry, no signature, nothing normalised.

Connections are used again as long as they last, and watched while they carry a request. One is held as long as its
request lasts, and some last as long as their clients like. So callers get one in turn, with a bounded wait, and no
account gets all of them, however many of its requests wait (`ConnectionShares`): a quarter is left to others. Of that
share, streamed uploads get a part.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from aiohappyeyeballs import AddrInfoType, start_connection

from gateway.core import cancellation
from gateway.core.errors import ConfigError, OriginBusy, OriginUnreachable
from gateway.disk.pem import PemFile
from gateway.origin.client import Direction, OriginSettings, turn_seconds
from gateway.origin.http1_client.connection import RECEIVED_AT_ONCE_BYTES, Connection, Supervision
from gateway.origin.http1_client.response_stream import ResponseBroken, ResponseStream
from gateway.origin.http1_client.short_answer import HEAD_BYTES, KeptBuffers, ShortAnswer
from gateway.origin.request_body import SLICE_BYTES, StreamedContent
from gateway.origin.signing import DEFAULT_PORTS, Target
from gateway.origin.traffic_meter import AnswerKind, Moved, Traffic
from gateway.s3.headers import sendable

KEPT_SECONDS = 10.0
"""S3 gives other addresses all the time, so that its clients spread; many connections begin at once, though."""


@dataclass(slots=True)
class Resolver:
    """Event loop only. The system's resolver runs in a thread; concurrent callers share one look-up of a name."""

    _found: dict[tuple[str, int], tuple[float, asyncio.Task[Sequence[AddrInfoType]]]] = field(default_factory=dict)

    async def addresses(self, host: str, port: int) -> Sequence[AddrInfoType]:
        """Return the addresses of a host; raise OSError when the name is unknown."""
        now, endpoint = asyncio.get_running_loop().time(), (host, port)
        asked_at, looking = self._found.get(endpoint, (0.0, None))
        if looking is None or now - asked_at > KEPT_SECONDS or _has_failed(looking):
            self._found = {known: found for known, found in self._found.items() if now - found[0] <= KEPT_SECONDS}
            looking = asyncio.create_task(_look_up(host, port), name="look up an origin")
            self._found[endpoint] = now, looking
        return await asyncio.shield(looking)


def _has_failed(looking: asyncio.Task[Sequence[AddrInfoType]]) -> bool:
    return looking.done() and (looking.cancelled() or looking.exception() is not None)


async def _look_up(host: str, port: int) -> Sequence[AddrInfoType]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


class Claim(NamedTuple):
    """On whose account a connection is taken, and whether for as long as a client likes (a streamed upload)."""

    account: str = ""
    is_lasting: bool = False


class ConnectionShares:
    """At most `total` claims are granted at a time. Event loop only.

    Accounts take turns, and within an account who came first is first. No claim waits that could be granted now.
    """

    def __init__(self, total: int, wait_seconds_max: float) -> None:
        self._total = total
        self._wait_seconds_max = wait_seconds_max
        self._of_one_account_max = max(1, total - total // 4)
        self._lasting_of_one_account_max = max(1, total // 2)
        self._lasting_max = max(1, total * 3 // 4)
        self._granted = 0
        self._lasting = 0
        self._of_account: dict[str, int] = {}
        self._lasting_of_account: dict[str, int] = {}
        self._waiting: OrderedDict[Claim, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def granted(self) -> int:
        return self._granted

    def take_now(self, claim: Claim) -> bool:
        """Have `claim` granted if it need not wait. Every grant ends with `release`."""
        if not self._is_free(claim):
            return False
        self._count(claim, 1)
        return True

    async def take(self, claim: Claim) -> None:
        """Wait until `claim` is granted; raise OriginBusy when that takes too long. A cancelled caller has none."""
        if self.take_now(claim):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(claim, deque()).append(turn)
        try:
            async with asyncio.timeout(turn_seconds(self._wait_seconds_max)):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.release(claim)
            else:
                self._forget(claim, turn)
            if isinstance(error, TimeoutError):
                raise OriginBusy("no connection to the origin was free in time") from None
            raise

    def release(self, claim: Claim) -> None:
        """Free the connection again."""
        self._count(claim, -1)
        while self._waiting and (next_waiter := next(filter(self._is_free, self._waiting), None)) is not None:
            self._grant(next_waiter)

    def _grant(self, claim: Claim) -> None:
        waiting = self._waiting[claim]
        turn = waiting.popleft()
        if waiting:
            self._waiting.move_to_end(claim)
        else:
            del self._waiting[claim]
        if not turn.done():
            turn.set_result(None)
            self._count(claim, 1)

    def _count(self, claim: Claim, change: int) -> None:
        self._granted += change
        _add(self._of_account, claim.account, change)
        if claim.is_lasting:
            self._lasting += change
            _add(self._lasting_of_account, claim.account, change)

    def _is_free(self, claim: Claim) -> bool:
        account = claim.account
        if self._granted >= self._total or self._of_account.get(account, 0) >= self._of_one_account_max:
            return False
        if not claim.is_lasting:
            return True
        of_account = self._lasting_of_account.get(account, 0)
        return of_account < self._lasting_of_one_account_max and self._lasting < self._lasting_max

    def _forget(self, claim: Claim, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(claim)
        if waiting is not None and turn in waiting:
            waiting.remove(turn)
            if not waiting:
                del self._waiting[claim]


def _add(counts: dict[str, int], account: str, change: int) -> None:
    count = counts.get(account, 0) + change
    if count:
        counts[account] = count
    else:
        del counts[account]


IDLE_SECONDS_MAX = 15.0
"""Origins close idle connections, some after 20 seconds, and a request that meets that has to be sent again."""

CHECK_SECONDS = 0.025
"""Seconds between two checks of connections at work."""

_NEXT_ADDRESS_AFTER_SECONDS = 0.25
"""Source: RFC 8305, 8."""

_PROXY_HEAD_BYTES_MAX = 64 * 1024
_STOPPED_MAX = 1024


class Tunnel(NamedTuple):
    """A proxy that is asked for a connection (RFC 9110, 9.3.6); `request` is its CONNECT, which may hold a password."""

    host: str
    port: int


class Endpoint(NamedTuple):
    """Whom a connection is to; `tls` where it is encrypted, `tunnel` where a proxy makes it."""

    host: str
    port: int
    tls: bool
    tunnel: Tunnel | None = None


class Pool:
    """At most `connections_max` at work, and as many open. Event loop only.

    `proxy_authorization` is what a tunnel's proxy is told.
    """

    def __init__(
        self,
        connections_max: int,
        ssl_context: ssl.SSLContext,
        *,
        connect_seconds_max: float,
        wait_seconds_max: float,
        proxy_authorization: str | None = None,
    ) -> None:
        self._connections_max = connections_max
        self._ssl_context = ssl_context
        self._connect_seconds_max = connect_seconds_max
        self._proxy_authorization = proxy_authorization
        self._loop = asyncio.get_running_loop()
        self._shares = ConnectionShares(connections_max, wait_seconds_max)
        self._resolver = Resolver()
        self._buffer = bytearray(RECEIVED_AT_ONCE_BYTES)
        self._open: dict[Connection, Endpoint] = {}
        self._busy: dict[Connection, Claim | None] = {}
        self._idle: dict[Endpoint, deque[Connection]] = {}
        self._connecting: dict[asyncio.Timeout, Endpoint] = {}
        self._stopped_at: dict[Endpoint, float] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        self._checking: asyncio.TimerHandle | None = None
        self._check_due = 0.0
        self._all_lost = asyncio.Event()
        self._closing = False
        self._moved = Moved()

    def traffic(self) -> Mapping[Direction, Traffic]:
        now, unread, unacknowledged, bodies, starved = self._loop.time(), 0, 0, 0, 0
        waiting: dict[Direction, list[tuple[AnswerKind, float]]] = {"read": [], "write": []}
        for connection in self._busy:
            unread += connection.unread_bytes()
            bodies += connection.has_body
            starved += connection.is_starved
            unacknowledged += connection.unacknowledged_bytes()
            if (waits := connection.waiting(now)) is not None:
                waiting[waits[0].direction].append(waits)
        acknowledged = self._moved.handed_bytes - unacknowledged
        return {
            "read": Traffic(self._moved.received_bytes + unread, 0, waiting["read"], bodies, starved),
            "write": Traffic(acknowledged, unacknowledged, waiting["write"]),
        }

    def limit_windows(self, size_bytes: int) -> None:
        """Let no more than this be on its way to any of the connections at work."""
        for connection in self._busy:
            connection.limit_window(size_bytes)

    async def take(self, endpoint: Endpoint, claim: Claim | None, *, unused: bool = False) -> Connection:
        """Take a connection in turn: the one used last, or a new one.

        Raises OSError and TimeoutError when there is none, OriginBusy when the turn does not come. The connection
        comes back by itself, when an answer was complete, or is no more. `claim` None waits for no turn: a probe of
        whether an origin lives. `unused`: one that the origin cannot be closing just now.
        """
        if claim is not None and not self._shares.take_now(claim):
            await self._wait_for_turn(endpoint, claim)
        try:
            connection = None if unused else self._idle_one(endpoint)
            connection = connection or await self._connect(endpoint)
        except BaseException:
            if claim is not None:
                self._shares.release(claim)
            raise
        return self._at_work(connection, claim)

    def take_now(self, endpoint: Endpoint, claim: Claim) -> Connection | None:
        """As `take`, where there is nothing to be waited for; else None."""
        if not self._idle.get(endpoint) or not self._shares.take_now(claim):
            return None
        connection = self._idle_one(endpoint)
        if connection is None:
            self._shares.release(claim)
            return None
        return self._at_work(connection, claim)

    def _at_work(self, connection: Connection, claim: Claim | None) -> Connection:
        self._busy[connection] = claim
        if self._checking is None:
            self._check_later()
        return connection

    def stop_connecting(self, endpoint: Endpoint) -> None:
        """End all waits for a new connection to the endpoint, or for a turn, as it does not answer."""
        now = self._loop.time()
        if len(self._stopped_at) >= _STOPPED_MAX:
            self._stopped_at.clear()
        self._stopped_at[endpoint] = now
        for limit, whose in self._connecting.items():
            if whose == endpoint and not limit.expired():
                limit.reschedule(now)

    async def _wait_for_turn(self, endpoint: Endpoint, claim: Claim) -> None:
        began = self._loop.time()
        await self._shares.take(claim)
        if self._stopped_at.get(endpoint, began) > began:
            self._shares.release(claim)
            raise ConnectionAbortedError("the origin has not answered lately")

    async def aclose(self) -> None:
        """Close every connection, at work or not."""
        self._closing = True
        for timer in (self._sweeping, self._checking):
            if timer is not None:
                timer.cancel()
        for connection in list(self._open):
            connection.close()
        while self._open:
            self._all_lost.clear()
            await self._all_lost.wait()

    def _check(self) -> None:
        self._checking = None
        now = self._loop.time()
        late_seconds = now - self._check_due
        try:
            for connection in list(self._busy):
                if late_seconds > CHECK_SECONDS:
                    connection.excuse(now, late_seconds)
                self._check_one(connection, now)
        finally:
            if self._busy and not self._closing:
                self._check_later()

    def _check_one(self, connection: Connection, now: float) -> None:
        try:
            connection.check(now)
        except BaseException:  # the others are looked at next time, without this one
            connection.close()
            raise

    def _check_later(self) -> None:
        self._checking = self._loop.call_later(CHECK_SECONDS, self._check)
        self._check_due = self._loop.time() + CHECK_SECONDS

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
        async with asyncio.timeout(self._connect_seconds_max) as limit:
            self._connecting[limit] = endpoint
            try:
                connection = await self._new_connection(endpoint)
            finally:
                del self._connecting[limit]
        self._open[connection] = endpoint
        if self._closing or not connection.usable:
            connection.close()
            raise ConnectionAbortedError("the connection is closed again")
        return connection

    async def _new_connection(self, endpoint: Endpoint) -> Connection:
        wire = await self._connected(endpoint)
        try:
            _, connection = await self._loop.create_connection(
                self._new,
                sock=wire,
                ssl=self._ssl_context if endpoint.tls else None,
                server_hostname=endpoint.host if endpoint.tls else None,
            )
        except BaseException:
            wire.close()
            raise
        return connection

    async def _connected(self, endpoint: Endpoint) -> socket.socket:
        hop = endpoint.tunnel or endpoint
        addresses = await self._resolver.addresses(hop.host, hop.port)
        wire = await start_connection(
            addresses, happy_eyeballs_delay=_NEXT_ADDRESS_AFTER_SECONDS, interleave=1, loop=self._loop
        )
        if endpoint.tunnel is not None:
            try:
                await self._dig(wire, endpoint)
            except BaseException:
                wire.close()
                raise
        return wire

    async def _dig(self, wire: socket.socket, endpoint: Endpoint) -> None:
        """Make the proxy connect to the endpoint; raise ConnectionRefusedError when it does not."""
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        lines = [f"CONNECT {host}:{endpoint.port} HTTP/1.1", f"Host: {host}:{endpoint.port}"]
        if self._proxy_authorization is not None:
            lines.append(f"Proxy-Authorization: {self._proxy_authorization}")
        await self._loop.sock_sendall(wire, "\r\n".join([*lines, "", ""]).encode())
        head = b""
        while not head.endswith(b"\r\n\r\n"):  # the origin says nothing before we do
            received = await self._loop.sock_recv(wire, 4096)
            head += received
            if not received or len(head) > _PROXY_HEAD_BYTES_MAX:
                raise ConnectionRefusedError("the proxy closed the connection")
        status = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        if len(status) < 2 or not status[0].startswith("HTTP/1.") or not status[1].startswith("2"):
            raise ConnectionRefusedError(f"the proxy refused the connection: {' '.join(status)[:100]!r}")

    def _new(self) -> Connection:
        return Connection(self._buffer, self._freed, self._lost, self._moved)

    def _freed(self, connection: Connection) -> None:
        self._end_work(connection)
        self._idle.setdefault(self._open[connection], deque()).append(connection)
        if self._sweeping is None and not self._closing:
            self._sweeping = self._loop.call_later(IDLE_SECONDS_MAX, self._sweep)

    def _lost(self, connection: Connection) -> None:
        endpoint = self._open.pop(connection, None)
        if connection in self._busy:
            self._end_work(connection)
        elif endpoint is not None and endpoint in self._idle:
            with suppress(ValueError):
                self._idle[endpoint].remove(connection)
        if not self._open:
            self._all_lost.set()

    def _end_work(self, connection: Connection) -> None:
        claim = self._busy.pop(connection)
        if claim is not None:
            self._shares.release(claim)

    def _close_one_idle(self) -> None:
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


ENDPOINTS_MAX = 1024

SHORT_BODY_BYTES_MAX = 128 * 1024
BUFFERS_KEPT_MAX = 256
"""34 MiB of buffers for short answers, if as many are waited for and written at a time."""

_CONTINUE_WAIT_SECONDS = 1.0
_WITH_THE_HEAD_BYTES_MAX = 256 * 1024


class OriginSilent(OriginUnreachable):
    """The origin says nothing: to a connection, a handshake or a request."""


class Http1Client:
    """Must be made where an event loop runs."""

    def __init__(self, settings: OriginSettings) -> None:
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
        self._answer_buffers = KeptBuffers(HEAD_BYTES + SHORT_BODY_BYTES_MAX, BUFFERS_KEPT_MAX)
        self._head_buffers = KeptBuffers(HEAD_BYTES, BUFFERS_KEPT_MAX)
        proxy = urlsplit(settings.proxy) if settings.proxy else None
        self._proxy = None if proxy is None else Tunnel(proxy.hostname or "", proxy.port or 80)
        self._proxy_authorization = None if proxy is None else _basic(proxy)
        self._pool = Pool(
            settings.max_connections,
            _ssl_context(settings.ca_bundle),
            connect_seconds_max=settings.connect_timeout_seconds,
            wait_seconds_max=settings.connection_wait_seconds,
            proxy_authorization=self._proxy_authorization,
        )

    async def exchange(
        self,
        method: str,
        target: Target,
        headers: Mapping[str, str],
        body: bytes | StreamedContent,
        supervision: Supervision,
        claim: Claim | None,
        *,
        unused: bool = False,
        kind: AnswerKind | None = None,
    ) -> ResponseStream:
        """Send a request and return its answer, of any status, once its head is there. It must be closed.

        `headers` are all that are sent, `host` among them. Raises OriginUnreachable when there is no answer, what the
        source of a streamed body raised, and S3Error for header values that cannot be sent. `unused` as `Pool.take`,
        `kind` as `ResponseConnection.ask`.
        """
        head, endpoint = self.head(method, target, headers), self._endpoint(target)
        cancellation.turn_now()
        connection = None if claim is None or unused else self._pool.take_now(endpoint, claim)
        connection = connection or await self._connection(endpoint, claim, unused=unused)
        bodiless = method == "HEAD"
        if isinstance(body, bytes) and len(body) <= _WITH_THE_HEAD_BYTES_MAX:
            return await _answer_to(connection.ask(head + body, supervision, bodiless=bodiless, kind=kind))
        content = StreamedContent(_slices(body), len(body)) if isinstance(body, bytes) else body
        stream = connection.ask(head, supervision, bodiless=bodiless, body_follows=True, kind=kind)
        await _send(connection, stream, content, waits="expect" in headers)
        return await _answer_to(stream, may_be_done=content.is_sent)

    def connection_now(self, target: Target, claim: Claim) -> Connection | None:
        """As `Pool.take_now`: the caller must begin a request on it, or call its `answered`."""
        return self._pool.take_now(self._endpoint(target), claim)

    def begin(
        self,
        connection: Connection,
        head: bytes,
        on_end: Callable[[], None],
        supervision: Supervision,
        kind: AnswerKind | None,
        *,
        bodiless: bool,
    ) -> ShortAnswer:
        """Send a request without a body, whose answer is short: `on_end` is as of `ShortAnswer`."""
        buffer = (self._head_buffers if bodiless else self._answer_buffers).take()
        answer = ShortAnswer(connection, buffer, on_end, bodiless=bodiless)
        connection.begin(head, answer, supervision, kind)
        return answer

    async def continued(self, answer: ShortAnswer, supervision: Supervision) -> ResponseStream:
        """As `exchange`, of a request that was begun, and whose answer was handed over."""
        return await _answer_to(answer.handed_over(supervision))

    async def _connection(self, endpoint: Endpoint, claim: Claim | None, *, unused: bool) -> Connection:
        try:
            with cancellation.turn():
                return await self._pool.take(endpoint, claim, unused=unused)
        except (OSError, TimeoutError) as error:
            text = f"no connection to the origin: {type(error).__name__}: {error}"
            kind = OriginSilent if isinstance(error, TimeoutError) else OriginUnreachable
            raise kind(text, may_be_done=False) from error

    def traffic(self) -> Mapping[Direction, Traffic]:
        """As `Pool.traffic`."""
        return self._pool.traffic()

    def limit_windows(self, size_bytes: int) -> None:
        """As `Pool.limit_windows`."""
        self._pool.limit_windows(size_bytes)

    def stop_connecting(self, target: Target) -> None:
        """As `Pool.stop_connecting`."""
        self._pool.stop_connecting(self._endpoint(target))

    async def aclose(self) -> None:
        await self._pool.aclose()

    def _endpoint(self, target: Target) -> Endpoint:
        name = target.scheme, target.host
        endpoint = self._endpoints.get(name)
        if endpoint is None:
            endpoint = self._new_endpoint(target)
            if len(self._endpoints) >= ENDPOINTS_MAX:
                self._endpoints.clear()
            self._endpoints[name] = endpoint
        return endpoint

    def _new_endpoint(self, target: Target) -> Endpoint:
        """Make an endpoint. A proxy takes requests for http itself, and digs tunnels for https."""
        if target.scheme == "http" and self._proxy is not None:
            return Endpoint(self._proxy.host, self._proxy.port, tls=False)
        url = urlsplit(f"//{target.host}")
        host, port = url.hostname or "", url.port or DEFAULT_PORTS[target.scheme]
        is_https = target.scheme == "https"
        return Endpoint(host, port, tls=is_https, tunnel=self._proxy if is_https else None)

    def head(self, method: str, target: Target, headers: Mapping[str, str]) -> bytes:
        """Request line and headers as they go onto the wire; to a proxy with the whole address."""
        is_proxied = self._proxy is not None and target.scheme == "http"
        where = f"http://{target.host}{target.path_and_query}" if is_proxied else target.path_and_query
        lines = [f"{method} {where} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in sendable(headers).items()]
        if is_proxied and self._proxy_authorization is not None:
            lines.append(f"proxy-authorization: {self._proxy_authorization}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _answer_to(stream: ResponseStream, *, may_be_done: bool = True) -> ResponseStream:
    try:
        await stream.begun()
    except ResponseBroken as error:
        kind = OriginSilent if error.silent else OriginUnreachable
        raise kind(f"no answer from the origin: {error}", may_be_done=may_be_done) from error
    except BaseException:
        stream.close()
        raise
    return stream


async def _slices(body: bytes) -> AsyncIterator[memoryview]:
    view = memoryview(body)
    for offset in range(0, len(view), SLICE_BYTES):
        yield view[offset : offset + SLICE_BYTES]


async def _send(connection: Connection, stream: ResponseStream, content: StreamedContent, *, waits: bool) -> None:
    """Send a body until it is over, or the answer is there. Raises what its source raises.

    Nothing reads from the source any more when this returns. A body that is not complete leaves an unfinished request:
    its connection serves no other.
    """

    async def run() -> None:
        if waits:
            await stream.go_ahead(_CONTINUE_WAIT_SECONDS)
        await content.send(connection.write)
        connection.sent()

    sending = asyncio.create_task(run(), name="send a body to an origin")
    # Its error is read below, unless another one is raised first: asyncio must not log it then.
    sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())
    try:
        await asyncio.wait([sending, stream.arrival], return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        stream.close()
        raise
    finally:
        if not sending.done():
            connection.break_off()
            sending.cancel()
            await asyncio.wait([sending])
    if content.failure is not None:
        stream.close()
        raise content.failure
    if not sending.cancelled() and (error := sending.exception()) is not None and not isinstance(error, OSError):
        stream.close()
        raise error


def _basic(proxy: SplitResult) -> str | None:
    """Source: RFC 7617, 2."""
    if proxy.username is None:
        return None
    pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _ssl_context(ca_bundle: PemFile | None) -> ssl.SSLContext:
    if ca_bundle is None:
        return ssl.create_default_context()
    try:
        with ca_bundle.in_memory() as path:
            return ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        raise ConfigError("origin.ca_bundle", str(ca_bundle.path), "a file of PEM certificates") from error

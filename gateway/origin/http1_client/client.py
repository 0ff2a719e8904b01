"""Requests and their answers over the pool: one exchange, no retry, no signature, nothing normalised."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from gateway import cancellation
from gateway.errors import ConfigError, OriginUnreachable
from gateway.origin.addressing import DEFAULT_PORTS, Target
from gateway.origin.http1_client.connection import Connection, Supervision
from gateway.origin.http1_client.pool import Claim, Endpoint, Pool, Tunnel
from gateway.origin.http1_client.response_stream import ResponseBroken, ResponseStream
from gateway.origin.request_body import SLICE_BYTES, StreamedContent
from gateway.origin.settings import OriginSettings
from gateway.s3.headers import sendable

ENDPOINTS_MAX = 1024

_CONTINUE_WAIT_SECONDS = 1.0
_WITH_THE_HEAD_BYTES_MAX = 256 * 1024


class OriginSilent(OriginUnreachable):
    """The origin says nothing: to a connection, a handshake or a request."""


class Http1Client:
    """Must be made where an event loop runs."""

    def __init__(self, settings: OriginSettings) -> None:
        self._endpoints: dict[tuple[str, str], Endpoint] = {}
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
    ) -> ResponseStream:
        """Send a request and return its answer, of any status, once its head is there. It must be closed.

        `headers` are all that are sent, `host` among them. Raises OriginUnreachable when there is no answer, what the
        source of a streamed body raised, and S3Error for header values that cannot be sent. `unused` as `Pool.take`.
        """
        head = self._head(method, target, headers)
        try:
            with cancellation.turn():
                connection = await self._pool.take(self._endpoint(target), claim, unused=unused)
        except (OSError, TimeoutError) as error:
            text = f"no connection to the origin: {type(error).__name__}: {error}"
            kind = OriginSilent if isinstance(error, TimeoutError) else OriginUnreachable
            raise kind(text, may_be_done=False) from error
        bodiless = method == "HEAD"
        if isinstance(body, bytes) and len(body) <= _WITH_THE_HEAD_BYTES_MAX:
            return await _answer_to(connection.ask(head + body, supervision, bodiless=bodiless))
        content = StreamedContent(_slices(body), len(body)) if isinstance(body, bytes) else body
        stream = connection.ask(head, supervision, bodiless=bodiless, body_follows=True)
        await _send(connection, stream, content, waits="expect" in headers)
        return await _answer_to(stream, may_be_done=content.is_sent)

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
        """A proxy takes requests for http itself, and digs tunnels for https."""
        if target.scheme == "http" and self._proxy is not None:
            return Endpoint(self._proxy.host, self._proxy.port, tls=False)
        url = urlsplit(f"//{target.host}")
        host, port = url.hostname or "", url.port or DEFAULT_PORTS[target.scheme]
        is_https = target.scheme == "https"
        return Endpoint(host, port, tls=is_https, tunnel=self._proxy if is_https else None)

    def _head(self, method: str, target: Target, headers: Mapping[str, str]) -> bytes:
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
    # What it raises is asked for below, but where something else is raised first: asyncio must not log it then.
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


def _ssl_context(ca_bundle: str | None) -> ssl.SSLContext:
    if ca_bundle is None:
        return ssl.create_default_context()
    if not Path(ca_bundle).is_file():
        raise ConfigError("origin.ca_bundle", ca_bundle, "a file of PEM certificates")
    try:
        return ssl.create_default_context(cafile=ca_bundle)
    except ssl.SSLError as error:
        raise ConfigError("origin.ca_bundle", ca_bundle, "a file of PEM certificates") from error

"""One HTTP exchange with the origin over pooled connections: no retry, no signature, nothing normalised.

Reading requests take our own way (wire/), because that costs a fraction; aiohttp has the others, and proxies.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.helpers import set_result
from yarl import URL

from gateway import cancellation
from gateway.errors import ConfigError, OriginUnreachable, S3Error
from gateway.origin.addressing import Target
from gateway.origin.response import AiohttpResponse, HttpResponse
from gateway.origin.settings import OriginSettings
from gateway.origin.upload import BytesUpload, StreamedUpload
from gateway.origin.wire.client import WireClient

if TYPE_CHECKING:
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

READ_BUFFER_BYTES = 256 * 1024
"""Reading pauses when twice this lies unread; what one transfer may hold in memory."""

EXPECT_CONTINUE_MIN_BYTES = 256 * 1024
"""Bodies from this size on wait for the origin's 100, so that a refusal costs no upload and is not lost in a reset.
What is smaller fits into the sockets' buffers, and is over before the origin closes.
"""

_UPLOADS_SHARE = 3
"""Quarters of the connections that streamed uploads may take: they last as long as their clients like, and readers must
not wait for them."""

_CONTINUE_WAIT_SECONDS = 1.0
_KEEP_ALIVE_SECONDS = 15.0
_ADDED_BY_AIOHTTP = ("accept", "accept-encoding", "user-agent", "content-type")
_MAX_HEADER_BYTES = 64 * 1024
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class _PatientRequest(aiohttp.ClientRequest):
    """Waits for a 100 as long as curl does, then sends the body anyway: not every server knows `Expect`.

    Source: RFC 9110, 10.1.1.
    """

    def update_expect_continue(self, expect: bool = False) -> None:
        super().update_expect_continue(expect)
        waiting = self._continue
        if waiting is not None:
            self.loop.call_later(_CONTINUE_WAIT_SECONDS, set_result, waiting, True)


class _BoundedResolver(aiohttp.ThreadedResolver):
    """The system's resolver, given up on after `timeout_seconds`."""

    def __init__(self, timeout_seconds: float) -> None:
        super().__init__()
        self._timeout_seconds = timeout_seconds

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        async with asyncio.timeout(self._timeout_seconds):
            return await super().resolve(host, port, family)


_READING = frozenset({"GET", "HEAD"})


class _Connector(aiohttp.TCPConnector):
    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        with cancellation.turn():
            return await super().connect(req, traces, timeout)


class HttpTransport:
    """Two bounded pools of connections: for reading, and for the rest. Must be made where an event loop runs."""

    def __init__(self, settings: OriginSettings) -> None:
        self._proxy = URL(settings.proxy) if settings.proxy else None
        self._uploads = asyncio.Semaphore(max(1, settings.max_connections * _UPLOADS_SHARE // 4))
        trust = _trust(settings.ca_bundle)
        self._wire = WireClient(settings, trust)
        connector = _Connector(
            limit=settings.max_connections,
            ssl=trust,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
            resolver=_BoundedResolver(settings.connect_timeout_seconds),
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_ADDED_BY_AIOHTTP,
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
            max_line_size=_MAX_HEADER_BYTES,
            request_class=_PatientRequest,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout_seconds, sock_read=settings.read_timeout_seconds
            ),
        )
        # Trying again is decided in one place, and never by resending half of a stream.
        self._session._retry_connection = False

    async def exchange(
        self, method: str, target: Target, headers: Mapping[str, str], body: BytesUpload | StreamedUpload | None
    ) -> HttpResponse:
        """Send one request and return the head of its answer, of any status.

        Raises OriginUnreachable when there is no answer, what the source of a streamed body raised, and S3Error for
        header values that cannot be sent.
        """
        if body is None and method in _READING and self._proxy is None:
            return await self._wire.exchange(method, target, wire_headers(headers))
        if isinstance(body, StreamedUpload):
            with cancellation.turn():
                await self._uploads.acquire()
            try:
                return await self._exchange(method, target.url, headers, body)
            finally:
                self._uploads.release()
        return await self._exchange(method, target.url, headers, body)

    async def _exchange(
        self, method: str, url: URL, headers: Mapping[str, str], body: BytesUpload | StreamedUpload | None
    ) -> HttpResponse:
        try:
            response = await self._session.request(
                method, url, headers=wire_headers(headers), data=body, proxy=self._proxy, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(body, StreamedUpload) and body.failure is not None:
                raise body.failure from None
            unsent = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            text = f"no answer from the origin: {_describe(error)}"
            raise OriginUnreachable(text, may_be_done=not unsent) from error
        finally:
            if isinstance(body, StreamedUpload):
                await body.finish()
        return AiohttpResponse(response)

    async def aclose(self) -> None:
        await self._wire.aclose()
        await self._session.close()


def wire_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Latin-1 text to what aiohttp encodes to the same bytes. S3 itself takes header values in UTF-8 only."""
    if (text := "".join(headers.values())).isascii() and text.isprintable():
        return headers
    return {
        name: value if value.isascii() and value.isprintable() else _as_utf8(name, value)
        for name, value in headers.items()
    }


def _as_utf8(name: str, value: str) -> str:
    try:
        text = value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise _unsendable(name, "Header values must be valid UTF-8.") from None
    if _CONTROL.search(text):
        raise _unsendable(name, "Header values must not hold control characters.")
    return text


def _unsendable(name: str, message: str) -> S3Error:
    return S3Error("InvalidArgument", message, 400, elements={"ArgumentName": name})


def _trust(ca_bundle: str | None) -> ssl.SSLContext:
    if ca_bundle is None:
        return ssl.create_default_context()
    if not Path(ca_bundle).is_file():
        raise ConfigError("origin.ca_bundle", ca_bundle, "a file of PEM certificates")
    try:
        return ssl.create_default_context(cafile=ca_bundle)
    except ssl.SSLError as error:
        raise ConfigError("origin.ca_bundle", ca_bundle, "a file of PEM certificates") from error


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

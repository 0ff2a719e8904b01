"""A strict S3 over real HTTP, for tests: `MemoryOrigin` behind a server that believes nothing.

It verifies signatures with botocore, payload hashes, Content-MD5, every checksum, aws-chunked trailers and conditions,
refuses incomplete bodies, and can be slow, refuse connections, or reset them at any byte.

    with StrictOrigin() as origin:
        origin.model.put("bucket", "key", b"data")
        client = boto3.client("s3", endpoint_url=origin.endpoint_url, ...)

By hand: `python -m tests.support.strict_origin --port 0`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Self, TypeVar

import uvicorn
from botocore.credentials import Credentials
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.core.clock import Clock, SystemClock
from gateway.core.errors import OriginUnreachable, S3Error
from gateway.origin.client import KeyPair, OriginRequest, StreamedBody
from gateway.s3.error_codes import error_document, s3_error
from gateway.s3.requests import parse_query
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.response import MemoryResponse
from tests.support.strict_chunks import UnsignedChunks
from tests.support.strict_dialects import S3, StrictDialect
from tests.support.strict_signatures import empty_payload_hash, verify

ACCESS_KEY_ID = "AKIASTRICTORIGIN"
SECRET_ACCESS_KEY = "strict/origin+secret/EXAMPLEKEY"

_PACE_BYTES = 16 * 1024
_BARRIER = "/.barrier/"
_T = TypeVar("_T")
_Receive = Callable[[], Awaitable[dict[str, Any]]]
_Send = Callable[[dict[str, Any]], Awaitable[None]]


class _ClientLeft(Exception):
    """The connection ended in the middle of a request."""


class _Protocol(HttpToolsProtocol):
    """Lets the application break the connection."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {"strict.transport": self.transport}  # type: ignore[dict-item]


class _Server(uvicorn.Server):
    """Says when it serves, and leaves no connection open."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self._ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End connections whose clients do not read or whose requests go on: a loop that ends closes nothing."""
        await super().shutdown(sockets)
        while self.server_state.connections:
            for connection in list(self.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await asyncio.sleep(0.001)


class StrictOrigin:
    """The server, on a thread of its own. Attributes may be changed while it runs."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        region: str = "us-east-1",
        clock: Clock | None = None,
        keep_bodies: bool = True,
        certificate_file: str | None = None,
        key_file: str | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.model = MemoryOrigin(self.clock, region=region, keep_bodies=keep_bodies)
        self.credentials = {ACCESS_KEY_ID: Credentials(ACCESS_KEY_ID, SECRET_ACCESS_KEY)}
        """What the others of them may do say `model.policies`; this one may do everything."""
        self.region = region
        self.dialects: dict[str, StrictDialect] = {}
        """By the host of requests, without the bucket before it; others get S3."""
        self.latency_seconds = 0.0
        self.bytes_per_second: float | None = None
        self.accepts_unknown_length = False
        self.is_out_of_reach = False
        """Whether requests that come now are reset and have no effect; what has begun goes on."""
        self.clients: set[tuple[str, int]] = set()
        self.request_lines: list[bytes] = []
        self.request_headers: list[list[tuple[bytes, bytes]]] = []
        self._host, self._port = host, port
        self._tls = {"ssl_certfile": certificate_file, "ssl_keyfile": key_file}
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def endpoint_url(self) -> str:
        return f"{'https' if self._tls['ssl_certfile'] else 'http'}://{self._host}:{self._port}"

    @property
    def settings(self) -> dict[str, Any]:
        """Of a gateway's [origin]: where it is, and who may do everything."""
        return {
            "endpoint_url": self.endpoint_url,
            "access_key_id": ACCESS_KEY_ID,
            "secret_access_key": SECRET_ACCESS_KEY,
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        # With the protocol named, asyncio sets TCP_NODELAY on what is accepted; else every answer waits for an ACK.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self._host, self._port))
        self._port = listener.getsockname()[1]
        ready = threading.Event()
        config = uvicorn.Config(
            self._application,
            http=_Protocol,
            loop="asyncio",
            interface="asgi3",
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=1,
            **self._tls,  # type: ignore[arg-type]
        )
        self._server = _Server(config, ready)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True, name="strict-origin")
        self._thread.start()
        if not ready.wait(10):
            raise RuntimeError("the strict origin did not start")

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            self._thread.join(10)
            self._server = self._thread = None

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """While this lasts, connections are refused; the objects stay."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def wait_for(self, event: asyncio.Event) -> None:
        """Until an event of the server's loop is set: one that a fault tells by that it has been reached."""
        assert self._server is not None
        assert self._server.loop is not None
        asyncio.run_coroutine_threadsafe(event.wait(), self._server.loop).result(60)

    def run_inside(self, action: Callable[[], _T]) -> _T:
        """Call `action` on the server's event loop: for events that faults wait on."""
        if self._server is None or self._server.loop is None:
            raise RuntimeError("the strict origin is not running")

        async def run() -> _T:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._server.loop).result(10)

    def settle(self) -> None:
        """Return when every request sent so far is over, those that were broken off included: nothing more is stored.

        Connections are accepted and read in order, so what came before the one made here is known when it is answered.
        """
        with socket.create_connection((self._host, self._port), timeout=10) as barrier:
            barrier.sendall(f"GET {_BARRIER} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode("ascii"))
            while barrier.recv(4096):
                pass
        if self._server is None or self._server.loop is None:
            raise RuntimeError("the strict origin is not running")
        asyncio.run_coroutine_threadsafe(self._requests_over(), self._server.loop).result(10)

    async def _requests_over(self) -> None:
        while self._server is not None and self._server.server_state.tasks:  # noqa: ASYNC110 - uvicorn has no event
            await asyncio.sleep(0.001)

    async def _application(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["path"] == _BARRIER:
            await send({"type": "http.response.start", "status": 204, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body"})
            return
        exchange = _Exchange(self, scope, receive, send)
        self.clients.add(tuple(scope["client"]))
        self.request_lines.append(scope["method"].encode() + b" " + _target(scope))
        self.request_headers.append(list(scope["headers"]))
        if self.latency_seconds:
            await self.clock.sleep(self.latency_seconds)
        with contextlib.suppress(_ClientLeft):
            await exchange.run()


def _target(scope: dict[str, Any]) -> bytes:
    query = bytes(scope["query_string"])
    return bytes(scope["raw_path"]) + (b"?" + query if query else b"")


class _Exchange:
    """One request and its answer."""

    def __init__(self, origin: StrictOrigin, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        self._origin = origin
        self._scope = scope
        self._receive = receive
        self._send = send
        self._method: str = scope["method"]
        self._headers = _headers(scope["headers"])
        self._body_is_over = False
        host = self._headers.get("host", "")
        self._place = next((one for one in origin.dialects if host == one or host.endswith(f".{one}")), host)
        self._dialect = origin.dialects.get(self._place, S3)
        self._transport: asyncio.Transport = scope["extensions"]["strict.transport"]

    async def run(self) -> None:
        if self._origin.is_out_of_reach:
            self._reset()
            return
        try:
            request = self._request()
        except S3Error as error:
            await self._refuse(error)
            return
        try:
            model, dialect = self._origin.model, self._dialect
            if dialect is S3:
                response = await model.send(request)
            else:
                response = dialect.answered(request, await model.send(dialect.understood(request, model)), model)
        except S3Error as error:
            await self._refuse(error)
            return
        except OriginUnreachable:
            self._reset()
            return
        await self._answer(response)

    def _request(self) -> OriginRequest:
        self._check_framing()
        key_id = verify(
            self._method,
            self._scope["raw_path"],
            self._scope["query_string"],
            self._dialect.at_front(self._scope["headers"]),
            secrets=self._origin.credentials,
            region=self._origin.region,
            now=self._origin.clock.now(),
            families=self._dialect.families,
        )
        bucket, key = self._dialect.place(self._headers.get("host", ""), self._place, self._scope["raw_path"])
        self._dialect.check_headers(self._headers)
        query = parse_query(self._scope["query_string"])
        body = self._body()
        own = KeyPair(key_id, "") if key_id != ACCESS_KEY_ID else None
        return OriginRequest(self._method, bucket, key, query, self._headers, body, signed_by=own)

    def _check_framing(self) -> None:
        length, chunked = self._headers.get("content-length"), "transfer-encoding" in self._headers
        if self._method in ("GET", "HEAD", "DELETE"):
            if chunked or length not in (None, "0"):
                raise s3_error("UnexpectedContent")
        elif length is None and not (chunked and self._origin.accepts_unknown_length) and not self._decoded_length():
            raise s3_error("MissingContentLength")

    def _body(self) -> bytes | StreamedBody:
        payload_hash = self._headers.get("x-amz-content-sha256") or self._headers.get("x-goog-content-sha256", "")
        if self._method in ("GET", "HEAD", "DELETE"):
            if payload_hash not in (empty_payload_hash(), "UNSIGNED-PAYLOAD"):
                raise s3_error("XAmzContentSHA256Mismatch")
            return b""
        if payload_hash == "STREAMING-UNSIGNED-PAYLOAD-TRAILER":
            return self._chunked_body()
        if payload_hash.startswith("STREAMING-"):
            raise s3_error("NotImplemented", "signed chunks")
        length = self._headers.get("content-length")
        return StreamedBody(self._raw_body(), None if length is None else int(length), payload_hash)

    def _decoded_length(self) -> str | None:
        return self._headers.get("x-amz-decoded-content-length")

    def _chunked_body(self) -> StreamedBody:
        if "aws-chunked" not in self._headers.get("content-encoding", ""):
            raise s3_error("InvalidRequest", "aws-chunked without its content-encoding")
        length = int(self._headers["x-amz-decoded-content-length"])
        chunks = UnsignedChunks(self._raw_body(), length)
        name = self._headers["x-amz-trailer"]
        codings = [coding.strip() for coding in self._headers["content-encoding"].split(",")]
        kept = ",".join(coding for coding in codings if coding != "aws-chunked")
        self._headers = {**self._headers, "content-encoding": kept}
        if not kept:
            del self._headers["content-encoding"]

        def trailer() -> str:
            if name not in chunks.trailers:
                raise s3_error("MalformedTrailerError")
            return chunks.trailers[name]

        return StreamedBody(chunks.pieces(), length, trailer_name=name, trailer_value=trailer)

    async def _raw_body(self) -> AsyncIterator[bytes]:
        while not self._body_is_over:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeft
            self._body_is_over = not message.get("more_body", False)
            if message.get("body"):
                yield message["body"]
                await self._pace(len(message["body"]))

    async def _refuse(self, error: S3Error) -> None:
        """Before the body was read: the connection ends with the answer."""
        body = error_document(error, resource="", request_id="strict", host_id="strict")
        headers = {"content-type": "application/xml", "content-length": str(len(body)), "connection": "close"}
        await self._start(error.status, headers)
        await self._send({"type": "http.response.body", "body": b"" if self._method == "HEAD" else body})

    async def _answer(self, response: MemoryResponse) -> None:
        headers = dict(response.headers)
        if self._method in ("PUT", "POST") and not self._body_is_over:
            headers["connection"] = "close"
        await self._start(response.status, headers)
        content, offset = response.content, 0
        end = content.size_bytes if response.with_body else 0
        stop = end if response.cut is None else min(end, response.cut.after_bytes)
        step = 256 * 1024 if self._origin.bytes_per_second is None else _PACE_BYTES
        while offset < stop:
            piece = content.read(offset, min(step, stop - offset))
            offset += len(piece)
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._pace(len(piece))
        if response.cut is not None and stop < end:
            self._reset() if response.cut.reset else self._transport.close()
            return
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        if "date" not in headers:
            raw.append((b"date", _http_date(self._origin.clock.now())))
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _pace(self, count: int) -> None:
        if self._origin.bytes_per_second is not None:
            await self._origin.clock.sleep(count / self._origin.bytes_per_second)

    def _reset(self) -> None:
        """RST: what the client has not read yet is lost."""
        connection = self._transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


def _headers(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for raw_name, raw_value in raw:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return headers


def _http_date(now: float) -> bytes:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(now)).encode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description="A strict S3 for tests.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", action="append", default=[])
    parser.add_argument("--discard-bodies", action="store_true")
    options = parser.parse_args()
    with StrictOrigin(port=options.port, keep_bodies=not options.discard_bodies) as origin:
        for name in options.bucket:
            origin.model.create_bucket(name)
        print(f"{origin.endpoint_url} {ACCESS_KEY_ID} {SECRET_ACCESS_KEY}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()

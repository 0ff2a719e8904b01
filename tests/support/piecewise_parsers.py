"""Everything that reads what clients send while it arrives, for tests that feed it byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.config import Config

from gateway.core.errors import S3Error
from gateway.edge.connection import S3Protocol
from gateway.edge.request_parsing import ChunkedDecoder
from gateway.edge.s3_server import Receive, Scope, Send
from gateway.edge.server_state import S3ServerState
from gateway.s3.aws_chunked import AwsChunkedDecoder
from gateway.s3.signature_v4 import STREAMING_SIGNED_TRAILER, STREAMING_UNSIGNED_TRAILER, PayloadMode
from tests.support.client_parsers import SEED

Feed = Callable[[bytes], object]


@dataclass(frozen=True)
class PiecewiseParser:
    """`make` gives what takes the next bytes; bytes behind a refusal are nobody's. `begin` comes before the words."""

    make: Callable[[], Feed]
    words: tuple[bytes, ...]
    begin: bytes = b""


class _NoSocket:
    def fileno(self) -> int:
        return -1

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    getsockname = getpeername


class SilentTransport(asyncio.Transport):
    """Takes what is written, and remembers whether it was closed."""

    def __init__(self) -> None:
        super().__init__({"socket": _NoSocket(), "sslcontext": object()})
        self.written = bytearray()
        self._closing = False

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        """Nobody reads: what comes is fed."""

    def resume_reading(self) -> None:
        """As above."""

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close


async def _never_answers(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


def _connection() -> Feed:
    """One that is fed as by the event loop: no request that comes whole is answered."""
    config = Config(_never_answers, log_config=None, ws="none", lifespan="off", interface="asgi3")
    config.load()
    protocol = S3Protocol(config, S3ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(SilentTransport())

    def feed(data: bytes) -> None:
        if not (protocol.flow.read_paused or protocol.transport.is_closing()):
            protocol.data_received(data)

    return feed


def _until_refused(feed: Feed) -> Feed:
    refused = False

    def take(data: bytes) -> None:
        nonlocal refused
        if not refused:
            try:
                feed(data)
            except S3Error:
                refused = True

    return take


def _http_chunks() -> Feed:
    decoder = ChunkedDecoder()
    return _until_refused(lambda data: decoder.feed(data, lambda _: None))


def _aws_chunks(mode: PayloadMode) -> Callable[[], Feed]:
    def make() -> Feed:
        return _until_refused(AwsChunkedDecoder(mode, 2**20, frozenset({"x-amz-checksum-crc32"}), SEED).feed)

    return make


_HEAD = b"GET /bucket/key HTTP/1.1\r\nHost: h\r\n"
_FIELDS = (b"a", b"a: b\r\n", b"\r", b"x-amz-meta-a: " + b"b" * 500 + b"\r\n")
_CHUNKS = (b"1\r\na\r\n", b"0", b"4000\r\n" + b"a" * 0x4000, b"0\r\n", b";a", b"a")

PIECEWISE = {
    "head": PiecewiseParser(_connection, _FIELDS, _HEAD + b"X: "),
    "request line": PiecewiseParser(_connection, (b"a", b"/", b"%41"), b"GET /"),
    "empty lines": PiecewiseParser(_connection, (b"\r\n", b"\r"), b""),
    "head behind a request": PiecewiseParser(_connection, _FIELDS, _HEAD + b"\r\n"),
    "body": PiecewiseParser(_connection, (b"a",), b"PUT /b/k HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n"),
    "HTTP chunks": PiecewiseParser(_http_chunks, _CHUNKS),
    "HTTP trailers": PiecewiseParser(_http_chunks, (b"a", b"a: b\r\n"), b"0\r\n"),
    "aws-chunks": PiecewiseParser(_aws_chunks(STREAMING_UNSIGNED_TRAILER), _CHUNKS),
    "signed aws-chunks": PiecewiseParser(_aws_chunks(STREAMING_SIGNED_TRAILER), (*_CHUNKS, b"0;chunk-signature=")),
    "aws trailers": PiecewiseParser(
        _aws_chunks(STREAMING_UNSIGNED_TRAILER), (b"a", b"x-amz-checksum-crc32:AAAAAA==\r\n"), b"0\r\n"
    ),
}

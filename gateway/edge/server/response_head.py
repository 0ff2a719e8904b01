"""Response heads: from what the application says to their bytes, and the refusals that the server says itself. Pure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.errors import S3Error
from gateway.objects import FileSpan
from gateway.s3.error_codes import error_document, s3_error

_OURS = frozenset((b"connection", b"content-length", b"transfer-encoding"))
_WITHOUT_BODY = frozenset((204, 304))

Header = tuple[bytes, bytes]


@dataclass(slots=True)
class Response:
    """A response that the server writes as it is, in one message of the application (`RESPONSE` in cycle.py).

    `headers` are looked at as those of ASGI are; `lines` are ready to be sent, and nobody looks at them again: whoever
    made them has checked that each is one line (`EncodedHeaders.of`). `length_bytes` is the Content-Length, where it is
    not among the headers. Where `body` is None, it follows in messages of its own.
    """

    status: int
    headers: Sequence[Header]
    lines: bytes
    body: bytes | memoryview | FileSpan | None
    length_bytes: int | None = None
    sent_bytes: int = 0
    """How much of the body has been sent: the server's to tell."""


@dataclass(slots=True)
class ResponseFraming:
    """How the end of a response body is told (RFC 9112, 6.3)."""

    left_bytes: int | None
    """Bytes of the Content-Length still to be sent; None where there is none."""
    chunked: bool
    bodiless: bool
    """An answer to HEAD, 204 or 304: whatever the application sends as a body stays here."""
    keep_alive: bool

    def account(self, size_bytes: int) -> None:
        """Count bytes of the body; RuntimeError when they are more than the head said."""
        if self.left_bytes is not None:
            if size_bytes > self.left_bytes:
                raise RuntimeError("the response body is longer than its Content-Length")
            self.left_bytes -= size_bytes

    @property
    def ends_with_connection(self) -> bool:
        return self.left_bytes is None and not self.chunked and not self.bodiless


def response_head(
    status: int,
    headers: Iterable[Header],
    *,
    method: str,
    http_version: str,
    keep_alive: bool,
    lines: bytes = b"",
    length_bytes: int | None = None,
) -> tuple[bytes, ResponseFraming]:
    """The head's bytes and the framing of what follows.

    `lines` and `length_bytes` are as those of a `Response`. The application's `connection` and `transfer-encoding`
    fields are taken as wishes. Raises RuntimeError when a field would break out of its line, so that no value from an
    origin can forge a response.
    """
    fields = []
    length = length_bytes
    for name, value in headers:
        lowered = name.lower()
        if lowered not in _OURS:
            fields.append(b"%b: %b\r\n" % (lowered, value))
        elif lowered == b"content-length":
            length = _length(value, length)
        elif lowered == b"connection" and b"close" in value.lower():
            keep_alive = False
    framing = _framing(status, length, method, http_version, keep_alive)
    if length is not None:
        fields.append(b"content-length: %d\r\n" % length)
    if framing.chunked:
        fields.append(b"transfer-encoding: chunked\r\n")
    if not framing.keep_alive:
        fields.append(b"connection: close\r\n")
    return b"%b%b%b\r\n" % (STATUS_LINE[status], lines, _checked(fields)), framing


def _length(value: bytes, earlier: int | None) -> int:
    if earlier is not None or not value.isdigit():
        raise RuntimeError(f"not a Content-Length: {value!r}")
    return int(value)


def _framing(status: int, length: int | None, method: str, http_version: str, keep_alive: bool) -> ResponseFraming:
    bodiless = method == "HEAD" or status in _WITHOUT_BODY
    chunked = length is None and not bodiless and http_version == "1.1"
    framing = ResponseFraming(None if bodiless else length, chunked, bodiless, keep_alive)
    if framing.ends_with_connection:
        framing.keep_alive = False
    return framing


def _checked(fields: list[bytes]) -> bytes:
    """The fields as one; each ends its line, and has no other line break in it."""
    lines = b"".join(fields)
    if lines.count(b"\r") != len(fields) or lines.count(b"\n") != len(fields) or 0 in lines:
        raise RuntimeError("a response header field has a line break or NUL in it")
    return lines


def refusal(error: S3Error) -> tuple[int, list[Header], bytes]:
    """Status, header fields and body of an error answer that ends its connection."""
    request_id = os.urandom(8).hex().upper()
    body = error_document(error, resource="", request_id=request_id, host_id=f"forebay/{request_id}")
    headers = [
        (b"content-type", b"application/xml"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-amz-request-id", request_id.encode()),
        *((name.encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()),
    ]
    return error.status, headers, body


def too_many_connections() -> S3Error:
    return s3_error("SlowDown", "Too many connections are open. Please reduce your request rate.")


def not_encrypted() -> S3Error:
    return s3_error("InvalidRequest", "The plain HTTP request was sent to HTTPS port. Please use https://.")


def refusal_bytes(error: S3Error, default_headers: Iterable[Header], *, without_body: bool) -> bytes:
    """The whole answer as it goes over the wire; `without_body` for HEAD."""
    status, headers, body = refusal(error)
    lines = [b"%s: %s\r\n" % field for field in (*default_headers, *headers)]
    return b"".join((STATUS_LINE[status], *lines, b"\r\n", b"" if without_body else body))

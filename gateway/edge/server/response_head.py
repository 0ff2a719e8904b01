"""From an `http.response.start` message to the bytes of a response head, and how its body is delimited. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from gateway.objects import FileSpan

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

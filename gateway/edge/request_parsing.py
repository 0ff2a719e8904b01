"""Requests from their bytes: what a head says, and a body with its framing taken off (RFC 9112, 3 and 6 and 7). No I/O.

httptools reads the lines of a head. Everything else here decides where a message ends or whom it is for, so it is
strict: what two implementations could read differently is refused, and the connection closed. The payload of an S3
upload may itself be aws-chunked: that is another layer, `s3.aws_chunked`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httptools

from gateway.core.errors import S3Error
from gateway.s3.error_codes import s3_error

FRAMING_HEADERS = frozenset((b"host", b"content-length", b"transfer-encoding", b"expect"))
"""The fields that `body_length`, `check_host` and `expects_continue` look at."""

HEAD_END = b"\r\n\r\n"

_VERSIONS = {b" HTTP/1.1\r\n": "1.1", b" HTTP/1.0\r\n": "1.0"}

_FRAGMENT = ord("#")
"""A number is found in bytes at a tenth of what looking for bytes costs."""

MAX_BODY_BYTES = 2**63 - 1

_ABSOLUTE = re.compile(rb"https?://([^/?]*+)([^?]*+)(?:\?(.*+))?", re.IGNORECASE | re.DOTALL)
_REQUEST_LINE = re.compile(rb"[A-Z-]+ [^ ]+ HTTP/1\.[01]\Z")
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class RequestTarget:
    """The request target as bytes of the wire, undecoded. `authority` is None unless the form was absolute."""

    raw_path: bytes
    raw_query: bytes
    authority: bytes | None = None


def bad_request(message: str = "An error occurred when parsing the HTTP request.") -> S3Error:
    """S3's answer to what is no HTTP request."""
    return s3_error("BadRequest", message, status=400)


def header_section_too_large(max_bytes: int) -> S3Error:
    return s3_error("RequestHeaderSectionTooLarge", MaxSizeAllowed=str(max_bytes))


def parse_target(method: str, target: bytes) -> RequestTarget:
    """Split a request target (RFC 9112, 3.2); InvalidURI for the authority form, a fragment or user information."""
    if _FRAGMENT in target:
        raise s3_error("InvalidURI", "The request target must not have a fragment; encode '#' as %23.")
    if target[:1] == b"/":
        raw_path, _, raw_query = target.partition(b"?")
        return RequestTarget(raw_path, raw_query)
    if target == b"*" and method == "OPTIONS":
        return RequestTarget(b"*", b"")
    return _absolute_form(target)


def _absolute_form(target: bytes) -> RequestTarget:
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        raise s3_error("InvalidURI")
    authority, raw_path, raw_query = match.groups(b"")
    if not authority or b"@" in authority:
        raise s3_error("InvalidURI", "The authority of the request target is not valid.")
    return RequestTarget(raw_path or b"/", raw_query, authority)


def http_version(head: bytes, method: str, target: bytes) -> str:
    """`1.0` or `1.1`; S3Error when the request line is anything but `METHOD SP TARGET SP VERSION CRLF`."""
    line = b"%b %b" % (method.encode(), target)
    version_at = len(line)
    version = _VERSIONS.get(head[version_at : version_at + 11])
    if version is None or head[:version_at] != line:
        raise bad_request()
    return version


def check_host(framing: Headers, http_version: str) -> None:
    """HTTP/1.1 has exactly one Host field, HTTP/1.0 at most one (RFC 9112, 3.2)."""
    count = sum(name == b"host" for name, _ in framing)
    if count > 1 or (count == 0 and http_version == "1.1"):
        raise bad_request("The request must have exactly one Host header.")


def body_length(framing: Headers, http_version: str) -> int | None:
    """Bytes of the request body; None when it comes in chunks (RFC 9112, 6.3)."""
    lengths = [value for name, value in framing if name == b"content-length"]
    codings = [value for name, value in framing if name == b"transfer-encoding"]
    if codings:
        if lengths:
            raise bad_request("A request must not have both Content-Length and Transfer-Encoding.")
        if len(codings) > 1 or codings[0].lower() != b"chunked" or http_version != "1.1":
            raise bad_request("The only transfer coding understood is 'chunked'.")
        return None
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 19 or int(lengths[0]) > MAX_BODY_BYTES:
        raise bad_request("The Content-Length header is not valid.")
    return int(lengths[0])


def expects_continue(framing: Headers, http_version: str) -> bool:
    """Tell whether the client holds the body back until it has seen `100 Continue` (RFC 9110, 10.1.1)."""
    return http_version == "1.1" and any(
        name == b"expect" and value.lower() == b"100-continue" for name, value in framing
    )


def _check_line_ends(piece: bytes | bytearray, position: int) -> None:  # apart, as tests count what it may search
    if _BARE_LINE_FEED.search(piece, position):
        raise bad_request("Lines must end with CRLF.")


class IncompleteHead:
    """Looks at a head while it comes, at each byte once: where it ends, and whether it can still become a request."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._looked_at = 0
        self._has_request_line = False

    def find_end(self, received: bytes | bytearray) -> int:
        """Behind its empty line, -1 where there is none in all that has come so far.

        Raises S3Error at once for what can never become a request, rather than wait for the rest until the timeout.
        """
        new_from = self._looked_at
        start = max(0, new_from - len(HEAD_END) + 1)
        piece = received[start:]
        self._looked_at = len(received)
        end = piece.find(HEAD_END)
        if end >= 0:
            return start + end + len(HEAD_END)
        if len(received) > self._max_bytes:
            raise header_section_too_large(self._max_bytes)
        if not received[:1].isalpha() and received != b"\r":
            raise bad_request()
        _check_line_ends(piece, new_from - start)
        if not self._has_request_line and (line_end := piece.find(b"\r\n")) >= 0:
            self._has_request_line = True
            if not _REQUEST_LINE.match(received, 0, start + line_end):
                raise bad_request()
        return -1


Header = tuple[bytes, bytes]


@dataclass(slots=True)
class RequestHead:
    """A request without its body. Header names are lower case; `body_length` is None for a chunked body."""

    method: str
    target: RequestTarget
    version: str
    headers: list[Header]
    body_length: int | None
    expects_continue: bool
    keep_alive: bool


class HeadParser:
    """Parses the heads of one connection, one after the other, each given whole.

    Its `on_…` methods are httptools' callbacks: they only take notes.
    """

    def __init__(self, *, max_bytes: int, max_headers: int) -> None:
        self._max_bytes = max_bytes
        self._max_headers = max_headers
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._method = ""
        self._keep_alive = False
        self._headers: list[Header] = []
        self._framing: list[Header] = []

    def parse(self, head: bytes) -> RequestHead:
        """`head` ends with its empty line. Raises S3Error for whatever is not exactly one request head."""
        if len(head) > self._max_bytes:
            raise header_section_too_large(self._max_bytes)
        try:
            self._run(head)
            if self._method == "CONNECT":
                raise s3_error("MethodNotAllowed")
            if len(self._headers) > self._max_headers:
                raise header_section_too_large(self._max_bytes)
            parsed = self._request_head(head)
        except S3Error:
            self._renew()  # it may hold what it had read
            raise
        finally:  # a connection that waits keeps nothing of what it has read
            self._url, self._headers, self._framing = b"", [], []
        if parsed.body_length != 0:
            self._renew()  # the body is not the parser's business, and it would wait for it
        return parsed

    def _request_head(self, head: bytes) -> RequestHead:
        method, framing = self._method, self._framing
        version = http_version(head, method, self._url)
        target = parse_target(method, self._url)
        headers = self._headers
        if target.authority is not None:  # it takes the place of the Host field (RFC 9112, 3.2.2)
            headers = [(name, target.authority if name == b"host" else value) for name, value in headers]
        keep_alive = self._keep_alive and version == "1.1"
        if len(framing) == 1 and framing[0][0] == b"host":  # nearly every GET: nothing more to look at
            return RequestHead(method, target, version, headers, 0, False, keep_alive)
        check_host(framing, version)
        length = body_length(framing, version)
        return RequestHead(method, target, version, headers, length, expects_continue(framing, version), keep_alive)

    def _renew(self) -> None:
        self._parser = httptools.HttpRequestParser(self)

    def _run(self, head: bytes) -> None:
        try:
            self._parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            self._renew()  # an upgrade is an offer (RFC 9110, 7.8); the request stands without it
        except httptools.HttpParserCallbackError:
            raise
        except httptools.HttpParserInvalidMethodError as error:
            raise s3_error("MethodNotAllowed") from error
        except httptools.HttpParserInvalidURLError as error:
            raise s3_error("InvalidURI") from error
        except httptools.HttpParserError as error:
            raise bad_request() from error

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        field = (name.lower(), value.rstrip(b" \t"))
        self._headers.append(field)
        if field[0] in FRAMING_HEADERS:
            self._framing.append(field)

    def on_headers_complete(self) -> None:
        self._method = self._parser.get_method().decode("ascii")
        self._keep_alive = self._parser.should_keep_alive()


def request_scope(of_connection: Mapping[str, object], head: RequestHead) -> dict[str, Any]:
    """Return the ASGI scope of one request; `path` and `forebay.authority` are as connection.py says."""
    target = head.target
    scope: dict[str, Any] = {
        **of_connection,
        "http_version": head.version,
        "method": head.method,
        "path": target.raw_path.decode("ascii"),
        "raw_path": target.raw_path,
        "query_string": target.raw_query,
        "headers": head.headers,
    }
    if target.authority is not None:
        scope["forebay.authority"] = target.authority
    return scope


MAX_LINE_BYTES = 1024
MAX_TRAILER_BYTES = 8 * 1024

CHUNK_BYTES_MIN = 256
"""Average size of a chunk at least: some clients send each of their writes as one, also the line of an aws-chunk."""

SMALL_CHUNKS_MAX = 1024
"""Number of chunks that may have any size. The bytes of one read of the socket are parsed at once, and each chunk costs
as much as kilobytes do."""

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER_LINE = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*")


class _Expecting(Enum):
    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()
    NOTHING = auto()


class ChunkedDecoder:
    """Takes the chunks apart, however the network has cut them. Extensions and trailer fields are thrown away.

    Raises S3Error (`BadRequest`) on anything but the exact grammar: a sender whose chunks are wrong cannot be trusted
    about where its request ends.
    """

    def __init__(self) -> None:
        self._expecting = _Expecting.SIZE
        self._line = b""
        self._chunk_left = 0
        self._trailer_bytes = 0
        self._missing_bytes = 0

    @property
    def complete(self) -> bool:
        return self._expecting is _Expecting.NOTHING

    def feed(self, data: bytes, emit: Callable[[bytes], None]) -> bytes:
        """Hand the payload in `data` to `emit`, in order; return what lies behind the end of the body."""
        position = 0
        while position < len(data) and not self.complete:
            if self._expecting is _Expecting.DATA:
                position = self._take_data(data, position, emit)
            else:
                position = self._take_line(data, position)
        return data[position:]

    def _take_data(self, data: bytes, position: int, emit: Callable[[bytes], None]) -> int:
        piece = data[position : position + self._chunk_left]
        emit(piece)
        position += len(piece)
        self._chunk_left -= len(piece)
        if not self._chunk_left:
            self._expecting = _Expecting.DATA_END
            if data.startswith(b"\r\n", position):  # nearly always
                self._expecting = _Expecting.SIZE
                return position + 2
        return position

    def _take_line(self, data: bytes, position: int) -> int:
        end = data.find(b"\n", position, position + MAX_LINE_BYTES)
        stop = len(data) if end < 0 else end + 1
        self._line += data[position:stop]
        if len(self._line) > MAX_LINE_BYTES:
            raise bad_request("A line between the chunks of the body is too long.")
        if end >= 0:
            line, self._line = self._line, b""
            self._on_line(line)
        return stop

    def _on_line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n"):
            raise bad_request("Lines between the chunks of the body must end with CRLF.")
        content = line[:-2]
        if self._expecting is _Expecting.SIZE:
            self._on_size(content)
        elif self._expecting is _Expecting.DATA_END:
            if content:
                raise bad_request("A chunk of the body is longer than its size says.")
            self._expecting = _Expecting.SIZE
        else:
            self._trailer_bytes += len(content)
            if not content:
                self._expecting = _Expecting.NOTHING
            elif self._trailer_bytes > MAX_TRAILER_BYTES or _TRAILER_LINE.fullmatch(content) is None:
                raise bad_request("The trailer section of the body is not valid.")

    def _on_size(self, content: bytes) -> None:
        match = _SIZE_LINE.fullmatch(content)
        if match is None:
            raise bad_request("A chunk size of the body is not valid.")
        self._chunk_left = int(match.group(1), 16)
        if self._chunk_left > MAX_BODY_BYTES:
            raise bad_request("A chunk of the body is too large.")
        # No average over all of the body: a large chunk makes up for those before it, never for those behind it.
        self._missing_bytes = max(0, self._missing_bytes + CHUNK_BYTES_MIN - self._chunk_left)
        if self._missing_bytes > SMALL_CHUNKS_MAX * CHUNK_BYTES_MIN:
            raise bad_request(f"More than {SMALL_CHUNKS_MAX} chunks are smaller than {CHUNK_BYTES_MIN} bytes.")
        self._expecting = _Expecting.DATA if self._chunk_left else _Expecting.TRAILER


_PIECE_OVERHEAD_BYTES = 256
"""Cost of a queued piece beside its bytes, so that many one-byte packets are bounded in memory, too."""

_WORTH_JOINING_BYTES = 64 * 1024


class BodyQueue:
    """The body of one request as it arrives.

    `length_bytes` is the Content-Length, None for a chunked body. `failure` is set once the body can never be
    completed: the reader raises it.
    """

    def __init__(self, length_bytes: int | None) -> None:
        self._decoder = ChunkedDecoder() if length_bytes is None else None
        self._left = length_bytes or 0
        self._pieces: deque[bytes] = deque()
        self.complete = length_bytes == 0
        self.failure: S3Error | None = None
        self.received_bytes = 0
        self.queued_bytes = 0

    @property
    def left_bytes(self) -> int | None:
        """Bytes of the Content-Length that are still to come; None for a chunked body."""
        return self._left if self._decoder is None else None

    def count(self, size_bytes: int) -> None:
        """Count bytes of a body with a Content-Length that were received past the queue."""
        self._left -= size_bytes
        self.received_bytes += size_bytes
        self.complete = not self._left

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body; the rest, behind its end, is returned. Raises S3Error on bad chunks."""
        if self._decoder is None:
            return self._feed_counted(data)
        try:
            rest = self._decoder.feed(data, self._append)
        except S3Error as error:
            self.failure = error
            raise
        self.complete = self._decoder.complete
        return rest

    def _feed_counted(self, data: bytes) -> bytes:
        rest = b""
        if len(data) > self._left:
            data, rest = data[: self._left], data[self._left :]
        self._left -= len(data)
        self.complete = not self._left
        if data:
            self._append(data)
        return rest

    def _append(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.received_bytes += len(piece)
        self.queued_bytes += len(piece) + _PIECE_OVERHEAD_BYTES

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def take(self) -> bytes:
        """Return the next bytes: a large piece as it came, or all queued bytes where the pieces are small."""
        if self._worth_joining():
            return self.take_all()[0]
        piece = self._pieces.popleft()
        self.queued_bytes -= len(piece) + _PIECE_OVERHEAD_BYTES
        return piece

    def take_all(self) -> list[bytes]:
        """All that is queued, joined where the pieces are small."""
        pieces = [b"".join(self._pieces)] if self._worth_joining() else list(self._pieces)
        self.discard()
        return pieces

    def _worth_joining(self) -> bool:
        count = len(self._pieces)
        return count > 1 and self.queued_bytes < count * _WORTH_JOINING_BYTES

    def discard(self) -> None:
        self._pieces.clear()
        self.queued_bytes = 0


NO_BODY = BodyQueue(0)
"""The body of all requests without one: it is never fed."""

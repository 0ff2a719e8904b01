"""From the bytes of a request head to what it says: httptools reads the lines, `request_head` has the rules."""

from __future__ import annotations

from dataclasses import dataclass

import httptools

from gateway.edge.server.request_head import (
    FRAMING_HEADERS,
    Target,
    bad_request,
    body_length,
    check_host,
    expects_continue,
    header_section_too_large,
    http_version,
    parse_target,
)
from gateway.s3.error_codes import s3_error

Header = tuple[bytes, bytes]


@dataclass(slots=True)
class RequestHead:
    """A request without its body. Header names are lower case; `body_length` is None for a chunked body."""

    method: str
    target: Target
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
        self._run(head)
        if self._method == "CONNECT":
            raise s3_error("MethodNotAllowed")
        if len(self._headers) > self._max_headers:
            raise header_section_too_large(self._max_bytes)
        parsed = self._request_head(head)
        if parsed.body_length != 0:
            self._renew()  # the body is not the parser's business, and it would wait for it
        return parsed

    def _request_head(self, head: bytes) -> RequestHead:
        method, framing = self._method, self._framing
        version = http_version(head, method, self._url)
        target = parse_target(method, self._url)
        headers = _with_host(self._headers, target.authority)
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

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._framing = []

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


def _with_host(headers: list[Header], authority: bytes | None) -> list[Header]:
    """The authority of an absolute-form target takes the place of the Host field (RFC 9112, 3.2.2)."""
    if authority is None:
        return headers
    return [(name, authority if name == b"host" else value) for name, value in headers]

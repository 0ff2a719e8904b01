"""Heads of answers (RFC 9112): httptools reads the lines; what is left to us is how the body ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import httptools

from gateway.s3.headers import HOP_BY_HOP

HEAD_BYTES_MAX = 64 * 1024
HEAD_END = b"\r\n\r\n"


class MalformedResponse(Exception):
    """What came is no answer in HTTP/1.1."""


@dataclass(slots=True)
class ResponseHead:
    """`headers` are those from end to end: lower-case names, latin-1 values, repeated ones joined.

    `length_bytes` is that of the body; None where the body says itself where it ends, or the end of the connection
    does.
    """

    status: int
    headers: dict[str, str]
    length_bytes: int | None
    keep_alive: bool


class ResponseParser:
    """One answer: its head, and a body of no known length. Its `on_…` methods are httptools' callbacks."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._fields: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._keep_alive = False
        self.complete = False
        self.ends_with_connection = False

    def head(self, head: bytes, *, bodiless: bool) -> ResponseHead:
        """`head` ends with its empty line; MalformedResponse. `bodiless`: it answers a HEAD (RFC 9112, 6.3)."""
        self._feed(head)
        status, headers = self._parser.get_status_code(), _end_to_end(self._fields)
        length: int | None = None
        if bodiless or status in (204, 304) or status < 200:
            length = 0
        elif "content-length" in headers:  # checked by httptools: digits, and no Transfer-Encoding beside it
            length = int(headers["content-length"])
        else:
            self.ends_with_connection = not any(name.lower() == b"transfer-encoding" for name, _ in self._fields)
        return ResponseHead(status, headers, length, self._keep_alive)

    def body(self, data: bytes) -> list[bytes]:
        """What `data` holds of the body; MalformedResponse. `complete` tells its end."""
        try:
            self._feed(data)
        except MalformedResponse:
            if not self.complete:
                raise
        pieces, self._pieces = self._pieces, []
        return pieces

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise MalformedResponse(f"the origin's answer is no HTTP: {error}") from error

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name, value))

    def on_headers_complete(self) -> None:
        self._keep_alive = self._parser.should_keep_alive()  # it forgets with the end of the answer

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


@lru_cache(maxsize=1024)
def _field_name(name: bytes) -> str:
    """Lower case, and the same object for all answers."""
    return name.decode("latin-1").lower()


def _end_to_end(fields: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Without what concerns this connection only."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in fields:
        name, value = _field_name(raw_name), raw_value.decode("latin-1").rstrip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if HOP_BY_HOP.isdisjoint(headers):
        return headers
    dropped = {name.strip().lower() for name in headers.get("connection", "").split(",")} | HOP_BY_HOP
    return {name: value for name, value in headers.items() if name not in dropped}

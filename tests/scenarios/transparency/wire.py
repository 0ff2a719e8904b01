"""A client that puts exactly the given bytes on the wire, over one connection for as long as the server keeps it."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

PATIENCE_SECONDS = 30.0

_IDLE_SECONDS_MAX = 45.0
"""Half of what the gateway keeps an idle connection for."""

_WITHOUT_BODY = frozenset({204, 304})


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it came, transfer coding taken off. `interim` are the statuses (1xx) before it."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    interim: tuple[int, ...] = ()

    def header(self, name: str) -> str | None:
        """The first value of a header, by its lower-case name."""
        return next((value for candidate, value in self.headers if candidate == name), None)


class Connection:
    """Requests one after the other; connects again only after the server has said that it closes, or might have had
    enough of an idle connection: on a busy machine, others' tests may take long.

    What is left in the connection behind an answer would be read as the next answer and fail there, so each exchange
    also proves that the one before left the connection in order. `awaits_end`: where the server says that it closes,
    wait until it has, and see that nothing came in between.
    """

    def __init__(self, url: str, *, awaits_end: bool) -> None:
        parts = urlsplit(url)
        self.host, self._port = parts.netloc, parts.port
        self._awaits_end = awaits_end
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._used_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def exchange(self, method: str, request: bytes) -> Answer:
        """Send the bytes of one request, read its answer."""
        self.send(request)
        return self.answer(method)

    def send(self, data: bytes) -> None:
        now = time.monotonic()
        if now - self._used_at > _IDLE_SECONDS_MAX:
            self.close()
        self._used_at = now
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port or 80), PATIENCE_SECONDS)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return  # refused in the middle of the body; the answer may still be there to read

    def answer(self, method: str) -> Answer:
        """The next final answer, to a request of this method."""
        interim: list[int] = []
        status, headers = self._head()
        while status < 200:
            interim.append(status)
            status, headers = self._head()
        fields = dict(headers)
        body = b"" if method == "HEAD" or status in _WITHOUT_BODY else self._body(fields)
        if fields.get("connection", "").lower() == "close":
            self._end()
        return Answer(status, headers, body, tuple(interim))

    def interim(self) -> int:
        """The status of the next head, which must be all that has come: 100 when a body is waited for."""
        status, _ = self._head()
        assert self._buffer == b"", f"bytes behind an interim answer: {self._buffer!r}"
        return status

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._buffer = None, b""

    def _end(self) -> None:
        rest = self._read_to_end() if self._awaits_end else b""
        self.close()
        assert rest == b"", f"bytes behind an answer that ends its connection: {rest[:200]!r}"

    def _head(self) -> tuple[int, tuple[tuple[str, str], ...]]:
        lines = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        version, status, *_ = lines[0].split(" ", 2)
        assert version.startswith("HTTP/1."), f"no status line: {lines[0]!r}"
        fields = (line.partition(":") for line in lines[1:])
        return int(status), tuple((name.lower(), value.strip()) for name, _, value in fields)

    def _body(self, fields: dict[str, str]) -> bytes:
        if fields.get("transfer-encoding", "").lower() == "chunked":
            return self._chunks()
        if "content-length" in fields:
            return self._exactly(int(fields["content-length"]))
        return self._read_to_end()

    def _chunks(self) -> bytes:
        body = b""
        while size := int(self._until(b"\r\n"), 16):
            body += self._exactly(size)
            assert self._exactly(2) == b"\r\n"
        assert self._exactly(2) == b"\r\n"
        return body

    def _until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            self._buffer += self._received() or self._broken_off()
        data, _, self._buffer = self._buffer.partition(end)
        return data

    def _exactly(self, count: int) -> bytes:
        pieces, missing = [self._buffer[:count]], count - len(self._buffer)
        self._buffer = self._buffer[count:]
        while missing > 0:
            piece = self._received() or self._broken_off()
            pieces.append(piece[:missing])
            self._buffer = piece[missing:]
            missing -= len(piece)
        return b"".join(pieces)

    def _read_to_end(self) -> bytes:
        pieces, self._buffer = [self._buffer], b""
        while piece := self._received():
            pieces.append(piece)
        return b"".join(pieces)

    def _received(self) -> bytes:
        assert self._socket is not None
        return self._socket.recv(1024 * 1024)

    def _broken_off(self) -> bytes:
        raise AssertionError(f"the connection ended in an answer, behind {self._buffer[:200]!r}")

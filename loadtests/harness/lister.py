"""A client that lists a bucket page by page over one connection, and looks for nothing but the token."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from loadtests.harness.reader import WrongAnswer
from loadtests.harness.signed_requests import Signer

_TOKEN = re.compile(rb"<NextContinuationToken>([^<]+)</NextContinuationToken>")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_BUFFER_BYTES = 1024 * 1024


class Lister:
    """ListObjectsV2 with `encoding-type=url`, a thousand keys a page."""

    def __init__(self, connection: socket.socket, signer: Signer, bucket: str) -> None:
        self._connection = connection
        self._signer = signer
        self._bucket = bucket
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def pages(self, prefix: str, count: int | None = None, **more: str) -> Iterator[memoryview]:
        """The documents of all pages, or of the first `count`; each is gone when the next is asked for."""
        token = None
        while count is None or count > 0:
            body = self._page({"prefix": prefix, "list-type": "2", "encoding-type": "url"} | more, token)
            yield body
            found = _TOKEN.search(body, 0, 4096) or _TOKEN.search(body)
            if found is None:
                return
            token, count = found[1].decode(), None if count is None else count - 1

    def _page(self, fields: dict[str, str], token: str | None) -> memoryview:
        if token is not None:
            fields["continuation-token"] = token
        query = "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in sorted(fields.items()))
        self._connection.sendall(self._signer.get(f"/{self._bucket}", query=query))
        received = self._receive(0)
        while (end := bytes(self._buffer[:received]).find(b"\r\n\r\n")) < 0:
            received = self._receive(received)
        head = bytes(self._buffer[: end + 2])
        length = _LENGTH.search(head)
        if not head.startswith(b"HTTP/1.1 200") or length is None:
            raise WrongAnswer(f"LIST was answered {head!r}")
        stop = end + 4 + int(length[1])
        while received < stop:
            received = self._receive(received)
        return self._buffer[end + 4 : stop]

    def _receive(self, received: int) -> int:
        count = self._connection.recv_into(self._buffer[received:])
        if not count:
            raise WrongAnswer("the server has closed the connection, or sends more than a page")
        return received + count


@contextmanager
def lister(address: tuple[str, int], bucket: str) -> Iterator[Lister]:
    """One connection, closed at the end."""
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield Lister(connection, Signer(f"{address[0]}:{address[1]}"), bucket)

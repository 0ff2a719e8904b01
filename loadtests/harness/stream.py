"""One object as one stream over one blocking socket: the plainest client, so that the server is what is measured."""

from __future__ import annotations

import re
import socket
import time

from loadtests.harness.content import LoadObject
from loadtests.harness.reader import WrongAnswer
from loadtests.harness.signed_requests import Signer

_BUFFER_BYTES = 1024 * 1024
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
_TIMEOUT_SECONDS = 120.0


def stream_seconds(address: tuple[str, int], of: LoadObject) -> float:
    """From the request to the last byte of a signed GET of the whole object. Raises WrongAnswer."""
    request = Signer("{}:{}".format(*address)).get(of.path)
    with socket.create_connection(address, timeout=_TIMEOUT_SECONDS) as connection:
        started = time.perf_counter()
        connection.sendall(request)
        _receive(connection, of)
        return time.perf_counter() - started


def _receive(connection: socket.socket, of: LoadObject) -> None:
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(4096)
    length = _LENGTH.search(head)
    if not head.startswith(b"HTTP/1.1 200 ") or length is None or int(length[1]) != of.size_bytes:
        raise WrongAnswer(f"{of.path}: {head[:300]!r}")
    left = of.size_bytes - (len(head) - head.index(b"\r\n\r\n") - 4)
    buffer = bytearray(_BUFFER_BYTES)
    while left:
        count = connection.recv_into(buffer)
        if not count:
            raise WrongAnswer(f"{of.path}: ended {left} bytes early")
        left -= count

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
    request, buffer = Signer("{}:{}".format(*address)).get(of.path), bytearray(_BUFFER_BYTES)
    with socket.create_connection(address, timeout=_TIMEOUT_SECONDS) as connection:
        started = time.perf_counter()
        connection.sendall(request)
        size_bytes = receive(connection, buffer, of.path)
        if size_bytes != of.size_bytes:
            raise WrongAnswer(f"{of.path}: {size_bytes} bytes")
        return time.perf_counter() - started


def receive(wire: socket.socket, buffer: bytearray, path: str) -> int:
    """Take the answer to a GET of a whole object: its length. Raises WrongAnswer."""
    head = b""
    while b"\r\n\r\n" not in head:
        piece = wire.recv(4096)
        if not piece:
            raise WrongAnswer(f"{path}: the connection ended")
        head += piece
    length = _LENGTH.search(head)
    if not head.startswith(b"HTTP/1.1 200 ") or length is None:
        raise WrongAnswer(f"{path}: {head[:300]!r}")
    size_bytes = int(length[1])
    left = size_bytes - (len(head) - head.index(b"\r\n\r\n") - 4)
    while left:
        count = wire.recv_into(buffer)
        if not count:
            raise WrongAnswer(f"{path}: ended {left} bytes early")
        left -= count
    return size_bytes

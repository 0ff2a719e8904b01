"""A client of many connections for HEAD, whose bodies `wrk` would wait for: one request each, then all answers."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from loadtests.harness.content import Family
from loadtests.harness.reader import WrongAnswer
from loadtests.harness.signed_requests import Signer

_HEAD_BYTES_MAX = 64 * 1024


def signed_heads(address: tuple[str, int], objects: Family) -> list[bytes]:
    """A HEAD of each object, dated over the last ten minutes: no two in a row alike."""
    signer, now = Signer("{}:{}".format(*address)), time.time()
    return [signer.get(objects.path(number), at=now - number % 600, method="HEAD") for number in range(objects.count)]


class HeadClient:
    """Open connections to one server."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = connections

    def run(self, requests: Sequence[bytes], seconds: float) -> int:
        """Send `requests` round and round; how many were answered with 200. WrongAnswer for any other answer."""
        following, stop, count = itertools.cycle(requests), time.monotonic() + seconds, 0
        while time.monotonic() < stop:
            count += self._one_each(following)
        return count

    def once(self, requests: Sequence[bytes]) -> list[bytes]:
        """The heads of the answers to all of them, in order."""
        following, heads = iter(requests), list[bytes]()
        while len(heads) < len(requests):
            sent = [one for one, request in zip(self._connections, following, strict=False) if _sent(one, request)]
            heads += [_head(one) for one in sent]
        return heads

    def _one_each(self, requests: Iterator[bytes]) -> int:
        for connection in self._connections:
            connection.sendall(next(requests))
        for connection in self._connections:
            _head(connection)
        return len(self._connections)


def _sent(connection: socket.socket, request: bytes) -> bool:
    connection.sendall(request)
    return True


def _head(connection: socket.socket) -> bytes:
    head = connection.recv(_HEAD_BYTES_MAX)
    while not head.endswith(b"\r\n\r\n"):
        more = connection.recv(_HEAD_BYTES_MAX)
        if not more:
            raise WrongAnswer(f"the connection ended behind {head!r}")
        head += more
    if not head.startswith(b"HTTP/1.1 200"):
        raise WrongAnswer(f"HEAD was answered {head!r}")
    return head


@contextmanager
def head_client(address: tuple[str, int], connections: int) -> Iterator[HeadClient]:
    """So many connections, closed at the end."""
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(address)) for _ in range(connections)]
        for one in opened:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield HeadClient(opened)

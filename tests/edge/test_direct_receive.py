"""Turns of a body that is received from its socket: over socket pairs, without a server."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import termios
from array import array
from collections.abc import Iterator

import pytest

from gateway.edge.receiving import (
    BUFFER_BYTES,
    SHARE_BYTES,
    DirectReceive,
    ReadBatch,
    ReceiveThreads,
    readable,
)
from gateway.operations.context import Sink

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The client's end and the gateway's, which does not block; both take much."""
    client, ours = socket.socketpair()
    for end in (client, ours):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * BUFFER_BYTES)
    ours.setblocking(False)
    with client, ours:
        yield client, ours


class SmallBuffers(ReceiveThreads):
    """So small that a socket pair holds more."""

    def buffer(self) -> memoryview:
        return memoryview(bytearray(65_536))


class Direct:
    """A receiver and what its sink got."""

    def __init__(
        self,
        ours: socket.socket,
        left_bytes: int,
        arrived: list[bytes] | None = None,
        sink: Sink | None = None,
        threads: ReceiveThreads | None = None,
    ) -> None:
        self.pieces: list[bytes] = []
        self.receive = DirectReceive(ours, arrived or [], left_bytes, sink or self._take, threads or ReceiveThreads(1))

    def _take(self, data: memoryview) -> None:
        assert data.readonly
        self.pieces.append(bytes(data))

    def turn(self) -> ReadBatch:
        return self.receive.turn()

    def close(self) -> None:
        self.receive.close()


def test_a_turn_ends_where_no_more_has_arrived(pair: Pair) -> None:
    """The thread does not wait for a slow sender: the event loop does."""
    client, ours = pair
    direct = Direct(ours, 100)
    assert direct.turn() is ReadBatch.NOTHING_MORE
    client.sendall(b"abc")
    assert direct.turn() is ReadBatch.NOTHING_MORE
    assert (direct.pieces, direct.receive.left_bytes) == ([b"abc"], 97)
    direct.close()


def test_what_has_arrived_before_comes_first(pair: Pair) -> None:
    """In order, and once."""
    client, ours = pair
    direct = Direct(ours, 4, [b"one", b"two"])
    client.sendall(b"four")
    assert direct.turn() is ReadBatch.SHARE
    assert direct.turn() is ReadBatch.SHARE
    assert (direct.pieces, direct.receive.left_bytes) == ([b"one", b"two", b"four"], 0)
    direct.close()


def test_not_a_byte_of_the_successor_is_taken(pair: Pair) -> None:
    """What lies behind the body stays in the kernel, for whoever parses the next request."""
    client, ours = pair
    direct = Direct(ours, 70_000)
    client.sendall(bytes(70_000) + b"GET /")
    assert direct.turn() is ReadBatch.SHARE
    assert sum(map(len, direct.pieces)) == 70_000
    assert ours.recv(100) == b"GET /"
    direct.close()


@pytest.mark.parametrize("bytes_before", [0, 1000])
def test_the_end_of_the_connection_is_the_clients(pair: Pair, bytes_before: int) -> None:
    """An end of file in the middle of a body."""
    client, ours = pair
    direct = Direct(ours, 10_000)
    client.sendall(bytes(bytes_before))
    client.close()
    assert direct.turn() is ReadBatch.CLIENT_LEFT
    assert sum(map(len, direct.pieces)) == bytes_before
    direct.close()


def test_a_reset_is_the_clients_end_too() -> None:
    """ECONNRESET is no fault of the gateway."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours:
        ours.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        direct = Direct(ours, 10_000)
        assert direct.turn() is ReadBatch.CLIENT_LEFT
        direct.close()


@pytest.fixture
def tcp() -> Iterator[Pair]:
    """The same over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours, _ = listener.accept()
    ours.setblocking(False)
    with client, ours:
        yield client, ours


def arrived(direct: Direct, size_bytes: int) -> None:
    """Wait until so many bytes lie in the kernel."""
    waiting = array("i", [0])
    while waiting[0] < size_bytes:
        fcntl.ioctl(direct.receive.descriptor, termios.FIONREAD, waiting)


@pytest.mark.parametrize(("left_bytes", "enough"), [(10_000, 1_000), (600, 600)], ids=["many", "the rest"])
def test_few_bytes_can_be_left_to_gather(tcp: Pair, left_bytes: int, enough: int) -> None:
    """The event loop is not woken for less than what is worth a thread, or for less than the rest of the body."""
    client, ours = tcp
    direct = Direct(ours, left_bytes)
    direct.receive.readable_from(1_000)
    client.sendall(bytes(enough - 1))
    arrived(direct, enough - 1)
    assert not readable(direct.receive.descriptor)
    client.sendall(b"x")
    arrived(direct, enough)
    assert readable(direct.receive.descriptor)
    direct.close()


def test_few_bytes_are_readable_again_when_no_more_come(tcp: Pair) -> None:
    """A slow sender makes progress too."""
    client, ours = tcp
    direct = Direct(ours, 10_000)
    direct.receive.readable_from(1_000)
    client.sendall(b"few")
    arrived(direct, 3)
    assert not readable(direct.receive.descriptor)
    direct.receive.readable_from(1)
    assert readable(direct.receive.descriptor)
    assert direct.turn() is ReadBatch.NOTHING_MORE
    assert direct.pieces == [b"few"]
    direct.close()


def test_a_turn_ends_with_its_share(pair: Pair) -> None:
    """However fast the sender is: then it is somebody else's turn."""
    client, ours = pair
    sent_bytes = 0

    def send_more(data: memoryview) -> None:
        nonlocal sent_bytes
        client.sendall(bytes(len(data)))
        sent_bytes += len(data)

    direct = Direct(ours, 10 * SHARE_BYTES, sink=send_more, threads=SmallBuffers(1))
    client.sendall(bytes(100_000))
    assert direct.turn() is ReadBatch.SHARE
    assert SHARE_BYTES <= sent_bytes < SHARE_BYTES + BUFFER_BYTES
    direct.close()


def test_what_the_sink_raises_ends_the_turn_and_the_count_is_right(pair: Pair) -> None:
    """Bytes that were taken off the socket are counted, whether the sink liked them or not."""
    client, ours = pair

    def fail(data: memoryview) -> None:
        raise OSError("the disk is full")

    direct = Direct(ours, 10_000, sink=fail)
    client.sendall(bytes(4_000))
    with pytest.raises(OSError, match="the disk is full"):
        direct.turn()
    assert direct.receive.left_bytes == 6_000
    direct.close()


def test_a_stopped_receiver_takes_nothing(pair: Pair) -> None:
    """Whoever is cancelled need not wait for a share."""
    client, ours = pair
    direct = Direct(ours, 10_000)
    client.sendall(bytes(4_000))
    direct.receive.stop()
    assert direct.turn() is ReadBatch.SHARE
    assert direct.pieces == []
    direct.close()


def test_the_descriptor_is_the_receivers_own(pair: Pair) -> None:
    """A connection that is closed meanwhile must not make it read from whatever gets its number next."""
    client, ours = pair
    direct = Direct(ours, 10_000)
    number = ours.fileno()
    ours.close()
    reading, writing = os.pipe()
    try:
        assert number in (reading, writing), "the number was not used again: the test shows nothing"
        client.sendall(b"mine")
        assert direct.turn() is ReadBatch.NOTHING_MORE
        assert direct.pieces == [b"mine"]
    finally:
        os.close(reading)
        os.close(writing)
        direct.close()


def test_a_client_that_cannot_be_reached_any_more_has_left(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the network calls it: it is no error of whoever takes the body."""
    _, ours = pair
    direct = Direct(ours, 10)

    class Unreachable:
        def recv_into(self, _: memoryview) -> int:
            raise OSError(errno.EHOSTUNREACH, "No route to host")

    with monkeypatch.context() as patched:
        patched.setattr(direct.receive, "_socket", Unreachable())
        assert direct.turn() is ReadBatch.CLIENT_LEFT
    direct.receive.close()

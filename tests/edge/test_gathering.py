"""How often a body that comes slowly costs a turn on a thread: with a clock of the test's own, over real sockets."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import termios
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.edge.receiving import (
    GATHERED_BYTES,
    GATHERING_SECONDS,
    QUEUED_BYTES,
    SLOW_GATHERING_SECONDS_MAX,
    ReceiveThreads,
    Receiving,
    readable,
)
from gateway.edge.request_parsing import BodyQueue

KIB = 1024
TICK_SECONDS = 0.01


def waiting_bytes(descriptor: int) -> int:
    """What lies in the kernel."""
    waiting = array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, waiting)
    return waiting[0]


class CountedThreads(ReceiveThreads):
    """Counts what they are asked to do."""

    turns = 0

    async def run(self, *arguments: Any, **keywords: Any) -> Any:
        self.turns += 1
        return await super().run(*arguments, **keywords)


class Client:
    """A request whose client has sent `sent_by(now)` bytes of its body, while time passes where somebody waits for it.

    Into a socket, or, without one, to the event loop.
    """

    abandoned = False

    def __init__(self, length_bytes: int, sent_by: Callable[[float], int], wire: socket.socket | None) -> None:
        self.request_body = BodyQueue(length_bytes)
        self.transport = SimpleNamespace(abort=lambda: None)
        self.flow = SimpleNamespace(read_paused=False, hand_over_reading=lambda: None, resume_reading=lambda: None)
        self.now = self.last_sent_at = 0.0
        self.sent_bytes = 0
        self._length_bytes, self._sent_by, self._wire = length_bytes, sent_by, wire

    def send_continue(self) -> None:
        """It has not asked."""

    @contextmanager
    def clients_time(self) -> Iterator[None]:
        yield

    async def wait_for_client(self) -> None:
        await self.something_happens()

    async def something_happens(self, descriptor: int | None = None, seconds: float | None = None) -> None:
        until = float("inf") if seconds is None else self.now + seconds
        received_bytes = self.request_body.received_bytes
        while self.now < until and self.request_body.received_bytes == received_bytes:
            if descriptor is not None and readable(descriptor):
                return
            self.now += TICK_SECONDS
            more = min(self._sent_by(self.now), self._length_bytes) - self.sent_bytes
            if more > 0:
                self._send(descriptor, more)

    def _send(self, descriptor: int | None, size_bytes: int) -> None:
        self.sent_bytes += size_bytes
        self.last_sent_at = self.now
        if self._wire is None or descriptor is None:
            self.request_body.feed(bytes(size_bytes))
            return
        expected = waiting_bytes(descriptor) + size_bytes
        self._wire.sendall(bytes(size_bytes))
        while waiting_bytes(descriptor) < expected and not readable(descriptor):
            continue


@contextmanager
def tcp() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's end and the gateway's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ours.setblocking(False)
    with client, ours:
        yield client, ours


def turns(length_bytes: int, sent_by: Callable[[float], int], *, direct: bool) -> int:
    """How many turns on threads a body takes, the last of them as soon as its last byte is there."""

    async def scenario() -> int:
        threads, got = CountedThreads(1), bytearray()
        with tcp() as (theirs, ours), pytest.MonkeyPatch.context() as patched:
            client = Client(length_bytes, sent_by, theirs if direct else None)
            patched.setattr(asyncio.get_running_loop(), "time", lambda: client.now)
            await Receiving(cast("Any", client), ours if direct else None, threads, lambda: None).receive_into(
                got.extend
            )
        threads.shut_down()
        assert len(got) == length_bytes
        assert client.now == client.last_sent_at
        return threads.turns

    return asyncio.run(scenario())


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "queued"])
def test_a_slow_sender_has_a_turn_a_second(direct: bool) -> None:
    """However many packets it sends. Its last byte is not waited with."""
    seconds = 20
    found = turns(seconds * 10 * KIB, lambda now: int(now * 10) * KIB, direct=direct)
    assert seconds / SLOW_GATHERING_SECONDS_MAX - 2 <= found <= seconds / SLOW_GATHERING_SECONDS_MAX / 0.75 + 4


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "queued"])
def test_a_sender_that_was_slow_is_waited_for_no_longer_than_it_fills_a_turn(direct: bool) -> None:
    """Once many bytes have come, the next turn comes as soon as for anybody else."""
    slow_seconds, rate = 5.0, 25 * KIB * KIB

    def sent_by(now: float) -> int:
        return int(now * 10) * KIB + max(0, int((now - slow_seconds) * rate))

    fast_bytes = 20 * KIB * KIB
    found = turns(int(slow_seconds * 10) * KIB + fast_bytes, sent_by, direct=direct)
    per_turn = rate * GATHERING_SECONDS / 2 if direct else QUEUED_BYTES
    assert fast_bytes / GATHERED_BYTES <= found <= fast_bytes / per_turn + 12

"""From a socket into a buffer and on to a sink, on a thread: past the event loop and its copies."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from enum import Enum, auto

from gateway.edge.server.receive_threads import ReceiveThreads
from gateway.operations.request_body import Sink

DIRECT_BYTES_MIN = 64 * 1024
"""Less than that comes over the event loop: it costs one read there, and here a descriptor and a thread."""

SHARE_BYTES = 8 * 1024 * 1024
"""What one turn receives before the thread goes to whoever waits for one."""

STEADY_BYTES = 256 * 1024
"""A sender that brought so much in one turn is worth waiting for, on the thread, POLL_MILLISECONDS long."""

POLL_MILLISECONDS = 1


class Turn(Enum):
    """How a turn ended."""

    SHARE = auto()
    """With its share, or with all of the body."""
    NOTHING_MORE = auto()
    """No more has arrived yet."""
    CLIENT_LEFT = auto()


class DirectReceive:
    """The rest of one body: what has `arrived` already, then `left_bytes` from a non-blocking socket, never one more.

    `turn` runs on a thread, one at a time. The descriptor is the receiver's own: whatever becomes of the connection,
    its number means this socket until `close`.
    """

    def __init__(
        self,
        socket_descriptor: int,
        arrived: Sequence[bytes],
        left_bytes: int,
        sink: Sink,
        threads: ReceiveThreads,
    ) -> None:
        self.descriptor = os.dup(socket_descriptor)
        self.left_bytes = left_bytes
        self._arrived = arrived
        self._sink = sink
        self._threads = threads
        self._stopped = False

    def stop(self) -> None:
        """End the turn that runs as soon as possible. From any thread."""
        self._stopped = True

    def close(self) -> None:
        """Only when no turn runs."""
        os.close(self.descriptor)

    def turn(self) -> Turn:
        """Receive what has arrived, at most a share, and hand it on. Raises what the sink raises."""
        arrived, self._arrived = self._arrived, ()
        for piece in arrived:
            self._sink(memoryview(piece))
        buffer, received_bytes = self._threads.buffer(), 0
        while self.left_bytes and received_bytes < SHARE_BYTES and not self._stopped:
            count, state = self._fill(buffer[: self.left_bytes])
            received_bytes += count
            if count:
                self._sink(buffer[:count].toreadonly())
            if state is Turn.CLIENT_LEFT:
                return state
            if state is Turn.NOTHING_MORE and not self._more_soon(received_bytes):
                return state
        return Turn.SHARE

    def _fill(self, wanted: memoryview) -> tuple[int, Turn]:
        """How many bytes have come, and what there is behind them."""
        filled = 0
        while filled < len(wanted):
            try:
                count = os.readv(self.descriptor, [wanted[filled:]])
            except (BlockingIOError, InterruptedError):
                return filled, Turn.NOTHING_MORE
            except (ConnectionError, TimeoutError):
                return filled, Turn.CLIENT_LEFT
            if not count:
                return filled, Turn.CLIENT_LEFT
            filled += count
            self.left_bytes -= count
        return filled, Turn.SHARE

    def _more_soon(self, received_bytes: int) -> bool:
        """Whether the thread should stay: a slow sender, or one too many, goes back to the event loop."""
        if received_bytes < STEADY_BYTES or self._threads.crowded:
            return False
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(POLL_MILLISECONDS))


class HandingOn:
    """Pieces that the event loop has received, on their way to a sink on a thread."""

    def __init__(self, pieces: Sequence[bytes], sink: Sink) -> None:
        self._pieces = pieces
        self._sink = sink
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        for piece in self._pieces:
            if self._stopped:
                return
            self._sink(memoryview(piece))

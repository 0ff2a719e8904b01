"""From a socket into a buffer and on to a sink, on a thread: past the event loop and its copies."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from enum import Enum, auto

from gateway.edge.server.receive_threads import ReceiveThreads
from gateway.operations.request_body import Sink

DIRECT_BYTES_MIN = 64 * 1024
"""Less than that comes over the event loop: it costs one read there, and here a descriptor and a thread."""

SHARE_BYTES = 8 * 1024 * 1024
"""What one turn receives before the thread goes to whoever waits for one."""


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
        wire: socket.socket,
        arrived: Sequence[bytes],
        left_bytes: int,
        sink: Sink,
        threads: ReceiveThreads,
    ) -> None:
        # `wire.dup()` would make both block: `wire` does not know that it does not.
        self._socket = socket.socket(wire.family, wire.type, wire.proto, os.dup(wire.fileno()))
        self.left_bytes = left_bytes
        self._arrived = arrived
        self._sink = sink
        self._threads = threads
        self._stopped = False

    def stop(self) -> None:
        """End the turn that runs as soon as possible. From any thread."""
        self._stopped = True

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def readable_from(self, size_bytes: int) -> None:
        """So many bytes must have arrived from now on before the socket counts as readable; or its end.

        (SO_RCVLOWAT, socket(7); the kernel makes its own buffer large enough, tcp(7).)
        """
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(size_bytes, self.left_bytes))

    def close(self) -> None:
        """Only when no turn runs."""
        self._socket.close()

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
            if state is not Turn.SHARE:
                return state
        return Turn.SHARE

    def _fill(self, wanted: memoryview) -> tuple[int, Turn]:
        """How many bytes have come, and what there is behind them."""
        filled = 0
        while filled < len(wanted):
            try:
                count = self._socket.recv_into(wanted[filled:])
            except (BlockingIOError, InterruptedError):
                return filled, Turn.NOTHING_MORE
            except OSError:  # reset, timed out, or no way to it any more (EHOSTUNREACH): nothing more will come
                return filled, Turn.CLIENT_LEFT
            if not count:
                return filled, Turn.CLIENT_LEFT
            filled += count
            self.left_bytes -= count
        return filled, Turn.SHARE

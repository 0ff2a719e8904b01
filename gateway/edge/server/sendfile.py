"""Bytes of a file to a socket without passing through this process: `sendfile(2)`.

Measured against `loop.sendfile` (asyncio, loopback, CPU per response with its head): 100 KiB 14 µs against 33 µs, 8 MiB
680 µs against 830 µs. That one stops reading from the client meanwhile, waits for the selector although all is sent,
and moves the file position of a descriptor that others share.
"""

from __future__ import annotations

import asyncio
import os

from gateway.errors import BlockDamaged, ClientDisconnected

STEP_BYTES = 1024 * 1024
"""Most that one call hands to the kernel: it bounds how long the loop serves a single client (about 0.1 ms)."""


class FileSender:
    """`count` bytes at `offset` of `file_descriptor`, to a connected, non-blocking socket whose own queue is empty.

    Both descriptors stay the caller's. `sent_bytes` tells how far it has got.
    """

    def __init__(self, socket_descriptor: int, file_descriptor: int, offset: int, count: int) -> None:
        self._socket = socket_descriptor
        self._file = file_descriptor
        self._offset = offset
        self._left = count
        self._finished: asyncio.Future[None] | None = None
        self.sent_bytes = 0

    async def send(self) -> None:
        """Return when the kernel has taken everything.

        Raises ClientDisconnected when the peer is gone, BlockDamaged when the file ends early, OSError when it cannot
        be read.
        """
        if self.push():
            return
        loop = asyncio.get_running_loop()
        # The loop lets nobody else wait on a transport's descriptor: a second one for the same socket may.
        watched = os.dup(self._socket)
        self._finished = loop.create_future()
        loop.add_writer(watched, self._on_writable)
        try:
            await self._finished
        finally:
            loop.remove_writer(watched)
            os.close(watched)

    def abandon(self) -> None:
        """The connection is lost: the sender stops before the descriptor's number means another socket."""
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(_gone())

    def _on_writable(self) -> None:
        if self._finished is None or self._finished.done():
            return
        try:
            if self.push():
                self._finished.set_result(None)
        except Exception as error:  # noqa: BLE001 - it is raised in the task that waits in `send`
            self._finished.set_exception(error)

    def push(self) -> bool:
        """Hand over as much as the kernel takes now, one step at most; true when all is sent. Raises as `send`."""
        if not self._left:
            return True
        try:
            sent = os.sendfile(self._socket, self._file, self._offset, min(self._left, STEP_BYTES))
        except (BlockingIOError, InterruptedError):
            return False
        except (ConnectionError, TimeoutError) as error:
            raise _gone() from error
        if not sent:
            raise BlockDamaged(f"the file ends {self._left} bytes early, at {self._offset}")
        self._offset += sent
        self._left -= sent
        self.sent_bytes += sent
        return not self._left


def _gone() -> ClientDisconnected:
    return ClientDisconnected("the client left while a file was sent to it")

"""Bytes of a file to a socket without passing through this process: `sendfile(2)`.

Measured against `loop.sendfile` (asyncio, loopback, CPU per response with its head): 100 KiB 14 µs against 33 µs, 8 MiB
680 µs against 830 µs. That one stops reading from the client meanwhile, waits for the selector although all is sent,
and moves the file position of a descriptor that others share.
"""

from __future__ import annotations

import os

from gateway.edge.server.sending import Sender, gone
from gateway.errors import BlockDamaged

STEP_BYTES = 1024 * 1024
"""Most that one call hands to the kernel: it bounds how long the loop serves a single client (about 0.1 ms)."""


class FileSender(Sender):
    """`count` bytes at `offset` of `file_descriptor`, which stays the caller's.

    BlockDamaged when the file ends early, OSError when it cannot be read.
    """

    def __init__(self, socket_descriptor: int, file_descriptor: int, offset: int, count: int) -> None:
        super().__init__(socket_descriptor)
        self._file = file_descriptor
        self._offset = offset
        self._left = count

    def push(self) -> bool:
        if not self._left:
            return True
        try:
            sent = os.sendfile(self._socket, self._file, self._offset, min(self._left, STEP_BYTES))
        except (BlockingIOError, InterruptedError):
            return False
        except (ConnectionError, TimeoutError) as error:
            raise gone() from error
        if not sent:
            raise BlockDamaged(f"the file ends {self._left} bytes early, at {self._offset}")
        self._offset += sent
        self._left -= sent
        self.sent_bytes += sent
        return not self._left

"""Bytes of a file to a socket without passing through this process: `sendfile(2)`.

Measured against `loop.sendfile` (asyncio, loopback, CPU per response with its head): 100 KiB 14 µs against 33 µs, 8 MiB
680 µs against 830 µs. That one stops reading from the client meanwhile, waits for the selector although all is sent,
and moves the file position of a descriptor that others share.
"""

from __future__ import annotations

import os

from gateway.edge.server.sending import Sender, gone
from gateway.errors import BlockDamaged
from gateway.objects import FileSpan

STEP_BYTES = 1024 * 1024
"""Most that one call hands to the kernel: it bounds how long the loop serves a single client (about 0.1 ms)."""


class FileSender(Sender):
    """The bytes of a span, whose descriptor stays the caller's.

    What has left memory while the client took its time is checked again before it is sent, and comes from memory where
    it does not stay there. `is_fresh`: the span has just been given, nothing can have left.

    BlockDamaged when the file ends early or holds other bytes than it should, OSError when it cannot be read.
    """

    def __init__(self, socket_descriptor: int, span: FileSpan, *, is_fresh: bool) -> None:
        super().__init__(socket_descriptor)
        self._span = span
        self._offset = span.offset
        self._left = span.count
        self._is_fresh = is_fresh
        self._restored: memoryview | None = None

    def push(self) -> bool:
        if not self._left:
            return True
        if not self._restored and not self._is_intact():
            self.needs_bytes = True
            return False
        try:
            sent = self._send_restored(self._restored) if self._restored else self._send_file()
        except (BlockingIOError, InterruptedError):
            return False
        except (ConnectionError, TimeoutError) as error:
            raise gone() from error
        self._offset += sent
        self._left -= sent
        self.sent_bytes += sent
        return not self._left

    async def fetch(self) -> None:
        file = self._span.file
        if file is not None:
            self._restored = await file.restore(self._offset, self._step_bytes)

    def _is_intact(self) -> bool:
        is_fresh, self._is_fresh = self._is_fresh, False
        file = self._span.file
        return is_fresh or file is None or file.intact(self._offset, self._step_bytes)

    @property
    def _step_bytes(self) -> int:
        return min(self._left, STEP_BYTES)

    def _send_file(self) -> int:
        sent = os.sendfile(self._socket, self._span.descriptor, self._offset, self._step_bytes)
        if not sent:
            raise BlockDamaged(f"the file ends {self._left} bytes early, at {self._offset}")
        return sent

    def _send_restored(self, restored: memoryview) -> int:
        sent = os.write(self._socket, restored)
        self._restored = restored[sent:]
        return sent

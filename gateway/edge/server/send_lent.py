"""Bytes lent from memory to a socket: what it does not take is given back at once, not copied."""

from __future__ import annotations

import os

from gateway.edge.server.sending import Sender, gone
from gateway.objects import LentBytes

STEP_BYTES = 1024 * 1024
"""As of sendfile.py."""


class LentSender(Sender):
    """`prefix`, and behind it as much of lent bytes as the kernel takes in one step.

    `send` returns when the kernel can take more, and all of the prefix is out. Meanwhile it does not hold the bytes: a
    client that reads slowly keeps nothing in memory.
    """

    def __init__(self, socket_descriptor: int, prefix: bytes, lent: LentBytes) -> None:
        super().__init__(socket_descriptor)
        self._prefix = prefix
        self._lent: LentBytes | None = lent

    def push(self) -> bool:
        lent, self._lent = self._lent, None
        if lent is None:
            self._prefix = self._prefix[self._give(self._prefix) :]
            return not self._prefix
        content = lent.content[:STEP_BYTES]
        sent = self._give(self._prefix, content)
        self.sent_bytes = lent.taken = max(0, sent - len(self._prefix))
        self._prefix = self._prefix[sent:]
        all_taken = lent.taken == len(content)
        content.release()
        lent.content.release()
        return all_taken

    def _give(self, *buffers: bytes | memoryview) -> int:
        try:
            return os.writev(self._socket, buffers)
        except (BlockingIOError, InterruptedError):
            return 0
        except (ConnectionError, TimeoutError) as error:
            raise gone() from error

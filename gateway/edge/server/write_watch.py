"""Clients that take nothing of what is sent to them."""

from __future__ import annotations

import asyncio

from gateway.edge.server.response_writer import ResponseWriter


class WriteWatch:
    """Looks now and then whether a connection takes what is sent. Pure but for what it looks at."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._progress: tuple[int, int] | None = None
        self._progress_at = 0.0

    def stalled(self, transport: asyncio.WriteTransport, writer: ResponseWriter | None, now: float) -> bool:
        """Whether something waits to be taken, and nothing has been for longer than allowed."""
        unsent_bytes = transport.get_write_buffer_size()
        if not unsent_bytes and (writer is None or not writer.sending):
            self._progress = None
            return False
        progress = (unsent_bytes, writer.sent_bytes if writer is not None else 0)
        if progress != self._progress:
            self._progress, self._progress_at = progress, now
        return now - self._progress_at >= self._timeout_seconds

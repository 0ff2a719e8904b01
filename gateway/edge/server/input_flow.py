"""Whether a connection is read from, and who is told when it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class InputFlow(FlowControl):
    """uvicorn's; calls `on_unread` when nobody reads any more, and `on_read` when somebody does again."""

    def __init__(
        self, transport: asyncio.Transport, on_unread: Callable[[], None], on_read: Callable[[], None]
    ) -> None:
        super().__init__(transport)
        self._on_unread = on_unread
        self._on_read = on_read

    def pause_reading(self) -> None:
        if not self.read_paused:
            super().pause_reading()
            self._on_unread()

    def resume_reading(self) -> None:
        if self.read_paused:
            super().resume_reading()
            self._on_read()

    def hand_over_reading(self) -> None:
        """The caller reads from the socket itself until it resumes, and sees its end."""
        self.resume_reading()
        super().pause_reading()

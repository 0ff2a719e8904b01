"""What a child process is given to do its work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.serve.handover import Handover, process_number


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process needs to do its work. `stop` is set by SIGTERM; `ready` is called once, when it serves."""

    name: str
    handover: Handover
    listeners: list[socket.socket]
    stop: asyncio.Event
    ready: Callable[[], None]

    @property
    def number(self) -> int:
        """Which process this is: a worker's number, from 0, or the background process's."""
        return process_number(self.name)


Work = Callable[[Orders], Awaitable[None]]

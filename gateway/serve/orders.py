"""What a child process is given to do its work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.serve.handover import Handover


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process needs to do its work. `stop` is set by SIGTERM; `ready` is called once, when it serves."""

    name: str
    handover: Handover
    listeners: list[socket.socket]
    stop: asyncio.Event
    ready: Callable[[], None]

    @property
    def slot(self) -> int:
        """Which worker this is, from 0."""
        return int(self.name.removeprefix("worker"))


Work = Callable[[Orders], Awaitable[None]]

"""The tools that a child process gets for its work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.config.live import LiveSettings
from gateway.serve.child_config import ChildConfig, process_number
from gateway.telemetry.access_log import AccessLog, AuditLog
from gateway.telemetry.tracing import Tracer


@dataclass(frozen=True, slots=True)
class ChildContext:
    """A process's tools for its work. SIGTERM sets `stop`; the process calls `ready` once, when it serves.

    `live` are the settings, which may change. `tell` sends a line to the supervisor; False: the supervisor has not read
    for long.
    """

    name: str
    config: ChildConfig
    live: LiveSettings
    tell: Callable[[str], bool]
    listeners: list[socket.socket]
    stop: asyncio.Event
    ready: Callable[[], None]
    audit: AuditLog | None = None
    access: AccessLog | None = None
    tracer: Tracer | None = None

    @property
    def number(self) -> int:
        """Which process this is: a worker's number, from 0, or the background process's."""
        return process_number(self.name)


Work = Callable[[ChildContext], Awaitable[None]]

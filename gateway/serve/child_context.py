"""What a child process is given to do its work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gateway.config.live import LiveSettings
from gateway.serve.child_config import ChildConfig, process_number
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.audit_log import AuditLog
from gateway.telemetry.tracing import Tracer


@dataclass(frozen=True, slots=True)
class ChildContext:
    """What a process needs to do its work. `stop` is set by SIGTERM; `ready` is called once, when it serves. `live` are
    the settings, which may change; with `tell` the process speaks to the supervisor, unless it
    has not listened for long (False)."""

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

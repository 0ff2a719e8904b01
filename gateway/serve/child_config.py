"""A child's configuration: one JSON line on standard input, because it holds secrets.

Later lines on the same pipe are other configurations, which the running process follows, and, for the background
process, states of the gateway. The pipe's end is the supervisor's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gateway.config import Settings, settings_from_json, settings_to_json
from gateway.config.live import LiveSettings, Numbers
from gateway.shared.arena import Numbering
from gateway.shared.heartbeats import BACKGROUND_PROCESS
from gateway.telemetry.access_log import AccessLog, AuditLog
from gateway.telemetry.tracing import Tracer

BACKGROUND = "background"
"""The background process's name; workers are `worker0`, `worker1`, …"""

SHOWS_READY = "shows-ready"
"""What the background process reports when the admin port answers that the gateway is ready."""


_KINDS = ("slots", "credentials", "classes")


def process_number(name: str) -> int:
    """Return the number of the process with this name, by which it is known in shared memory."""
    return BACKGROUND_PROCESS if name == BACKGROUND else int(name.removeprefix("worker"))


def generation_of(lines: bytes) -> int:
    return int(orjson.loads(lines.partition(b"\n")[0])["generation"])


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """`settings` hold the ports really listened on; `instance_id` is one per serve, for the hop header.

    `memory` is the memory that all processes share, `numbers` say where names are in it. `generation`: how often the
    settings were changed since the start. `closed`: why no process may touch the cache directory; None: all use it.
    `peer_listeners`: how many of a worker's listeners, the last ones, are for the other nodes of the cluster;
    `local_listeners`: how many before these are for local reads.
    """

    settings: Settings
    instance_id: str
    metrics_directory: Path
    memory: Path
    numbers: Numbers
    closed: str | None = None
    generation: int = 0
    peer_listeners: int = 0
    local_listeners: int = 0

    @property
    def heartbeats(self) -> Path:
        """The file of heartbeats that all processes share."""
        return self.metrics_directory / "heartbeats"

    def to_line(self) -> bytes:
        document = {
            "settings": orjson.Fragment(settings_to_json(self.settings)),
            "instance_id": self.instance_id,
            "metrics_directory": str(self.metrics_directory),
            "closed": self.closed,
            "memory": str(self.memory),
            "numbers": self.numbers,
            "generation": self.generation,
            "peer_listeners": self.peer_listeners,
            "local_listeners": self.local_listeners,
        }
        return orjson.dumps(document) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ChildConfig:
        return cls.from_document(orjson.loads(line))

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> ChildConfig:
        slots, credentials, classes = (Numbering(**document["numbers"][kind]) for kind in _KINDS)
        return cls(
            settings=settings_from_json(orjson.dumps(document["settings"])),
            instance_id=document["instance_id"],
            metrics_directory=Path(document["metrics_directory"]),
            closed=document["closed"],
            memory=Path(document["memory"]),
            numbers=Numbers(slots, credentials, classes),
            generation=document["generation"],
            peer_listeners=document["peer_listeners"],
            local_listeners=document["local_listeners"],
        )


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

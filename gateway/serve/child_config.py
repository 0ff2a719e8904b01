"""What the supervisor tells a child: on standard input, one JSON line, because it holds secrets.

Later lines on the same pipe are states of the gateway, for the background process. The pipe's end is the supervisor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from gateway.config import Settings, settings_from_json, settings_to_json
from gateway.heartbeats import BACKGROUND_PROCESS

BACKGROUND = "background"
"""The background process's name; workers are `worker0`, `worker1`, …"""


def process_number(name: str) -> int:
    """The number of the process with this name, by which it is known in shared memory."""
    return BACKGROUND_PROCESS if name == BACKGROUND else int(name.removeprefix("worker"))


@dataclass(frozen=True, slots=True)
class ChildConfig:
    """`settings` hold the ports really listened on; `instance_id` is one per serve, for the hop header.

    `bandwidth`: the descriptor, inherited by every process, of the memory in which they keep the ceilings; None: there
    are none. `callers`: the same of the limits of callers.
    `closed`: why no process may touch the cache directory; None: they all use it.
    """

    settings: Settings
    instance_id: str
    metrics_directory: Path
    bandwidth: int | None = None
    callers: int | None = None
    closed: str | None = None

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
            "bandwidth": self.bandwidth,
            "callers": self.callers,
        }
        return orjson.dumps(document) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> ChildConfig:
        document = orjson.loads(line)
        return cls(
            settings=settings_from_json(orjson.dumps(document["settings"])),
            instance_id=document["instance_id"],
            metrics_directory=Path(document["metrics_directory"]),
            closed=document["closed"],
            bandwidth=document["bandwidth"],
            callers=document["callers"],
        )

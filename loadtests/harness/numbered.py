"""The origin of numbered keys as a process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtests.harness import machine
from loadtests.harness.server_process import ServerProcess

_REPOSITORY = Path(__file__).resolve().parents[2]


class NumberedOrigin(ServerProcess):
    """`with NumberedOrigin(1_000_000, latency_seconds=0.03) as origin:` serves bucket `load`."""

    name = "origin"

    def __init__(self, count: int, *, latency_seconds: float) -> None:
        super().__init__(cores=machine.client_cores())
        self._arguments = str(count), str(latency_seconds)

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "loadtests.harness.numbered_server", str(self.port), *self._arguments]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(_REPOSITORY)}

"""The load origin as a process: shaped and read out from outside."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.harness import machine
from loadtests.harness.content import Family
from loadtests.harness.server_process import ServerProcess

_REPOSITORY = Path(__file__).resolve().parents[2]
_SETTLED_SECONDS = 0.5
_SETTLE_AT_MOST_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What the origin has answered since it started."""

    gets: int
    heads: int
    lists: int
    sent_bytes: int
    stalled: int
    refused: int
    lost: int


class LoadOrigin(ServerProcess):
    """`with LoadOrigin([Family("small/", 10_000, 102_400)]) as origin:` serves bucket `load`."""

    name = "origin"

    def __init__(self, families: Sequence[Family], files: Mapping[str, Path] | None = None) -> None:
        """`files`: by key, what else it serves."""
        super().__init__(cores=machine.client_cores())
        self._files = files or {}
        self._families = families

    def command(self) -> Sequence[str]:
        files = [f"{key}={file}" for key, file in self._files.items()]
        program = [sys.executable, "-m", "loadtests.harness.origin_server", str(self.port)]
        return [*program, *map(str, self._families), *files]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(_REPOSITORY)}

    def shape(
        self,
        *,
        latency_seconds: float = 0.0,
        bytes_per_second: float = 0.0,
        requests_per_second: float = 0.0,
        stall_every: int = 0,
        taken_per_second: float = 0.0,
    ) -> None:
        """How it answers from now on; 0 is none and unlimited."""
        self._ask(
            f"/.shape?latency_seconds={latency_seconds}&bytes_per_second={bytes_per_second}"
            f"&requests_per_second={requests_per_second}&stall_every={stall_every}"
            f"&taken_per_second={taken_per_second}"
        )

    def counts(self) -> Counts:
        return Counts(**json.loads(self._ask("/.counters")))

    def settled_counts(self) -> Counts:
        """The counts once nothing has been sent for half a second: fills behind an answer are over."""
        deadline = time.monotonic() + _SETTLE_AT_MOST_SECONDS
        before = self.counts()
        while time.monotonic() < deadline:
            time.sleep(_SETTLED_SECONDS)
            after = self.counts()
            if after == before:
                return after
            before = after
        raise RuntimeError(f"the origin was still being read after {_SETTLE_AT_MOST_SECONDS:g} seconds")

    def _ask(self, target: str) -> bytes:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}{target}", timeout=10) as answer:
            body: bytes = answer.read()
        return body

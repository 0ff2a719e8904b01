"""The origin that takes what is written, as a process: paced and read out from outside."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadtests.harness import machine
from loadtests.harness.content import Family
from loadtests.harness.server_process import ServerProcess

_REPOSITORY = Path(__file__).resolve().parents[2]
_POLL_SECONDS = 0.005
_QUIET_SECONDS = 0.5


class SinkOrigin(ServerProcess):
    """`with SinkOrigin() as origin:` takes bucket `load`, or any."""

    name = "origin"

    def __init__(self, families: Sequence[Family] = (), *, cores: set[int] | None = None) -> None:
        """On all `cores` unless told otherwise; objects of `families` can be read from it."""
        super().__init__(cores=cores or machine.all_cores())
        self._families = families

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "loadtests.harness.sink_server", str(self.port), *map(str, self._families)]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(_REPOSITORY)}

    def pace(self, bytes_per_second: float) -> None:
        """What all connections together bring from now on; 0 is unlimited."""
        self._ask(f"/.shape?bytes_per_second={bytes_per_second}")

    def objects(self) -> int:
        """How many it has."""
        return int(self._ask("/.counters")["objects"])

    def kept_bytes(self) -> int:
        """The lengths of all objects that it has."""
        return int(self._ask("/.counters")["kept_bytes"])

    def gets(self) -> int:
        """How many objects of its families, or parts of such, it has been asked for."""
        return int(self._ask("/.counters")["gets"])

    def requests(self) -> int:
        """How many requests about objects it has had."""
        return int(self._ask("/.counters")["requests"])

    def until_it_has(self, objects: int, seconds_max: float) -> None:
        """Return as soon as it has so many; RuntimeError when that takes too long."""
        self._until(self.objects, objects, "objects", seconds_max)

    def until_it_keeps(self, size_bytes: int, seconds_max: float) -> None:
        """Do the same for bytes, in whatever objects they lie."""
        self._until(self.kept_bytes, size_bytes, "bytes", seconds_max)

    def _until(self, count: Callable[[], int], wanted: int, of: str, seconds_max: float) -> None:
        deadline = time.monotonic() + seconds_max
        while (found := count()) < wanted:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the origin has {found} of {wanted} {of} after {seconds_max:g} seconds")
            time.sleep(_POLL_SECONDS)

    def until_quiet(self) -> None:
        """Return when nothing was asked for half a second."""
        before = -1
        while (now := self.requests()) != before:
            before = now
            time.sleep(_QUIET_SECONDS)

    def _ask(self, target: str) -> dict[str, float]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}{target}", timeout=10) as answer:
            found: dict[str, float] = json.loads(answer.read())
        return found

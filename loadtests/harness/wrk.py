"""wrk with requests prepared in a file: each with its own key, date and signature."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtests.harness import machine, tools

_SCRIPT = Path(__file__).with_name("wrk_requests.lua")
_LINE = re.compile(r"^RESULT (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class WrkFigures:
    """What wrk saw of one run."""

    requests: int
    seconds: float
    received_bytes: int
    p50_seconds: float
    p99_seconds: float
    cpu_seconds: float = 0.0
    """wrk's own, user and system."""

    @property
    def requests_per_second(self) -> float:
        return self.requests / self.seconds


def run(url: str, requests: Sequence[bytes], *, connections: int, seconds: float, body_bytes: int) -> WrkFigures:
    """Send `requests` round and round. Raises RuntimeError unless every answer is a success of `body_bytes` or more."""
    with tempfile.NamedTemporaryFile(prefix="forebay-load-") as file:
        file.write(b"\0".join(requests) + b"\0")
        file.flush()
        command = [tools.program("wrk"), "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "20s"]
        command += ["-s", str(_SCRIPT), url, "--", file.name]
        with machine.on_cores(machine.client_cores()):
            before = machine.cpu_seconds_of_ended_children()
            output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds + 60).stdout
    return replace(figures(output, body_bytes), cpu_seconds=machine.cpu_seconds_of_ended_children() - before)


def figures(output: str, body_bytes: int) -> WrkFigures:
    """What the script's last line says."""
    line = _LINE.search(output)
    if line is None:
        raise RuntimeError(f"wrk said nothing of its results:\n{output}")
    count, microseconds, received_bytes, errors, p50, p99 = map(int, line[1].split())
    if errors or not count or received_bytes < count * body_bytes:
        raise RuntimeError(f"{errors} wrong answers, or bodies that are too short:\n{output}")
    return WrkFigures(count, microseconds / 1e6, received_bytes, p50 / 1e6, p99 / 1e6)

"""A bare program as what a server is compared with: a module of the harness that runs once and prints its figures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from loadtests.harness import machine

_REPOSITORY = Path(__file__).resolve().parents[2]
_TIMEOUT_SECONDS = 300


def figures(module: str, *arguments: object) -> list[float]:
    """Run `python -m loadtests.harness.MODULE` with these arguments on the server core; the numbers that it prints."""
    command = [sys.executable, "-m", f"loadtests.harness.{module}", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(_REPOSITORY)}
    with machine.on_cores(machine.server_core()):
        ran = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS, env=environment
        )
    return [float(one) for one in ran.stdout.split()]

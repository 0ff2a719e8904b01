"""What the disk gives when nothing stands in between: fio, direct, sequential."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from loadtests.harness import tools

_TIMEOUT_SECONDS = 120


def sequential_read_bytes_per_second(path: Path) -> float:
    """One direct sequential read of the whole file: 1 MiB at a time, eight in flight. Raises Missing."""
    command = [tools.program("fio"), "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--bs=1M"]
    command += ["--direct=1", "--ioengine=libaio", "--iodepth=8", f"--size={path.stat().st_size}"]
    command += ["--output-format=json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
    return float(json.loads(answer.stdout)["jobs"][0]["read"]["bw_bytes"])

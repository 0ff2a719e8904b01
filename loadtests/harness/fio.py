"""What the disk gives when nothing stands in between: fio, direct, sequential, a job for each file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from loadtests.harness import tools

_TIMEOUT_SECONDS = 120


def sequential_read_bytes_per_second(*paths: Path) -> float:
    """One direct sequential read of whole files at once: 1 MiB at a time, eight in flight for each. Raises Missing."""
    command = [tools.program("fio"), "--readonly", "--rw=read", "--bs=1M", "--direct=1", "--ioengine=libaio"]
    command += ["--iodepth=8", "--group_reporting", "--output-format=json"]
    for number, path in enumerate(paths):
        command += [f"--name=read-{number}", f"--filename={path}", f"--size={path.stat().st_size}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_SECONDS)
    return float(json.loads(answer.stdout)["jobs"][0]["read"]["bw_bytes"])

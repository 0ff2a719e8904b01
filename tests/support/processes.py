"""Processes as the kernel shows them right now."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def is_over(pid: int) -> bool:
    """Whether a process is gone, or a zombie, with all of its threads: any of them holds its files."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def children_of(pid: int) -> list[int]:
    """Process ids, of those that live and those that nobody has waited for; none when there is no such process."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def kill_if_there(pid: int) -> bool:
    """SIGKILL; False when it has gone by itself."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True

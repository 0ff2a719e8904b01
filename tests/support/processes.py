"""Processes as the kernel shows them right now."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "GATEWAY_PROCESS_TEST_MARK"
MARK_DESCRIPTOR = 290
"""All processes that a test has started inherit a file: one that was executed as what the variable names, one that was
forked under this number, as /proc goes on to show the environment of its parent."""

NOT_COUNTED: set[int] = set()
"""Children of pytest that are there for later tests."""


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
        found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [child for child in found if child not in NOT_COUNTED]
    return []


def kill_if_there(pid: int) -> bool:
    """SIGKILL; False when it has gone by itself."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def marked(mark: Path) -> list[int]:
    """Living processes that have inherited `mark`."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _has_mark(entry, mark)]


def _has_mark(process: Path, mark: Path) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # gone by now, or of another user
        if f"{MARK_VARIABLE}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
            return True
        return os.readlink(process / "fd" / str(MARK_DESCRIPTOR)) == str(mark)
    return False

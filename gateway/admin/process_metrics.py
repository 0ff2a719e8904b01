"""Reads the processor time, memory and open files of each of the gateway's processes from /proc; see proc(5).

prometheus_client's own process metrics know only the process that is asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from gateway.telemetry import metrics

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def set_process_metrics(processes: Mapping[str, int | None]) -> None:
    """Set metrics of processes, by name and id: 0 for one that is down. Reads files: call it in a thread."""
    if not _shows_own_namespace():
        processes = dict.fromkeys(processes)  # the ids are those of other processes there
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for name, process_id in processes.items():
        started = cpu = memory = descriptors = 0.0
        if process_id is not None:
            directory = Path(f"/proc/{process_id}")
            try:
                # Behind the name in brackets, which may hold anything: fields 3 and on.
                fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
                started = booted_at + int(fields[19]) / _TICKS
                cpu = (int(fields[11]) + int(fields[12])) / _TICKS
                memory = float(int(fields[21]) * _PAGE_BYTES)
                descriptors = float(len(os.listdir(directory / "fd")))
            except (OSError, IndexError):
                started = cpu = memory = descriptors = 0.0  # it has just ended
        metrics.PROCESS_START.set(round(started, 2), name)
        metrics.PROCESS_CPU.set(cpu, name)
        metrics.PROCESS_MEMORY.set(memory, name)
        metrics.PROCESS_DESCRIPTORS.set(descriptors, name)


def _shows_own_namespace() -> bool:
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False

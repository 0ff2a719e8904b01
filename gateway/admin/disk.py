"""How the disk under the cache directory is, as the gateway's processes have found it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.telemetry import metric_reading, metrics
from gateway.telemetry.metric_reading import MetricReading


def disk_document(read: Path | MetricReading) -> dict[str, Any]:
    """The worst that any process has found, how many have found what, and of how many the write-back journal takes
    nothing. Full is also a disk on which blocks may replace each other, and no write finds room. Of a directory, reads
    files: call it in a thread."""
    reading = read if isinstance(read, MetricReading) else MetricReading(read)
    found, journal = metric_reading.by_label(
        reading, "state", metrics.CACHE_DISK_STATE, metrics.WRITEBACK_JOURNAL_STATE
    )
    processes = {state: int(found[state]) for state in metrics.DISK_STATES if found.get(state)}
    worst = list(processes)[-1] if processes else "well"
    return {
        "state": "full" if worst == "well" and reading.total(metrics.WRITEBACK_DISK_FULL) else worst,
        "processes": processes,
        "journal_failing_processes": int(journal.get("failing", 0)),
    }

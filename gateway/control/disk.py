"""How the disk under the cache directory is, as the gateway's processes have found it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway import metric_kinds, metrics


def disk_document(metrics_directory: Path) -> dict[str, Any]:
    """The worst that any process has found, how many have found what, and of how many the write-back journal takes
    nothing. Reads files: call it in a thread."""
    found, journal = metric_kinds.by_label(
        metrics_directory, "state", metrics.CACHE_DISK_STATE, metrics.WRITEBACK_JOURNAL_STATE
    )
    processes = {state: int(found[state]) for state in metrics.DISK_STATES if found.get(state)}
    return {
        "state": list(processes)[-1] if processes else "well",
        "processes": processes,
        "journal_failing_processes": int(journal.get("failing", 0)),
    }

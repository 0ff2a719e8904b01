"""How the disk under the cache directory is, as the gateway's processes have found it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway import metric_kinds, metrics
from gateway.metric_kinds import Reading


def disk_document(read: Path | Reading) -> dict[str, Any]:
    """The worst that any process has found, how many have found what, and of how many the write-back journal takes
    nothing. Of a directory, reads files: call it in a thread."""
    found, journal = metric_kinds.by_label(read, "state", metrics.CACHE_DISK_STATE, metrics.WRITEBACK_JOURNAL_STATE)
    processes = {state: int(found[state]) for state in metrics.DISK_STATES if found.get(state)}
    return {
        "state": list(processes)[-1] if processes else "well",
        "processes": processes,
        "journal_failing_processes": int(journal.get("failing", 0)),
    }

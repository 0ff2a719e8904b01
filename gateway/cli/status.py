"""What `forebay status` shows to people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show_status(document: dict[str, Any]) -> None:
    """Print the document of `/api/v1/status`."""
    console = Console()
    gateway, origin = document["gateway"], document["origin"]
    if gateway is None:
        console.print("starting")
        return
    state = "draining" if gateway["draining"] else "ready" if gateway["ready"] else "not ready"
    console.print(f"forebay {gateway['version']}: {state}, S3 on {gateway['s3_url']}", soft_wrap=True)
    reachable = "reachable" if origin["reachable"] else "not reachable"
    console.print(f"origin {origin['endpoint_url']}: {reachable}", soft_wrap=True)
    cache = document["cache"]
    ratio = "nothing read yet" if cache["hit_ratio"] is None else f"{cache['hit_ratio']:.1%} of bytes from cache"
    used, capacity = cache["usage_bytes"] / 2**30, cache["capacity_bytes"] / 2**30
    console.print(f"cache {cache['directory']}: {used:.1f} of {capacity:.1f} GiB in use, {ratio}", soft_wrap=True)
    for prefix in document["pins"]:
        console.print(f"pinned: {prefix}", soft_wrap=True, highlight=False, markup=False)
    table = Table("process", "pid", "state", "restarts")
    for process in gateway["processes"]:
        ready = "ready" if process["ready"] else "down"
        table.add_row(process["name"], str(process["process_id"] or "-"), ready, str(process["restarts"]))
    console.print(table)

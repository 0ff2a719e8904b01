"""The document of the dashboard, as a part of the OpenAPI document."""

from __future__ import annotations

from typing import Any

from gateway.admin.openapi_requests import REQUESTS
from gateway.admin.openapi_snapshots import SNAPSHOT
from gateway.admin.openapi_writeback import CHECKPOINT, OBJECT, UPLOAD

_COUNT = {"type": "integer"}
_LATENCIES = {
    "type": "array",
    "items": _COUNT,
    "description": "how many took up to each of latency_buckets_seconds and longer than the one before, and how many "
    "took longer than all of them",
}
_COUNTS = {
    "type": "object",
    "description": "sums since the gateway started, but for in_flight",
    "properties": {
        "at": {"type": "number", "description": "seconds since 1970-01-01 UTC"},
        "requests": _COUNT,
        "failed": {"type": "integer", "description": "requests answered 5xx, or not to the end"},
        "in_flight": {"type": "integer", "description": "requests that are being answered now"},
        "sent_bytes": _COUNT,
        "received_bytes": _COUNT,
        "hit_bytes": _COUNT,
        "miss_bytes": _COUNT,
        "misses": {"type": "object", "additionalProperties": _COUNT, "description": "by reason"},
        "origin_requests": _COUNT,
        "origin_failed": {"type": "integer", "description": "answered 5xx or 429, or not at all"},
        "origin_read_bytes": _COUNT,
        "flush_bytes": _COUNT,
        "flushed_objects": _COUNT,
        "served_latencies": _LATENCIES,
        "origin_latencies": {**_LATENCIES, "description": "the same of requests to the origin, flushes left out"},
        "flush_latencies": {**_LATENCIES, "description": "the same of flushes"},
    },
}


_TROUBLE = {
    "type": "object",
    "properties": {
        "level": {"enum": ["error", "warning"]},
        **{name: {"type": "string"} for name in ("what", "why", "advice", "page")},
    },
    "description": "what is wrong, why, what to do, and a page of the documentation",
}


def overview_schema(
    status: dict[str, Any], slots: dict[str, Any], job: dict[str, Any], callers: dict[str, Any]
) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "host": {"type": "string", "description": "the name of the machine"},
            "status": status,
            "troubles": {"type": "array", "items": _TROUBLE},
            "callers": callers["properties"]["callers"],
            "counts": _COUNTS,
            "history": {"type": "array", "items": _COUNTS, "description": "of the last 15 minutes, with history=true"},
            "latency_buckets_seconds": {"type": "array", "items": {"type": "number"}},
            **slots["properties"],
            "requests": REQUESTS,
            "jobs": {"type": "array", "items": job, "description": "those that run, then the newest of the others"},
            "snapshots": {"type": "array", "items": SNAPSHOT},
            "checkpoints": {
                "type": "array",
                "items": CHECKPOINT,
                "description": "those that failed, have a conflict or stalled first, then the newest",
            },
            "problems": {"type": "array", "items": OBJECT, "description": "what does not get to the origin"},
            "uploads": {"type": "array", "items": UPLOAD},
        },
    }

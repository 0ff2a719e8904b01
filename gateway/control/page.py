"""The page at `/`: what is running, for a person with a browser. No script, nothing loaded from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from html import escape
from typing import Any

from gateway.control.words import origin_text, size_text, wrong_with

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5"><title>Forebay</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 52rem; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 0 0 1.5rem }} td, th {{ padding: .2rem 1.2rem .2rem 0; text-align: left }}
.bad {{ color: #b00020; font-weight: 600 }}
</style></head><body><h1>Forebay</h1>{body}
<p><a href="/metrics">metrics</a> · <a href="/api/v1/status">status as JSON</a> ·
<a href="/api/openapi.json">OpenAPI</a></p></body></html>
"""


def render(status: dict[str, Any]) -> str:
    """The page for the document of `/api/v1/status`."""
    gateway, origin, cache = status["gateway"], status["origin"], status["cache"]
    if gateway is None:
        return _PAGE.format(body='<p class="bad">starting</p>')
    facts = [
        ("version", gateway["version"]),
        ("S3", gateway["s3_url"]),
        ("state", _state(gateway)),
        ("origin", f"{origin['endpoint_url']} ({origin_text(origin)})"),
        *(
            (one["prefix"], f"{one['endpoint_url']}, signed by {one['credentials']} ({origin_text(one)})")
            for one in origin.get("differing", ())
        ),
        (
            "cache",
            f"{cache['directory']}, {size_text(cache['usage_bytes'])} of {size_text(cache['capacity_bytes'])} in use",
        ),
        ("disk", cache["disk"]["state"]),
        *([("write-back journal", "takes nothing now")] if cache["disk"]["journal_failing_processes"] else []),
        ("bytes from cache", _ratio(cache["hit_ratio"])),
    ]
    processes = [
        (p["name"], p["process_id"] or "-", "ready" if p["ready"] else "down", p["restarts"])
        for p in gateway["processes"]
    ]
    slots = [
        (
            s["name"],
            s["prefix"],
            s["mode"],
            size_text(s["usage_bytes"]),
            size_text(s["capacity_bytes"]),
            _ratio(s["hit_ratio"]),
        )
        for s in status["slots"]
    ]
    pending = [_pending(one) for one in (status["writeback"] or {"slots": []})["slots"]]
    frozen = [(one["slot"], one["snapshot"], one["problem"] or "in use") for one in status["frozen"]]
    indexes = [
        (i["slot"], "yes" if i["complete"] else "no", _age(i["age_seconds"]), i["keys"], i["state"])
        for i in status["indexes"]
    ]
    body = _table((), facts) + _table(("process", "pid", "state", "restarts"), processes)
    if indexes:
        body += _table(("index of slot", "complete", "age", "keys", "state"), indexes)
    if pending:
        body += _table(
            ("not at the origin yet", "objects", "bytes", "oldest", "open uploads", "buffer", "state"), pending
        )
    head = ("slot", "prefix", "mode", "in use", "guaranteed", "bytes from cache")
    body += _table(head, slots) if slots else ""
    return _PAGE.format(body=body + (_table(("slot", "frozen by", "state"), frozen) if frozen else ""))


def _pending(slot: dict[str, Any]) -> tuple[object, ...]:
    oldest_at = slot["oldest_acknowledged_at"]
    age_seconds = None if oldest_at is None else max(0.0, time.time() - oldest_at)
    state = ", ".join([*wrong_with(slot), *([slot["reason"]] if slot["reason"] else [])]) or "well"
    limit = "" if slot["buffer_bytes"] is None else f" of {size_text(slot['buffer_bytes'])}"
    buffer = f"{size_text(slot['staged_bytes'])}{limit}"
    return (
        slot["slot"],
        slot["objects"],
        size_text(slot["bytes"]),
        _age(age_seconds),
        slot["open_uploads"],
        buffer,
        state,
    )


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f} s"


def _state(gateway: dict[str, Any]) -> str:
    return "draining" if gateway["draining"] else "ready" if gateway["ready"] else "not ready"


def _table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _row(tag: str, cells: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

"""`forebay callers`: who calls, what they may take, what they take, and which limit binds."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_port, print_json
from gateway.control.words import size_text


def callers(config: ConfigOption = None, admin_url: AdminUrlOption = None, json: JsonOption = False) -> None:
    """Show the callers of a running gateway: limits, what runs and waits, what was throttled, which limit binds."""
    document = admin_port(admin_url, config).get("/api/v1/callers")
    if json:
        print_json(document)
        return
    table = Table("caller", "limits", "now", "waiting", "throttled", "refused", "bound by")
    for one in document["callers"]:
        table.add_row(
            f"{one['name']}\n{one['scope']}",
            _limits(one["limits"]),
            _now(one),
            str(one["waiting"]),
            _counts(one["throttled"]),
            _counts(one["refused"]),
            "\n".join(one["binds"]) or "-",
        )
    Console().print(table)


def _limits(limits: dict[str, Any]) -> str:
    lines = []
    if limits["max_concurrent_requests"] is not None:
        lines.append(f"{limits['max_concurrent_requests']} at a time")
    if limits["requests_per_second"] is not None:
        lines.append(f"{limits['requests_per_second']:g}/s")
    lines += [
        f"{name} {size_text(limits[f'{name}_bandwidth'])}/s"
        for name in ("read", "write")
        if limits[f"{name}_bandwidth"]
    ]
    return "\n".join(lines) or "none"


def _now(one: dict[str, Any]) -> str:
    lines = [f"{one['running']} running"] if any(one["limits"].values()) else []
    moved = one["per_second"]
    if moved is not None:
        lines += [f"{moved['requests']:g}/s", f"read {size_text(moved['sent_bytes'])}/s"]
        lines.append(f"write {size_text(moved['received_bytes'])}/s")
    return "\n".join(lines)


def _counts(by_limit: dict[str, int]) -> str:
    return "\n".join(f"{limit} {count:,}" for limit, count in by_limit.items() if count) or "-"

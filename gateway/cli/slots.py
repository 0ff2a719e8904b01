"""`forebay slots`: what each slot has, what it is entitled to, and what binds it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_port, print_json
from gateway.control.words import counted, size_text


def slots(config: ConfigOption = None, admin_url: AdminUrlOption = None, json: JsonOption = False) -> None:
    """Show the slots of a running gateway: disk, hits, bandwidth now against guarantee, share and ceiling, limits."""
    document = admin_port(admin_url, config).get("/api/v1/slots")
    if json:
        print_json(document)
        return
    console = Console()
    for direction, link in document["link"].items():
        console.print(f"link, {direction}: {size_text(link['bytes_per_second'])}/s, {_most(link)}", highlight=False)
    table = Table("slot", "disk", "hits", "misses", "read", "write", "throttled", "not at the origin yet", "bound by")
    for slot in document["slots"]:
        table.add_row(
            f"{slot['name']}\n{slot['prefix']}",
            _disk(slot["capacity"]),
            "-" if slot["hit_ratio"] is None else f"{slot['hit_ratio']:.1%}",
            "\n".join(f"{reason} {count:,}" for reason, count in sorted(slot["misses"].items())) or "-",
            _rate(slot["read_bandwidth"]),
            _rate(slot["write_bandwidth"]),
            _throttled(slot["origin_requests"]),
            _unflushed(slot["unflushed"]),
            "\n".join(slot["binds"]) or "-",
        )
    console.print(table)


def _most(link: dict[str, Any]) -> str:
    """What the link bears."""
    if not link["capacity_found"]:
        return "not limited" if link["capacity"] is None else f"of {size_text(link['capacity'])}/s"
    if link["capacity"] is None:
        return "not limited: no queue was seen yet"
    return f"of {size_text(link['capacity'])}/s found, answers late by {link['delay_seconds'] * 1000:.0f} ms"


def _disk(capacity: dict[str, Any]) -> str:
    lines = [f"{size_text(capacity['used_bytes'])} used"]
    if capacity["guaranteed_bytes"]:
        lines.append(f"{size_text(capacity['guaranteed_bytes'])} guaranteed")
    if capacity["limit_bytes"] is not None:
        lines.append(f"{size_text(capacity['limit_bytes'])} at most")
    if capacity["borrowed_bytes"]:
        lines.append(f"{size_text(capacity['borrowed_bytes'])} borrowed")
    if capacity["pinned_bytes"]:
        lines.append(f"{size_text(capacity['pinned_bytes'])} pinned")
    return "\n".join(lines)


def _rate(moved: dict[str, Any]) -> str:
    lines = [f"{size_text(moved['bytes_per_second'])}/s"]
    names = {"guarantee": "guaranteed", "share": "share", "ceiling": "ceiling"}
    return "\n".join(
        [*lines, *(f"{size_text(moved[key])}/s {name}" for key, name in names.items() if moved[key] is not None)]
    )


def _throttled(requests: dict[str, Any]) -> str:
    lines = []
    if requests["throttled"]:
        lines.append(f"{requests['throttled']:,} for {requests['waited_seconds'] / requests['throttled']:.2g} s")
    if requests["in_vain"]:
        lines.append(f"{requests['in_vain']:,} in vain")
    if requests["slow_down"]:
        lines.append(f"{requests['slow_down']:,} refused")
    return "\n".join(lines) or "-"


def _unflushed(pending: dict[str, Any] | None) -> str:
    if pending is None:
        return "-"
    return (
        f"{counted(pending['objects'], 'object')}, {size_text(pending['bytes'])}" if pending["objects"] else "nothing"
    )

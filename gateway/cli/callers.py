"""`forebay callers`: who calls, what they may take, what they take, and which limit binds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.admin.formatting import size_text
from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_client, print_json, printable
from gateway.cli.tables import NOTHING, Column, Row, print_table

if TYPE_CHECKING:
    from gateway.api import documents as to

_COLUMNS = (
    Column("caller", shortened=True),
    Column("scope", rank=4),
    Column("running", right=True, rank=3),
    Column("waiting", right=True),
    Column("requests", right=True, rank=2),
    Column("read", right=True),
    Column("write", right=True),
    Column("limits", rank=6),
    Column("throttled", rank=5),
    Column("refused", rank=5),
    Column("bound by", rank=1),
)


def callers(config: ConfigOption = None, admin_url: AdminUrlOption = None, json: JsonOption = False) -> None:
    """Show who calls the gateway: limits, what runs and waits, what was throttled, and which limit binds."""
    answer = admin_client(admin_url, config).callers()
    if json:
        print_json(answer.document())
    else:
        print_table(_COLUMNS, (Row(_cells(one), "yellow" if one.binds else "") for one in answer.callers))


def _cells(one: to.Caller) -> list[str]:
    moved = one.per_second
    return [
        printable(one.name),
        one.scope,
        str(one.running) if one.limits.is_any else NOTHING,
        str(one.waiting),
        NOTHING if moved is None else f"{moved.requests:g}/s",
        NOTHING if moved is None else f"{size_text(moved.sent_bytes)}/s",
        NOTHING if moved is None else f"{size_text(moved.received_bytes)}/s",
        _limits(one.limits),
        _counts(one.throttled),
        _counts(one.refused),
        ", ".join(one.binds) or NOTHING,
    ]


def _limits(limits: to.CallerLimits) -> str:
    found = []
    if limits.max_concurrent_requests is not None:
        found.append(f"{limits.max_concurrent_requests} at a time")
    if limits.requests_per_second is not None:
        found.append(f"{limits.requests_per_second:g}/s")
    if limits.read_bandwidth:
        found.append(f"read {size_text(limits.read_bandwidth)}/s")
    if limits.write_bandwidth:
        found.append(f"write {size_text(limits.write_bandwidth)}/s")
    return ", ".join(found) or NOTHING


def _counts(by_limit: dict[str, int]) -> str:
    return ", ".join(f"{limit} {count:,}" for limit, count in by_limit.items() if count) or NOTHING

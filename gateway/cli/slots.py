"""`forebay slots`: what each slot has, what it is entitled to, and what binds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from gateway.admin.formatting import counted, size_text
from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_client, print_json, printable
from gateway.cli.tables import NOTHING, Column, Row, print_table

if TYPE_CHECKING:
    from gateway.api import documents as to

_COLUMNS = (
    Column("slot"),
    Column("prefix", shortened=True),
    Column("used", right=True),
    Column("guaranteed", right=True, rank=5),
    Column("at most", right=True, rank=5),
    Column("borrowed", right=True, rank=7),
    Column("pinned", right=True, rank=7),
    Column("hits", right=True),
    Column("misses", rank=6),
    Column("read", right=True),
    Column("read right", rank=4),
    Column("write", right=True),
    Column("write right", rank=4),
    Column("throttled", rank=3),
    Column("not at the origin yet", rank=2),
    Column("bound by", rank=1),
)


def slots(config: ConfigOption = None, admin_url: AdminUrlOption = None, json: JsonOption = False) -> None:
    """Show what each slot has of the disk, its hits, its bandwidth now and by right, and which limit binds it."""
    answer = admin_client(admin_url, config).slots()
    if json:
        print_json(answer.document())
        return
    for direction, link in (("read", answer.link.read), ("write", answer.link.write)):
        typer.echo(f"link, {direction}: {size_text(link.bytes_per_second)}/s, {_most(link)}")
    print_table(_COLUMNS, (Row(_cells(slot), "yellow" if slot.binds else "") for slot in answer.slots))


def _cells(slot: to.Slot) -> list[str]:
    capacity = slot.capacity
    return [
        printable(slot.name),
        printable(slot.prefix),
        size_text(capacity.used_bytes),
        size_text(capacity.guaranteed_bytes) if capacity.guaranteed_bytes else NOTHING,
        NOTHING if capacity.limit_bytes is None else size_text(capacity.limit_bytes),
        size_text(capacity.borrowed_bytes) if capacity.borrowed_bytes else NOTHING,
        size_text(capacity.pinned_bytes) if capacity.pinned_bytes else NOTHING,
        NOTHING if slot.hit_ratio is None else f"{slot.hit_ratio:.1%}",
        ", ".join(f"{reason} {count:,}" for reason, count in sorted(slot.misses.items())) or NOTHING,
        f"{size_text(slot.read_bandwidth.bytes_per_second)}/s",
        _right(slot.read_bandwidth),
        f"{size_text(slot.write_bandwidth.bytes_per_second)}/s",
        _right(slot.write_bandwidth),
        _throttled(slot.origin_requests),
        _unflushed(slot.unflushed),
        ", ".join(slot.binds) or NOTHING,
    ]


def _most(link: to.Link) -> str:
    if not link.capacity_found:
        return "not limited" if link.capacity is None else f"of {size_text(link.capacity)}/s"
    if link.capacity is None:
        return "not limited: no queue was seen yet"
    return f"of {size_text(link.capacity)}/s found, answers late by {(link.delay_seconds or 0.0) * 1000:.0f} ms"


def _right(moved: to.SlotBandwidth) -> str:
    named = {"guaranteed": moved.guarantee, "share": moved.share, "ceiling": moved.ceiling}
    told = [f"{size_text(bandwidth)}/s {name}" for name, bandwidth in named.items() if bandwidth is not None]
    return ", ".join(told) or NOTHING


def _throttled(requests: to.OriginRequests) -> str:
    told = []
    if requests.throttled:
        told.append(f"{requests.throttled:,} for {requests.waited_seconds / requests.throttled:.2g} s")
    if requests.in_vain:
        told.append(f"{requests.in_vain:,} in vain")
    if requests.slow_down:
        told.append(f"{requests.slow_down:,} refused")
    return ", ".join(told) or NOTHING


def _unflushed(pending: to.Unflushed | None) -> str:
    if pending is None:
        return NOTHING
    return f"{counted(pending.objects, 'object')}, {size_text(pending.bytes)}" if pending.objects else "nothing"

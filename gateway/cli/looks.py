"""`forebay callers`, `explain`, `requests` and `slots`: what the running gateway does, and what binds it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.admin.formatting import age_text, counted, size_text
from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_client, print_json, printable
from gateway.cli.tables import NOTHING, Column, Row, print_table, print_text

if TYPE_CHECKING:
    from gateway.api import documents as to

_CALLERS = (
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
        print_table(_CALLERS, (Row(_caller(one), "yellow" if one.binds else "") for one in answer.callers))


def _caller(one: to.Caller) -> list[str]:
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
        _by_limit(one.throttled),
        _by_limit(one.refused),
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


def _by_limit(by_limit: dict[str, int]) -> str:
    return ", ".join(f"{limit} {count:,}" for limit, count in by_limit.items() if count) or NOTHING


_REQUESTS = (
    Column("at", rank=3),
    Column("took", right=True),
    Column("operation"),
    Column("object", shortened=True),
    Column("status"),
    Column("cache", rank=2),
    Column("sent", right=True, rank=4),
    Column("received", right=True, rank=6),
    Column("caller", shortened=True, rank=5),
    Column("request id", rank=1),
)
_FAILURES = (
    Column("at", rank=1),
    Column("took", right=True),
    Column("method"),
    Column("object", shortened=True),
    Column("status"),
    Column("purpose", rank=2),
    Column("slot", rank=3),
)

LimitOption = Annotated[
    int, typer.Option("--limit", metavar="N", min=1, max=1000, help="Show so many of each kind at most.")
]


def requests(
    limit: LimitOption = 20, config: ConfigOption = None, admin_url: AdminUrlOption = None, json: JsonOption = False
) -> None:
    """Show recent requests: the slowest of five minutes, the last that failed or were refused, failures of the origin.

    404, 412 and 416 are no refusals: clients ask for these on purpose.
    """
    answer = admin_client(admin_url, config).requests(limit)
    if json:
        print_json(answer.document())
        return
    parts = [
        ("slowest of the last five minutes", _REQUESTS, _request_rows(answer.slowest)),
        ("failed, the latest first", _REQUESTS, _request_rows(answer.errors)),
        ("refused, the latest first", _REQUESTS, _request_rows(answer.refusals)),
        ("the origin failed, the latest first", _FAILURES, [Row(_failure(one)) for one in answer.origin_failures]),
    ]
    parts = [one for one in parts if one[2]]
    if not parts:
        typer.echo("no request in the last minutes", err=True)
    for number, (title, columns, rows) in enumerate(parts):
        typer.echo(("\n" if number else "") + f"{title}:")
        print_table(columns, rows)


def _request_rows(found: Sequence[to.RecentRequest]) -> list[Row]:
    return [Row(_request(one), "red" if one.is_error else "") for one in found]


def _request(one: to.RecentRequest) -> list[str]:
    return [
        time.strftime("%H:%M:%S", time.localtime(one.at)),
        seconds_text(one.seconds),
        one.operation,
        printable(one.url),
        one.status if one.error is None else f"{one.status} {printable(one.error)}",
        NOTHING if one.cache is None else one.cache if one.reason is None else f"{one.cache}; {one.reason}",
        size_text(one.sent_bytes),
        size_text(one.received_bytes),
        printable(one.caller),
        one.request_id,
    ]


def _failure(one: to.OriginFailure) -> list[str]:
    return [
        time.strftime("%H:%M:%S", time.localtime(one.at)),
        seconds_text(one.seconds),
        one.method,
        printable(one.url),
        one.status,
        one.purpose,
        printable(one.slot),
    ]


def seconds_text(seconds: float) -> str:
    """`0.4 ms`, `12 ms`, `1.53 s`, `0:02:05`."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


_SLOTS = (
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
    print_table(_SLOTS, (Row(_slot(slot), "yellow" if slot.binds else "") for slot in answer.slots))


def _slot(slot: to.Slot) -> list[str]:
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


ObjectArgument = Annotated[str, typer.Argument(metavar="s3://BUCKET/KEY", help="The object.")]

_BELIEVED = {
    "fresh": "answers HEAD and GET without the origin",
    "stale": "the origin is asked first; it answers where the origin does not",
    "useless": "too old, or of a slot that asks each time: the origin is asked",
    "unknown": "the origin is asked",
}


def explain(
    key: ObjectArgument, config: ConfigOption = None, admin_url: AdminUrlOption = None, json: JsonOption = False
) -> None:
    """Say what the gateway knows of an object, which blocks are here, and why the others are not. Asks no origin."""
    answer = admin_client(admin_url, config).explain(key)
    if json:
        print_json(answer.document())
        return
    for name, text in _explained(answer):
        print_text(f"{name:<9}{printable(text)}", indent=9)


def _explained(found: to.Explanation) -> Iterator[tuple[str, str]]:
    slot, known, held = found.slot, found.known, found.held
    yield "object", f"s3://{found.bucket}/{found.key}"
    yield "slot", f"{slot.name} ({slot.prefix}), {slot.mode}, {_consistency(slot)}, write {slot.write}"
    if slot.authorization == "origin":
        ttl = f"{slot.authorization_ttl_seconds or 0.0:g} s"
        yield "allowed", f"to callers to whom the origin allows it, too: its yes counts for {ttl}"
    yield "version", _version(known)
    if found.pending is not None:
        yield "pending", _pending(found.pending)
    for pin in found.pins:
        yield "pinned", f"by {pin}: it is not evicted"
    if found.blocks is not None:
        yield from _blocks(found.blocks, known.bytes or 0)
    total = f"{counted(held.blocks, 'block')}, {size_text(held.bytes)}"
    yield "held", f"{total}, of all versions together" if held.blocks else "nothing of any version"
    yield "kept", "yes" if found.why_not_kept is None else f"no: {found.why_not_kept}"


def _consistency(slot: to.ExplainedSlot) -> str:
    if slot.snapshot is not None:
        return f"frozen by the snapshot {slot.snapshot}"
    return f"ttl {slot.metadata_ttl_seconds or 0.0:g} s" if slot.consistency == "ttl" else slot.consistency


def _version(known: to.KnownVersion) -> str:
    if known.by is None:
        return f"not known: {_BELIEVED['unknown']}"
    what = f"{known.etag}, {size_text(known.bytes or 0)}" if known.exists else "there is none"
    if known.by == "snapshot":
        return f"{what}, by the snapshot"
    age = "of unknown age" if known.age_seconds is None else f"learned {known.age_seconds:.0f} s ago"
    return f"{what}, {age}: {_BELIEVED[known.state]}"


def _pending(write: to.PendingObject) -> str:
    what = "a deletion" if write.deleted else f"{write.etag}, {size_text(write.bytes or 0)}"
    why = f": {write.reason}" if write.reason else ""
    return f"{what}, {write.state}, acknowledged {age_text(write.acknowledged_at)} ago{why}"


def _blocks(blocks: to.ExplainedBlocks, size_bytes: int) -> Iterator[tuple[str, str]]:
    text = f"{blocks.here:,} of {counted(blocks.total, 'block')} here"
    if blocks.partly_here:
        text += f", {blocks.partly_here:,} in part"
    text += f", {size_text(blocks.bytes_here)} of {size_text(size_bytes)}"
    if blocks.looked_at < blocks.total:
        text += f" (the first {blocks.looked_at:,} were looked at)"
    yield "blocks", text
    if blocks.evicted:
        yield "evicted", f"{counted(blocks.evicted, 'block')}, as far as is remembered"
    for first, last in blocks.missing:
        yield "missing", f"bytes {first}-{last}"

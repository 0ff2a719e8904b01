"""Looks at a running gateway: `forebay status`, `slots`, `callers`, `requests` and `explain`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.admin.formatting import (
    DISK_STATES,
    age_text,
    bucket_text,
    cluster_text,
    counted,
    journal_problem_text,
    open_uploads_text,
    origin_text,
    size_text,
    waiting_text,
    wrong_with,
)
from gateway.cli.common import JsonOption, asks, print_json, printable
from gateway.cli.tables import NOTHING, Column, Columns, print_table, print_text, rate_text, some_bytes_text

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient
    from gateway.api import documents as to


def show_status(status: to.Status) -> None:
    """Print the document of `/api/v1/status`."""
    gateway, origin = status.gateway, status.origin
    if gateway is None:
        print_text("starting")
        return
    state = "draining" if gateway.draining else "ready" if gateway.ready else "not ready"
    peers = f", peers on {gateway.peer_address}" if gateway.peer_address else ""
    print_text(f"forebay {gateway.version}: {state}, S3 on {gateway.s3_url}{peers}")
    style = "red" if origin.problem else ""
    print_text(f"origin {origin.endpoint_url}: {origin_text(origin)}", style)
    for one in origin.differing:
        place = f"slot {one.slot}, {one.prefix}" if one.slot is not None else one.prefix
        place = f"replica of {place}" if one.replica is not None else place
        text = f"{place} at {one.endpoint_url}, signed by {one.credentials}: {origin_text(one)}"
        style = "red" if one.problem else ""
        print_text(text, style)
    cache = status.cache
    ratio = "nothing read yet" if cache.hit_ratio is None else f"{cache.hit_ratio:.1%} of bytes from cache"
    used, capacity = size_text(cache.usage_bytes), size_text(cache.capacity_bytes)
    print_text(f"cache {cache.directory}: {used} of {capacity} in use, {ratio}")
    if cache.disk.state != "well":
        print_text(f"disk: {'; '.join(DISK_STATES[cache.disk.state])}", "bold red")
    if failing := cache.disk.journal_failing_processes:
        text = "write-back journal: takes nothing now; tried again, see the log. Processes that it fails: "
        print_text(f"{text}{failing}", "bold red")
    if gateway.settings_problem:
        text = f"the configuration was read anew and is not in force: {gateway.settings_problem}"
        print_text(text, "red")
    if gateway.closed:
        print_text(gateway.closed, "red")
    if (cluster := status.cluster) is not None:
        moved = f"gave {size_text(cluster.sent_bytes)} to others, took {size_text(cluster.received_bytes)} from them"
        is_whole = all(one.state == "up" for one in cluster.members)
        print_text(f"{printable(cluster_text(cluster))}; {moved}", "" if is_whole else "red")
        if cluster.redis is not None and not cluster.redis.believed:
            print_text(f"Redis is not believed: {printable(cluster.redis.problem or '')}", "red")
    if cache.scrub is not None:
        print_text(_scrub(cache.scrub))
    for prefix in status.pins:
        print_text(printable(f"pinned: {prefix}"))
    for frozen in status.frozen:
        problem = frozen.problem
        text = f"slot {frozen.slot}: frozen by snapshot {frozen.snapshot}" if problem is None else problem
        print_text(text, "red" if problem else "")
    for source in status.event_sources:
        lag = "no event yet" if source.lag_seconds is None else f"the last event was {source.lag_seconds:.1f} s old"
        heard = f", its canary came back {age_text(source.silent_seconds)} ago" if source.canary else ""
        text = f"events of {source.queue_url}: {source.problem or lag + heard}"
        print_text(text, "red" if source.problem else "")
    for index in status.indexes:
        print_text(_index(index))
    if status.writeback is not None:
        _show_writeback(status.writeback)
    print_table(_PROCESSES, gateway.processes, lambda one: "" if one.ready and not one.hangs else "red")


_PROCESSES: Columns[to.Process] = (
    Column("process", lambda one: one.name),
    Column("pid", lambda one: str(one.process_id or NOTHING), right=True),
    Column("state", lambda one: "hangs" if one.hangs else "ready" if one.ready else "down"),
    Column("restarts", lambda one: str(one.restarts), right=True),
    Column("last end", lambda one: f"{one.last_end}, {age_text(one.last_end_at)} ago" if one.last_end else NOTHING),
)


def _show_writeback(pending: to.Writeback) -> None:
    """Print `not at the origin yet, checkpoints: 12 objects, 3.1 GiB, the oldest for 0:00:12`."""
    for slot in pending.slots:
        amount = f"{counted(slot.objects, 'object')}, {size_text(slot.bytes)}" if slot.objects else "nothing"
        is_local = slot.local_objects and not slot.objects
        text = f"{slot.slot}: nothing to send" if is_local else f"not at the origin yet, {slot.slot}: {amount}"
        if slot.oldest_acknowledged_at is not None:
            age_seconds = max(0.0, time.time() - slot.oldest_acknowledged_at)
            text += f", the oldest for {timedelta(seconds=round(age_seconds))}"
        if waiting := waiting_text(slot):
            text += f"; {waiting}" + (f" ({slot.reason})" if slot.reason and not slot.failing else "")
        if slot.local_objects:
            text += f"; not to be sent: {counted(slot.local_objects, 'object')}, {size_text(slot.local_bytes)}"
        if slot.open_uploads:
            text += f"; {open_uploads_text(slot)}"
        if slot.buffer_bytes is not None:
            text += f"; {size_text(slot.staged_bytes)} of {size_text(slot.buffer_bytes)} of its buffer in use"
        print_text(text)
        wrong = wrong_with(slot)
        if wrong:
            reason = f" ({slot.reason})" if slot.reason and slot.failing else ""
            text = f"{slot.slot}: {', '.join(wrong)}{reason}: forebay writeback list --problems"
            print_text(text, "bold red")
    if pending.journal_problem:
        print_text(journal_problem_text(pending.journal_problem), "bold red")
    for bucket in pending.buckets:
        print_text(bucket_text(bucket))


def _index(index: to.Index) -> str:
    """Say `index of imagenet: complete, 0:00:38 old; 1,281,167 keys`."""
    stands = "complete" if index.complete else "not complete"
    if index.complete and index.age_seconds is not None:
        stands += f", {timedelta(seconds=round(index.age_seconds))} old"
    before = "" if index.keys_before is None else f" of about {index.keys_before:,}"
    now = {
        "starting": "",
        "inventory": "; reading the inventory",
        "crawling": f"; crawling, {index.keys:,}{before} keys so far",
        "waiting": "" if index.keys_before is None else f"; {index.keys_before:,} keys",
        "failing": f"; {index.error}",
    }
    inventory = f"; inventory not used: {index.inventory_error}" if index.inventory_error else ""
    return f"index of {index.slot}: {stands}{now[index.state]}{inventory}"


def _scrub(scrub: to.Scrub) -> str:
    read, dropped = size_text(scrub.read_bytes), counted(scrub.dropped_blocks, "block")
    done = f"{scrub.part_done:.0%} of this pass"
    if scrub.ended_at is not None:
        done = f"last pass ended {datetime.fromtimestamp(scrub.ended_at):%Y-%m-%d %H:%M}"
    return f"scrub: {done}, {read} read from disk, {dropped} dropped"


_CALLERS: Columns[to.CallerDocument] = (
    Column("caller", lambda one: printable(one.name), shortened=True),
    Column("scope", lambda one: one.scope, rank=4),
    Column("running", lambda one: str(one.running) if one.limits.is_any else NOTHING, right=True, rank=3),
    Column("waiting", lambda one: str(one.waiting), right=True),
    Column("requests", lambda one: f"{one.per_second.requests:g}/s" if one.per_second else NOTHING, right=True, rank=2),
    Column("read", lambda one: rate_text(one.per_second.sent_bytes if one.per_second else None), right=True),
    Column("write", lambda one: rate_text(one.per_second.received_bytes if one.per_second else None), right=True),
    Column("limits", lambda one: _limits(one.limits), rank=6),
    Column("throttled", lambda one: _by_limit(one.throttled), rank=5),
    Column("refused", lambda one: _by_limit(one.refused), rank=5),
    Column("bound by", lambda one: _bound(one), rank=1),
)


def _bound(one: to.CallerDocument | to.SlotDocument) -> str:
    return ", ".join(one.binds) or NOTHING


def _bound_style(one: to.CallerDocument | to.SlotDocument) -> str:
    return "yellow" if one.binds else ""


@asks
def callers(client: AdminClient, json: JsonOption = False) -> None:
    """Show who calls the gateway: limits, what runs and waits, what was throttled, and which limit binds."""
    answer = client.callers()
    if json:
        print_json(answer.document())
    else:
        print_table(_CALLERS, answer.callers, _bound_style)


def _limits(limits: to.CallerLimitsDocument) -> str:
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


_REQUESTS: Columns[to.RecentRequest] = (
    Column("at", lambda one: _clock(one), rank=3),
    Column("took", lambda one: seconds_text(one.seconds), right=True),
    Column("operation", lambda one: one.operation),
    Column("object", lambda one: printable(one.url), shortened=True),
    Column("status", lambda one: one.status if one.error is None else f"{one.status} {printable(one.error)}"),
    Column("cache", lambda one: "; ".join(filter(None, (one.cache, one.reason))) or NOTHING, rank=2),
    Column("sent", lambda one: size_text(one.sent_bytes), right=True, rank=4),
    Column("received", lambda one: size_text(one.received_bytes), right=True, rank=6),
    Column("caller", lambda one: printable(one.caller), shortened=True, rank=5),
    Column("request id", lambda one: one.request_id, rank=1),
)
_FAILURES: Columns[to.OriginFailure] = (
    Column("at", lambda one: _clock(one), rank=1),
    Column("took", lambda one: seconds_text(one.seconds), right=True),
    Column("method", lambda one: one.method),
    Column("object", lambda one: printable(one.url), shortened=True),
    Column("status", lambda one: one.status),
    Column("purpose", lambda one: one.purpose, rank=2),
    Column("slot", lambda one: printable(one.slot), rank=3),
)


def _clock(one: to.Try) -> str:
    return time.strftime("%H:%M:%S", time.localtime(one.at))


LimitOption = Annotated[
    int, typer.Option("--limit", metavar="N", min=1, max=1000, help="Show so many of each kind at most.")
]


@asks
def requests(client: AdminClient, limit: LimitOption = 20, json: JsonOption = False) -> None:
    """Show recent requests: the slowest of five minutes, the last that failed or were refused, failures of the origin.

    404, 412 and 416 are no refusals: clients ask for these on purpose.
    """
    answer = client.requests(limit)
    if json:
        print_json(answer.document())
        return
    parts = [
        ("slowest of the last five minutes", answer.slowest),
        ("failed, the latest first", answer.errors),
        ("refused, the latest first", answer.refusals),
    ]
    parts = [one for one in parts if one[1]]
    for number, (title, found) in enumerate(parts):
        typer.echo(("\n" if number else "") + f"{title}:")
        print_table(_REQUESTS, found, request_style)
    if answer.origin_failures:
        typer.echo(("\n" if parts else "") + "the origin failed, the latest first:")
        print_table(_FAILURES, answer.origin_failures)
    elif not parts:
        typer.echo("no request in the last minutes", err=True)


def request_style(one: to.RecentRequest) -> str:
    return "red" if one.is_error else ""


def seconds_text(seconds: float) -> str:
    """`0.4 ms`, `12 ms`, `1.53 s`, `0:02:05`."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"


_SLOTS: Columns[to.SlotDocument] = (
    Column("slot", lambda one: printable(one.name)),
    Column("prefix", lambda one: printable(one.prefix), shortened=True),
    Column("used", lambda one: size_text(one.capacity.used_bytes), right=True),
    Column("guaranteed", lambda one: some_bytes_text(one.capacity.guaranteed_bytes), right=True, rank=5),
    Column("at most", lambda one: some_bytes_text(one.capacity.limit_bytes), right=True, rank=5),
    Column("borrowed", lambda one: some_bytes_text(one.capacity.borrowed_bytes), right=True, rank=7),
    Column("pinned", lambda one: some_bytes_text(one.capacity.pinned_bytes), right=True, rank=7),
    Column("hits", lambda one: NOTHING if one.hit_ratio is None else f"{one.hit_ratio:.1%}", right=True),
    Column("misses", lambda one: ", ".join(f"{why} {n:,}" for why, n in sorted(one.misses.items())) or NOTHING, rank=6),
    Column("read", lambda one: rate_text(one.read_bandwidth.bytes_per_second), right=True),
    Column("read right", lambda one: _right(one.read_bandwidth), rank=4),
    Column("write", lambda one: rate_text(one.write_bandwidth.bytes_per_second), right=True),
    Column("write right", lambda one: _right(one.write_bandwidth), rank=4),
    Column("throttled", lambda one: _throttled(one.origin_requests), rank=3),
    Column("not at the origin yet", lambda one: _unflushed(one.unflushed), rank=2),
    Column("bound by", lambda one: _bound(one), rank=1),
)


@asks
def slots(client: AdminClient, json: JsonOption = False) -> None:
    """Show what each slot has of the disk, its hits, its bandwidth now and by right, and which limit binds it."""
    answer = client.slots()
    if json:
        print_json(answer.document())
        return
    for direction, link in (("read", answer.link.read), ("write", answer.link.write)):
        typer.echo(f"link, {direction}: {size_text(link.bytes_per_second)}/s, {_most(link)}")
    print_table(_SLOTS, answer.slots, _bound_style)


def _most(link: to.LinkDocument) -> str:
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


@asks
def explain(client: AdminClient, key: ObjectArgument, json: JsonOption = False) -> None:
    """Say what the gateway knows of an object, which blocks are here, and why the others are not. Asks no origin."""
    answer = client.explain(key)
    if json:
        print_json(answer.document())
        return
    for name, text in _explained(answer):
        print_text(f"{name:<9}{printable(text)}", indent=9)


def _explained(found: to.ExplanationDocument) -> Iterator[tuple[str, str]]:
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
    for one in found.owners:
        name = f"{one.address}{' (this node)' if one.this_node else ''}"
        yield "owner", f"{name}: {counted(one.first, 'block')}, and {one.second} as the second"
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

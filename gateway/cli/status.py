"""What `forebay status` shows to people."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from rich.console import Console

from gateway.cli.common import printable
from gateway.cli.tables import NOTHING, Column, Row, print_table
from gateway.control.words import (
    bucket_text,
    counted,
    journal_problem_text,
    local_text,
    open_uploads_text,
    origin_text,
    size_text,
    wrong_with,
)

if TYPE_CHECKING:
    from gateway.admin_client import Index, Process, Scrub, Status, Writeback

DISK_STATES = {
    "full": "full; what is cached is served, nothing is added",
    "read-only": "takes nothing; what is cached is served, nothing is added",
    "failing": "failing; the cache is left alone, the origin serves",
    "closed": "cannot be used; there is no cache, the origin serves",
}


def show_status(status: Status) -> None:
    """Print the document of `/api/v1/status`."""
    console = Console(highlight=False, markup=False)
    gateway, origin = status.gateway, status.origin
    if gateway is None:
        console.print("starting")
        return
    state = "draining" if gateway.draining else "ready" if gateway.ready else "not ready"
    console.print(f"forebay {gateway.version}: {state}, S3 on {gateway.s3_url}", soft_wrap=True)
    style = "red" if origin.problem else None
    console.print(f"origin {origin.endpoint_url}: {origin_text(origin.model_dump())}", style=style, soft_wrap=True)
    for one in origin.differing:
        place = f"slot {one.slot}, {one.prefix}" if one.slot is not None else one.prefix
        text = f"{place} at {one.endpoint_url}, signed by {one.credentials}: {origin_text(one.model_dump())}"
        style = "red" if one.problem else None
        console.print(text, style=style, soft_wrap=True)
    cache = status.cache
    ratio = "nothing read yet" if cache.hit_ratio is None else f"{cache.hit_ratio:.1%} of bytes from cache"
    used, capacity = size_text(cache.usage_bytes), size_text(cache.capacity_bytes)
    console.print(f"cache {cache.directory}: {used} of {capacity} in use, {ratio}", soft_wrap=True)
    if cache.disk.state != "well":
        console.print(f"disk: {DISK_STATES[cache.disk.state]}", style="bold red", soft_wrap=True)
    if failing := cache.disk.journal_failing_processes:
        text = "write-back journal: takes nothing now; tried again, see the log. Processes that it fails: "
        console.print(f"{text}{failing}", style="bold red", soft_wrap=True)
    if gateway.settings_problem:
        text = f"the configuration was read anew and is not in force: {gateway.settings_problem}"
        console.print(text, style="red", soft_wrap=True)
    if gateway.closed:
        console.print(gateway.closed, style="red", soft_wrap=True)
    if cache.scrub is not None:
        console.print(_scrub(cache.scrub), soft_wrap=True)
    for prefix in status.pins:
        console.print(printable(f"pinned: {prefix}"), soft_wrap=True)
    for frozen in status.frozen:
        problem = frozen.problem
        text = f"slot {frozen.slot}: frozen by snapshot {frozen.snapshot}" if problem is None else problem
        console.print(text, style="red" if problem else None, soft_wrap=True)
    for index in status.indexes:
        console.print(_index(index), soft_wrap=True)
    if status.writeback is not None:
        _show_writeback(console, status.writeback)
    print_table(_PROCESSES, (Row(_process(one), "" if one.ready else "red") for one in gateway.processes))


_PROCESSES = (Column("process"), Column("pid", right=True), Column("state"), Column("restarts", right=True))


def _process(one: Process) -> list[str]:
    return [one.name, str(one.process_id or NOTHING), "ready" if one.ready else "down", str(one.restarts)]


def _show_writeback(console: Console, pending: Writeback) -> None:
    """`not at the origin yet, checkpoints: 12 objects, 3.1 GiB, the oldest for 0:00:12`"""
    for slot in pending.slots:
        amount = f"{counted(slot.objects, 'object')}, {size_text(slot.bytes)}" if slot.objects else "nothing"
        text = f"not at the origin yet, {slot.slot}: {amount}"
        if slot.oldest_acknowledged_at is not None:
            age_seconds = max(0.0, time.time() - slot.oldest_acknowledged_at)
            text += f", the oldest for {timedelta(seconds=round(age_seconds))}"
        if slot.local_objects:
            text += f"; not to be sent: {local_text(slot.model_dump())}"
        if slot.open_uploads:
            text += f"; {open_uploads_text(slot.model_dump())}"
        if slot.buffer_bytes is not None:
            text += f"; {size_text(slot.staged_bytes)} of {size_text(slot.buffer_bytes)} of its buffer in use"
        console.print(text, soft_wrap=True)
        wrong = wrong_with(slot.model_dump())
        if wrong:
            reason = f" ({slot.reason})" if slot.reason else ""
            text = f"{slot.slot}: {', '.join(wrong)}{reason}: forebay writeback list --problems"
            console.print(text, style="bold red", soft_wrap=True)
    if pending.journal_problem:
        console.print(journal_problem_text(pending.model_dump()), style="bold red", soft_wrap=True)
    for bucket in pending.buckets:
        console.print(bucket_text(bucket.model_dump()), soft_wrap=True)


def _index(index: Index) -> str:
    """`index of imagenet: complete, 0:00:38 old; 1,281,167 keys`"""
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


def _scrub(scrub: Scrub) -> str:
    read, dropped = size_text(scrub.read_bytes), counted(scrub.dropped_blocks, "block")
    done = f"{scrub.part_done:.0%} of this pass"
    if scrub.ended_at is not None:
        done = f"last pass ended {datetime.fromtimestamp(scrub.ended_at):%Y-%m-%d %H:%M}"
    return f"scrub: {done}, {read} read from disk, {dropped} dropped"

"""The output of `forebay status` for people."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from gateway.admin.formatting import (
    age_text,
    bucket_text,
    counted,
    journal_problem_text,
    open_uploads_text,
    origin_text,
    size_text,
    waiting_text,
    wrong_with,
)
from gateway.admin.troubles import DISK_STATES
from gateway.cli.common import printable
from gateway.cli.tables import NOTHING, Column, Columns, print_table, print_text

if TYPE_CHECKING:
    from gateway.api import documents as to


def show_status(status: to.Status) -> None:
    """Print the document of `/api/v1/status`."""
    gateway, origin = status.gateway, status.origin
    if gateway is None:
        print_text("starting")
        return
    state = "draining" if gateway.draining else "ready" if gateway.ready else "not ready"
    print_text(f"forebay {gateway.version}: {state}, S3 on {gateway.s3_url}")
    style = "red" if origin.problem else ""
    print_text(f"origin {origin.endpoint_url}: {origin_text(origin)}", style)
    for one in origin.differing:
        place = f"slot {one.slot}, {one.prefix}" if one.slot is not None else one.prefix
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
    if cache.scrub is not None:
        print_text(_scrub(cache.scrub))
    for prefix in status.pins:
        print_text(printable(f"pinned: {prefix}"))
    for frozen in status.frozen:
        problem = frozen.problem
        text = f"slot {frozen.slot}: frozen by snapshot {frozen.snapshot}" if problem is None else problem
        print_text(text, "red" if problem else "")
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

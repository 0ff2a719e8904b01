"""A running gateway: how it says that it is, and what its figures say about the settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gateway import __version__
from gateway.admin.client import AdminClient, Sample, samples
from gateway.admin.formatting import age_text, bucket_text, counted, size_text, waiting_text
from gateway.admin.troubles import troubles
from gateway.api import documents as to
from gateway.config import Settings
from gateway.core.errors import AdminPortError, NoAdminPort
from gateway.doctor import Area, Finding
from gateway.telemetry import metrics

AREA, SLOTS = Area("running gateway"), Area("slots")

_READS_MIN = 200
"""Fewer say little."""

_HEADS_SHARE = 0.5
_SMALL_BYTES = 4 * 2**20
"""The HEAD before a GET of so much costs as much time as the bytes, or more."""


def running(client: AdminClient, settings: Settings | None) -> Iterator[Finding]:
    """Yield what the running gateway reports. Without a running gateway there is nothing to find."""
    try:
        status = client.status()
        slots, exposition = client.slots().slots, client.metrics()
    except NoAdminPort as absent:
        yield AREA.note(str(absent), "start it, or give --admin-url, for more checks")
        return
    except AdminPortError as refusal:  # it is another one, or another program, or has another token
        yield AREA.error(str(refusal), "see what has the port; give the --config of that gateway, or --admin-url")
        return
    yield from _health(status)
    if settings is not None and status.origin.endpoint_url != settings.origin.endpoint_url:
        yield AREA.warning(
            f"its origin is {status.origin.endpoint_url}, and this configuration says {settings.origin.endpoint_url}",
            "give its --config to check that one",
        )
    yield from _pending(status)
    yield from advised(slots, exposition)


def _health(status: to.Status) -> Iterator[Finding]:
    gateway = status.gateway
    if gateway is None:
        yield AREA.note("it starts", "ask again in a moment")
        return
    if gateway.ready:
        yield AREA.ok(f"version {gateway.version}, ready, S3 on {gateway.s3_url}")
    if gateway.version != __version__:
        yield AREA.note(
            f"it has version {gateway.version}, and this command {__version__}", "restart it after an upgrade"
        )
    for one in gateway.processes:
        yield from _process(one)
    for found in troubles(status):
        text = f"{found.what}: {found.why}" if found.why else found.what
        yield (AREA.error if found.level == "error" else AREA.warning)(text, found.advice)


def _process(one: to.Process) -> Iterator[Finding]:
    if one.restarts:
        found = f"{counted(one.restarts, 'restart')} of {one.name} since the gateway started"
        if one.last_end is not None:
            found += f"; {age_text(one.last_end_at)} ago: {one.last_end}"
        yield AREA.warning(found, _KILLED if one.last_end == "SIGKILL" else "see its log for why")


_KILLED = "somebody has killed it; the kernel does where memory is short: dmesg, and the memory limit"


def _pending(status: to.Status) -> Iterator[Finding]:
    if status.writeback is None:
        return
    for slot in status.writeback.slots:
        if waiting := waiting_text(slot):
            text = f"slot {slot.slot}: not at the origin: {waiting}"
            yield AREA.note(text, "nothing about the writes: they go when it answers")
    for bucket in status.writeback.buckets:
        yield _profile(bucket)


def _profile(bucket: to.BucketProfile) -> Finding:
    """Return the finding about a bucket that the gateway writes back to."""
    found = bucket_text(bucket)
    if not bucket.md5_etags:
        return AREA.warning(found, 'use write = "through" for its slots, or SSE-S3 as its encryption')
    if {"ignored", "refused"} & {*bucket.conditions.values()}:
        return AREA.warning(found, "flushes look by HEAD before they write: let nobody else write under these slots")
    return AREA.ok(found)


@dataclass(slots=True)
class _Reads:
    """The reads of a slot, and the requests to the origin for them."""

    gets: float = 0.0
    sent_bytes: float = 0.0
    heads: float = 0.0


def advised(slots: list[to.SlotDocument], exposition: str) -> Iterator[Finding]:
    """Yield slots whose unchanged objects are asked for at the origin again and again."""
    reads = _reads(samples(exposition, {one.name for one in _COUNTED}))
    for slot in slots:
        found = reads[slot.name]
        if slot.consistency != "strict" or found.gets < _READS_MIN or found.heads < _HEADS_SHARE * found.gets:
            continue
        mean_bytes = found.sent_bytes / found.gets
        if mean_bytes > _SMALL_BYTES:
            continue
        place = "a slot of its own" if slot.name == "default" else f"slot {slot.name}"
        yield SLOTS.note(
            f"slot {slot.name} (strict): {found.heads:,.0f} HEADs to the origin for {found.gets:,.0f} GETs of "
            f"{size_text(mean_bytes)} on average",
            f'give these objects {place} with consistency = "immutable" if they never change, or "ttl" if a change may '
            "be seen a minute later",
        )
    if not any(one.gets for one in reads.values()):
        yield SLOTS.note("nothing was read yet: figures say nothing about the settings", "ask again after an epoch")


_COUNTED = (metrics.REQUESTS, metrics.SENT_BYTES, metrics.ORIGIN_REQUESTS)


def _reads(found: Iterator[Sample]) -> defaultdict[str, _Reads]:
    reads: defaultdict[str, _Reads] = defaultdict(_Reads)
    for name, labels, value in found:
        if name == metrics.ORIGIN_REQUESTS.name:
            if labels.get("method") == "HEAD":
                reads[labels["slot"]].heads += value
        elif labels.get("operation") == "GetObject":
            if name == metrics.REQUESTS.name:
                reads[labels["slot"]].gets += value
            else:
                reads[labels["slot"]].sent_bytes += value
    return reads

"""The gateway as a whole over the admin port: whether it is ready, its settings, and the state of each part."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.backends import Backends, StateHolder, opened
from gateway.admin.cluster import cluster_document
from gateway.admin.operations import (
    CLOSED,
    OF_OBJECT,
    TOKEN,
    RefusedRequest,
    json_answer,
    number,
    number_of,
    operation,
    query,
)
from gateway.admin.origin_check import OriginChecks, OriginFinding
from gateway.api import documents as to
from gateway.config import Settings, public_settings
from gateway.config.live import LiveSettings
from gateway.config.settings import Signer
from gateway.core.clock import SystemClock
from gateway.core.errors import S3Error, StoreUnavailable
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.shared.recent_requests import recent_requests
from gateway.telemetry import metric_reading, metrics
from gateway.telemetry.metric_reading import MetricReading

LIMIT, LIMIT_MAX = 20, 1000
"""The usual and the greatest length of each list of requests."""

_NOT_ASKED = OriginFinding("unreachable", "not asked")
_NOT_READY = {503: "Not ready."}


class StatusApi:
    def __init__(
        self,
        live: LiveSettings,
        holder: StateHolder,
        metrics_directory: Path,
        lent: Backends,
        check: OriginChecks | None,
    ) -> None:
        self._live = live
        self._holder = holder
        self._lent = lent
        self._directory = metrics_directory
        self._check = check

    @operation("GET /healthz", "The background process answers.", to.Health, _NOT_READY, is_open=True)
    async def healthz(self, _request: Request) -> to.Health:
        return to.Health(status="ok")

    @operation("GET /readyz", "Every process serves; 503 otherwise.", to.Readiness, _NOT_READY, is_open=True)
    async def readyz(self, _request: Request) -> Response:
        """Answer 200 while every process serves. Origin, disk and frozen slots are only reported: others do without."""
        state = self._holder.state
        ready = state is not None and state.ready
        workers = [one.name for one in state.processes if one.ready and one.name != "background"] if state else []
        origin = await self._check.finding() if self._check is not None else _NOT_ASKED
        document = to.Readiness(
            ready=ready,
            draining=state.draining if state else False,
            workers_ready=workers,
            origin_reachable=origin.reachable,
            origin_problem=origin.problem,
            events_problem="; ".join(feed.problem for feed in self._lent.feeds or () if feed.problem) or None,
            frozen_slots_missing=[one.slot for one in await self._frozen() if one.problem is not None],
            cache_disk=(await asyncio.to_thread(disk_status, self._directory)).state,
        )
        return json_answer(document, 200 if ready else 503)

    @operation("GET /api/v1/status", "Processes, origin, cache and slots.", to.Status)
    async def show(self, _request: Request) -> to.Status:
        return await self.status(await asyncio.to_thread(MetricReading, self._directory))

    @operation("GET /api/v1/settings", "Settings in force, and defaults.", to.SettingsInForce)
    async def settings(self, _request: Request) -> to.SettingsInForce:
        """Answer what `forebay check-config` prints, secrets hidden; and the defaults."""
        return to.SettingsInForce(settings=public_settings(self._live.now), defaults=public_settings(Settings()))

    @operation("GET /api/v1/indexes", "Indexes of slots.", to.IndexesDocument)
    async def indexes(self, _request: Request) -> to.IndexesDocument:
        return to.IndexesDocument(indexes=opened(self._lent.indexes).documents())

    @operation(
        "GET /api/v1/requests",
        "Requests of late that were slow, failed or were refused, and failures of the origin.",
        to.RecentRequestsDocument,
        {**TOKEN, 400: "A limit that is none."},
        parameters=[query("limit", "of each list", number(1, LIMIT_MAX, default=LIMIT))],
    )
    async def requests(self, request: Request) -> to.RecentRequestsDocument:
        return await self.recent_requests(number_of(request, "limit", 1, LIMIT_MAX, LIMIT))

    @operation(
        "GET /api/v1/explain",
        "What this node knows of an object, and which of its blocks are here.",
        to.ExplanationDocument,
        {**TOKEN, 400: "The object's name is not valid.", 409: "The snapshot of its slot cannot be used.", **CLOSED},
        parameters=OF_OBJECT,
    )
    async def explain(self, request: Request) -> to.ExplanationDocument:
        asked = Prefix.parse(request.query_params.get("object", ""))
        if not asked.bucket or not asked.key_prefix:
            raise ValueError(f"{str(asked)!r} names no object: s3://bucket/key")
        explainer, key = opened(self._lent.explainer), ObjectKey(asked.bucket, asked.key_prefix)
        try:
            found, pending = await explainer.explain(key), await self._pending(key)
        except S3Error as error:
            raise RefusedRequest(409, str(error)) from error
        why, exists = found.why_not_kept, found.known.exists
        if why is None and not (exists or found.held.blocks or (pending is not None and not pending.deleted)):
            why = "nothing is known of it yet" if exists is None else "there is no such object"
        return found.model_copy(update={"pending": pending, "why_not_kept": why})

    async def _pending(self, key: ObjectKey) -> to.PendingObject | None:
        """Return the first write of the key that the origin does not have yet; it is the first under its own prefix."""
        if self._lent.writeback is None:
            return None
        page = await self._lent.writeback.objects(Prefix(*key), "", 1)
        return next((one for one in page.objects if one.key == key.key), None)

    async def recent_requests(self, limit: int) -> to.RecentRequestsDocument:
        found = await asyncio.to_thread(recent_requests, self._directory, limit, time.time())
        return to.RecentRequestsDocument.model_validate(found)

    async def findings(self) -> tuple[OriginFinding, list[tuple[Signer, OriginFinding]]]:
        return await self._check.findings() if self._check is not None else (_NOT_ASKED, [])

    async def _frozen(self) -> list[to.FrozenSlot]:
        """Return the slots that are frozen; none while the cache directory is not open."""
        return await self._lent.snapshots.slots() if self._lent.snapshots is not None else []

    def _pins(self) -> list[str]:
        """Return the pinned prefixes; none while the cache directory is not open."""
        try:
            return self._lent.jobs.pins() if self._lent.jobs is not None else []
        except StoreUnavailable:
            return []

    def _scrub(self) -> to.Scrub | None:
        progress = self._lent.scrubber.progress if self._lent.scrubber is not None else None
        if progress is None:
            return None
        found = to.Scrub.model_validate(progress, from_attributes=True)
        next_at = found.started_at + self._live.now.cache.scrub_period_seconds
        return found.model_copy(update={"next_at": next_at, "part_done": round(found.part_done, 4)})

    async def status(self, reading: MetricReading) -> to.Status:
        state, settings = self._holder.state, self._live.now
        cache, figures = settings.cache, _figures_by_slot(reading, settings)
        origin, others = await self.findings()
        polling, of_cluster = self._lent.cluster, settings.cluster
        cluster = None
        if polling is not None and of_cluster is not None:
            cluster = await cluster_document(
                settings, of_cluster, polling, reading, self._directory, SystemClock(), self._lent.registry
            )
        return to.Status(
            cluster=cluster,
            gateway=state.status() if state else None,
            origin=to.MainOrigin(
                endpoint_url=settings.origin.endpoint_url,
                region=settings.origin.region,
                **_finding(origin),
                differing=[
                    to.DifferingOrigin(
                        endpoint_url=one.endpoint_url,
                        region=one.region,
                        **_finding(found),
                        prefix=one.prefix,
                        slot=one.slot,
                        replica=one.replica,
                        credentials=one.credentials,
                    )
                    for one, found in others
                ],
            ),
            cache=to.CacheStatus(
                directory=str(cache.directory),
                capacity_bytes=cache.capacity_bytes,
                block_size_bytes=cache.block_size_bytes,
                disk=disk_status(reading),
                scrub=self._scrub(),
                **dict(_sum(figures.values())),
            ),
            pins=self._pins(),
            frozen=await self._frozen(),
            indexes=self._lent.indexes.documents() if self._lent.indexes is not None else [],
            event_sources=[feed.document() for feed in self._lent.feeds or ()],
            writeback=await self._lent.pending(),
            slots=[
                to.SlotStatus(
                    name=slot.name,
                    prefix=str(slot.prefix),
                    mode=slot.mode,
                    eviction=slot.eviction,
                    capacity_bytes=slot.capacity_bytes or 0,
                    capacity_limit_bytes=slot.capacity_limit_bytes or cache.capacity_bytes,
                    **dict(figures[slot.name]),
                )
                for slot in settings.slots
            ],
        )


def disk_status(read: Path | MetricReading) -> to.DiskStatus:
    """Return the disk's state, as the processes have found it. With a directory it blocks: call it in a thread."""
    reading = read if isinstance(read, MetricReading) else MetricReading(read)
    found, journal = metric_reading.by_label(
        reading, "state", metrics.CACHE_DISK_STATE, metrics.WRITEBACK_JOURNAL_STATE
    )
    processes = {state: int(found[state]) for state in metrics.DISK_STATES if found.get(state)}
    worst = list(processes)[-1] if processes else "well"
    # A disk on which blocks may replace each other and no write finds room is full, too.
    return to.DiskStatus(
        state="full" if worst == "well" and reading.total(metrics.WRITEBACK_DISK_FULL) else worst,
        processes=processes,
        journal_failing_processes=int(journal.get("failing", 0)),
    )


def _finding(found: OriginFinding) -> dict[str, Any]:
    return {"reachable": found.reachable, "state": found.state, "problem": found.problem}


def _figures_by_slot(reading: MetricReading, settings: Settings) -> dict[str, to.FiguresDocument]:
    found = metric_reading.by_label(
        reading,
        "slot",
        metrics.CACHE_USAGE_BYTES,
        metrics.CACHE_HIT_BYTES,
        metrics.CACHE_MISS_BYTES,
        metrics.CACHE_PINNED_BYTES,
    )
    names = {"default", *(slot.name for slot in settings.slots), *(name for one in found for name in one)}
    return {name: _figures(*(int(one.get(name, 0)) for one in found)) for name in names}


def _figures(usage_bytes: int, hit_bytes: int, miss_bytes: int, pinned_bytes: int) -> to.FiguresDocument:
    given_bytes = hit_bytes + miss_bytes
    return to.FiguresDocument(
        usage_bytes=usage_bytes,
        hit_bytes=hit_bytes,
        miss_bytes=miss_bytes,
        pinned_bytes=pinned_bytes,
        hit_ratio=hit_bytes / given_bytes if given_bytes else None,
    )


def _sum(figures: Iterable[to.FiguresDocument]) -> to.FiguresDocument:
    found = [(one.usage_bytes, one.hit_bytes, one.miss_bytes, one.pinned_bytes) for one in figures]
    return _figures(*map(sum, zip(*found, strict=True)))

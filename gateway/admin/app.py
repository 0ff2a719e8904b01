"""The admin port: health, metrics, status. Small answers for people and machines; jobs begin and end here."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway import __version__
from gateway.admin.admin_backends import Holders
from gateway.admin.callers import CallersApi, known_credentials, known_limits
from gateway.admin.disk import disk_document
from gateway.admin.events import EventsApi
from gateway.admin.explain import ExplainApi
from gateway.admin.guard import Guard
from gateway.admin.history import CountsHistory
from gateway.admin.jobs import JobsApi
from gateway.admin.openapi import describe
from gateway.admin.origin_check import OriginChecks, OriginFinding, OriginState
from gateway.admin.overview import OverviewApi
from gateway.admin.page import page_routes
from gateway.admin.process_metrics import set_process_metrics
from gateway.admin.requests import RequestsApi
from gateway.admin.responses import json_answer
from gateway.admin.slot_changes import SlotChanges
from gateway.admin.slots import SlotsApi
from gateway.admin.snapshots import SnapshotsApi
from gateway.admin.state import StateHolder
from gateway.admin.writeback import WritebackApi
from gateway.config import Settings, public_settings
from gateway.config.live import LiveSettings
from gateway.config.signers import Signer
from gateway.core.errors import StoreUnavailable
from gateway.origin.signing import origin_name
from gateway.telemetry import metric_reading, metrics
from gateway.telemetry.audit_log import AuditLog
from gateway.telemetry.metric_kinds import Known
from gateway.telemetry.metric_reading import MetricReading

_NOT_ASKED = OriginFinding("unreachable", "not asked")
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def control_app(
    live: LiveSettings,
    holder: StateHolder,
    metrics_directory: Path,
    lent: Holders | None = None,
    check: OriginChecks | None = None,
    changes: SlotChanges | None = None,
    audit: AuditLog | None = None,
    history: CountsHistory | None = None,
) -> Starlette:
    """The application. With `admin.token` set, everything but /healthz, /readyz and the page's files asks for it."""
    lent = lent or Holders()
    control = _Control(live, holder, metrics_directory, lent, check)
    work, events, frozen = JobsApi(lent.jobs), EventsApi(lent.changes), SnapshotsApi(lent.snapshots)
    pending = WritebackApi(lent.writeback)
    guard = Guard(live, audit)
    slots = SlotsApi(live, metrics_directory, lent.writeback, changes)
    requests = RequestsApi(metrics_directory)
    callers = CallersApi(live, metrics_directory)
    history = history or CountsHistory(metrics_directory)
    overview = OverviewApi(control.document, slots, lent, metrics_directory, requests, callers, history)
    return Starlette(
        routes=[
            Route("/healthz", control.healthz),
            Route("/readyz", control.readyz),
            Route("/metrics", guard(control.metrics, any_host=True)),
            *page_routes(),
            Route("/api/v1/overview", guard(overview.show)),
            Route("/api/v1/status", guard(control.status)),
            Route("/api/v1/settings", guard(control.settings)),
            Route("/api/v1/warm", guard(work.warm), methods=["POST"]),
            Route("/api/v1/evict", guard(work.evict), methods=["POST"]),
            Route("/api/v1/pin", guard(work.pin), methods=["POST"]),
            Route("/api/v1/unpin", guard(work.unpin), methods=["POST"]),
            Route("/api/v1/pins", guard(work.pins)),
            Route("/api/v1/events", guard(events.post), methods=["POST"]),
            Route("/api/v1/explain", guard(ExplainApi(lent.explain, lent.writeback).show)),
            Route("/api/v1/indexes", guard(lent.indexes.list)),
            Route("/api/v1/callers", guard(callers.list)),
            Route("/api/v1/requests", guard(requests.list)),
            Route("/api/v1/slots", guard(slots.list)),
            _by_method("/api/v1/slots/{name}", PUT=guard(slots.put), DELETE=guard(slots.delete)),
            Route("/api/v1/reload", guard(slots.reload), methods=["POST"]),
            Route("/api/v1/jobs", guard(work.list)),
            _by_method("/api/v1/jobs/{job_id}", GET=guard(work.show), DELETE=guard(work.cancel)),
            _by_method("/api/v1/snapshots", GET=guard(frozen.list), POST=guard(frozen.create)),
            _by_method(
                "/api/v1/snapshots/{name}",
                GET=guard(frozen.show),
                PUT=guard(frozen.put),
                DELETE=guard(frozen.delete),
            ),
            Route("/api/v1/snapshots/{name}/objects", guard(frozen.objects)),
            Route("/api/v1/snapshots/{name}/diff", guard(frozen.diff)),
            _by_method("/api/v1/flush", POST=guard(pending.flush), GET=guard(pending.progress)),
            Route("/api/v1/writeback", guard(pending.show)),
            Route("/api/v1/writeback/objects", guard(pending.objects)),
            Route("/api/v1/writeback/versions", guard(pending.versions)),
            Route("/api/v1/writeback/uploads", guard(pending.uploads)),
            Route("/api/v1/checkpoints", guard(pending.checkpoints)),
            Route("/api/v1/writeback/resolve", guard(pending.resolve), methods=["POST"]),
            Route("/api/v1/writeback/abort", guard(pending.abort), methods=["POST"]),
            Route("/api/openapi.json", guard(control.openapi, any_host=True)),
        ]
    )


def _by_method(path: str, **endpoints: Callable[[Request], Awaitable[Response]]) -> Route:
    """One route for all methods of a path: a refusal of another method names them all (`Allow`, RFC 9110, 15.5.6)."""

    async def endpoint(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, endpoint, methods=list(endpoints))


async def _one_by_one(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


class _Control:
    def __init__(
        self,
        live: LiveSettings,
        holder: StateHolder,
        metrics_directory: Path,
        lent: Holders,
        check: OriginChecks | None,
    ) -> None:
        self._live = live
        self._holder = holder
        self._lent = lent
        self._metrics_directory = metrics_directory
        self._check = check
        self._scraping: asyncio.Task[list[bytes]] | None = None
        self._scraped_next: asyncio.Task[list[bytes]] | None = None

    @property
    def _settings(self) -> Settings:
        return self._live.now

    async def healthz(self, _request: Request) -> Response:
        """This process answers."""
        return json_answer({"status": "ok"})

    async def readyz(self, _request: Request) -> Response:
        """200 while every process serves. The origin, the disk and what freezes slots are reported and not required:
        the others do without.
        """
        state = self._holder.state
        ready = state is not None and state.ready
        workers = [one.name for one in state.processes if one.ready and one.name != "background"] if state else []
        origin = await self._origin()
        document = {
            "ready": ready,
            "draining": state.draining if state else False,
            "workers_ready": workers,
            "origin_reachable": origin.reachable,
            "origin_problem": origin.problem,
            "frozen_slots_missing": [one["slot"] for one in await self._frozen() if one["problem"] is not None],
            "cache_disk": (await asyncio.to_thread(disk_document, self._metrics_directory))["state"],
        }
        return json_answer(document, 200 if ready else 503)

    async def _origin(self) -> OriginFinding:
        return await self._check.finding() if self._check is not None else _NOT_ASKED

    async def metrics(self, _request: Request) -> Response:
        """Prometheus' text format, with what this process knows of the gateway as a whole.

        Once at a time, however many ask: who comes meanwhile gets the next, together with all others who wait.
        """
        if self._scraped_next is None:
            self._scraped_next = asyncio.create_task(self._scrape(self._scraping), name="metrics")
        parts = await asyncio.shield(self._scraped_next)
        # As the client takes them: of 1,000 slots they are 18 MB.
        length = sum(map(len, parts))
        return StreamingResponse(
            _one_by_one(parts), headers={"content-type": _METRICS_TYPE, "content-length": str(length)}
        )

    async def _scrape(self, before: asyncio.Task[list[bytes]] | None) -> list[bytes]:
        """When the one before is over."""
        if before is not None:
            await asyncio.wait([before])
        self._scraping, self._scraped_next = self._scraped_next, None
        try:
            return await self._exposition()
        finally:
            self._scraping = None  # it holds what it has found

    async def _exposition(self) -> list[bytes]:
        state = self._holder.state
        metrics.BUILD_INFO.set(1, __version__, platform.python_version())
        origins = await self._set_origin_metrics()
        processes = {} if state is None else {one.name: one.process_id for one in state.processes}
        if state is not None:
            processes["supervisor"] = state.process_id
        await asyncio.to_thread(set_process_metrics, processes)
        slots = [*(slot.name for slot in self._settings.slots), "default"]
        names = {
            "slot": list(dict.fromkeys(slots)),
            "origin": origins,
            "process": [name for name in processes if name != "supervisor"],
            "credential": known_credentials(self._settings),
        }
        known = Known(names, known_limits(self._settings))
        return await asyncio.to_thread(metric_reading.exposition_parts, self._metrics_directory, known)

    async def _set_origin_metrics(self) -> list[str]:
        """The names of all origins; of each, what its users have found out is in the metrics then."""
        main, others = await self._findings()
        name = origin_name(self._settings.origin.endpoint_url)
        found = [(name, metrics.USED_BY_ALL, main)]
        found += [(origin_name(one.endpoint_url), one.used_by, finding) for one, finding in others]
        for origin, used_by, finding in found:
            metrics.ORIGIN_UP.set(float(finding.reachable), origin, used_by)
            metrics.ORIGIN_KEY_NOT_RENEWED.set(float(finding.is_key_not_renewed), origin, used_by)
            for state in get_args(OriginState):
                metrics.ORIGIN_STATE.set(float(state == finding.state), origin, used_by, state.replace(" ", "-"))
        return list(dict.fromkeys(origin for origin, _, _ in found))

    async def _findings(self) -> tuple[OriginFinding, list[tuple[Signer, OriginFinding]]]:
        return await self._check.findings() if self._check is not None else (_NOT_ASKED, [])

    async def status(self, _request: Request) -> Response:
        return json_answer(await self.document(await asyncio.to_thread(MetricReading, self._metrics_directory)))

    async def settings(self, _request: Request) -> Response:
        """What `forebay check-config` prints, secrets hidden; and the defaults."""
        return json_answer({"settings": public_settings(self._settings), "defaults": public_settings(Settings())})

    async def openapi(self, _request: Request) -> Response:
        return json_answer(describe())

    def _figures(self, reading: MetricReading) -> dict[str, dict[str, float | None]]:
        found = metric_reading.by_label(
            reading,
            "slot",
            metrics.CACHE_USAGE_BYTES,
            metrics.CACHE_HIT_BYTES,
            metrics.CACHE_MISS_BYTES,
            metrics.CACHE_PINNED_BYTES,
        )
        names = {"default", *(slot.name for slot in self._settings.slots), *(name for one in found for name in one)}
        return {name: _figures(*(int(one.get(name, 0)) for one in found)) for name in names}

    async def _frozen(self) -> list[dict[str, Any]]:
        """The slots that are frozen; none while the cache directory is not open."""
        return await self._lent.snapshots.service.slots() if self._lent.snapshots.service is not None else []

    def _pins(self) -> list[str]:
        """The pinned prefixes; none while the cache directory is not open."""
        try:
            return self._lent.jobs.jobs.pins() if self._lent.jobs.jobs is not None else []
        except StoreUnavailable:
            return []

    async def document(self, reading: MetricReading) -> dict[str, Any]:
        state = self._holder.state
        cache = self._settings.cache
        figures, disk = self._figures(reading), disk_document(reading)
        origin, others = await self._findings()
        return {
            "gateway": state.as_dict() if state else None,
            "origin": {
                "endpoint_url": self._settings.origin.endpoint_url,
                "region": self._settings.origin.region,
                **_finding(origin),
                "differing": [_differing(one) | _finding(found) for one, found in others],
            },
            "cache": {
                "directory": str(cache.directory),
                "capacity_bytes": cache.capacity_bytes,
                "block_size_bytes": cache.block_size_bytes,
                "disk": disk,
                "scrub": self._lent.scrub.document(),
                **_sum(figures.values()),
            },
            "pins": self._pins(),
            "frozen": await self._frozen(),
            "indexes": self._lent.indexes.documents() or [],
            "writeback": await self._lent.writeback.summary(),
            "slots": [
                {
                    "name": slot.name,
                    "prefix": slot.prefix,
                    "mode": slot.mode,
                    "eviction": slot.eviction,
                    "capacity_bytes": slot.capacity_bytes or 0,
                    "capacity_limit_bytes": slot.capacity_limit_bytes or cache.capacity_bytes,
                    **figures[slot.name],
                }
                for slot in self._settings.slots
            ],
        }


def _differing(one: Signer) -> dict[str, Any]:
    document = one._asdict()
    del document["name"]
    return document


def _finding(found: OriginFinding) -> dict[str, Any]:
    return {"reachable": found.reachable, "state": found.state, "problem": found.problem}


def _figures(usage_bytes: int, hit_bytes: int, miss_bytes: int, pinned_bytes: int) -> dict[str, float | None]:
    """The ratio is None while nothing was given."""
    given_bytes = hit_bytes + miss_bytes
    ratio = hit_bytes / given_bytes if given_bytes else None
    return {
        "usage_bytes": usage_bytes,
        "hit_bytes": hit_bytes,
        "miss_bytes": miss_bytes,
        "pinned_bytes": pinned_bytes,
        "hit_ratio": ratio,
    }


def _sum(figures: Iterable[Mapping[str, float | None]]) -> dict[str, float | None]:
    found = list(figures)
    names = ("usage_bytes", "hit_bytes", "miss_bytes", "pinned_bytes")
    return _figures(*(sum(int(one[name] or 0) for one in found) for name in names))

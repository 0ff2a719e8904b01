"""The admin port: health, metrics, status. Small answers for people and machines; jobs begin and end here."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncIterator, Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway import __version__
from gateway.admin.backends import Backends
from gateway.admin.callers import CallersApi, known_credentials, known_limits
from gateway.admin.events import EventsApi
from gateway.admin.guard import Guard
from gateway.admin.history import CountsHistory
from gateway.admin.jobs import JobsApi
from gateway.admin.openapi import document_of
from gateway.admin.operations import JSON_TYPE, TEXT, TOKEN, Endpoint, answering, operation, operations_of
from gateway.admin.origin_check import OriginChecks, OriginState
from gateway.admin.overview import OverviewApi
from gateway.admin.page import PAGE, page_routes
from gateway.admin.process_metrics import set_process_metrics
from gateway.admin.responses import json_answer
from gateway.admin.slot_changes import SlotChanges
from gateway.admin.slots import SlotsApi
from gateway.admin.snapshots import SnapshotsApi
from gateway.admin.state import StateHolder
from gateway.admin.status import StatusApi
from gateway.admin.writeback import WritebackApi
from gateway.config.live import LiveSettings
from gateway.origin.signing import origin_name
from gateway.telemetry import metric_reading, metrics
from gateway.telemetry.access_log import AuditLog
from gateway.telemetry.metric_kinds import Known

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ANY_HOST = ("/metrics", "/api/openapi.json")
"""They tell nothing of keys, and are asked for by names that this machine does not know."""


def control_app(
    live: LiveSettings,
    holder: StateHolder,
    metrics_directory: Path,
    lent: Backends | None = None,
    check: OriginChecks | None = None,
    changes: SlotChanges | None = None,
    audit: AuditLog | None = None,
    history: CountsHistory | None = None,
) -> Starlette:
    """Return the application. With `admin.token` set, all but /healthz, /readyz and the page's files asks for it."""
    lent, history = lent or Backends(), history or CountsHistory(metrics_directory)
    status = StatusApi(live, holder, metrics_directory, lent, check)
    slots = SlotsApi(live, metrics_directory, lent, changes)
    callers = CallersApi(live, metrics_directory)
    of_kinds = (
        MetricsApi(live, holder, metrics_directory, status),
        status,
        OverviewApi(status, slots, lent, metrics_directory, callers, history),
        JobsApi(lent),
        EventsApi(lent),
        callers,
        slots,
        SnapshotsApi(lent),
        WritebackApi(lent),
    )
    guard, by_path = Guard(live, audit), dict[str, dict[str, Endpoint]]()
    for api in of_kinds:
        for name, one in operations_of(type(api)):
            endpoint = answering(one, getattr(api, name))
            if not one.is_open:
                endpoint = guard(endpoint, any_host=one.path in _ANY_HOST)
            by_path.setdefault(one.path, {})[one.method] = endpoint
    return Starlette(routes=[*page_routes(), *(_by_method(path, found) for path, found in by_path.items())])


_KINDS = (StatusApi, OverviewApi, JobsApi, EventsApi, CallersApi, SlotsApi, SnapshotsApi, WritebackApi)


@cache
def describe() -> dict[str, Any]:
    """Return the OpenAPI document; it is made once."""
    return document_of([PAGE, *(one for kind in (MetricsApi, *_KINDS) for _, one in operations_of(kind))])


def _by_method(path: str, endpoints: dict[str, Endpoint]) -> Route:
    """Return one route for all methods of a path: its refusals name every allowed one (`Allow`, RFC 9110, 15.5.6)."""

    async def endpoint(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return Route(path, endpoint, methods=list(endpoints))


async def _one_by_one(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


class MetricsApi:
    def __init__(self, live: LiveSettings, holder: StateHolder, metrics_directory: Path, status: StatusApi) -> None:
        self._live = live
        self._holder = holder
        self._status = status
        self._metrics_directory = metrics_directory
        self._scraping: asyncio.Task[list[bytes]] | None = None
        self._scraped_next: asyncio.Task[list[bytes]] | None = None

    @operation("GET /api/openapi.json", "This document.", {JSON_TYPE: {"type": "object"}})
    async def openapi(self, _request: Request) -> Response:
        return json_answer(await asyncio.to_thread(describe))

    @operation("GET /metrics", "Metrics in Prometheus' text format.", {"text/plain": TEXT}, TOKEN)
    async def metrics(self, _request: Request) -> Response:
        """Return metrics in Prometheus' text format, with this process's knowledge of the gateway as a whole.

        Scrapes run one at a time: requests that come meanwhile share the next one.
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
        slots = [*(slot.name for slot in self._live.now.slots), "default"]
        names = {
            "slot": list(dict.fromkeys(slots)),
            "origin": origins,
            "process": [name for name in processes if name != "supervisor"],
            "credential": known_credentials(self._live.now),
        }
        known = Known(names, known_limits(self._live.now))
        return await asyncio.to_thread(metric_reading.exposition_parts, self._metrics_directory, known)

    async def _set_origin_metrics(self) -> list[str]:
        """Set each origin's metrics to what its users have found out. Return the names of all origins."""
        main, others = await self._status.findings()
        name = origin_name(self._live.now.origin.endpoint_url)
        found = [(name, metrics.USED_BY_ALL, main)]
        found += [(origin_name(one.endpoint_url), one.used_by, finding) for one, finding in others]
        for origin, used_by, finding in found:
            metrics.ORIGIN_UP.set(float(finding.reachable), origin, used_by)
            metrics.ORIGIN_KEY_NOT_RENEWED.set(float(finding.is_key_not_renewed), origin, used_by)
            for state in get_args(OriginState):
                metrics.ORIGIN_STATE.set(float(state == finding.state), origin, used_by, state.replace(" ", "-"))
        return list(dict.fromkeys(origin for origin, _, _ in found))

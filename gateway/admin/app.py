"""The Starlette app of the admin port: its routes, the dashboard, the documentation as text, and /metrics.

A browser asks once for the files of the dashboard; all figures come from `/api/v1/overview`. The files tell nothing
about the gateway, so they need no token; the page asks for it. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gateway import __version__
from gateway.admin.backends import Backends, SlotChanges, StateHolder
from gateway.admin.cluster import ClusterApi
from gateway.admin.cluster_reports import ClusterReportsApi
from gateway.admin.guard import Guard
from gateway.admin.jobs import EventsApi, JobsApi, SnapshotsApi
from gateway.admin.operations import (
    JSON_TYPE,
    TEXT,
    TOKEN,
    AdminOperation,
    Endpoint,
    answering,
    document_of,
    json_answer,
    operation,
    operations_of,
)
from gateway.admin.origin_check import OriginChecks, OriginState
from gateway.admin.overview import CountsHistory, OverviewApi
from gateway.admin.slots import SlotsApi, known_credentials, known_limits
from gateway.admin.status import StatusApi
from gateway.admin.writeback import WritebackApi
from gateway.config.live import LiveSettings
from gateway.core.clock import SystemClock
from gateway.origin.signing import origin_name
from gateway.telemetry import metric_reading, metrics
from gateway.telemetry.access_log import AuditLog
from gateway.telemetry.metric_kinds import Known

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def set_process_metrics(processes: Mapping[str, int | None]) -> None:
    """Set metrics of processes, by name and id: 0 for one that is down. Reads files: call it in a thread."""
    if not _shows_own_namespace():
        processes = dict.fromkeys(processes)  # the ids are those of other processes there
    booted_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for name, process_id in processes.items():
        started = cpu = memory = descriptors = 0.0
        if process_id is not None:
            directory = Path(f"/proc/{process_id}")
            try:
                # Behind the name in brackets, which may hold anything: fields 3 and on.
                fields = (directory / "stat").read_bytes().rpartition(b")")[2].split()
                started = booted_at + int(fields[19]) / _TICKS
                cpu = (int(fields[11]) + int(fields[12])) / _TICKS
                memory = float(int(fields[21]) * _PAGE_BYTES)
                descriptors = float(len(os.listdir(directory / "fd")))
            except (OSError, IndexError):
                started = cpu = memory = descriptors = 0.0  # it has just ended
        metrics.PROCESS_START.set(round(started, 2), name)
        metrics.PROCESS_CPU.set(cpu, name)
        metrics.PROCESS_MEMORY.set(memory, name)
        metrics.PROCESS_DESCRIPTORS.set(descriptors, name)


def _shows_own_namespace() -> bool:
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_FILES = {
    "/": ("index.html", "text/html"),
    "/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard.js": ("dashboard.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


_CONTENTS = {name: files("gateway.admin").joinpath("dashboard", name).read_bytes() for name, _ in _FILES.values()}
"""Read while the code is loaded: a process that is forked later needs no file of the package, which may be gone."""


PAGE = AdminOperation("GET /", "The dashboard.", {"text/html": TEXT}, {503: "Not ready."}, is_open=True)
_DOCS = [files("gateway").joinpath("docs"), Path(__file__).parents[2] / "docs"]  # in a wheel, and in a clone


def page_routes() -> list[Route]:
    routes = [Route(path, _served(name, media_type)) for path, (name, media_type) in _FILES.items()]
    return [*routes, Route("/docs/{name}", _documentation)]


async def _documentation(request: Request) -> Response:
    """One page of it, read when it is asked for."""
    name = request.path_params["name"]
    pages = [folder.joinpath(f"{name}.md") for folder in _DOCS if name.replace("-", "").isalnum()]
    page = next((one for one in pages if one.is_file()), None)
    if page is None:
        return Response("there is no such page", 404, headers=_HEADERS, media_type="text/plain")
    return Response(await asyncio.to_thread(page.read_bytes), headers=_HEADERS, media_type="text/plain")


def _served(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = _CONTENTS[name]
    headers = _HEADERS | {"etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return serve


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
    of_kinds = (
        MetricsApi(live, holder, metrics_directory, status),
        status,
        OverviewApi(status, slots, lent, metrics_directory, history),
        JobsApi(lent),
        EventsApi(lent),
        slots,
        SnapshotsApi(lent),
        WritebackApi(lent),
        ClusterApi(live, metrics_directory, lent, SystemClock()),
        ClusterReportsApi(live, lent, SystemClock()),
    )
    guard, by_path = Guard(live, audit), dict[str, dict[str, Endpoint]]()
    for api in of_kinds:
        for name, one in operations_of(type(api)):
            endpoint = answering(one, getattr(api, name))
            if not one.is_open:
                endpoint = guard(endpoint, any_host=one.path in _ANY_HOST)
            by_path.setdefault(one.path, {})[one.method] = endpoint
    return Starlette(routes=[*page_routes(), *(_by_method(path, found) for path, found in by_path.items())])


_KINDS = (
    StatusApi,
    OverviewApi,
    JobsApi,
    EventsApi,
    SlotsApi,
    SnapshotsApi,
    WritebackApi,
    ClusterApi,
    ClusterReportsApi,
)


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

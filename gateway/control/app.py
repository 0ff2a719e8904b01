"""The admin port: health, metrics, status. Small answers for people and machines; nothing here changes anything."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from gateway import metric_kinds, metrics
from gateway.config import Settings
from gateway.control.openapi import describe
from gateway.control.page import render
from gateway.control.reachability import OriginProbe
from gateway.control.state import StateHolder

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Endpoint = Callable[[Request], Awaitable[Response]]


def control_app(settings: Settings, holder: StateHolder, metrics_directory: Path) -> Starlette:
    """The application. With `admin.token` set, everything but /healthz and /readyz asks for it."""
    control = _Control(settings, holder, metrics_directory)
    guard = _Guard(settings.admin.token.get_secret_value() if settings.admin.token else None)
    return Starlette(
        routes=[
            Route("/healthz", control.healthz),
            Route("/readyz", control.readyz),
            Route("/metrics", guard(control.metrics)),
            Route("/", guard(control.page)),
            Route("/api/v1/status", guard(control.status)),
            Route("/api/openapi.json", guard(control.openapi)),
        ]
    )


class _Guard:
    """Wraps endpoints that ask for the bearer token (RFC 6750), if there is one."""

    def __init__(self, token: str | None) -> None:
        self._token = token.encode() if token is not None else None

    def __call__(self, endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            return await endpoint(request) if self._allows(request) else _unauthorized()

        return guarded

    def _allows(self, request: Request) -> bool:
        if self._token is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._token)


def _unauthorized() -> Response:
    problem = {"error": "this needs the header 'Authorization: Bearer …' with admin.token"}
    return _json(problem, 401, {"www-authenticate": 'Bearer realm="forebay"'})


def _json(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"
    return Response(body, status, {"cache-control": "no-store"} | (headers or {}), "application/json")


class _Control:
    def __init__(self, settings: Settings, holder: StateHolder, metrics_directory: Path) -> None:
        self._settings = settings
        self._holder = holder
        self._metrics_directory = metrics_directory
        self._probe = OriginProbe(settings.origin)

    async def healthz(self, _request: Request) -> Response:
        """This process answers."""
        return _json({"status": "ok"})

    async def readyz(self, _request: Request) -> Response:
        """200 while every worker serves. The origin is reported and not required: cached data needs none."""
        state = self._holder.state
        ready = state is not None and state.ready
        workers = [one.name for one in state.processes if one.ready and one.name != "background"] if state else []
        document = {
            "ready": ready,
            "draining": state.draining if state else False,
            "workers_ready": workers,
            "origin_reachable": await self._probe.reachable(),
        }
        return _json(document, 200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        text = await asyncio.to_thread(metric_kinds.exposition, self._metrics_directory)
        return Response(text, headers={"content-type": _METRICS_TYPE})

    async def status(self, _request: Request) -> Response:
        return _json(await self._document())

    async def page(self, _request: Request) -> Response:
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        return HTMLResponse(render(await self._document()), headers={"content-security-policy": policy})

    async def openapi(self, _request: Request) -> Response:
        return _json(describe())

    def _figures(self) -> dict[str, dict[str, float | None]]:
        """What each slot holds and has given since the gateway started."""
        found = metric_kinds.by_label(
            self._metrics_directory,
            "slot",
            metrics.CACHE_USAGE_BYTES,
            metrics.CACHE_HIT_BYTES,
            metrics.CACHE_MISS_BYTES,
        )
        names = {"default", *(slot.name for slot in self._settings.slots), *(name for one in found for name in one)}
        return {name: _figures(*(int(one.get(name, 0)) for one in found)) for name in names}

    async def _document(self) -> dict[str, Any]:
        state = self._holder.state
        cache = self._settings.cache
        figures = await asyncio.to_thread(self._figures)
        return {
            "gateway": state.as_dict() if state else None,
            "origin": {
                "endpoint_url": self._settings.origin.endpoint_url,
                "region": self._settings.origin.region,
                "reachable": await self._probe.reachable(),
            },
            "cache": {
                "directory": str(cache.directory),
                "capacity_bytes": cache.capacity_bytes,
                "block_size_bytes": cache.block_size_bytes,
                **_sum(figures.values()),
            },
            "slots": [
                {
                    "name": slot.name,
                    "prefix": slot.prefix,
                    "mode": slot.mode,
                    "capacity_bytes": slot.capacity_bytes or 0,
                    "capacity_limit_bytes": slot.capacity_limit_bytes or cache.capacity_bytes,
                    **figures[slot.name],
                }
                for slot in self._settings.slots
            ],
        }


def _figures(usage_bytes: int, hit_bytes: int, miss_bytes: int) -> dict[str, float | None]:
    """The ratio is None while nothing was given."""
    given_bytes = hit_bytes + miss_bytes
    ratio = hit_bytes / given_bytes if given_bytes else None
    return {"usage_bytes": usage_bytes, "hit_bytes": hit_bytes, "miss_bytes": miss_bytes, "hit_ratio": ratio}


def _sum(figures: Iterable[Mapping[str, float | None]]) -> dict[str, float | None]:
    found = list(figures)
    return _figures(*(sum(int(one[name] or 0) for one in found) for name in ("usage_bytes", "hit_bytes", "miss_bytes")))

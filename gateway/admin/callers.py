"""Limits of callers over the admin port: who, what they may take, what they take now, and which limit binds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from starlette.requests import Request

from gateway.admin.operations import operation
from gateway.api import documents as to
from gateway.api.documents import LIMITS
from gateway.config import CallerLimitSettings, Settings
from gateway.config.live import LiveSettings
from gateway.policy.callers import OWN, UNSIGNED
from gateway.telemetry import metrics
from gateway.telemetry.metric_kinds import GONE
from gateway.telemetry.metric_reading import MetricReading, by_labels

LOOK_SECONDS = 1.0
"""A limit binds if a request waits for it, or has within this time: an answer takes as long."""

SHOWN = 50
"""Callers that the dashboard shows."""


def known_credentials(settings: Settings) -> list[str]:
    unsigned = [UNSIGNED] if settings.server.allow_unsigned else []
    return [*([one.access_key_id for one in settings.credentials] or [OWN]), *unsigned, "none"]


def known_limits(settings: Settings) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the limits that may keep requests waiting, by the labels that name them in the metrics."""
    callers = [("credential", one.access_key_id, _limits(one)) for one in settings.credentials]
    callers += [("class", one.name, _limits(one)) for one in settings.caller_classes]
    return {
        ("scope", "name", "limit"): [(scope, name, limit) for scope, name, limits in callers for limit in limits],
        ("scope", "name"): [(scope, name) for scope, name, limits in callers if limits],
    }


def _limits(of: CallerLimitSettings) -> list[str]:
    of_bodies = of.read_bandwidth_bytes_per_second, of.write_bandwidth_bytes_per_second
    values = of.max_concurrent_requests, of.requests_per_second, *of_bodies
    return [limit for limit, value in zip(LIMITS, values, strict=True) if value is not None]


class _Counts:
    """The counters of all processes at one time."""

    def __init__(self, reading: MetricReading) -> None:
        self.at = monotonic()
        of_limits = metrics.CALLER_WAITS, metrics.CALLER_WAIT_SECONDS, metrics.CALLER_REFUSED, metrics.CALLER_WAITING
        found = by_labels(reading, ("scope", "name", "limit"), *of_limits)
        self.waits, self.seconds, self.refused, self.waiting = found
        [self.running] = by_labels(reading, ("scope", "name"), metrics.CALLER_RUNNING)
        of_credentials = metrics.CALLER_REQUESTS, metrics.CALLER_SENT_BYTES, metrics.CALLER_RECEIVED_BYTES
        self.used = by_labels(reading, ("credential",), *of_credentials)


def _counts(directory: Path) -> _Counts:
    return _Counts(MetricReading(directory))


class CallersApi:
    def __init__(self, live: LiveSettings, metrics_directory: Path) -> None:
        self._live = live
        self._directory = metrics_directory
        self._last: _Counts | None = None

    def since_last(self, reading: MetricReading) -> list[to.CallerDocument]:
        """Return SHOWN callers and what they took since the last call: limited ones first, then by requests sent."""
        now = _Counts(reading)
        before, self._last = self._last or now, now
        found = self._documents(before, now)
        found.sort(key=lambda one: (bool(one.binds), one.used.requests if one.used is not None else 0), reverse=True)
        return found[:SHOWN]

    @operation("GET /api/v1/callers", "Callers, and which limit binds each.", to.CallersDocument)
    async def show(self, _request: Request) -> to.CallersDocument:
        """Answer with every credential and class of the configuration, and all others that have called."""
        before = await asyncio.to_thread(_counts, self._directory)
        await asyncio.sleep(LOOK_SECONDS)
        now = await asyncio.to_thread(_counts, self._directory)
        return to.CallersDocument(callers=self._documents(before, now))

    def _documents(self, before: _Counts, now: _Counts) -> list[to.CallerDocument]:
        return [_document(scope, name, limits, before, now) for scope, name, limits in self._all(now)]

    def _all(self, now: _Counts) -> Iterator[tuple[str, str, CallerLimitSettings]]:
        settings = self._live.now
        for credential in settings.credentials:
            yield "credential", credential.access_key_id, credential
        known = {one.access_key_id for one in settings.credentials}
        for (name,) in sorted(now.used[0]):
            if name not in known and name != GONE:
                yield "credential", name, CallerLimitSettings()
        for one in settings.caller_classes:
            yield "class", one.name, one


def _document(scope: str, name: str, limits: CallerLimitSettings, before: _Counts, now: _Counts) -> to.CallerDocument:
    keys = {limit: (scope, name, limit) for limit in LIMITS}
    waiting = {limit: int(now.waiting.get(key, 0)) for limit, key in keys.items()}
    started = {limit for limit, key in keys.items() if now.waits.get(key, 0) > before.waits.get(key, 0)}
    refused = {limit for limit, key in keys.items() if now.refused.get(key, 0) > before.refused.get(key, 0)}
    used = [counts.get((name,), 0.0) for counts in now.used]
    per_second = [
        round(max(0.0, count - earlier.get((name,), 0.0)) / max(1e-3, now.at - before.at), 1)
        for count, earlier in zip(used, before.used, strict=True)
    ]
    is_credential = scope == "credential"
    return to.CallerDocument(
        scope=scope,
        name=name,
        limits=to.CallerLimitsDocument(
            max_concurrent_requests=limits.max_concurrent_requests,
            requests_per_second=limits.requests_per_second,
            read_bandwidth=limits.read_bandwidth_bytes_per_second,
            write_bandwidth=limits.write_bandwidth_bytes_per_second,
        ),
        running=int(now.running.get((scope, name), 0)),
        waiting=sum(waiting.values()),
        throttled={limit: int(now.waits.get(key, 0)) for limit, key in keys.items()},
        waited_seconds={limit: round(now.seconds.get(key, 0.0), 3) for limit, key in keys.items()},
        refused={limit: int(now.refused.get(key, 0)) for limit, key in keys.items()},
        used=to.CallerUse(**dict(zip(_USED, map(int, used), strict=True))) if is_credential else None,
        per_second=to.CallerRates(**dict(zip(_USED, per_second, strict=True))) if is_credential else None,
        binds=sorted(started | refused | {limit for limit, count in waiting.items() if count > 0}),
    )


_USED = ("requests", "sent_bytes", "received_bytes")

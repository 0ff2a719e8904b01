"""An S3 worker: the application behind the S3 port, served until told to stop."""

from __future__ import annotations

import asyncio

from gateway.app.bandwidth import callers_plan, names_in_metrics
from gateway.app.node import s3_application
from gateway.config import ServerSettings
from gateway.config.live import LiveSettings
from gateway.edge.asgi import S3App
from gateway.edge.prepared import PreparedRequests
from gateway.edge.s3_server import ConnectionCounts, S3Server, TlsFiles
from gateway.edge.server_state import ServerLimits
from gateway.policy.callers import Callers
from gateway.serve.child_context import ChildContext
from gateway.shared.heartbeats import Heartbeats
from gateway.telemetry.request_counts import count_refusal


async def serve_s3(context: ChildContext) -> None:
    """Serve S3 on the inherited sockets; when told to stop, answer what is in flight within the grace time."""
    config, live = context.config, context.live
    settings = live.now
    async with s3_application(
        live,
        worker=context.number,
        instance_id=config.instance_id,
        shared_directory=config.metrics_directory,
        closed=config.closed is not None,
    ) as app:
        app.audit, app.access, app.tracer = context.audit, context.access, context.tracer
        prepared = PreparedRequests(app)
        counts = ConnectionCounts(
            config.metrics_directory / "connections",
            context.number,
            settings.server.workers,
            Heartbeats(config.heartbeats),
        )
        server = S3Server(
            app,
            sockets=context.listeners,
            limits=server_limits(settings.server),
            tls=_tls(settings.server),
            prepared=prepared,
            on_refused=count_refusal,
            counts=counts,
        )
        callers = _LiveCallers(app, live, context.stop)

        async def apply_settings() -> None:
            callers.apply_settings()
            prepared.forget()
            prepared.keep_tallies(*names_in_metrics(live.now))
            server.apply_settings(_tls(live.now.server))

        try:
            grace_seconds = settings.server.shutdown_grace_seconds
            with live.following(apply_settings):
                await server.serve(context.stop, grace_seconds=grace_seconds, on_ready=context.ready)
        finally:
            counts.close()
            prepared.close()
            await callers.close()


_LOOK_SECONDS = 1.0
"""Seconds between two looks whether requests remain under earlier limits."""

_KNOWN_MAX = 8
"""Number of kept limits: more than the supervisor keeps memories for."""


class _LiveCallers:
    """The limits of callers in the present settings. Requests that have begun under other limits end under those."""

    def __init__(self, app: S3App, live: LiveSettings, stop: asyncio.Event) -> None:
        self._app = app
        self._live = live
        self._stop = stop
        self._known: list[tuple[object, Callers | None]] = []
        """Every set of limits, the current one last. Returning settings find their earlier set, which counts the
        requests still under it."""
        self._tended: set[Callers] = set()
        self._tending: set[asyncio.Task[None]] = set()
        self.apply_settings()

    def apply_settings(self) -> None:
        """StartupError where the other processes' limits cannot be shared."""
        wanted = self._live.callers, callers_plan(self._live.now)
        if self._known and self._known[-1][0] == wanted:
            return
        found = [one for one in self._known if one[0] == wanted] or [(wanted, self._app.limits())]
        self._known = [*(one for one in self._known if one[0] != wanted), *found][-_KNOWN_MAX:]
        before = self._app.callers
        self._app.callers = callers = found[0][1]
        if before is not None and before is not callers:
            before.release()
        if callers is not None and callers not in self._tended:
            self._tended.add(callers)
            task = asyncio.create_task(self._tend(callers), name="limits of callers")
            self._tending.add(task)
            task.add_done_callback(self._tending.discard)

    async def close(self) -> None:
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)

    async def _tend(self, callers: Callers) -> None:
        """Beat for other workers until the limits have no requests, or the worker must stop; then no request waits."""
        beating = asyncio.create_task(callers.beat(), name="heartbeat of callers")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            while callers is self._app.callers or not callers.is_idle:
                done, _ = await asyncio.wait((stopping, beating), timeout=_LOOK_SECONDS)
                if done:
                    callers.close()
                    await beating
        finally:
            self._tended.discard(callers)
            beating.cancel()
            stopping.cancel()
            await asyncio.gather(beating, stopping, return_exceptions=True)


def server_limits(server: ServerSettings) -> ServerLimits:
    return ServerLimits(
        head_timeout_seconds=server.head_timeout_seconds,
        body_timeout_seconds=server.body_timeout_seconds,
        keep_alive_timeout_seconds=server.keep_alive_timeout_seconds,
        max_header_bytes=server.max_header_bytes,
    )


def _tls(server: ServerSettings) -> TlsFiles | None:
    if server.certificate_file is None or server.key_file is None:
        return None
    return TlsFiles(server.certificate_file, server.key_file)

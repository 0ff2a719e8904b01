"""An S3 worker: the application behind the S3 port, served until told to stop."""

from __future__ import annotations

import asyncio

from gateway.app.bandwidth import names_in_metrics
from gateway.app.node import s3_application
from gateway.config import ServerSettings
from gateway.edge.prepared import PreparedRequests
from gateway.edge.s3_server import ConnectionCounts, S3Server, TlsFiles
from gateway.edge.server_state import ServerLimits
from gateway.policy.callers import Callers
from gateway.serve.child_config import ChildContext
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

        async def apply_settings() -> None:
            prepared.forget()
            prepared.keep_tallies(*names_in_metrics(live.now))
            server.apply_settings(_tls(live.now.server))

        assert app.callers is not None  # noqa: S101 - s3_application makes them
        tending = asyncio.create_task(_tend(app.callers, context.stop), name="limits of callers")
        try:
            grace_seconds = settings.server.shutdown_grace_seconds
            with live.following(apply_settings):
                await server.serve(context.stop, grace_seconds=grace_seconds, on_ready=context.ready)
        finally:
            counts.close()
            prepared.close()
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)


async def _tend(callers: Callers, stop: asyncio.Event) -> None:
    """Beat for other workers; when the worker must stop, no request waits any more."""
    beating = asyncio.create_task(callers.beat(), name="heartbeat of callers")
    try:
        await stop.wait()
        callers.close()
        await beating
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


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

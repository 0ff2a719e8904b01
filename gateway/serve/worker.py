"""An S3 worker: the application behind the S3 port, served until told to stop."""

from __future__ import annotations

import asyncio

from gateway.app import s3_application
from gateway.config import ServerSettings
from gateway.edge.server import S3Server, ServerLimits, TlsFiles
from gateway.edge.server.prepared import PreparedRequests
from gateway.policy.callers import Callers
from gateway.serve.child_context import ChildContext


async def serve_s3(context: ChildContext) -> None:
    """Serve S3 on the inherited sockets; when told to stop, answer what is in flight within the grace time."""
    config = context.config
    settings = config.settings
    async with s3_application(
        settings,
        worker=context.number,
        instance_id=config.instance_id,
        bandwidth=config.bandwidth,
        callers=config.callers,
        shared_directory=config.metrics_directory,
        closed=config.closed is not None,
    ) as app:
        prepared = PreparedRequests(
            app.services, app.authenticator, app.base_domains, app.observer, app.log, app.callers
        )
        server = S3Server(
            app,
            sockets=context.listeners,
            limits=_limits(settings.server),
            tls=_tls(settings.server),
            prepared=prepared,
        )
        tending = asyncio.create_task(_tend(app.callers, context.stop), name="limits of callers")
        try:
            grace_seconds = settings.server.shutdown_grace_seconds
            await server.serve(context.stop, grace_seconds=grace_seconds, on_ready=context.ready)
        finally:
            prepared.close()
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)


async def _tend(callers: Callers | None, stop: asyncio.Event) -> None:
    """Tell the other workers that this one turns; nobody waits for room any more when it is told to stop."""
    if callers is None:
        return
    beating = asyncio.create_task(callers.beat(), name="heartbeat of callers")
    try:
        await stop.wait()
        callers.close()
        await beating
    finally:
        beating.cancel()


def _limits(server: ServerSettings) -> ServerLimits:
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

"""An S3 worker: the application behind the S3 port, served until told to stop."""

from __future__ import annotations

from gateway.app import s3_application
from gateway.config import ServerSettings
from gateway.edge.server import S3Server, ServerLimits, TlsFiles
from gateway.serve.orders import Orders


async def serve_s3(orders: Orders) -> None:
    """Serve S3 on the inherited sockets; when told to stop, answer what is in flight within the grace time."""
    handover = orders.handover
    settings = handover.settings
    async with s3_application(
        settings,
        worker=orders.number,
        instance_id=handover.instance_id,
        bandwidth=handover.bandwidth,
        shared_directory=handover.metrics_directory,
        closed=handover.closed is not None,
    ) as app:
        server = S3Server(app, sockets=orders.listeners, limits=_limits(settings.server), tls=_tls(settings.server))
        await server.serve(orders.stop, grace_seconds=settings.server.shutdown_grace_seconds, on_ready=orders.ready)


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

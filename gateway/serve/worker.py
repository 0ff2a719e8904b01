"""An S3 worker: the applications behind the S3 port, and the peer port of a cluster, served until told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

from gateway.app.bandwidth import names_in_metrics
from gateway.app.node import s3_application
from gateway.config import ServerSettings
from gateway.edge.asgi import S3App
from gateway.edge.local_port import LocalPort
from gateway.edge.peer_access import PeerAccess
from gateway.edge.peer_port import PeerApp
from gateway.edge.prepared import PreparedRequests
from gateway.edge.s3_server import ConnectionCounts, S3Server, TlsFiles
from gateway.edge.server_state import ServerLimits
from gateway.policy.callers import Callers
from gateway.serve.child_config import ChildContext
from gateway.shared.heartbeats import Heartbeats
from gateway.shared.peer_bytes import PeerBytes
from gateway.shared.seen_nonces import SeenNonces
from gateway.telemetry import metrics
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
        counts = _counts(context, "connections")
        server = S3Server(
            app,
            sockets=context.listeners[: len(context.listeners) - config.peer_listeners - config.local_listeners],
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
                async with _peer_port(context, app), _local_port(context, prepared):
                    await server.serve(context.stop, grace_seconds=grace_seconds, on_ready=context.ready)
        finally:
            counts.close()
            prepared.close()
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)


def _counts(context: ChildContext, name: str) -> ConnectionCounts:
    config = context.config
    heartbeats = Heartbeats(config.heartbeats)
    return ConnectionCounts(config.metrics_directory / name, context.number, config.settings.server.workers, heartbeats)


@asynccontextmanager
async def _peer_port(context: ChildContext, app: S3App) -> AsyncIterator[None]:
    """Answer the other nodes of the cluster, if there is one; at the end wait until what is in flight is answered."""
    config, live, stop = context.config, context.live, context.stop
    settings, cluster = live.now, live.now.cluster
    if cluster is None or not config.peer_listeners:
        yield
        return
    counts = _counts(context, "peer-connections")
    with closing(counts), closing(SeenNonces(config.metrics_directory / "peer-nonces")) as nonces:
        access = PeerAccess(nonces, app.services.clock, cluster.name, cluster.secrets, cluster.advertise)
        server = S3Server(
            PeerApp(app.services, access, PeerBytes(config.metrics_directory, "sent", context.number)),
            sockets=context.listeners[len(context.listeners) - config.peer_listeners :],
            limits=server_limits(settings.server),
            tls=_tls(settings.server) if cluster.tls else None,
            on_refused=lambda _status: metrics.CLUSTER_PEER_REQUESTS.add(1, "refused"),
            counts=counts,
        )

        async def apply_settings() -> None:
            if live.now.cluster is not None:
                access.apply_settings(live.now.cluster.name, live.now.cluster.secrets)
            server.apply_settings(_tls(live.now.server))

        ready = asyncio.Event()
        grace_seconds = settings.server.shutdown_grace_seconds
        serving = asyncio.create_task(server.serve(stop, grace_seconds=grace_seconds, on_ready=ready.set), name="peers")
        serving.add_done_callback(lambda _: ready.set())
        serving.add_done_callback(lambda _: stop.set())  # a worker without its peer port must not go on
        try:
            await ready.wait()
            if serving.done():
                serving.result()
            with live.following(apply_settings):
                yield
        except BaseException:
            serving.cancel()
            raise
        finally:
            await asyncio.wait((serving,))
        serving.result()


@asynccontextmanager
async def _local_port(context: ChildContext, prepared: PreparedRequests) -> AsyncIterator[None]:
    """Answer local reads, if there is a socket for them."""
    config, first = context.config, len(context.listeners) - context.config.peer_listeners
    if not config.local_listeners:
        yield
        return
    with closing(_counts(context, "local-connections")) as counts:
        sockets, clock = context.listeners[first - config.local_listeners : first], prepared.app.services.clock
        port = LocalPort(prepared, sockets, clock, counts)
        serving = asyncio.create_task(port.serve(context.stop), name="local reads")
        serving.add_done_callback(lambda _: context.stop.set())  # as of the peer port
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait((serving,))
        if not serving.cancelled():
            serving.result()


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

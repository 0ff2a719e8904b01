"""The parts of a process by which this node is one of a cluster, made from the settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from gateway import __version__
from gateway.cluster.cluster_origin import ClusterOrigin, ClusterRoles
from gateway.cluster.hello import SILENT_TOLD, Hello, digests_of
from gateway.cluster.members import VIEW, Member, Members, View, alike
from gateway.cluster.peers import Peers
from gateway.cluster.polling import Membership, Polling, addresses_of
from gateway.config import ClusterSettings, Settings
from gateway.config.live import LiveSettings
from gateway.core.clock import Clock, SystemClock
from gateway.origin.client import KeyPair, Origin, OriginSettings
from gateway.origin.retry import OriginHealth
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials

MEMBERSHIP = "cluster.json"
"""The file in the cache directory that says since when this node has been a member."""

CONNECT_SECONDS_MAX = 1.0
CONNECTION_WAIT_SECONDS_MAX = 5.0
CONNECTIONS_MAX = 64
"""Connections of a process to one peer."""

QUIET_SECONDS_MAX = 1.0
"""Seconds after which a peer that has not answered is asked whether it lives, and in which it must say so."""

_log = structlog.get_logger("forebay.cluster")


@dataclass(frozen=True, slots=True)
class Clustered:
    """The parts by which a process belongs to a cluster. `origin` asks the other nodes, then the bucket."""

    members: Members
    origin: ClusterOrigin
    roles: ClusterRoles


@asynccontextmanager
async def clustered(
    live: LiveSettings,
    cluster: ClusterSettings,
    bucket: Origin,
    block_size_of: Callable[[str], int],
    clock: Clock,
    *,
    instance_id: str,
    shared_directory: Path | None,
    silence: OriginHealth,
) -> AsyncIterator[Clustered]:
    """Yield this process's part in the cluster."""
    async with _peers_of(live, cluster, clock, instance_id, silence) as peers:
        try:
            listed = await addresses_of(cluster.members)
        except OSError as error:  # the background process goes on trying
            _log.warning("the names in cluster.members cannot be resolved", error=str(error))
            listed = []
        own = _own_member(cluster, caches=True)
        first = [own if one == own.address else alike(own, one) for one in listed]
        file = shared_directory / VIEW if shared_directory is not None else None
        members = Members(file, first, own.address, own.zone, clock, peers.is_away)

        def view() -> View:
            return members.view

        ration, homes = max(1, cluster.fallback_requests // live.now.server.workers), live.now.homes
        origin = ClusterOrigin(bucket, peers, view, block_size_of, homes, clock, ration)
        following = asyncio.create_task(members.follow(), name="view of the cluster")
        try:
            yield Clustered(members, origin, ClusterRoles(view))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@asynccontextmanager
async def _peers_of(
    live: LiveSettings, cluster: ClusterSettings, clock: Clock, instance_id: str, silence: OriginHealth
) -> AsyncIterator[Peers]:
    settings = live.now
    credentials = StaticCredentials(_pair_of(cluster))

    def connect(address: str) -> S3Origin:
        home = _peer_settings(settings, cluster, address)
        return S3Origin(home, credentials, clock, instance_id=instance_id, silence=silence, hedges=False)

    peers = Peers(connect, cluster.secrets, clock)

    async def apply_settings() -> None:
        if live.now.cluster is not None:
            credentials.apply_settings(_pair_of(live.now.cluster))
            peers.apply_settings(live.now.cluster.secrets)

    try:
        with live.following(apply_settings):
            yield peers
    finally:
        await peers.aclose()


def _pair_of(cluster: ClusterSettings) -> KeyPair:
    return KeyPair(f"forebay-{cluster.name}", cluster.secrets[0].decode())


def _peer_settings(settings: Settings, cluster: ClusterSettings, address: str) -> OriginSettings:
    """Return how to reach a peer, which answers when it has all that it is asked for, or says that it lives."""
    patience_seconds = settings.origin.read_timeout_seconds
    return OriginSettings(
        endpoint_url=f"{'https' if cluster.tls else 'http'}://{address}",
        addressing_style="path",
        ca_bundle=settings.origin.ca_bundle if cluster.tls else None,
        connect_timeout_seconds=CONNECT_SECONDS_MAX,
        first_byte_timeout_seconds=patience_seconds,
        read_timeout_seconds=patience_seconds,
        stall_timeout_seconds=QUIET_SECONDS_MAX,
        connection_wait_seconds=CONNECTION_WAIT_SECONDS_MAX,
        max_connections=CONNECTIONS_MAX,
        max_attempts=1,
        quiet_seconds_max=QUIET_SECONDS_MAX,
    )


def hello_of(
    live: LiveSettings, cluster: ClusterSettings, members: Members, clock: Clock, *, closed: bool
) -> Callable[[], bytes]:
    """Return what makes the document for `GET /-/hello`. `closed`: this process has no cache directory."""
    digests = digests_of(live.now.homes)

    def hello() -> bytes:
        own = _own_member(live.now.cluster or cluster, caches=not closed)
        since = members.view.me.since if members.view.me is not None else None
        silent = [one.address for one in members.view.members if not one.answers]
        return Hello(
            name=cluster.node,
            address=own.address,
            version=__version__,
            zone=own.zone,
            weight=own.weight,
            caches=own.caches,
            homes=digests,
            silent=tuple(silent[:SILENT_TOLD]),
            age_seconds=max(0.0, clock.monotonic() - since) if since is not None else 0.0,
            at=clock.now(),
        ).content()

    return hello


@asynccontextmanager
async def polling(
    live: LiveSettings, instance_id: str, shared_directory: Path, silence: OriginHealth, *, closed: bool
) -> AsyncIterator[Polling | None]:
    """Find out who is in the cluster, for all processes of this node; None: it is alone.

    `closed`: there is no cache directory. This node owns nothing then, and asks the others all the same.
    """
    cluster, clock = live.now.cluster, SystemClock()
    if cluster is None:
        yield None
        return

    def own() -> Member:
        return _own_member(live.now.cluster or cluster, caches=not closed)

    membership = Membership(None if closed else live.now.cache.directory / MEMBERSHIP, cluster.name, clock)
    async with _peers_of(live, cluster, clock, instance_id, silence) as peers:
        found = Polling(cluster.members, own, membership, shared_directory / VIEW, clock, peers.hello)
        task = asyncio.create_task(found.run(), name="polling of the cluster")
        try:
            yield found
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _own_member(cluster: ClusterSettings, *, caches: bool) -> Member:
    return Member(cluster.advertise, cluster.advertise, cluster.zone, cluster.weight or 1, caches)

"""The parts of a process by which this node is one of a cluster, made from the settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from gateway import __version__
from gateway.app.registry import InRedis, in_redis, members_on_disk
from gateway.cluster.cluster_origin import ClusterOrigin, ClusterRoles
from gateway.cluster.earlier_writes import EarlierWrites
from gateway.cluster.hello import SILENT_TOLD, Hello, block_sizes_of, digests_of
from gateway.cluster.members import VIEW, Member, Members, View, alike
from gateway.cluster.peers import Peers
from gateway.cluster.polling import Membership, Polling, addresses_of
from gateway.cluster.scripts import BEAT_SECONDS
from gateway.cluster.stores import AskAll, PeerStores
from gateway.cluster.switched_registry import SwitchedRegistry
from gateway.config import ClusterSettings, Settings
from gateway.config.live import LiveSettings
from gateway.core.clock import Clock, SystemClock
from gateway.jobs.job import Unpinned
from gateway.metadata.catalog import Catalog
from gateway.operations.cluster_writes import ClusterWrites
from gateway.origin.client import KeyPair, Origin, OriginSettings
from gateway.origin.retry import OriginHealth
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials
from gateway.policy.registry import Registry
from gateway.policy.slots import Prefix, Slots
from gateway.shared.peer_bytes import PeerBytes

MEMBERSHIP = "cluster.json"
"""The file in the cache directory that says since when this node has been a member."""

WITHOUT_DIRECTORY = " (without its directory)"
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
    stores: PeerStores
    in_redis: InRedis | None

    def registry(self) -> Registry:
        """Return the process's way to the registry. Without Redis it is never asked."""
        if self.in_redis is None:
            return AskAll(self.stores, lambda _slot: False)
        redis = self.in_redis.registry
        return SwitchedRegistry(redis, AskAll(self.stores, redis.asks))

    def writes(self, catalog: Catalog, slots: Slots, clock: Clock) -> ClusterWrites:
        """Return the process's knowledge of other nodes' writes."""
        return ClusterWrites(self.registry(), self.stores, catalog, slots, clock)

    def earlier_writes(self, slots: Slots) -> EarlierWrites:
        return EarlierWrites(self.registry(), self.stores, slots)

    async def unpin_at_others(self, prefix: str) -> Unpinned:
        """As `JobDependencies.unpin_at_others`."""
        told = await self.origin.unpin(Prefix.parse(prefix))
        return Unpinned(any(told.values()), [address for address, was_pinned in told.items() if was_pinned is None])


@asynccontextmanager
async def clustered(
    live: LiveSettings,
    cluster: ClusterSettings,
    bucket: Origin,
    block_size_of: Callable[[str], int],
    clock: Clock,
    *,
    process: int,
    instance_id: str,
    shared_directory: Path | None,
    silence: OriginHealth,
) -> AsyncIterator[Clustered]:
    """Yield this process's part in the cluster."""
    async with _peers_of(live, cluster, clock, instance_id, silence) as peers:
        own = own_member(cluster, caches=True)
        first = await _first_members(cluster, own, live.now.cache.directory)
        file = shared_directory / VIEW if shared_directory is not None else None
        members = Members(file, first, own.address, own.zone, clock, peers.is_away)

        def view() -> View:
            return members.view

        received = PeerBytes(shared_directory, "received", process)
        ration, homes = max(1, cluster.fallback_requests // live.now.server.workers), live.now.homes
        origin = ClusterOrigin(bucket, peers, view, block_size_of, homes, clock, ration, received)
        following = asyncio.create_task(members.follow(), name="view of the cluster")
        try:
            async with in_redis(live.now, cluster, shared_directory, view, clock) as way:
                yield Clustered(members, origin, ClusterRoles(view), PeerStores(peers, view, homes), way)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _first_members(cluster: ClusterSettings, own: Member, directory: Path) -> list[Member]:
    """Return the members until the background process has found out who they are."""
    if cluster.redis:
        return [own, *(one for one in await members_on_disk(directory) if one.name != own.name)]
    try:
        listed = await addresses_of(cluster.members)
    except OSError as error:  # the background process goes on trying
        _log.warning("the names in cluster.members cannot be resolved", error=str(error))
        listed = []
    return [own if one == own.address else alike(own, one) for one in listed]


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
    live: LiveSettings,
    cluster: ClusterSettings,
    members: Members,
    clock: Clock,
    store: Callable[[], str],
    *,
    closed: bool,
) -> Callable[[], bytes]:
    """Return what makes the document for `GET /-/hello`. `closed`: this process has no cache directory.

    `store` returns the name of this node's buffer.
    """
    digests = digests_of(live.now.homes)

    def hello() -> bytes:
        own = own_member(live.now.cluster or cluster, caches=not closed)
        since = members.view.me.since if members.view.me is not None else None
        silent = [one.address for one in members.view.members if not one.answers]
        return Hello(
            name=cluster.node,
            address=own.address,
            version=__version__,
            zone=own.zone,
            weight=own.weight,
            caches=own.caches,
            store=store(),
            homes=digests,
            silent=tuple(silent[:SILENT_TOLD]),
            block_sizes=block_sizes_of((prefix, size) for _, prefix, size in live.now.block_sizes),
            age_seconds=max(0.0, clock.monotonic() - since) if since is not None else 0.0,
            at=clock.now(),
        ).content()

    return hello


@asynccontextmanager
async def polling(
    live: LiveSettings, instance_id: str, shared_directory: Path, silence: OriginHealth, *, closed: Callable[[], bool]
) -> AsyncIterator[Polling | None]:
    """Find out who is in the cluster, for all processes of this node; None: it is alone.

    `closed` tells whether there is no cache directory. This node owns nothing then, and asks the others all the same.
    """
    cluster, clock = live.now.cluster, SystemClock()
    if cluster is None:
        yield None
        return

    def own() -> Member:
        return own_member(live.now.cluster or cluster, caches=not closed())

    told: dict[str, Member] = {}

    async def in_redis_now(_entries: Sequence[str]) -> list[str]:
        told.clear()
        directory = shared_directory if closed() else live.now.cache.directory
        members = sorted(await members_on_disk(directory), key=lambda one: one.caches)
        told.update({one.address: one for one in members})  # a node that has its directory again is that one
        return list(dict.fromkeys((own().address, *told)))

    by_redis: dict[str, Any] = {"resolve": in_redis_now, "resolve_seconds": BEAT_SECONDS, "told": told.get}
    membership = Membership(None if closed() else live.now.cache.directory / MEMBERSHIP, cluster.name, clock)
    async with _peers_of(live, cluster, clock, instance_id, silence) as peers:
        view = shared_directory / VIEW
        more = by_redis if cluster.redis else {}
        found = Polling(cluster.members, own, membership, view, clock, peers.hello, **more)
        task = asyncio.create_task(found.run(), name="polling of the cluster")
        try:
            yield found
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def own_member(cluster: ClusterSettings, *, caches: bool) -> Member:
    """Return this node. One without its cache directory is another one in Redis.

    What the one with the directory has pending stays its own: nobody is told that there is nothing.
    """
    name = cluster.advertise
    if cluster.redis:
        name = cluster.node if caches else f"{cluster.node}{WITHOUT_DIRECTORY}"
    return Member(name, cluster.advertise, cluster.zone, cluster.weight or 1, caches)

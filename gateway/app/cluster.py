"""The parts of a process by which this node is one of a cluster, made from the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from gateway import __version__
from gateway.cluster.hello import Hello
from gateway.cluster.members import VIEW, Member, Members
from gateway.cluster.polling import Ask, Membership, Polling, addresses_of
from gateway.config import ClusterSettings, Settings
from gateway.config.live import LiveSettings
from gateway.core.clock import Clock
from gateway.origin.peer_protocol import home_digest

MEMBERSHIP = "cluster.json"
"""The file in the cache directory that says since when this node has been a member."""

_log = structlog.get_logger("forebay.cluster")


async def members_of(
    settings: Settings,
    shared_directory: Path | None,
    clock: Clock,
    is_silent: Callable[[Member], bool] = lambda _member: False,
) -> Members | None:
    """Return the members as this process knows them, and for it to follow; None: this node is alone.

    Until the background process has asked them, all those that are listed count as being like this node.
    """
    cluster = settings.cluster
    if cluster is None:
        return None
    try:
        listed = await addresses_of(cluster.members)
    except OSError as error:  # the background process goes on trying
        _log.warning("the names in cluster.members cannot be resolved", error=str(error))
        listed = []
    own = _own_member(cluster, caches=True)
    first = [own if one == own.address else Member(one, one, own.zone, own.weight) for one in listed]
    file = shared_directory / VIEW if shared_directory is not None else None
    return Members(file, first, own.address, own.zone, clock, is_silent)


def hello_of(
    live: LiveSettings, cluster: ClusterSettings, members: Members, clock: Clock, *, closed: bool
) -> Callable[[], bytes]:
    """Return what makes the document for `GET /-/hello`. `closed`: this process has no cache directory."""
    homes = {live.now.origin.endpoint_url, *(bucket.endpoint_url for bucket in live.now.buckets)}
    digests = tuple(sorted(map(home_digest, homes)))

    def hello() -> bytes:
        own = _own_member(live.now.cluster or cluster, caches=not closed)
        since = members.view.me.since if members.view.me is not None else None
        return Hello(
            name=cluster.node,
            address=own.address,
            version=__version__,
            zone=own.zone,
            weight=own.weight,
            caches=own.caches,
            homes=digests,
            age_seconds=max(0.0, clock.monotonic() - since) if since is not None else 0.0,
            at=clock.now(),
        ).content()

    return hello


def polling(
    live: LiveSettings, ask: Ask, shared_directory: Path, clock: Clock, *, is_closed: Callable[[], bool]
) -> Polling | None:
    """Return what finds out who is in the cluster; None: this node is alone."""
    cluster = live.now.cluster
    if cluster is None:
        return None
    file = None if is_closed() else live.now.cache.directory / MEMBERSHIP

    def own() -> Member:
        return _own_member(live.now.cluster or cluster, caches=not is_closed())

    membership = Membership(file, cluster.name, clock)
    return Polling(cluster.members, own, membership, shared_directory / VIEW, clock, ask)


def _own_member(cluster: ClusterSettings, *, caches: bool) -> Member:
    return Member(cluster.advertise, cluster.advertise, cluster.zone, cluster.weight or 1, caches)

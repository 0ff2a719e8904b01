"""The cluster as this node knows it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from starlette.requests import Request

from gateway import __version__
from gateway.admin.backends import Backends, opened
from gateway.admin.operations import CLOSED, GUARDED, RefusedRequest, operation
from gateway.api import documents as to
from gateway.cluster.hello import digests_of
from gateway.cluster.members import Member
from gateway.cluster.polling import Heard, Polling
from gateway.config import ClusterSettings, Settings
from gateway.config.live import LiveSettings
from gateway.core.clock import Clock
from gateway.origin.peer_protocol import VERSION
from gateway.shared.peer_bytes import bytes_by_peer, digest
from gateway.telemetry import metric_reading, metrics
from gateway.telemetry.metric_reading import MetricReading


class ClusterApi:
    def __init__(self, live: LiveSettings, metrics_directory: Path, lent: Backends, clock: Clock) -> None:
        self._live = live
        self._metrics_directory = metrics_directory
        self._lent = lent
        self._clock = clock

    @operation(
        "GET /api/v1/cluster",
        "The members of the cluster, as this node knows them.",
        to.ClusterDocument,
        {**GUARDED, 404: "This node is in no cluster.", **CLOSED},
    )
    async def cluster(self, _request: Request) -> to.ClusterDocument:
        if self._live.now.cluster is None:
            raise RefusedRequest(404, "this node is in no cluster: its settings have no [cluster]")
        polling, directory = opened(self._lent.cluster), self._metrics_directory
        reading = await asyncio.to_thread(MetricReading, directory)
        return await cluster_document(self._live.now, self._live.now.cluster, polling, reading, directory, self._clock)


async def cluster_document(
    settings: Settings,
    cluster: ClusterSettings,
    polling: Polling,
    reading: MetricReading,
    directory: Path,
    clock: Clock,
) -> to.ClusterDocument:
    """Return the members as `polling` knows them, and what this node gave and took, as `directory` has it by node."""
    sent = await asyncio.to_thread(bytes_by_peer, directory, "sent")
    received = await asyncio.to_thread(bytes_by_peer, directory, "received")
    members, homes = polling.members, digests_of(settings.homes)
    weights = Counter[str]()
    for one in members:
        weights[one.zone] += one.weight if one.caches else 0

    def document(member: Member) -> to.ClusterMember:
        is_me = member.address == cluster.advertise
        heard = polling.heard.get(member.address, Heard())
        hello = heard.hello
        total = weights[member.zone] if member.caches else 0
        return to.ClusterMember(
            name=cluster.node if is_me else hello.name if hello is not None else "",
            address=member.address,
            this_node=is_me,
            zone=member.zone,
            weight=member.weight,
            share=member.weight / total if total else 0.0,
            state=polling.state_of(member),
            problem=heard.problem or _of_protocol(heard),
            version=__version__ if is_me else hello.version if hello is not None else None,
            age_seconds=clock.monotonic() - member.since if member.since is not None else None,
            heard_at=heard.at if hello is not None else None,
            clock_seconds=heard.clock_seconds if hello is not None else None,
            same_homes=hello.homes == homes if hello is not None else None,
            reaches_this_node=cluster.advertise not in hello.silent if hello is not None else None,
            sent_bytes=sent[digest(member.address)],
            received_bytes=received[digest(member.address)],
        )

    (moved,) = metric_reading.by_label(reading, "direction", metrics.CLUSTER_PEER_BYTES)
    return to.ClusterDocument(
        name=cluster.name,
        node=cluster.node,
        address=cluster.advertise,
        zone=cluster.zone,
        sent_bytes=int(moved.get("sent", 0)),
        received_bytes=int(moved.get("received", 0)),
        members=[document(one) for one in members],
    )


def _of_protocol(heard: Heard) -> str | None:
    if heard.hello is None or heard.hello.protocol == VERSION:
        return None
    return f"it speaks version {heard.hello.protocol} of the protocol between nodes, this node {VERSION}"

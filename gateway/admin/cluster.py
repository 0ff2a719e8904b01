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
from gateway.cluster.members import Member
from gateway.cluster.polling import Heard
from gateway.config.live import LiveSettings
from gateway.core.clock import Clock
from gateway.origin.peer_protocol import VERSION
from gateway.telemetry import metric_reading, metrics


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
        settings = self._live.now.cluster
        if settings is None:
            raise RefusedRequest(404, "this node is in no cluster: its settings have no [cluster]")
        polling = opened(self._lent.cluster)
        members = polling.members
        weights = Counter[str]()
        for one in members:
            weights[one.zone] += one.weight if one.caches else 0

        def document(member: Member) -> to.ClusterMember:
            is_me = member.address == settings.advertise
            heard = polling.heard.get(member.address, Heard())
            hello = heard.hello
            total = weights[member.zone] if member.caches else 0
            return to.ClusterMember(
                name=settings.node if is_me else hello.name if hello is not None else "",
                address=member.address,
                this_node=is_me,
                zone=member.zone,
                weight=member.weight,
                share=member.weight / total if total else 0.0,
                state=_state(member, heard, is_me=is_me),
                problem=heard.problem or _of_protocol(heard),
                version=__version__ if is_me else hello.version if hello is not None else None,
                age_seconds=self._clock.monotonic() - member.since if member.since is not None else None,
                heard_at=heard.at if hello is not None else None,
                clock_seconds=heard.clock_seconds if hello is not None else None,
            )

        read = self._metrics_directory, "direction", metrics.CLUSTER_PEER_BYTES
        (moved,) = await asyncio.to_thread(metric_reading.by_label, *read)
        return to.ClusterDocument(
            name=settings.name,
            node=settings.node,
            address=settings.advertise,
            zone=settings.zone,
            sent_bytes=int(moved.get("sent", 0)),
            received_bytes=int(moved.get("received", 0)),
            members=[document(one) for one in members],
        )


def _state(member: Member, heard: Heard, *, is_me: bool) -> str:
    if heard.problem is not None:
        return "unknown" if heard.hello is None else "silent"
    if heard.hello is None and not is_me:
        return "unknown"
    return "up" if member.caches else "closed"


def _of_protocol(heard: Heard) -> str | None:
    if heard.hello is None or heard.hello.protocol == VERSION:
        return None
    return f"it speaks version {heard.hello.protocol} of the protocol between nodes, this node {VERSION}"

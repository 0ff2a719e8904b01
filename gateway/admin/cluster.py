"""The cluster as this node knows it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request

from gateway import __version__
from gateway.admin.backends import Backends, opened
from gateway.admin.operations import CLOSED, GUARDED, KIND, RefusedRequest, body, operation, posted_json
from gateway.api import documents as to
from gateway.cluster.hello import Hello, block_sizes_of, digests_of
from gateway.cluster.members import Member
from gateway.cluster.polling import Heard, Polling
from gateway.config import ClusterSettings, Settings
from gateway.config.live import LiveSettings
from gateway.core.clock import Clock
from gateway.core.errors import RegistryAway
from gateway.origin.peer_protocol import VERSION
from gateway.shared.peer_bytes import bytes_by_peer, digest
from gateway.telemetry import metric_reading, metrics
from gateway.telemetry.metric_reading import MetricReading

if TYPE_CHECKING:
    from gateway.cluster.registry_beats import RegistryBeats


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
        settings, cluster = self._live.now, self._live.now.cluster
        return await cluster_document(settings, cluster, polling, reading, directory, self._clock, self._lent.registry)

    @operation(
        "POST /api/v1/cluster/forget",
        "Give up a node that does not come back, and what only it has pending.",
        to.ForgottenNode,
        {
            **GUARDED,
            **KIND,
            400: "The document names no node.",
            404: "There is no such node.",
            409: "It is alive, or Redis cannot be asked.",
            **CLOSED,
        },
        body=body("node", node={"type": "string"}, only_ask={"type": "boolean", "default": False}),
    )
    async def forget(self, request: Request) -> to.ForgottenNode:
        document, beats = await posted_json(request), self._lent.registry
        node = document.get("node") if isinstance(document, dict) else None
        if not isinstance(node, str):
            raise RefusedRequest(400, 'the document must be {"node": "its name"}')
        if not isinstance(only_ask := document.get("only_ask", False), bool):
            raise RefusedRequest(400, "only_ask must be true or false")
        try:
            pending = await beats.forget_node(node, only_ask=only_ask) if beats is not None else 0
        except RegistryAway as error:
            raise RefusedRequest(409, f"Redis cannot be asked: {error}") from error
        if beats is None or (pending == 0 and node not in beats.listed.members):
            raise RefusedRequest(404, f"Redis knows no node {node!r}: forebay cluster status shows the names")
        if pending is None:
            raise RefusedRequest(409, f"the node {node!r} is alive: stop it first")
        return to.ForgottenNode(node=node, pending=pending, forgotten=not only_ask)


async def cluster_document(
    settings: Settings,
    cluster: ClusterSettings,
    polling: Polling,
    reading: MetricReading,
    directory: Path,
    clock: Clock,
    beats: RegistryBeats | None,
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
            name=cluster.node if is_me else hello.name if hello is not None else _told_name(member),
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
            differing_blocks=_differing_blocks(settings, hello) if hello is not None else [],
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
        redis=_redis_document(beats) if beats is not None else None,
        members=[document(one) for one in members],
    )


def _differing_blocks(settings: Settings, hello: Hello) -> list[to.DifferingBlocks]:
    found = list[to.DifferingBlocks]()
    for name, prefix, here in settings.block_sizes:
        [told_as] = block_sizes_of([(prefix, here)])
        there = hello.block_sizes.get(told_as, here)
        if there != here:
            found.append(to.DifferingBlocks(slot=name, here_bytes=here, there_bytes=there))
    return found


def _told_name(member: Member) -> str:
    """Return the name that Redis has told; empty without Redis: then the address is the name."""
    return member.name if member.name != member.address else ""


def _redis_document(beats: RegistryBeats) -> to.RedisState:
    about = beats.about

    def number(name: str) -> int:
        told = about.get(name, "")
        return int(told) if told.isdecimal() else 0

    return to.RedisState(
        believed=not beats.problem,
        problem=beats.problem or None,
        since=beats.believed_since,
        version=about.get("valkey_version") or about.get("redis_version", ""),
        policy=about.get("maxmemory_policy", ""),
        used_bytes=number("used_memory"),
        limit_bytes=number("maxmemory"),
        clients=number("connected_clients"),
        clients_max=number("maxclients"),
        replicas=number("connected_slaves"),
        waits_for_replicas="min_slaves_good_slaves" in about,
        clock_seconds=beats.clock_seconds,
    )


def _of_protocol(heard: Heard) -> str | None:
    if heard.hello is None or heard.hello.protocol == VERSION:
        return None
    return f"it speaks version {heard.hello.protocol} of the protocol between nodes, this node {VERSION}"

"""The parts of a process by which it keeps, or asks, the registry of its cluster in Redis, made from the settings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway.cluster.belief import SharedBelief
from gateway.cluster.members import Member, View
from gateway.cluster.scripts import prefix_of
from gateway.config import ClusterSettings, Settings
from gateway.config.cluster_checks import redis_url
from gateway.config.live import LiveSettings
from gateway.core.clock import Clock
from gateway.metadata.catalog import Catalog
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.pending_claims import PendingClaims

if TYPE_CHECKING:
    from gateway.cluster.redis_link import RedisLink
    from gateway.cluster.redis_registry import RedisRegistry
    from gateway.cluster.registry_beats import RegistryBeats

MEMBERS = "cluster-members.json"
"""The file with the members as Redis had them last: in the cache directory, or in memory if that is closed."""

_BELIEF = "registry"
"""The file in the shared directory that says whether Redis is believed."""


@dataclass(frozen=True, slots=True)
class InRedis:
    """A process's way to the registry."""

    link: RedisLink
    belief: SharedBelief
    registry: RedisRegistry


@asynccontextmanager
async def in_redis(
    settings: Settings, cluster: ClusterSettings, shared_directory: Path | None, view: Callable[[], View], clock: Clock
) -> AsyncIterator[InRedis | None]:
    """Yield the way to the registry; None: there is none. Nothing is connected before the first question."""
    if not cluster.redis or shared_directory is None:
        yield None
        return
    from gateway.cluster.redis_link import RedisLink, RedisPlace
    from gateway.cluster.redis_registry import RedisRegistry

    url, ca = redis_url(cluster.redis), settings.origin.ca_bundle
    assert url is not None  # noqa: S101 - it was checked
    password, sentinel_password = (
        one.get_secret_value() if one is not None else None
        for one in (cluster.redis_password, cluster.sentinel_password)
    )
    place = RedisPlace(
        *(url.places, url.service, url.database, cluster.redis_user, password, sentinel_password, url.tls),
        (ca.content or b"").decode() if ca is not None else None,
    )
    link = RedisLink(place, prefix_of(cluster.name), clock)
    belief = SharedBelief(shared_directory / _BELIEF)
    try:
        async with _running({"link to Redis": link.run()}):
            yield InRedis(link, belief, RedisRegistry(link, belief.read, view, clock))
    finally:
        belief.close()


@asynccontextmanager
async def beating(
    live: LiveSettings,
    way: InRedis,
    own: Callable[[], Member],
    catalog: Catalog,
    buffer: WritebackBuffer | None,
    file: Path,
    clock: Clock,
) -> AsyncIterator[RegistryBeats]:
    """Keep the registry, for all processes of this node, and its members in `file`.

    `own` is this node as other nodes reach it.
    """
    from gateway.cluster.registry_beats import RegistryBeats

    claims = PendingClaims(buffer.journal) if buffer is not None else None

    def told() -> Member:
        asking = [slot for slot in live.now.slots if slot.asks_other_nodes]
        prefixes, pending = {str(slot.prefix) for slot in asking}, claims.slots() if claims is not None else ()
        if claims is not None and not {slot.name for slot in asking}.issuperset(pending):
            prefixes.update(f"s3://{bucket}/" for bucket in claims.buckets())
        acknowledges = bool(pending) or any(slot.is_buffered for slot in asking)
        store = buffer.node_id if buffer is not None and acknowledges else ""
        return replace(own(), prefixes=tuple(sorted(prefixes)), store=store)

    async def forget() -> None:
        for bucket in {slot.prefix.bucket for slot in live.now.slots if way.registry.asks(slot)}:
            catalog.forget_bucket(bucket or None)

    way.link.store = buffer.node_id if buffer is not None else ""
    beats = RegistryBeats(way.link, way.belief, told, claims, forget, file, clock)
    async with _running({"registry": beats.run()}):
        yield beats


async def members_on_disk(directory: Path) -> list[Member]:
    """Return the members as Redis had them last."""
    from gateway.cluster.registry_beats import member_of, read_members

    listed = await asyncio.to_thread(read_members, directory / MEMBERS)
    return [member_of(name, info) for name, info in listed.members.items()]


@asynccontextmanager
async def _running(work: dict[str, Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(one, name=name) for name, one in work.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

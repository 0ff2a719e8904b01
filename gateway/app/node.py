"""Composition root: builds each process's parts from the settings, and takes them down again."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from gateway.app.bandwidth import CapacityFinder, SharedLimits
from gateway.app.cluster import Clustered, clustered, hello_of, own_member
from gateway.app.origins import OriginKeys, Replicas, http_origin, origin_settings, routed_origin, store_origin
from gateway.app.registry import MEMBERS, beating
from gateway.app.write_back import (
    Flushing,
    FlushServices,
    flushing,
    follow_slots,
    is_needed,
    no_claim,
    opened_buffer,
    reports_of,
)
from gateway.blocks.cache import BlockCache, PassthroughCache
from gateway.blocks.layout import BlockSettings
from gateway.blocks.scrubber import Scrubber, ScrubSettings
from gateway.cluster.members import Member
from gateway.cluster.stores import PeerStores
from gateway.config import Settings
from gateway.config.entries import EventSourceSettings
from gateway.config.live import LiveSettings
from gateway.core.clock import Clock, SystemClock
from gateway.core.model import ObjectKey
from gateway.edge.access import Authenticator, ConfiguredKeyring, Key, Keyring, OriginKeyring
from gateway.edge.asgi import S3App
from gateway.jobs.event_feed import EventFeed, FeedPlan, region_of_queue
from gateway.jobs.explaining import Explainer
from gateway.jobs.indexing.indexes import Indexes, IndexPlan
from gateway.jobs.job import JobDependencies, JobStore
from gateway.jobs.runner import Jobs
from gateway.jobs.snapshot_service import SnapshotService
from gateway.metadata.bucket_metadata import BucketMetadataCache
from gateway.metadata.catalog import Catalog
from gateway.metadata.opening import ANSWERS, discard_catalog
from gateway.metadata.snapshots.registry import SnapshotRegistry
from gateway.metadata.snapshots.store import SnapshotStore
from gateway.operations.context import AppContext
from gateway.operations.visibility import OriginEvents
from gateway.origin.client import Origin, OriginCredentials, OriginSettings, begin_read_of
from gateway.origin.peer_protocol import Roles
from gateway.origin.retry import OriginHealth
from gateway.origin.s3 import OwnKeyOrigin, S3Origin
from gateway.origin.signing import CredentialsOf
from gateway.origin.stores.directory.store import DirectoryStore
from gateway.origin.stores.face import StoreOrigin
from gateway.origin.traffic_meter import MeteredOrigin, OriginMeter
from gateway.policy.registry import BOUND_SECONDS_MAX
from gateway.policy.slots import Grant, Slot, Slots
from gateway.shared.heartbeats import BACKGROUND_PROCESS
from gateway.shared.recent_requests import RecentRequests
from gateway.telemetry import metrics
from gateway.writeback.admin.writeback_admin import NoWriteback, WritebackAdmin
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.checkpoints.reads import CheckpointReads

if TYPE_CHECKING:
    from gateway.cluster.registry_beats import RegistryBeats
    from gateway.writeback.admin.flush_report import FlushReport

_log = structlog.get_logger("forebay.writeback")

_LEARNED_SECONDS_MAX = 1.0
"""The most seconds that changed slots wait until what was learned is written down."""

SNAPSHOTS = "snapshots"
"""The directory of snapshots in the cache directory."""

CHECKS_AT_ONCE = 8
"""Parallel questions to one home in its check."""

_SILENCE = "origin-silence"
"""The file in the shared directory by which processes report silent origins to each other."""


@dataclass(frozen=True, slots=True)
class _Node:
    """The parts of every process of the gateway. `process` is its number."""

    process: int

    clock: Clock
    keys: OriginKeys
    origin: Origin
    slots: Slots
    limits: SharedLimits
    recent: RecentRequests
    block_settings: BlockSettings
    check_place: Callable[[ObjectKey], Awaitable[bool]] | None
    cluster: Clustered | None
    """None: this node is alone, and asks no other."""

    reads_near: Callable[[ObjectKey, str], bool]
    """Returns True if a replica probably gives the bytes of a key of this slot, once its version is known."""

    @property
    def roles(self) -> Roles | None:
        return self.cluster.roles if self.cluster is not None else None


@asynccontextmanager
async def _node(
    live: LiveSettings, process: int, *, instance_id: str, shared_directory: Path | None
) -> AsyncIterator[_Node]:
    settings, clock = live.now, SystemClock()
    async with AsyncExitStack() as stack:
        recent = stack.enter_context(_recent_requests(shared_directory, process))
        metrics.CACHE_CAPACITY_BYTES.set(settings.cache.capacity_bytes)
        keys = OriginKeys(settings, clock)
        stack.push_async_callback(keys.aclose)
        await keys.start()
        limits = SharedLimits(live, clock, process)
        stack.push_async_callback(limits.request_rates.aclose)
        meter = OriginMeter(limits.bandwidth, limits.request_rates, recent)
        silence = silence_board(shared_directory)

        connected: list[S3Origin] = []
        stores: dict[str, StoreOrigin] = {}

        def connect(home: OriginSettings, signs: CredentialsOf | None) -> Origin:
            if (store := store_origin(home, clock, on_attempt=meter.attempt)) is not None:
                stores[home.endpoint_url or ""] = store
                return store
            send = partial(
                S3Origin,
                credentials=keys.own,
                clock=clock,
                instance_id=instance_id,
                credentials_of=signs or keys.of,
                on_attempt=meter.attempt,
                on_hedge=lambda outcome: metrics.ORIGIN_HEDGES.add(1, outcome),
                silence=silence,
                rates=meter,
            )
            sender, made = http_origin(home, clock, send)
            connected.append(sender)
            if isinstance(made, StoreOrigin):
                stores[home.endpoint_url or ""] = made
            return made

        replicas = Replicas(settings, keys, clock)
        origin = MeteredOrigin(OwnKeyOrigin(routed_origin(settings, connect, replicas), keys.refused), meter)
        stack.push_async_callback(origin.aclose)
        finder = CapacityFinder(limits.bandwidth, connected, clock, tells=process == BACKGROUND_PROCESS)
        stack.push_async_callback(finder.close)
        slots = Slots(slots_of(settings))
        block_settings = _block_settings(settings, slots, shared_directory)
        cluster: Clustered | None = None
        if settings.cluster is not None:
            of_cluster = clustered(
                live,
                settings.cluster,
                origin,
                block_settings.block_size_of,
                clock,
                process=process,
                instance_id=instance_id,
                shared_directory=shared_directory,
                silence=silence,
            )
            cluster = await stack.enter_async_context(of_cluster)
        first = cluster.origin if cluster is not None else origin

        async def check_place(key: ObjectKey) -> bool:
            at = stores.get(settings.homes.of(key.bucket))
            if at is not None:
                await at.store.check_place(key)
            return at is not None and isinstance(at.store, DirectoryStore)

        places = check_place if stores else None
        of_node = limits, recent, block_settings, places, cluster, replicas.reads_near
        node = _Node(process, clock, keys, first, slots, *of_node)

        async def apply_settings() -> None:
            metrics.CACHE_CAPACITY_BYTES.set(live.now.cache.capacity_bytes)
            node.slots.apply_settings(slots_of(live.now))
            await keys.apply_settings(live.now)
            replicas.apply_settings(live.now)
            limits.apply_settings()
            finder.apply_settings()

        stack.enter_context(live.following(apply_settings))
        yield node


def slots_of(settings: Settings) -> list[Slot]:
    """Return the slots as this node follows them: stamps in the registry outlive what is believed, in all of them."""
    if settings.cluster is None or not settings.cluster.redis:
        return list(settings.slots)
    return [one.believing_at_most(BOUND_SECONDS_MAX) if one.asks_other_nodes else one for one in settings.slots]


def silence_board(shared_directory: Path | None) -> OriginHealth:
    """Return the board on which processes that share this directory report silent or failed origins to each other."""
    return OriginHealth(shared_directory / _SILENCE if shared_directory is not None else None)


@asynccontextmanager
async def origin_for_checks(live: LiveSettings, instance_id: str) -> AsyncIterator[tuple[Origin, OriginKeys]]:
    """Yield the origins, which tell their refusals of the keys, each asked once and for a short time; and the keys."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        keys = OriginKeys(live.now, clock)
        stack.push_async_callback(keys.aclose)
        await keys.start()

        def connect(home: OriginSettings, signs: CredentialsOf | None) -> Origin:
            impatient = replace(home, max_attempts=1, max_connections=CHECKS_AT_ONCE)
            if (store := store_origin(impatient, clock)) is not None:
                return store
            signing = signs or keys.of
            send = partial(S3Origin, credentials=keys.own, clock=clock, instance_id=instance_id, credentials_of=signing)
            return http_origin(impatient, clock, send)[1]

        origin = routed_origin(live.now, connect, Replicas(live.now, keys, clock))
        stack.push_async_callback(origin.aclose)

        async def apply_settings() -> None:
            await keys.apply_settings(live.now)

        stack.enter_context(live.following(apply_settings))
        yield origin, keys


@asynccontextmanager
async def _directory(settings: Settings, node: _Node, worker: int) -> AsyncIterator[tuple[BlockCache, Catalog]]:
    """Open the cache directory; StartupError when it is a mistake, StoreUnavailable when the disk fails."""
    blocks = await BlockCache.open(node.block_settings, node.origin, worker=worker, clock=node.clock, roles=node.roles)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(blocks.close)
        catalog = await Catalog.open(
            settings.cache.directory / "catalog",
            node.origin,
            homes=settings.homes,
            clock=node.clock,
            slots=node.slots,
            process=worker,
            roles=node.roles,
        )
        stack.push_async_callback(catalog.close)
        yield blocks, catalog


@asynccontextmanager
async def _no_directory(node: _Node) -> AsyncIterator[tuple[PassthroughCache, Catalog]]:
    yield (
        PassthroughCache.without_directory(node.origin, node.clock),
        Catalog.switched_off(node.origin, node.clock),
    )


@asynccontextmanager
async def s3_application(
    live: LiveSettings,
    *,
    worker: int,
    instance_id: str,
    shared_directory: Path | None = None,
    closed: bool = False,
) -> AsyncIterator[S3App]:
    """Yield the S3 port's application of worker slot `worker`, with everything behind it; it follows changed settings.

    `instance_id` is the same in all workers of one `forebay serve`. Works with the origin away: it is asked nothing.
    All processes map files of `shared_directory` (BlockSettings). `closed`: no worker touches the cache directory, and
    the origin answers all. Otherwise StoreUnavailable when the disk under it fails.
    """
    settings = live.now
    async with (
        _node(live, worker, instance_id=instance_id, shared_directory=shared_directory) as node,
        _no_directory(node) if closed else _directory(settings, node, worker) as (blocks, catalog),
        AsyncExitStack() as stack,
    ):
        way = node.cluster.in_redis if node.cluster is not None else None

        async def buffer_if_needed() -> WritebackBuffer | None:
            opened = opened_buffer(live.now, worker, node.slots, node.clock, blocks)
            buffer = await stack.enter_async_context(opened)
            if way is not None and buffer is not None:
                way.link.store = buffer.node_id
            return buffer

        answers = BucketMetadataCache(
            settings.cache.directory / "catalog" / ANSWERS,
            catalog.listing.moment,
            ttl_seconds=0 if closed else settings.cache.bucket_metadata_ttl_seconds,
        )
        authenticator = Authenticator(
            _keyring(settings, node.keys.own),
            node.clock,
            allow_unsigned=settings.server.allow_unsigned,
            allow_signature_v2=settings.server.allow_signature_v2,
        )

        def store_name() -> str:
            return services.writeback.node_id if services.writeback is not None else ""

        def flush_report() -> FlushReport | None:
            if not made and services.writeback is not None:
                reporting = reports_of(
                    settings, services.writeback, node.origin, node.slots, node.clock, shared_directory
                )
                made.append(stack.enter_context(reporting))
            return made[0] if made else None

        made: list[FlushReport] = []
        services = AppContext(
            node.origin,
            catalog,
            answers,
            blocks,
            node.slots,
            node.clock,
            writeback=None if closed else await buffer_if_needed(),
            buffer_closed=closed and is_needed(settings),
            homes=settings.homes,
            begin_read=begin_read_of(node.origin),
            reads_near=node.reads_near,
            check_place=node.check_place,
            roles=None if closed else node.roles,
            hello=_hello(live, node, store_name, closed=closed),
            reads=stack.enter_context(_counted_reads(shared_directory, worker, node.clock)),
            flush_report=flush_report,
        )
        if node.cluster is not None:
            services.cluster_writes = node.cluster.writes(catalog, node.slots, node.clock)
        stack.push_async_callback(answers.close)
        services.snapshots = snapshots = SnapshotRegistry(None, node.slots, node.clock, settings.homes)
        stack.push_async_callback(snapshots.close)
        stack.push_async_callback(services.close)

        async def follow_frozen() -> None:
            if not closed:
                await snapshots.apply_settings(lambda: SnapshotStore(live.now.cache.directory / SNAPSHOTS))

        async def apply_settings() -> None:
            authenticator.apply_settings(_keyring(live.now, node.keys.own))
            services.rights.forget()
            if not closed:
                with suppress(TimeoutError):  # what was learned under the slots of before can be contradicted then
                    async with asyncio.timeout(_LEARNED_SECONDS_MAX):
                        await catalog.settle()
                await blocks.apply_settings(live.now.cache.capacity_bytes)
                if services.writeback is None:
                    services.writeback = await buffer_if_needed()
                else:
                    await follow_slots(services.writeback, node.slots, blocks)
            services.buffer_closed = closed and is_needed(live.now)
            await follow_frozen()

        await follow_frozen()
        stack.enter_context(live.following(apply_settings))
        yield S3App(
            services,
            authenticator,
            tuple(settings.server.base_domains),
            instance_id,
            callers=node.limits.callers(),
            recent=node.recent,
        )


@dataclass(eq=False, slots=True)
class BackgroundServices:
    """The background process's work on the cache directory. `is_outdated` is set when it must be opened anew."""

    jobs: Jobs
    explainer: Explainer
    events: OriginEvents
    indexes: Indexes
    blocks: BlockCache
    scrubber: Scrubber | None
    snapshots: SnapshotService
    flushing: Flushing | None
    beats: RegistryBeats | None
    stores: PeerStores | None
    """The other nodes' buffers; None without a cluster."""
    feeds: Sequence[EventFeed]
    settle: Callable[[], Awaitable[None]]
    """Brings the disk in line with the new settings, once all processes keep to them."""

    is_outdated: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def writeback(self) -> WritebackAdmin | NoWriteback:
        return self.flushing.admin if self.flushing is not None else NoWriteback()


@asynccontextmanager
async def background_services(
    live: LiveSettings, *, instance_id: str, shared_directory: Path | None = None
) -> AsyncIterator[BackgroundServices]:
    """Run the background process's part: jobs, indexes, and following changes of settings.

    StartupError when the directory is a mistake, StoreUnavailable when the disk under it fails.
    """
    settings = live.now
    async with (
        _node(live, BACKGROUND_PROCESS, instance_id=instance_id, shared_directory=shared_directory) as node,
        _directory(settings, node, BACKGROUND_PROCESS) as (blocks, catalog),
        opened_buffer(settings, BACKGROUND_PROCESS, node.slots, node.clock, blocks) as buffer,
        _beating(live, node, catalog, buffer, settings.cache.directory / MEMBERS) as beats,
    ):
        snapshots = await asyncio.to_thread(SnapshotStore, settings.cache.directory / SNAPSHOTS)
        tools = JobDependencies(
            node.origin,
            catalog,
            blocks,
            node.slots,
            node.clock,
            snapshots,
            homes=settings.homes,
            unpin_at_others=node.cluster.unpin_at_others if node.cluster is not None else None,
        )
        store = await asyncio.to_thread(JobStore, settings.cache.directory / "jobs")
        jobs = await Jobs.open(tools, store)
        indexes = Indexes.open(tools, _index_plans(settings, store.scratch))
        feeds: Sequence[EventFeed] = ()
        followed = [Slots(node.slots)]
        """Slots that the listing index may still know, the present ones last."""

        async def apply_settings() -> None:
            await blocks.apply_settings(live.now.cache.capacity_bytes)
            if flusher is not None:
                await follow_slots(flusher.buffer, node.slots, blocks)
                flusher.follow_slots()
            elif is_needed(live.now):
                kept.is_outdated.set()
            await indexes.apply_settings(_index_plans(live.now, store.scratch))
            followed.append(Slots(node.slots))

        async def settle() -> None:
            before, followed[:] = list(followed), followed[-1:]
            for slots in before:
                await catalog.listing.trim(slots)
            await blocks.move_between_slots()

        try:
            others = node.cluster.stores if node.cluster is not None else None
            events = OriginEvents(catalog, blocks, node.slots, others)
            feeds = [_feed(one, settings, node, events) for one in settings.event_sources]
            service = SnapshotService(tools, jobs)
            settled = beats.settle if beats is not None else no_claim
            earlier = node.cluster.earlier_writes(node.slots) if node.cluster is not None else None
            services = FlushServices(node.origin, catalog, blocks, node.slots, node.clock, settled, earlier)
            async with flushing(settings, buffer, services, shared_directory) as flusher:
                scrubber = _scrubber(settings, blocks)
                kept = BackgroundServices(
                    *(
                        jobs,
                        Explainer(tools),
                        events,
                        indexes,
                        blocks,
                        scrubber,
                        service,
                        flusher,
                        beats,
                        others,
                        feeds,
                        settle,
                    )
                )
                with live.following(apply_settings):
                    if live.now is not settings:  # changed while all this was opened
                        await apply_settings()
                    yield kept
        finally:
            for feed in feeds:
                await feed.aclose()
            await indexes.close()
            await jobs.close()
            snapshots.close()


_NOT_IN_NAMES = re.compile("[^A-Za-z0-9._-]")


def _feed(one: EventSourceSettings, settings: Settings, node: _Node, events: OriginEvents) -> EventFeed:
    name = settings.cluster.node if settings.cluster is not None else socket.gethostname()
    plan = FeedPlan(
        one.queue_url,
        one.region or region_of_queue(one.queue_url) or settings.origin.region,
        one.canary,
        one.canary_window_seconds,
        _NOT_IN_NAMES.sub("-", name),
    )
    keys, wanted = node.keys, one.origin_credentials
    return EventFeed(plan, events.apply, node.origin, lambda: keys.named(wanted), node.clock, origin_settings(settings))


@asynccontextmanager
async def services_without_directory(
    live: LiveSettings, *, instance_id: str, shared_directory: Path
) -> AsyncIterator[RegistryBeats | None]:
    """Run the background process's part while there is no cache directory: other nodes' writes are known, and told.

    None: there is no registry.
    """
    async with (
        _node(live, BACKGROUND_PROCESS, instance_id=instance_id, shared_directory=shared_directory) as node,
        _no_directory(node) as (_, catalog),
        _beating(live, node, catalog, None, shared_directory / MEMBERS, closed=True) as beats,
    ):
        yield beats


def _hello(live: LiveSettings, node: _Node, store: Callable[[], str], *, closed: bool) -> Callable[[], bytes]:
    if node.cluster is None or live.now.cluster is None:
        return bytes
    return hello_of(live, live.now.cluster, node.cluster.members, node.clock, store, closed=closed)


@asynccontextmanager
async def _beating(
    live: LiveSettings,
    node: _Node,
    catalog: Catalog,
    buffer: WritebackBuffer | None,
    file: Path,
    *,
    closed: bool = False,
) -> AsyncIterator[RegistryBeats | None]:
    """Keep the registry for all processes of this node, and its members in `file`; None: there is none."""
    cluster, way = live.now.cluster, node.cluster.in_redis if node.cluster is not None else None
    if cluster is None or way is None:
        yield None
        return

    def own() -> Member:
        return own_member(live.now.cluster or cluster, caches=not closed)

    async with beating(live, way, own, catalog, buffer, file, node.clock) as beats:
        yield beats


@contextmanager
def _counted_reads(directory: Path | None, worker: int, clock: Clock) -> Iterator[CheckpointReads | None]:
    """Yield the counter of checkpoint reads; None without a shared directory, or room in it."""
    try:
        reads = CheckpointReads(directory, worker, clock) if directory is not None else None
    except OSError as error:
        _log.warning("reads of checkpoints cannot be counted", reason=str(error))
        reads = None
    with closing(reads) if reads is not None else nullcontext():
        yield reads


@contextmanager
def _recent_requests(directory: Path | None, process: int) -> Iterator[RecentRequests]:
    """Yield the recent requests for operators; without room in the directory, of this process alone."""
    try:
        recent = RecentRequests(directory, process)
    except OSError as error:
        _log.warning("slow and failed requests of this process are not shown", reason=str(error))
        recent = RecentRequests(None, process)
    with closing(recent):
        yield recent


def _index_plans(settings: Settings, scratch: Path) -> list[IndexPlan]:
    return [
        IndexPlan(slot.name, slot.index_refresh_in_force_seconds, slot.index_concurrency, slot.index_inventory, scratch)
        for slot in settings.slots
        if slot.index
    ]


def _scrubber(settings: Settings, blocks: BlockCache) -> Scrubber | None:
    cache = settings.cache
    if cache.scrub_period_seconds == 0:
        return None
    record = cache.directory / "blocks" / "scrub.json"
    return blocks.scrubber(ScrubSettings(record, cache.scrub_period_seconds, cache.scrub_bandwidth_bytes_per_second))


def forget_remembered(directory: Path) -> None:
    """Reset the catalog in a cache directory that no process has open; StoreUnavailable when the disk fails."""
    discard_catalog(directory / "catalog")


def _block_settings(settings: Settings, slots: Slots, shared_directory: Path | None) -> BlockSettings:
    cache = settings.cache
    return BlockSettings(
        directory=cache.directory / "blocks",
        capacity_bytes=cache.capacity_bytes,
        block_size_bytes=cache.block_size_bytes,
        small_object_bytes_max=cache.small_object_bytes_max,
        readahead_bytes=cache.readahead_bytes,
        slots=slots,
        daily_writes_bytes=cache.daily_writes_bytes,
        shared_directory=shared_directory,
        homes=settings.homes,
        has_one_worker=settings.server.workers == 1,
        has_local_readers=settings.server.local_socket is not None,
    )


def _keyring(settings: Settings, credentials: OriginCredentials) -> Keyring:
    if not settings.credentials:
        return OriginKeyring(credentials)
    return ConfiguredKeyring(
        Key(
            entry.access_key_id,
            entry.secret,
            entry.session_token.get_secret_value() if entry.session_token is not None else None,
            Grant(tuple(entry.allow), entry.operations == "read-only"),
        )
        for entry in settings.credentials
    )

"""Composition root: builds each process's parts from the settings, and takes them down again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.blocks.cache import BlockCache
from gateway.blocks.closed import Blocks, ClosedCache
from gateway.blocks.layout import BlockSettings
from gateway.blocks.maintenance.scrubber import Scrubber, ScrubSettings
from gateway.buffering import Bounding, Flushing, Surroundings, flushing, is_needed, opened_buffer
from gateway.clock import Clock, SystemClock
from gateway.config import Settings
from gateway.counting import WorkerMetrics
from gateway.edge.access import Authenticator, ConfiguredKeyring, Key, Keyring, OriginKeyring
from gateway.edge.asgi import S3App
from gateway.heartbeats import BACKGROUND_PROCESS
from gateway.jobs.dependencies import JobDependencies
from gateway.jobs.explaining import Explainer
from gateway.jobs.indexing.indexes import Indexes, IndexPlan
from gateway.jobs.runner import Jobs
from gateway.jobs.snapshot_service import SnapshotService
from gateway.jobs.store import JobStore
from gateway.metadata.bucket_metadata import BucketMetadataCache
from gateway.metadata.catalog import Catalog
from gateway.metadata.opening import ANSWERS, disbelieve
from gateway.metadata.snapshots.registry import SnapshotRegistry
from gateway.metadata.snapshots.store import SnapshotStore
from gateway.metering import callers_of, origin_meter
from gateway.operations.context import AppContext
from gateway.operations.origin_events import OriginEvents
from gateway.origin.client import Origin
from gateway.origin.retry import SilenceBoard
from gateway.origin.s3 import OwnKeyOrigin, S3Origin
from gateway.origin.settings import OriginSettings
from gateway.origin.signing import ChainCredentials, KeyPair, OriginCredentials, StaticCredentials
from gateway.origin.traffic_meter import MeteredOrigin
from gateway.policy.slots import Grant, Prefix, Slot, Slots
from gateway.writeback.admin.writeback_admin import NoWriteback, WritebackAdmin
from gateway.writeback.flushing.flush_logger import FlushLogger

SNAPSHOTS = "snapshots"
"""Where in the cache directory they lie."""

SILENCE = "origin-silence"
"""Where in the shared directory the processes tell each other that an origin is silent."""


@dataclass(frozen=True, slots=True)
class _Node:
    """What every process of the gateway has."""

    clock: Clock
    metrics: WorkerMetrics
    credentials: OriginCredentials
    origin: MeteredOrigin
    slots: Slots


@asynccontextmanager
async def _node(
    settings: Settings, process: int, *, instance_id: str, bandwidth: int | None, shared_directory: Path | None
) -> AsyncIterator[_Node]:
    clock = SystemClock()
    metrics = WorkerMetrics(settings.cache.capacity_bytes)
    async with AsyncExitStack() as stack:
        credentials = _origin_credentials(settings, clock)
        await credentials.start()
        stack.push_async_callback(credentials.aclose)
        meter = origin_meter(settings, metrics, clock, process=process, shared=bandwidth)
        s3_origin = S3Origin(
            _origin_settings(settings),
            credentials,
            clock,
            instance_id=instance_id,
            on_attempt=meter.attempt,
            on_hedge=metrics.origin_hedge,
            silence=SilenceBoard(shared_directory / SILENCE if shared_directory is not None else None),
        )
        origin = MeteredOrigin(OwnKeyOrigin(s3_origin), meter)
        stack.push_async_callback(origin.aclose)
        yield _Node(clock, metrics, credentials, origin, _slots(settings))


@asynccontextmanager
async def origin_for_checks(settings: Settings, instance_id: str) -> AsyncIterator[Origin]:
    """The origin as it answers, refusals of the gateway's key included; asked once each time, and for a short while."""
    clock = SystemClock()
    credentials = _origin_credentials(settings, clock)
    impatient = replace(_origin_settings(settings), max_attempts=1, max_connections=1)
    async with AsyncExitStack() as stack:
        await credentials.start()
        stack.push_async_callback(credentials.aclose)
        origin = S3Origin(impatient, credentials, clock, instance_id=instance_id)
        stack.push_async_callback(origin.aclose)
        yield origin


@asynccontextmanager
async def _directory(
    settings: Settings, node: _Node, worker: int, shared_directory: Path | None
) -> AsyncIterator[tuple[BlockCache, Catalog]]:
    """What lies in the cache directory; StartupError when that is a mistake, StoreUnavailable when the disk fails."""
    blocks = await BlockCache.open(
        _block_settings(settings, node.slots, shared_directory),
        node.origin,
        worker=worker,
        clock=node.clock,
        observer=node.metrics.cache,
    )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(blocks.close)
        catalog = await Catalog.open(
            settings.cache.directory / "catalog",
            node.origin,
            origin_name=settings.origin.endpoint_url,
            clock=node.clock,
            observer=node.metrics.catalog,
            slots=node.slots,
            process=worker,
        )
        stack.push_async_callback(catalog.close)
        yield blocks, catalog


@asynccontextmanager
async def _no_directory(node: _Node) -> AsyncIterator[tuple[Blocks, Catalog]]:
    """What there is without one."""
    yield (
        ClosedCache(node.origin, node.clock, node.metrics.cache),
        Catalog.switched_off(node.origin, node.clock, node.metrics.catalog),
    )


@asynccontextmanager
async def s3_application(
    settings: Settings,
    *,
    worker: int,
    instance_id: str,
    bandwidth: int | None = None,
    callers: int | None = None,
    shared_directory: Path | None = None,
    closed: bool = False,
) -> AsyncIterator[S3App]:
    """The S3 port's application of worker slot `worker`, with everything behind it.

    `instance_id` is the same in all workers of one `forebay serve`. Works with the origin away: nothing is asked of it.
    `bandwidth` is the memory in which all processes keep the ceilings, `callers` that of the limits of callers
    (metering.py); in `shared_directory` lie files
    that all of them have in memory (BlockSettings). `closed`: no worker touches the cache directory, and all is the
    origin's. Otherwise StoreUnavailable when the disk under it fails.
    """
    async with (
        _node(
            settings, worker, instance_id=instance_id, bandwidth=bandwidth, shared_directory=shared_directory
        ) as node,
        _no_directory(node) if closed else _directory(settings, node, worker, shared_directory) as (blocks, catalog),
        nullcontext() if closed else opened_buffer(settings, worker, _bounding(node), blocks) as buffer,
    ):
        answers = BucketMetadataCache(
            settings.cache.directory / "catalog" / ANSWERS,
            catalog.now_of_bucket,
            ttl_seconds=0 if closed else settings.cache.small_answers_ttl_seconds,
            observer=node.metrics.answers,
        )
        authenticator = Authenticator(
            _keyring(settings, node.credentials),
            node.clock,
            allow_unsigned=settings.server.allow_unsigned,
            allow_signature_v2=settings.server.allow_signature_v2,
        )
        snapshots, snapshot_store = await _snapshots(settings, node, closed=closed)
        services = AppContext(
            node.origin,
            catalog,
            answers,
            blocks,
            node.slots,
            node.clock,
            snapshots=snapshots,
            writeback=buffer,
            buffer_closed=closed and is_needed(settings),
        )
        try:
            yield S3App(
                services,
                authenticator,
                tuple(settings.server.base_domains),
                instance_id,
                node.metrics.requests,
                callers=callers_of(settings, node.metrics, node.clock, worker=worker, shared=callers),
            )
        finally:
            await answers.close()
            await snapshots.close()
            if snapshot_store is not None:
                snapshot_store.close()


async def _snapshots(settings: Settings, node: _Node, *, closed: bool) -> tuple[SnapshotRegistry, SnapshotStore | None]:
    """What freezes slots. What cannot be opened does not keep the worker from starting."""
    if closed or not node.slots.any_frozen:
        return SnapshotRegistry.switched_off(), None
    store = await asyncio.to_thread(SnapshotStore, settings.cache.directory / SNAPSHOTS)
    registry = SnapshotRegistry(store, node.slots, node.clock, node.metrics.snapshots)
    await registry.refresh()
    return registry, store


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What the background process does with the cache directory."""

    jobs: Jobs
    explainer: Explainer
    events: OriginEvents
    indexes: Indexes
    blocks: BlockCache
    scrubber: Scrubber | None
    snapshots: SnapshotService
    flushing: Flushing | None

    @property
    def writeback(self) -> WritebackAdmin | NoWriteback:
        """Who sees to what the origin does not have yet."""
        return self.flushing.admin if self.flushing is not None else NoWriteback()


@asynccontextmanager
async def upkeep(
    settings: Settings, *, instance_id: str, bandwidth: int | None = None, shared_directory: Path | None = None
) -> AsyncIterator[Upkeep]:
    """The background process's part: jobs go on while this lasts, and indexes are kept up.

    StartupError when the directory is a mistake, StoreUnavailable when the disk under it fails.
    """
    async with (
        _node(
            settings,
            BACKGROUND_PROCESS,
            instance_id=instance_id,
            bandwidth=bandwidth,
            shared_directory=shared_directory,
        ) as node,
        _directory(settings, node, BACKGROUND_PROCESS, shared_directory) as (blocks, catalog),
        opened_buffer(settings, BACKGROUND_PROCESS, _bounding(node), blocks) as buffer,
    ):
        snapshots = await asyncio.to_thread(SnapshotStore, settings.cache.directory / SNAPSHOTS)
        tools = JobDependencies(
            node.origin, catalog, blocks, node.slots, node.clock, snapshots, origin_name=settings.origin.endpoint_url
        )
        store = await asyncio.to_thread(JobStore, settings.cache.directory / "jobs")
        jobs = await Jobs.open(tools, store)
        indexes = Indexes.open(tools, _index_plans(settings, store.scratch), node.metrics.indexes)
        try:
            events = OriginEvents(catalog, blocks, node.slots)
            service = SnapshotService(tools, jobs)
            counters = node.metrics.writeback
            log = FlushLogger(counters, node.clock)
            around = Surroundings(node.origin, catalog, blocks, node.slots, node.clock, log, counters)
            async with flushing(settings, buffer, around) as flusher:
                yield Upkeep(
                    jobs, Explainer(tools), events, indexes, blocks, _scrubber(settings, blocks), service, flusher
                )
        finally:
            await indexes.close()
            await jobs.close()
            snapshots.close()


def _bounding(node: _Node) -> Bounding:
    return Bounding(node.slots, node.clock, node.metrics.writeback)


def _index_plans(settings: Settings, scratch: Path) -> list[IndexPlan]:
    return [
        IndexPlan(slot.name, slot.index_refresh_in_force_seconds, slot.index_listers, slot.index_inventory, scratch)
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
    """Have the catalog in a cache directory that nobody has open begin anew; StoreUnavailable when the disk fails."""
    disbelieve(directory / "catalog")


def _origin_credentials(settings: Settings, clock: Clock) -> OriginCredentials:
    origin = settings.origin
    if origin.access_key_id is None or origin.secret_access_key is None:
        return ChainCredentials(clock, profile=origin.profile)
    token = origin.session_token.get_secret_value() if origin.session_token else None
    return StaticCredentials(KeyPair(origin.access_key_id, origin.secret_access_key.get_secret_value(), token))


def _origin_settings(settings: Settings) -> OriginSettings:
    origin = settings.origin
    return OriginSettings(
        endpoint_url=origin.endpoint_url,
        region=origin.region,
        addressing_style=origin.addressing_style,
        ca_bundle=str(origin.ca_bundle) if origin.ca_bundle else None,
        proxy=origin.proxy.get_secret_value() if origin.proxy else None,
        connect_timeout_seconds=origin.connect_timeout_seconds,
        first_byte_timeout_seconds=origin.first_byte_timeout_seconds,
        stall_timeout_seconds=origin.stall_timeout_seconds,
        read_timeout_seconds=origin.read_timeout_seconds,
        slow_timeout_seconds=origin.slow_timeout_seconds,
        connection_wait_seconds=origin.connection_wait_seconds,
        max_connections=origin.max_connections,
        max_attempts=origin.max_attempts,
    )


def _block_settings(settings: Settings, slots: Slots, shared_directory: Path | None) -> BlockSettings:
    cache = settings.cache
    return BlockSettings(
        directory=cache.directory / "blocks",
        capacity_bytes=cache.capacity_bytes,
        block_size_bytes=cache.block_size_bytes,
        packed_bytes_max=cache.packed_bytes_max,
        readahead_bytes=cache.readahead_bytes,
        slots=slots,
        daily_writes_bytes=cache.daily_writes_bytes,
        shared_directory=shared_directory,
    )


def _keyring(settings: Settings, credentials: OriginCredentials) -> Keyring:
    if not settings.credentials:
        return OriginKeyring(credentials)
    return ConfiguredKeyring(
        Key(
            entry.access_key_id,
            entry.secret,
            None,
            Grant(tuple(map(Prefix.parse, entry.allow)), entry.operations == "read-only"),
        )
        for entry in settings.credentials
    )


def _slots(settings: Settings) -> Slots:
    return Slots(
        Slot(
            slot.name,
            Prefix.parse(slot.prefix),
            slot.mode,
            slot.consistency_in_force,
            slot.metadata_ttl_seconds,
            slot.negative_ttl_seconds,
            slot.stale_if_unreachable_seconds,
            slot.capacity_bytes or 0,
            slot.capacity_limit_bytes,
            slot.block_size_bytes,
            slot.eviction,
            slot.kept_object_bytes_max,
            slot.snapshot or "",
            slot.write,
            slot.buffer_bytes,
            slot.buffer_full,
            slot.exposure_bytes_max,
            slot.exposure_age_seconds_max,
            slot.order,
            tuple(slot.markers),
            slot.upload_expiry_seconds,
        )
        for slot in settings.slots
    )

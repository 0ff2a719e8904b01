"""The S3 port's application over a `MemoryOrigin`, in this process: no socket, no other process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeAlias

from gateway.blocks.cache import BlockCache
from gateway.blocks.layout import BlockSettings
from gateway.core.clock import Clock, SystemClock
from gateway.core.model import Homes, ObjectKey
from gateway.edge.access import Authenticator, ConfiguredKeyring, Key, Keyring
from gateway.edge.asgi import S3App
from gateway.metadata.bucket_metadata import BucketMetadataCache
from gateway.metadata.catalog import Catalog
from gateway.metadata.opening import ANSWERS
from gateway.metadata.snapshots.registry import SnapshotRegistry
from gateway.metadata.snapshots.store import SnapshotStore
from gateway.operations.context import AppContext
from gateway.operations.warm_up_queue import WarmUpQueue
from gateway.origin.client import Origin, begin_read_of
from gateway.origin.peer_protocol import Roles
from gateway.policy.slots import EVERYTHING, Grant, Slots
from gateway.writeback.buffer import WritebackBuffer
from tests.support.asgi import ACCESS_KEY_ID, SECRET_ACCESS_KEY
from tests.support.memory_origin import MemoryOrigin
from tests.support.slots import Slot

BLOCK_SIZE_BYTES = 64 * 1024
INSTANCE_ID = "feedfacefeedface"


@dataclass(frozen=True)
class GatewayApp:
    """What a test needs to drive a gateway and to look behind it."""

    app: S3App
    origin: MemoryOrigin
    blocks: BlockCache
    catalog: Catalog
    answers: BucketMetadataCache
    snapshots: SnapshotStore
    buffer: WritebackBuffer | None = None
    warm_ups: WarmUpQueue | None = None


@asynccontextmanager
async def gateway_app(
    directory: Path,
    *,
    origin: MemoryOrigin | None = None,
    through: Origin | None = None,
    grant: Grant = EVERYTHING,
    slots: Sequence[Slot] = (),
    keyring: Keyring | None = None,
    clock: Clock | None = None,
    allow_unsigned: bool = False,
    allow_signature_v2: bool = True,
    block_size_bytes: int = BLOCK_SIZE_BYTES,
    worker: int = 0,
    bucket_metadata_ttl_seconds: float = 60.0,
    writeback: bool = False,
    buffer_closed: bool = False,
    capacity_bytes: int = 256 * 1024**2,
    roles: Roles | None = None,
    reads_near: Callable[[ObjectKey, str], bool] = lambda key, slot: False,
) -> AsyncIterator[GatewayApp]:
    """A gateway with one bucket, `bucket`. `through` stands between the gateway and `origin`, where given."""
    clock = clock or SystemClock()
    if origin is None:
        origin = MemoryOrigin(clock)
        origin.create_bucket("bucket")
    front: Origin = through or origin
    settings = BlockSettings(
        directory,
        capacity_bytes=capacity_bytes,
        block_size_bytes=block_size_bytes,
        slots=Slots(slots),
        has_local_readers=True,
    )
    blocks = await BlockCache.open(settings, front, worker=worker, clock=clock, roles=roles)
    try:
        catalog = await Catalog.open(
            directory / "catalog",
            front,
            homes=Homes("memory"),
            clock=clock,
            slots=Slots(slots),
            process=worker,
            roles=roles,
        )
    except BaseException:
        await blocks.close()
        raise
    answers = BucketMetadataCache(
        directory / "catalog" / ANSWERS,
        catalog.listing.moment,
        ttl_seconds=bucket_metadata_ttl_seconds,
    )
    snapshots = SnapshotStore(directory / "snapshots")
    registry = SnapshotRegistry(snapshots, slots, clock)
    buffer: WritebackBuffer | None = None
    if writeback:
        buffer = await WritebackBuffer.open(directory / "writeback", worker, slots, clock=clock)
        blocks.keep_free(buffer.bounds.unused_bytes)
    try:
        services = AppContext(
            front,
            catalog,
            answers,
            blocks,
            Slots(slots),
            clock,
            snapshots=registry,
            writeback=buffer,
            buffer_closed=buffer_closed,
            begin_read=begin_read_of(front),
            reads_near=reads_near,
            roles=roles,
        )
        authenticator = Authenticator(
            keyring or ConfiguredKeyring([Key(ACCESS_KEY_ID, SECRET_ACCESS_KEY, None, grant)]),
            clock,
            allow_unsigned=allow_unsigned,
            allow_signature_v2=allow_signature_v2,
        )
        app = S3App(services, authenticator, ("s3.local",), INSTANCE_ID)
        try:
            yield GatewayApp(app, origin, blocks, catalog, answers, snapshots, buffer, services.warm_ups)
        finally:
            await services.close()
    finally:
        if buffer is not None:
            await buffer.close()
        await registry.close()
        snapshots.close()
        await answers.close()
        await catalog.close()
        await blocks.close()


AsyncTest: TypeAlias = Callable[..., Coroutine[Any, Any, None]]


def within(opened: Callable[..., AbstractAsyncContextManager[Any]], **options: Any) -> Callable[[AsyncTest], Any]:
    """Make a test of an async function whose first parameter is what `opened` gives, for the test's directory."""

    def made(test: AsyncTest) -> Callable[..., None]:
        @wraps(test)
        def run(tmp_path: Path, **values: Any) -> None:
            async def scenario() -> None:
                async with opened(tmp_path, **options) as what:
                    await test(what, **values)

            asyncio.run(scenario())

        path = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        _, *others = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature([path, *others])  # type: ignore[attr-defined]
        return run

    return made

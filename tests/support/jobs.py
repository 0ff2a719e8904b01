"""Jobs over an origin in memory, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.blocks.cache import BlockCache
from gateway.core.clock import Clock, SystemClock
from gateway.core.model import Homes, ObjectVersion
from gateway.jobs.job import Job, JobDependencies, JobState, JobStore, Unpinned
from gateway.jobs.runner import Jobs
from gateway.jobs.snapshot_service import SnapshotService
from gateway.metadata.catalog import Catalog
from gateway.metadata.snapshots.store import SnapshotStore
from gateway.origin.client import Origin
from gateway.origin.peer_protocol import Roles
from gateway.policy.slots import Slots
from tests.support.blocks import BLOCK, BUCKET, MIB, make_origin, open_cache, stored
from tests.support.memory_origin import MemoryOrigin
from tests.support.slots import Slot
from tests.support.waiting import until


@dataclass(frozen=True)
class JobBench:
    """What a test needs to start jobs and to look behind them."""

    jobs: Jobs
    store: JobStore
    cache: BlockCache
    catalog: Catalog
    origin: MemoryOrigin
    service: SnapshotService
    snapshots: SnapshotStore

    async def ended(self, job: Job) -> Job:
        """The job once it runs no more."""
        await until(lambda: self.now(job).state is not JobState.RUNNING)
        return self.now(job)

    def now(self, job: Job) -> Job:
        """The job as it stands."""
        found = self.jobs.get(job.id)
        assert found is not None
        return found


@asynccontextmanager
async def job_bench(
    directory: Path,
    origin: MemoryOrigin,
    *,
    through: Origin | None = None,
    slots: Sequence[Slot] = (),
    clock: Clock | None = None,
    capacity_bytes: int = 64 * MIB,
    roles: Roles | None = None,
    unpin_at_others: Callable[[str], Awaitable[Unpinned]] | None = None,
) -> AsyncIterator[JobBench]:
    clock, front, policy = clock or SystemClock(), through or origin, Slots(slots)
    store = JobStore(directory / "jobs")
    settings: dict[str, Any] = {"slots": policy, "capacity_bytes": capacity_bytes, "readahead_bytes": 0}
    async with open_cache(directory / "blocks", front, roles=roles, **settings) as cache:
        catalog = await Catalog.open(
            directory / "catalog",
            front,
            homes=Homes("memory"),
            clock=clock,
            slots=policy,
        )
        try:
            snapshots = SnapshotStore(directory / "snapshots")
            homes = Homes("memory")
            tools = JobDependencies(front, catalog, cache, policy, clock, snapshots, homes, unpin_at_others)
            jobs = await Jobs.open(tools, store)
            try:
                yield JobBench(jobs, store, cache, catalog, origin, SnapshotService(tools, jobs), snapshots)
            finally:
                await jobs.close()
                snapshots.close()
        finally:
            await catalog.close()


def data_set(
    count: int, size_bytes: int = BLOCK, origin: MemoryOrigin | None = None
) -> tuple[MemoryOrigin, list[ObjectVersion]]:
    """An origin with so many objects under `data/`."""
    origin = origin or make_origin()
    return origin, [stored(origin, f"data/{number:04d}", size_bytes) for number in range(count)]


def gets(origin: MemoryOrigin) -> int:
    """How often the origin was asked for bytes."""
    return sum(call.method == "GET" and call.key is not None for call in origin.calls)


__all__ = ["BUCKET", "JobBench", "data_set", "gets", "job_bench"]

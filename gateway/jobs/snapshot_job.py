"""Making a snapshot: the origin is listed, page by page, into a snapshot that is none yet, and becomes one at the end.

Killed in between, it is gone on with behind the last key that it has; after a boot it is begun anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import structlog

from gateway.core.errors import OriginBodyError, SnapshotConflict, SnapshotError
from gateway.jobs.job import Job, JobDependencies, JobState, steadily
from gateway.jobs.listing import list_pages
from gateway.metadata.snapshots.staging import Origins, SnapshotStaging, made_by
from gateway.policy.slots import Prefix
from gateway.s3.list_result import ListedEntry

_log = structlog.get_logger("forebay.snapshots")


class SnapshotJob:
    """One run of a job that makes a snapshot, to its end or until it is cancelled. `job` is how it stands."""

    def __init__(self, dependencies: JobDependencies, job: Job) -> None:
        self.job = job
        self._dependencies = dependencies

    async def run(self) -> None:
        """Make the snapshot, or finish it. On ForebayError nothing of it stays."""
        store = self._dependencies.snapshots
        if await asyncio.to_thread(made_by, store, self.job.name, self.job.id) is not None:
            self.job = replace(self.job, found_all=True)
            return  # the process was killed just behind the end
        home = self._dependencies.homes.of(Prefix.parse(self.job.prefix).bucket)
        origins = Origins(self.job.name, self.job.prefix, home, self._dependencies.clock.now(), self.job.id)
        begin = partial(SnapshotStaging.begin, store, self.job.id, origins)
        staging = await steadily(begin, unwanted=SnapshotStaging.leave)
        try:
            await self._list(staging)
            self.job = replace(self.job, found_all=True)
            if not self.job.objects_found and not self.job.allow_empty:
                raise SnapshotError(f"{self.job.prefix} holds no object: check the name, or allow it to be empty")
            manifest = await steadily(partial(staging.publish, self._dependencies.clock.now()))
        except asyncio.CancelledError:
            await asyncio.to_thread(staging.discard if self.job.state is JobState.CANCELLED else staging.leave)
            raise
        except BaseException:
            await asyncio.to_thread(staging.discard)
            raise
        _log.info("a snapshot was made", name=manifest.name, prefix=manifest.prefix, objects=manifest.objects)

    async def _list(self, staging: SnapshotStaging) -> None:
        objects, size_bytes = await steadily(staging.totals)
        self._count(objects, size_bytes)
        last = await asyncio.to_thread(staging.last_key)
        prefix = Prefix.parse(self.job.prefix)
        async with aclosing(pages(self._dependencies, prefix, last)) as listed:
            async for entries in listed:
                await steadily(partial(staging.append, entries))
                self._count(
                    self.job.objects_found + len(entries),
                    self.job.bytes_found + sum(entry.size_bytes for entry in entries),
                )

    @property
    def coming_bytes(self) -> int:
        """It moves none."""
        return 0

    def _count(self, objects: int, size_bytes: int) -> None:
        self.job = replace(
            self.job, objects_found=objects, objects_done=objects, bytes_found=size_bytes, bytes_done=size_bytes
        )


async def check_free(dependencies: JobDependencies, name: str) -> None:
    """SnapshotConflict when there is a snapshot of that name, were it one that cannot be used."""
    if any(one.name == name for one in await asyncio.to_thread(dependencies.snapshots.all)):
        raise SnapshotConflict(f"there is a snapshot {name!r} already: delete it, or take another name")


async def pages(
    dependencies: JobDependencies, prefix: Prefix, after: bytes | None
) -> AsyncGenerator[list[ListedEntry], None]:
    """All that the origin has under `prefix` behind the key `after`, in order, with all that a LIST can say of it.

    Raises as `list_pages`, and OriginBodyError for what cannot be frozen.
    """
    found = list_pages(dependencies, prefix, start_after=(after or b"").decode(), with_owner=True)
    async with aclosing(found) as listed:
        async for entries in listed:
            for entry in entries:
                if not entry.key.startswith(prefix.key_prefix.encode()):
                    raise OriginBodyError(f"the origin lists keys that do not begin with {prefix.key_prefix!r}")
                if not entry.etag:
                    raise OriginBodyError(f"the origin lists {entry.key.decode()!r} without an ETag")
            yield entries

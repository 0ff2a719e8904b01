"""Making a snapshot: the origin is listed, page by page, into a snapshot that is none yet, and becomes one at the end.

Killed in between, it is gone on with behind the last key that it has; after a boot it is begun anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import ParamSpec, TypeVar

import structlog

from gateway.core.errors import OriginBodyError, SnapshotConflict, SnapshotError, StoreUnavailable
from gateway.jobs.job import Job, JobDependencies, JobState
from gateway.jobs.listing import fetch_page, with_retries
from gateway.metadata.snapshots.staging import Origins, SnapshotStaging, made_by
from gateway.metadata.snapshots.store import Snapshot, SnapshotStore
from gateway.origin.client import Purpose
from gateway.policy.slots import Prefix
from gateway.s3.list_result import ListedEntry, ListedPage, PageChain, parse_listed_page

P = ParamSpec("P")
T = TypeVar("T")

_log = structlog.get_logger("forebay.snapshots")


class SnapshotJob:
    """One run of a job that makes a snapshot, to its end or until it is cancelled. `job` is how it stands."""

    def __init__(self, dependencies: JobDependencies, job: Job) -> None:
        self.job = job
        self._dependencies = dependencies

    async def run(self) -> None:
        """Make the snapshot, or finish it. On ForebayError nothing of it stays."""
        store = snapshots_of(self._dependencies)
        if await asyncio.to_thread(made_by, store, self.job.name, self.job.id) is not None:
            self.job = replace(self.job, found_all=True)
            return  # the process was killed just behind the end
        home = self._dependencies.homes.of(Prefix.parse(self.job.prefix).bucket)
        origins = Origins(self.job.name, self.job.prefix, home, self._dependencies.clock.now(), self.job.id)
        staging = await steadily(SnapshotStaging.begin, store, self.job.id, origins)
        try:
            await self._list(staging)
            self.job = replace(self.job, found_all=True)
            if not self.job.objects_found and not self.job.allow_empty:
                raise SnapshotError(f"{self.job.prefix} holds no object: check the name, or allow it to be empty")
            manifest = await steadily(staging.publish, self._dependencies.clock.now())
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
                await steadily(staging.append, entries)
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


async def steadily(work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run `work` in a thread and return its result. A cancelled caller waits for its end, as `work` uses open files."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments, **options))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        given: object = None if running.cancelled() or running.exception() else running.result()
        if isinstance(given, SnapshotStaging):
            given.leave()  # nobody will have it
        elif isinstance(given, Snapshot):
            given.close()
        raise


async def check_free(dependencies: JobDependencies, name: str) -> None:
    """SnapshotConflict when there is a snapshot of that name, were it one that cannot be used."""
    store = snapshots_of(dependencies)
    if any(one.name == name for one in await asyncio.to_thread(store.all)):
        raise SnapshotConflict(f"there is a snapshot {name!r} already: delete it, or take another name")


def snapshots_of(dependencies: JobDependencies) -> SnapshotStore:
    """Return the snapshot store. Raise StoreUnavailable without a cache directory."""
    if dependencies.snapshots is None:
        raise StoreUnavailable("snapshots need the cache directory, and it cannot be used")
    return dependencies.snapshots


async def pages(
    dependencies: JobDependencies, prefix: Prefix, after: bytes | None
) -> AsyncGenerator[list[ListedEntry], None]:
    """All that the origin has under `prefix` behind the key `after`, in order, with all that a LIST can say of it.

    Raises OriginAnswered when the origin refuses, OriginUnreachable, and OriginBodyError for an answer that is no list,
    and for pages without an end.
    """
    slot, start_after, token = (
        dependencies.slots.find(prefix.bucket, prefix.key_prefix).name,
        (after or b"").decode(),
        None,
    )
    chain = PageChain()
    while True:

        async def ask() -> ListedPage:
            document = await fetch_page(
                dependencies.origin,
                prefix,
                slot=slot,
                purpose=Purpose.WARM,
                start_after=start_after,
                token=token,  # noqa: B023 - asked before it changes
                with_owner=True,
            )
            return parse_listed_page(document, with_owner=True)

        page = await with_retries(dependencies.clock, ask)
        dependencies.catalog.listed(prefix.bucket, page.entries)
        _check(page, prefix.key_prefix.encode())
        yield page.entries
        token = page.next_token
        if token is None:
            return
        chain.follow([entry.key for entry in page.entries], token)


def _check(page: ListedPage, prefix: bytes) -> None:
    """OriginBodyError for what cannot be frozen."""
    for entry in page.entries:
        if not entry.key.startswith(prefix):
            raise OriginBodyError(f"the origin lists keys that do not begin with {prefix.decode()!r}")
        if not entry.etag:
            raise OriginBodyError(f"the origin lists {entry.key.decode()!r} without an ETag")

"""The jobs of this gateway: started, carried on after a restart, cancelled, and remembered for a while."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace

import structlog

from gateway.errors import ForebayError, SnapshotConflict
from gateway.jobs.manifest import ManifestLines
from gateway.jobs.rate import Rate
from gateway.jobs.records import Job, JobKind, JobState
from gateway.jobs.snapshot_work import SnapshotWork, check_free
from gateway.jobs.store import JobStore
from gateway.jobs.tools import Tools
from gateway.jobs.work import Work
from gateway.jobs.worklist import Worklist

RUNNING_MAX = 16
ENDED_KEPT = 100
"""The last of them can still be asked about."""

_SAVE_SECONDS = 1.0
_log = structlog.get_logger("forebay.jobs")


class TooManyJobs(ForebayError):
    """So many jobs are running that no further one is begun."""


class Jobs:
    """All jobs. Use `open`, and `close` at the end: what runs then goes on with the next `open`."""

    def __init__(self, tools: Tools, store: JobStore) -> None:
        self._tools = tools
        self._store = store
        self._ended: dict[str, Job] = {}
        self._works: dict[str, Work | SnapshotWork] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rates: dict[str, Rate] = {}

    @classmethod
    async def open(cls, tools: Tools, store: JobStore) -> Jobs:
        """Carry on what was running when the last process ended."""
        jobs = cls(tools, store)
        found = await asyncio.to_thread(store.load)
        if tools.library is not None:
            running = {job.id for job in found if job.state is JobState.RUNNING}
            await asyncio.to_thread(tools.library.sweep, running)
        for job in found:
            if job.state is JobState.RUNNING:
                jobs._begin(replace(job, full=False))
            else:
                jobs._ended[job.id] = job
        return jobs

    def all(self) -> list[Job]:
        """Every job, the oldest first."""
        running = (work.job for work in self._works.values())
        return sorted([*self._ended.values(), *running], key=lambda job: (job.created_at, job.id))

    def get(self, job_id: str) -> Job | None:
        """One job as it stands."""
        work = self._works.get(job_id)
        return work.job if work is not None else self._ended.get(job_id)

    def rate(self, job_id: str) -> Rate | None:
        """How fast a running job goes."""
        return self._rates.get(job_id)

    async def start(self, kind: JobKind, prefix: str) -> Job:
        """Begin a job about all keys under `prefix`; TooManyJobs, StoreUnavailable, PinRefused."""
        job = self._new(kind, prefix)
        if kind is JobKind.PIN:
            await self._tools.blocks.pin(prefix)
        return await self._start(job)

    async def start_snapshot(self, name: str, prefix: str) -> Job:
        """Begin to make a snapshot; SnapshotConflict where one of that name is there or being made, TooManyJobs."""
        await check_free(self._tools, name)
        if any(work.job.name == name for work in self._works.values()):
            raise SnapshotConflict(f"a snapshot {name!r} is being made")
        return await self._start(replace(self._new(JobKind.SNAPSHOT, prefix), name=name))

    def pins(self) -> list[str]:
        """The prefixes that are pinned; StoreUnavailable."""
        return sorted(self._tools.blocks.pins())

    async def unpin(self, prefix: str) -> bool:
        """Have what lies under a pinned prefix evicted again, and end the jobs that pin it; False: it is not pinned."""
        for job in self.all():
            if job.kind is JobKind.PIN and job.prefix == prefix and job.state is JobState.RUNNING:
                await self.cancel(job.id)
        return await self._tools.blocks.unpin(prefix)

    async def start_listed(self, kind: JobKind, manifest: AsyncIterator[bytes]) -> Job:
        """Begin a job about the objects of a manifest, in its order; BadManifest, TooManyJobs, StoreUnavailable."""
        job = self._new(kind, "", manifest=True)
        lines, count = ManifestLines(), 0
        worklist = Worklist(self._store.objects(job.id))
        try:
            async for piece in manifest:
                count += await asyncio.to_thread(_take, worklist, list(lines.feed(piece)))
            count += await asyncio.to_thread(_take, worklist, list(lines.end()))
            await asyncio.to_thread(worklist.sync)
        except BaseException:
            await asyncio.to_thread(self._store.remove, job.id)
            raise
        return await self._start(replace(job, objects_found=count, found_all=True))

    async def cancel(self, job_id: str) -> Job | None:
        """End a job; what it has brought stays. None when there is none of that id."""
        task = self._tasks.get(job_id)
        if task is not None:
            self._works[job_id].job = replace(self._works[job_id].job, state=JobState.CANCELLED)
            task.cancel()
            await asyncio.wait({task})
        return self.get(job_id)

    async def close(self) -> None:
        """Stop; running jobs stay so on disk."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _new(self, kind: JobKind, prefix: str, *, manifest: bool = False) -> Job:
        if len(self._works) >= RUNNING_MAX:
            raise TooManyJobs(f"{RUNNING_MAX} jobs are running: wait for one, or cancel one")
        return Job(secrets.token_hex(6), kind, prefix, manifest, created_at=self._tools.clock.now())

    async def _start(self, job: Job) -> Job:
        await asyncio.to_thread(self._store.save, job)
        self._begin(job)
        return job

    def _begin(self, job: Job) -> None:
        work = self._work(job)
        self._works[job.id], self._rates[job.id] = work, Rate()
        self._tasks[job.id] = asyncio.create_task(self._run(work), name=f"job {job.id}")

    def _work(self, job: Job) -> Work | SnapshotWork:
        if job.kind is JobKind.SNAPSHOT:
            return SnapshotWork(self._tools, job)
        return Work(self._tools, job, Worklist(self._store.objects(job.id)))

    async def _run(self, work: Work | SnapshotWork) -> None:
        saving = asyncio.create_task(self._save_for_ever(work), name="job saving")
        state: JobState | None = JobState.DONE
        try:
            await work.run()
            if work.job.objects_failed:
                state = JobState.FAILED
        except ForebayError as error:
            work.job, state = work.job.failed_with(str(error)), JobState.FAILED
        except asyncio.CancelledError:
            state = JobState.CANCELLED if work.job.state is JobState.CANCELLED else None
        except Exception as error:  # noqa: BLE001 - a job that fails must be seen to have failed
            _log.error("a job failed", job=work.job.id, exc_info=error)
            work.job, state = work.job.failed_with(f"{type(error).__name__}: see the log"), JobState.FAILED
        finally:
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)
            await self._finish(work, state)

    async def _finish(self, work: Work | SnapshotWork, state: JobState | None) -> None:
        """Write down how it stands; None: the process ends, the job does not."""
        job = work.job
        if state is not None:
            job = replace(job, state=state, ended_at=self._tools.clock.now())
            self._ended[job.id] = job
        try:
            await asyncio.to_thread(self._store.save, job)
            if state is not None:
                await asyncio.to_thread(self._store.drop_objects, job.id)
                await asyncio.to_thread(self._forget_oldest)
        except ForebayError as error:
            _log.warning("a job's end could not be written down", job=job.id, error=str(error))
        del self._works[job.id], self._tasks[job.id], self._rates[job.id]

    def _forget_oldest(self) -> None:
        for job_id in list(self._ended)[:-ENDED_KEPT]:
            self._store.remove(job_id)
            del self._ended[job_id]

    async def _save_for_ever(self, work: Work | SnapshotWork) -> None:
        told = False
        while True:
            self._rates[work.job.id].note(self._tools.clock.monotonic(), work.job.bytes_done)
            await self._tools.clock.sleep(_SAVE_SECONDS)
            try:
                await asyncio.to_thread(self._store.save, work.job)
                told = False
            except ForebayError as error:
                if told:
                    continue
                told = True
                _log.warning("a job's progress could not be written down", job=work.job.id, error=str(error))


def _take(worklist: Worklist, objects: list[tuple[str, str]]) -> int:
    if objects:
        worklist.add(objects)
    return len(objects)

"""The jobs of this gateway: started, carried on after a restart, cancelled, and remembered for a while."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec

import structlog

from gateway.core.errors import ForebayError, SnapshotConflict, StoreUnavailable
from gateway.core.progress_rate import ProgressRate
from gateway.jobs.job import Job, JobDependencies, JobKind, JobState, JobStore, Unpinned, steadily
from gateway.jobs.listing import failure_text
from gateway.jobs.object_job import ObjectJob
from gateway.jobs.snapshot_job import SnapshotJob, check_free
from gateway.jobs.worklist import ManifestLines, Worklist

P = ParamSpec("P")

RUNNING_MAX = 16
ENDED_KEPT = 100
"""The last of them can still be asked about."""

RATE_SECONDS = 30.0
"""Over so long it is said how fast a job goes."""

_SKIPPED_FACTOR = 10
"""A job that passes so many times more bytes that were there than it fetches does not go as fast where it fetches."""

_SAVE_SECONDS = 1.0
_SAVE_SECONDS_MAX = 60.0
_log = structlog.get_logger("forebay.jobs")


class TooManyJobs(ForebayError):
    """The limit of running jobs is reached."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The rate of a job and its remaining time. None: unknown, or the job moves no bytes."""

    bytes_per_second: float | None
    seconds_left: float | None


UNKNOWN_PACE = Pace(None, None)


@dataclass(eq=False, slots=True)
class _JobRun:
    """A job that runs in this process. Cancelling `doing` interrupts it; `following` stores how it ends.

    `is_cancelled` tells a cancelled job from one that the process's end interrupts. `told` is set
    once its end is shown and it was tried to store it.
    """

    work: ObjectJob | SnapshotJob
    doing: asyncio.Task[None]
    following: asyncio.Task[None] | None = None
    waiting: asyncio.Task[None] | None = None
    rate: ProgressRate = field(default_factory=lambda: ProgressRate(RATE_SECONDS))
    passed_bytes: int = 0
    fetched_bytes: int = 0
    is_cancelled: bool = False
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def note_rate(self, now: float) -> None:
        """Record the progress so far, without objects that were cached before, which say nothing about the rate."""
        job = self.work.job
        passed_bytes = job.bytes_done - job.bytes_fetched
        fetched_bytes = max(self.fetched_bytes, job.bytes_fetched + self.work.coming_bytes)
        if passed_bytes - self.passed_bytes > _SKIPPED_FACTOR * (fetched_bytes - self.fetched_bytes):
            self.rate.begin_anew()
        self.passed_bytes, self.fetched_bytes = passed_bytes, fetched_bytes
        self.rate.note(now, passed_bytes + fetched_bytes)

    def pace(self) -> Pace:
        job, left_seconds = self.work.job, None
        if job.kind is JobKind.SNAPSHOT:
            return UNKNOWN_PACE
        if job.found_all and not job.manifest:
            left_bytes = job.bytes_found - job.bytes_done - self.work.coming_bytes
            left_seconds = self.rate.seconds_left(max(0, left_bytes))
        return Pace(self.rate.bytes_per_second, left_seconds)


class Jobs:
    """All jobs. Use `open`, and `close` at the end: what runs then goes on with the next `open`.

    Whatever goes wrong with a job, it ends in a state that is shown, and that is stored as soon as the disk takes it.
    """

    def __init__(self, dependencies: JobDependencies, store: JobStore) -> None:
        self._dependencies = dependencies
        self._store = store
        self._ended: dict[str, Job] = {}
        self._runs: dict[str, _JobRun] = {}
        self._is_closing = False

    @classmethod
    async def open(cls, dependencies: JobDependencies, store: JobStore) -> Jobs:
        """Carry on what was running when the last process ended."""
        jobs = cls(dependencies, store)
        found = await asyncio.to_thread(store.load)
        running = {job.id for job in found if job.state is JobState.RUNNING}
        await _tried("the lists of ended jobs could not be removed", store.sweep, running)
        await asyncio.to_thread(dependencies.snapshots.sweep, running)
        for job in found:
            if job.state is JobState.RUNNING:
                jobs._begin(replace(job, full=False))
            else:
                jobs._ended[job.id] = job
        return jobs

    def all(self) -> list[Job]:
        """Every job, the oldest first."""
        return sorted([*self._ended.values(), *self._running()], key=lambda job: (job.created_at, job.id))

    def get(self, job_id: str) -> Job | None:
        """One job as it stands."""
        run = self._runs.get(job_id)
        return run.work.job if run is not None else self._ended.get(job_id)

    def pace(self, job_id: str) -> Pace:
        """How fast a running job goes."""
        run = self._runs.get(job_id)
        return run.pace() if run is not None and job_id not in self._ended else UNKNOWN_PACE

    async def start(self, kind: JobKind, prefix: str, *, allow_empty: bool = False, cluster: bool = False) -> Job:
        """Begin a job about all keys under `prefix`, or return its pin. TooManyJobs, StoreUnavailable, PinRefused."""
        job = replace(self._new(kind, prefix), cluster=cluster)
        if kind is not JobKind.PIN:
            return await self._start(job)
        for running in self._running():
            if (running.kind, running.prefix, running.cluster) == (kind, prefix, cluster):
                return running
        was_pinned = prefix in self._dependencies.blocks.pins()
        await self._dependencies.blocks.pin(prefix, cluster=cluster)
        try:
            return await self._start(replace(job, allow_empty=allow_empty, was_pinned=was_pinned))
        except BaseException:
            if not was_pinned:
                await self._dependencies.blocks.unpin(prefix)
            raise

    async def start_snapshot(self, name: str, prefix: str, *, allow_empty: bool = False) -> Job:
        """Begin to make a snapshot; SnapshotConflict where one of that name is there or being made, TooManyJobs."""
        await check_free(self._dependencies, name)
        if any(job.name == name for job in self._running()):
            raise SnapshotConflict(f"a snapshot {name!r} is being made")
        return await self._start(replace(self._new(JobKind.SNAPSHOT, prefix), name=name, allow_empty=allow_empty))

    def pins(self) -> list[str]:
        """Return the prefixes that are pinned; StoreUnavailable."""
        return sorted(self._dependencies.blocks.pins())

    async def unpin(self, prefix: str, *, cluster: bool = False) -> Unpinned:
        """Unpin a prefix and end the jobs that pin it here. `cluster`: unpin what is pinned over it, on all nodes."""
        was_pinned = prefix in self._dependencies.blocks.pins()
        for job in self._running():
            if (job.kind, job.prefix) == (JobKind.PIN, prefix) and job.cluster >= cluster:
                await self.cancel(job.id)
        was_pinned = was_pinned and prefix not in self._dependencies.blocks.pins()  # its job has just ended
        unpinned = await self._let_go(prefix, cluster=cluster)
        return replace(unpinned, was_pinned=unpinned.was_pinned or was_pinned)

    async def _let_go(self, prefix: str, *, cluster: bool) -> Unpinned:
        was_pinned, elsewhere = await self._dependencies.blocks.unpin(prefix, cluster=cluster), Unpinned(False)
        if cluster and self._dependencies.unpin_at_others is not None:
            elsewhere = await self._dependencies.unpin_at_others(prefix)
        return replace(elsewhere, was_pinned=was_pinned or elsewhere.was_pinned)

    async def start_listed(self, kind: JobKind, manifest: AsyncIterator[bytes], *, cluster: bool = False) -> Job:
        """Begin a job about the objects of a manifest, in its order; BadManifest, TooManyJobs, StoreUnavailable."""
        job = replace(self._new(kind, "", manifest=True), cluster=cluster)
        lines, count = ManifestLines(), 0
        worklist = Worklist(self._store.objects(job.id))
        try:
            async for piece in manifest:
                count += await asyncio.to_thread(_take, worklist, list(lines.feed(piece)))
            count += await asyncio.to_thread(_take, worklist, list(lines.end()))
            await asyncio.to_thread(worklist.sync)
            return await self._start(replace(job, objects_found=count, found_all=True))
        except BaseException:
            await _tried("what was left of a refused job could not be removed", self._store.remove, job.id)
            raise

    async def cancel(self, job_id: str) -> Job | None:
        """End a job; what it has brought stays. None when there is none of that id."""
        run = self._runs.get(job_id)
        if run is not None:
            if not run.doing.done():
                run.is_cancelled = True
                run.work.job = replace(run.work.job, state=JobState.CANCELLED)
                run.doing.cancel()
            await run.told.wait()
        return self.get(job_id)

    async def close(self) -> None:
        """Stop; running jobs stay so on disk."""
        self._is_closing = True
        runs = list(self._runs.values())
        for run in runs:
            run.doing.cancel()
            if run.waiting is not None:
                run.waiting.cancel()
        await asyncio.gather(*(run.following for run in runs if run.following is not None), return_exceptions=True)

    def _running(self) -> list[Job]:
        return [run.work.job for job_id, run in self._runs.items() if job_id not in self._ended]

    def _new(self, kind: JobKind, prefix: str, *, manifest: bool = False) -> Job:
        if len(self._runs) >= RUNNING_MAX:
            raise TooManyJobs(f"{RUNNING_MAX} jobs are running: wait for one, or cancel one")
        return Job(secrets.token_hex(6), kind, prefix, manifest, created_at=self._dependencies.clock.now())

    async def _start(self, job: Job) -> Job:
        await asyncio.to_thread(self._store.save, job)
        self._begin(job)
        return job

    def _begin(self, job: Job) -> None:
        work: ObjectJob | SnapshotJob
        if job.kind is JobKind.SNAPSHOT:
            work = SnapshotJob(self._dependencies, job)
        else:
            work = ObjectJob(self._dependencies, job, Worklist(self._store.objects(job.id)))
        run = self._runs[job.id] = _JobRun(work, asyncio.create_task(work.run(), name=f"job {job.id}"))
        run.following = asyncio.create_task(self._follow(run), name=f"end of job {job.id}")

    # Its end. What does the work is another task: however that one is broken off, this one goes on to the end.

    async def _follow(self, run: _JobRun) -> None:
        saving = asyncio.create_task(self._save_for_ever(run), name="job saving")
        await asyncio.wait({run.doing})
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        state, error = self._outcome(run)
        if error is not None:
            run.work.job = run.work.job.failed_with(error)
        if state is None:
            await _tried("a job's progress could not be written down", self._store.save, run.work.job)
        else:
            await self._take_back_pin(run)
            await self._end(run, replace(run.work.job, state=state, ended_at=self._dependencies.clock.now()))
        run.told.set()
        del self._runs[run.work.job.id]

    async def _take_back_pin(self, run: _JobRun) -> None:
        """Unpin the prefix of a pin that was cancelled, or brought nothing, unless it was pinned before."""
        job = run.work.job
        is_in_vain = run.doing.cancelled() or run.doing.exception() or (job.objects_failed and not job.objects_done)
        if job.kind is JobKind.PIN and is_in_vain and not job.was_pinned:
            try:
                not_told = (await self._let_go(job.prefix, cluster=job.cluster)).not_told
            except StoreUnavailable as failure:
                _log.warning("a prefix stays pinned though its job has failed", job=job.id, error=str(failure))
            else:
                for one in not_told:
                    _log.warning("a prefix stays pinned on a node though its job has failed", job=job.id, member=one)

    def _outcome(self, run: _JobRun) -> tuple[JobState | None, str | None]:
        """Return the state in which a job ends, and why all of it failed. No state: only the process ends."""
        if run.doing.cancelled():
            if run.is_cancelled:
                return JobState.CANCELLED, None
            return (None, None) if self._is_closing else (JobState.FAILED, "it was broken off")
        error = run.doing.exception()
        if error is None:
            return JobState.FAILED if run.work.job.objects_failed else JobState.DONE, None
        if isinstance(error, ForebayError):
            return JobState.FAILED, failure_text(error)
        _log.error("a job failed", job=run.work.job.id, exc_info=error)
        return JobState.FAILED, f"{type(error).__name__}: see the log"

    async def _end(self, run: _JobRun, job: Job) -> None:
        """Store the end of a job and show it; where the disk does not take it, show it and try again for ever."""
        message, pause_seconds = "a job's end could not be written down", _SAVE_SECONDS
        is_stored = await _tried(message, self._store.save, job)
        run.work.job = self._ended[job.id] = job
        run.told.set()
        while not is_stored:
            if self._is_closing:
                return
            run.waiting = asyncio.create_task(self._dependencies.clock.sleep(pause_seconds), name="job end waiting")
            await asyncio.wait({run.waiting})
            pause_seconds = min(2 * pause_seconds, _SAVE_SECONDS_MAX)
            is_stored = await _tried(message, self._store.save, job)
        await _tried("the list of an ended job could not be removed", self._store.drop_objects, job.id)
        for job_id in list(self._ended)[:-ENDED_KEPT]:
            if job_id not in self._runs and await _tried("an old job could not be removed", self._store.remove, job_id):
                self._ended.pop(job_id, None)

    async def _save_for_ever(self, run: _JobRun) -> None:
        is_stored = True
        while True:
            run.note_rate(self._dependencies.clock.monotonic())
            await self._dependencies.clock.sleep(_SAVE_SECONDS)
            message = "a job's progress could not be written down" if is_stored else None
            is_stored = await _tried(message, self._store.save, run.work.job)


async def _tried(message: str | None, work: Callable[P, None], *arguments: P.args, **options: P.kwargs) -> bool:
    """Run `work` in a thread and return whether it succeeded. If it failed, log `message`, if given.

    A cancelled caller waits for its end, so that a late write cannot overwrite a newer one.
    """
    try:
        await steadily(partial(work, *arguments, **options))
    except Exception as error:  # noqa: BLE001 - no failure of the disk may keep a job from its end
        if message is not None:
            _log.warning(message, error=str(error), exc_info=not isinstance(error, (ForebayError, OSError)))
        return False
    return True


def _take(worklist: Worklist, objects: list[tuple[str, str]]) -> int:
    if objects:
        worklist.add(objects)
    return len(objects)

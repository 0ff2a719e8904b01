"""However a job fails, and whichever call of its store fails, it ends in a state that is shown and then stored."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.blocks.cache import BlockCache
from gateway.core.errors import StoreUnavailable
from gateway.jobs import job as store_module
from gateway.jobs.job import Job, JobKind, JobState, JobStore
from gateway.jobs.runner import ENDED_KEPT, RUNNING_MAX
from gateway.jobs.worklist import BadManifest
from gateway.s3.requests import Operation
from tests.support.blocks import BUCKET, TestClock, make_origin
from tests.support.indexing import pages_without_end
from tests.support.jobs import data_set, job_bench
from tests.support.memory_origin.faults import Answer, Hold, on
from tests.support.waiting import until

PREFIX = f"s3://{BUCKET}/data/"

Fault = Callable[[], Exception]
FAULTS: list[Fault] = [lambda: OSError(errno.EIO, "no disk"), lambda: StoreUnavailable("no disk")]
METHODS = ["save", "drop_objects", "remove", "sweep"]


class Faults:
    """Has calls of one method of the store fail while `on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, fault: Fault) -> None:
        self.on = False
        self.failed = 0
        original = getattr(JobStore, method)

        def failing(store: JobStore, *arguments: Any) -> Any:
            if self.on:
                self.failed += 1
                raise fault()
            return original(store, *arguments)

        monkeypatch.setattr(JobStore, method, failing)


class ShortWaits(TestClock):
    """Every wait is one turn of the event loop."""

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        await asyncio.sleep(0.001)


async def manifest_of(*keys: str) -> AsyncIterator[bytes]:
    for key in keys:
        yield f"s3://{BUCKET}/data/{key}\n".encode()


async def test_a_late_write_of_progress_does_not_overwrite_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that still writes how far the job was ends before the job's end is written."""
    original, begun, may_end = JobStore.save, threading.Event(), threading.Event()
    saved: list[JobState] = []

    def slow(store: JobStore, job: Job) -> None:
        if job.state is JobState.RUNNING and saved:
            begun.set()
            assert may_end.wait(60)
        original(store, job)
        saved.append(job.state)

    monkeypatch.setattr(JobStore, "save", slow)
    origin, _ = data_set(1, 1000)
    held = asyncio.Event()
    origin.inject(on(Operation.GET_OBJECT), Hold(held))
    async with job_bench(tmp_path, origin, clock=ShortWaits()) as bench:
        job = await bench.jobs.start_listed(JobKind.WARM, manifest_of("0000"))
        await until(begun.is_set)
        held.set()
        for _ in range(100):
            await asyncio.sleep(0.001)  # the end is written now, if nothing waits
        may_end.set()
        assert (await bench.ended(job)).state is JobState.DONE
        await until(lambda: JobState.DONE in saved)
        await until(lambda: [one.state for one in bench.store.load()] == [JobState.DONE])
    assert saved[-1] is JobState.DONE


@pytest.mark.parametrize("fault", FAULTS, ids=["OSError", "StoreUnavailable"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keys", [["0000"], ["0000", "missing"]], ids=["done", "failed"])
async def test_a_job_ends_though_its_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, fault: Fault, keys: list[str]
) -> None:
    """It is shown as ended at once, and it is stored as ended once the disk is back."""
    faults = Faults(monkeypatch, method, fault)
    expected = JobState.FAILED if "missing" in keys else JobState.DONE
    origin, _ = data_set(1, 1000)
    async with job_bench(tmp_path, origin, clock=ShortWaits()) as bench:
        job = await bench.jobs.start_listed(JobKind.WARM, manifest_of(*keys))
        faults.on = True
        assert (await bench.ended(job)).state is expected
        if method == "save":
            await until(lambda: faults.failed > 3)  # tried again
        assert [one.state for one in bench.jobs.all()] == [expected]
        faults.on = False
        await until(lambda: [one.state for one in bench.store.load()] == [expected])
    async with job_bench(tmp_path, origin) as bench:
        assert [one.state for one in bench.jobs.all()] == [expected]
        assert not list((tmp_path / "jobs").glob("*.objects"))


def test_the_store_raises_what_it_says_whatever_the_disk_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """StoreUnavailable, from each of its calls."""
    store = JobStore(tmp_path / "jobs")

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "no disk")

    store.objects("x").touch()
    monkeypatch.setattr(os, "unlink", fails)
    monkeypatch.setattr(os, "listdir", fails)
    monkeypatch.setattr(store_module, "write_durably", fails)
    calls: list[Callable[[], object]] = [
        lambda: store.remove("x"),
        lambda: store.drop_objects("x"),
        lambda: store.sweep([]),
        store.load,
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()


@pytest.mark.parametrize("fault", FAULTS, ids=["OSError", "StoreUnavailable"])
async def test_a_refused_manifest_is_refused_with_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """What the disk says of the clean-up is no answer to the client; the next start cleans up."""
    faults = Faults(monkeypatch, "remove", fault)

    async def nonsense() -> AsyncIterator[bytes]:
        yield b"s3://b/k\n"
        yield b"nonsense\n"

    async with job_bench(tmp_path, make_origin()) as bench:
        faults.on = True
        with pytest.raises(BadManifest, match="line 2"):
            await bench.jobs.start_listed(JobKind.WARM, nonsense())
        assert bench.jobs.all() == []
    async with job_bench(tmp_path, make_origin()):
        assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.parametrize("fault", FAULTS, ids=["OSError", "StoreUnavailable"])
async def test_a_job_that_cannot_be_stored_is_not_begun_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """Neither the list of its objects nor its pin."""
    faults = Faults(monkeypatch, "save", fault)
    origin, _ = data_set(1, 1000)
    async with job_bench(tmp_path, origin) as bench:
        faults.on = True
        with pytest.raises((OSError, StoreUnavailable)):
            await bench.jobs.start_listed(JobKind.WARM, manifest_of("0000"))
        with pytest.raises((OSError, StoreUnavailable)):
            await bench.jobs.start(JobKind.PIN, PREFIX)
        assert bench.jobs.all() == []
        assert bench.jobs.pins() == []
        assert list((tmp_path / "jobs").iterdir()) == []


async def test_a_job_that_is_cancelled_before_its_first_step_has_ended(tmp_path: Path) -> None:
    """Nothing of it has run yet, so nothing of it can say that it has ended."""
    origin, _ = data_set(1, 1000)
    async with job_bench(tmp_path, origin) as bench:
        job = await bench.jobs.start(JobKind.WARM, PREFIX)
        cancelled = await bench.jobs.cancel(job.id)
        assert cancelled is not None
        assert cancelled.state is JobState.CANCELLED
        assert cancelled.ended_at is not None
        await until(lambda: [one.state for one in bench.store.load()] == [JobState.CANCELLED])
        for _ in range(RUNNING_MAX + 1):  # it takes no room any more
            await bench.jobs.cancel((await bench.jobs.start(JobKind.WARM, PREFIX)).id)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RuntimeError("a mistake"), OSError(errno.EIO, "no disk")])
async def test_a_job_that_breaks_off_by_itself_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Even where it looks as if somebody had cancelled it."""

    async def breaks(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(BlockCache, "invalidate", breaks)
    origin, _ = data_set(1, 1000)
    async with job_bench(tmp_path, origin) as bench:
        job = await bench.jobs.start(JobKind.EVICT, PREFIX)
        await until(lambda: bench.jobs.get(job.id) is None or bench.now(job).state is not JobState.RUNNING)
        assert (bench.now(job).state, len(bench.now(job).errors)) == (JobState.FAILED, 1)
        await until(lambda: [one.state for one in bench.store.load()] == [JobState.FAILED])


@pytest.mark.parametrize("keys", [0, 3])
@pytest.mark.parametrize("kind", [JobKind.WARM, JobKind.SNAPSHOT])
async def test_a_job_ends_though_the_origins_pages_do_not(tmp_path: Path, kind: JobKind, keys: int) -> None:
    """Empty ones, or the same again and again: it fails, and has kept no more of them than a few."""
    origin = make_origin()
    origin.inject(on(Operation.LIST_OBJECTS_V2), Answer(200, body=pages_without_end(keys)), times=None)
    async with job_bench(tmp_path, origin, clock=ShortWaits()) as bench:
        started = bench.service.create("frozen", PREFIX) if kind is JobKind.SNAPSHOT else None
        job = await (started or bench.jobs.start(kind, PREFIX))
        await until(lambda: bench.now(job).state is not JobState.RUNNING)
        assert bench.now(job).state is JobState.FAILED
        assert bench.now(job).objects_found <= 3 * keys
        assert origin.count() <= 100


async def test_old_jobs_that_the_disk_does_not_let_go_of_go_with_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended jobs take no more room than is said, once the disk is back."""
    faults = Faults(monkeypatch, "remove", FAULTS[0])
    origin, _ = data_set(1, 10)
    async with job_bench(tmp_path, origin) as bench:
        faults.on = True
        for _ in range(ENDED_KEPT + 3):
            await bench.ended(await bench.jobs.start(JobKind.EVICT, PREFIX))
        faults.on = False
        await bench.ended(await bench.jobs.start(JobKind.EVICT, PREFIX))
        await until(lambda: len(bench.store.load()) == len(bench.jobs.all()) == ENDED_KEPT)

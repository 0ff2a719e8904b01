"""Pinning as a job: it fetches, holds, refuses what is too much before fetching it, and goes on after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.core.errors import PinRefused
from gateway.jobs.job import JobKind, JobState
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support.blocks import BLOCK, BUCKET, PacedOrigin, read, stored
from tests.support.jobs import data_set, gets, job_bench
from tests.support.memory_origin.faults import Answer, on
from tests.support.slots import Slot
from tests.support.waiting import until

PREFIX = f"s3://{BUCKET}/data/"
FILE = BLOCK + 4096


async def test_a_pinned_prefix_is_here_and_stays(tmp_path: Path) -> None:
    """What was there before is held too; whatever is read afterwards, nothing of it is fetched again."""
    origin, versions = data_set(8)
    async with job_bench(tmp_path, origin, capacity_bytes=12 * FILE) as bench:
        await read(bench.cache, versions[0])
        await bench.cache.settle()
        job = await bench.ended(await bench.jobs.start(JobKind.PIN, PREFIX))
        assert (job.state, job.objects_done, job.bytes_fetched) == (JobState.DONE, 8, 7 * BLOCK)
        assert bench.jobs.pins() == [PREFIX]
        for number in range(30):
            await read(bench.cache, stored(origin, f"other/{number}", BLOCK))
            await bench.cache.settle()
        asked = gets(origin)
        for version in versions:
            await read(bench.cache, version)
        assert gets(origin) == asked
        assert (await bench.jobs.unpin(PREFIX)).was_pinned
        assert bench.jobs.pins() == []
        assert bench.cache.usage().slots["default"].pinned_bytes == 0


async def test_more_than_may_be_pinned_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    """The job fails with both figures, and nothing is pinned."""
    origin, _ = data_set(9)
    slot = Slot("data", Prefix.parse(PREFIX), capacity_limit_bytes=8 * BLOCK)
    async with job_bench(tmp_path, origin, slots=[slot]) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.PIN, PREFIX))
        assert job.state is JobState.FAILED
        assert job.errors == (f"{PREFIX} holds {9 * BLOCK} bytes, and slot data can pin {8 * BLOCK}",)
        assert gets(origin) == 0
        assert bench.jobs.pins() == []


async def test_what_does_not_fit_after_all_is_refused(tmp_path: Path) -> None:
    """Headers and pages make the files larger than the objects: then the pin is taken back, what was fetched stays."""
    origin, _ = data_set(8)
    slot = Slot("data", Prefix.parse(PREFIX), capacity_limit_bytes=8 * BLOCK)
    async with job_bench(tmp_path, origin, slots=[slot]) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.PIN, PREFIX))
        assert job.state is JobState.FAILED
        assert len(job.errors) == 1
        assert bench.jobs.pins() == []
        assert bench.cache.usage().slots["data"].pinned_bytes == 0
        assert bench.cache.usage().slots["data"].blocks == 7


async def test_an_overlapping_pin_is_refused_at_once(tmp_path: Path) -> None:
    """No job is begun for it."""
    origin, _ = data_set(1)
    async with job_bench(tmp_path, origin) as bench:
        await bench.ended(await bench.jobs.start(JobKind.PIN, PREFIX))
        with pytest.raises(PinRefused):
            await bench.jobs.start(JobKind.PIN, f"s3://{BUCKET}/")
        assert len(bench.jobs.all()) == 1


async def test_pinning_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Where the process ended; the pin is there from the first moment."""
    origin, _ = data_set(20)
    paced = PacedOrigin(origin, pause_after=BLOCK // 2)
    async with job_bench(tmp_path, origin, through=paced) as bench:
        job = await bench.jobs.start(JobKind.PIN, PREFIX)
        await asyncio.wait_for(paced.paused.wait(), 10)
    async with job_bench(tmp_path, origin) as bench:
        assert bench.jobs.pins() == [PREFIX]
        ended = await bench.ended(job)
        assert (ended.state, ended.objects_done) == (JobState.DONE, 20)
        assert bench.cache.usage().slots["default"].pinned_bytes == 20 * FILE


async def test_unpinning_ends_the_job_that_pins(tmp_path: Path) -> None:
    """It would hold again what was let go of."""
    origin, _ = data_set(20)
    paced = PacedOrigin(origin, pause_after=BLOCK // 2)
    async with job_bench(tmp_path, origin, through=paced) as bench:
        job = await bench.jobs.start(JobKind.PIN, PREFIX)
        await asyncio.wait_for(paced.paused.wait(), 10)
        assert (await bench.jobs.unpin(PREFIX)).was_pinned
        assert bench.now(job).state is JobState.CANCELLED
        paced.go.set()
        await bench.cache.settle()
        await until(lambda: bench.cache.usage().reserved_bytes == 0)
        assert bench.cache.usage().slots["default"].pinned_bytes == 0


async def test_a_pin_that_finds_no_object_fails_and_pins_nothing(tmp_path: Path) -> None:
    """A mistyped prefix stands in nobody's way; with `allow_empty` it is pinned for what comes later."""
    origin, _ = data_set(1)
    async with job_bench(tmp_path, origin) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.PIN, f"{PREFIX}typo/"))
        assert (job.state, job.errors) == (
            JobState.FAILED,
            (f"{PREFIX}typo/ holds no object: check the name, or allow it to be empty",),
        )
        assert bench.jobs.pins() == []
        assert (await bench.ended(await bench.jobs.start(JobKind.PIN, PREFIX))).state is JobState.DONE
        empty = f"s3://{BUCKET}/later/"
        job = await bench.ended(await bench.jobs.start(JobKind.PIN, empty, allow_empty=True))
        assert (job.state, bench.jobs.pins()) == (JobState.DONE, [PREFIX, empty])


@pytest.mark.parametrize("operation", [Operation.LIST_OBJECTS_V2, Operation.GET_OBJECT])
async def test_a_pin_that_brings_nothing_is_taken_back(tmp_path: Path, operation: Operation) -> None:
    """The origin refuses to list the prefix, or refuses each object. A prefix that was pinned before stays pinned."""
    origin, _ = data_set(2)
    async with job_bench(tmp_path, origin) as bench:
        origin.inject(on(operation), Answer(403, "AccessDenied"), times=None)
        job = await bench.ended(await bench.jobs.start(JobKind.PIN, PREFIX))
        assert (job.state, bench.jobs.pins()) == (JobState.FAILED, [])
        await bench.cache.pin(PREFIX)
        job = await bench.ended(await bench.jobs.start(JobKind.PIN, PREFIX))
        assert (job.state, bench.jobs.pins()) == (JobState.FAILED, [PREFIX])


async def test_a_pin_of_which_an_object_fails_stays(tmp_path: Path) -> None:
    """One object that the origin does not give costs nobody the others."""
    origin, _ = data_set(3)
    refused = on(Operation.GET_OBJECT, key="data/0001")
    origin.inject(refused, Answer(403, "InvalidObjectState"), times=None)
    async with job_bench(tmp_path, origin) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.PIN, PREFIX))
        assert (job.state, job.objects_done, bench.jobs.pins()) == (JobState.FAILED, 2, [PREFIX])


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_cancelled_pin_is_taken_back(tmp_path: Path, restarted: bool) -> None:
    """The next process takes it back too. A client that asks again meanwhile gets the same job."""
    origin, _ = data_set(20)
    paced = PacedOrigin(origin, pause_after=BLOCK // 2)
    async with job_bench(tmp_path, origin, through=paced) as bench:
        job = await bench.jobs.start(JobKind.PIN, PREFIX)
        await asyncio.wait_for(paced.paused.wait(), 10)
        assert (await bench.jobs.start(JobKind.PIN, PREFIX)).id == job.id
        if not restarted:
            await bench.jobs.cancel(job.id)
            assert bench.jobs.pins() == []
    if restarted:
        paced = PacedOrigin(origin, pause_after=BLOCK // 2)
        async with job_bench(tmp_path, origin, through=paced) as bench:
            await asyncio.wait_for(paced.paused.wait(), 10)
            await bench.jobs.cancel(job.id)
            assert bench.jobs.pins() == []

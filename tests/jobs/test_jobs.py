"""Jobs: what they bring, how they end, and that they go on where they were."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.blocks.directory import BlockDirectory
from gateway.blocks.layout import Extent
from gateway.core.errors import OriginUnreachable
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.jobs.job import JobKind, JobState, JobStore
from gateway.jobs.object_job import ObjectJob
from gateway.jobs.runner import RUNNING_MAX, TooManyJobs
from gateway.jobs.worklist import BadManifest, Worklist
from gateway.metadata.listing.index import FoundPage
from gateway.metadata.listing.pages import ListRequest
from gateway.metadata.listing.ranges import KeyBound
from gateway.origin.client import OriginRequest, OriginResponse, Purpose
from gateway.policy.slots import Prefix
from tests.support.blocks import BLOCK, BUCKET, PacedOrigin, TestClock, content_of, make_origin, read, stored
from tests.support.jobs import data_set, gets, job_bench
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import AlterHeaders, Answer, Effect, Fault
from tests.support.slots import Slot
from tests.support.waiting import until

PREFIX = f"s3://{BUCKET}/data/"


async def lines(*lines: str) -> AsyncIterator[bytes]:
    for line in lines:
        yield line.encode()


async def test_a_prefix_is_warm_afterwards(tmp_path: Path) -> None:
    """Every block under it, none beside it, is on disk; what was there already is not fetched again."""
    origin, versions = data_set(40, BLOCK + 1000)
    stored(origin, "other", BLOCK)
    async with job_bench(tmp_path, origin) as bench:
        await read(bench.cache, versions[0])
        await bench.cache.settle()
        job = await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        total = sum(version.size_bytes for version in versions)
        assert (job.state, job.objects_done, job.objects_found, job.found_all) == (JobState.DONE, 40, 40, True)
        assert (job.bytes_done, job.bytes_found, job.bytes_fetched) == (total, total, total - BLOCK - 1000)
        await bench.cache.settle()
        assert gets(origin) == 80
        for version in versions:
            assert await read(bench.cache, version) == content_of(origin, version)
        assert gets(origin) == 80
        assert bench.cache.usage().blocks == 80


@pytest.mark.slow
async def test_a_slot_that_is_not_strict_is_listed_afterwards(tmp_path: Path) -> None:
    """Warming lists the prefix: LIST is then answered from the index, however many pages it takes."""
    origin, _ = data_set(1200, size_bytes=10)
    slot = Slot("data", Prefix.parse(PREFIX), consistency="immutable")
    async with job_bench(tmp_path, origin, slots=[slot]) as bench:
        await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        await bench.catalog.settle()
        for_ever, after = KeyBound(math.inf, math.inf), b"data/1189"
        first = bench.catalog.listing.find(BUCKET, ListRequest(b"data/"), for_ever, with_owner=False)
        last = bench.catalog.listing.find(BUCKET, ListRequest(b"data/", after=after), for_ever, with_owner=False)
        assert isinstance(first, FoundPage)
        assert isinstance(last, FoundPage)
        assert (len(first.page.keys), first.page.is_truncated) == (1000, True)
        assert (len(last.page.keys), last.page.is_truncated) == (10, False)


async def test_a_slot_that_remembers_needs_no_question_afterwards(tmp_path: Path) -> None:
    """Where metadata is remembered, warming learns it too: the first epoch asks nothing."""
    origin, _ = data_set(5, BLOCK + 1000)
    slot = Slot("data", Prefix.parse(PREFIX), consistency="immutable")
    async with job_bench(tmp_path, origin, slots=[slot]) as bench:
        await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        await bench.catalog.settle()
        asked = origin.count()
        for headers in ({}, {"x-amz-checksum-mode": "ENABLED"}):
            assert (await bench.catalog.current(ObjectKey(BUCKET, "data/0003"), slot, headers=headers)).remembered
        assert origin.count() == asked
        assert bench.cache.usage().slots["data"].blocks == 10


async def test_a_manifest_is_fetched_in_its_order(tmp_path: Path) -> None:
    """The order in which the sampler will ask."""
    origin, versions = data_set(30, 1000)
    wanted = [versions[n] for n in (20, 3, 11)]
    async with job_bench(tmp_path, origin) as bench:
        manifest = lines(*(f"s3://{BUCKET}/{version.key.key}\n" for version in wanted))
        job = await bench.ended(await bench.jobs.start_listed(JobKind.WARM, manifest))
        assert (job.state, job.objects_done, job.objects_found, job.bytes_done) == (JobState.DONE, 3, 3, 3000)
        asked = [call.key for call in origin.calls if call.method == "HEAD"]
        assert asked == [version.key.key for version in wanted]


async def test_a_bad_manifest_leaves_nothing(tmp_path: Path) -> None:
    """It is refused as a whole."""
    async with job_bench(tmp_path, make_origin()) as bench:
        with pytest.raises(BadManifest, match="line 2"):
            await bench.jobs.start_listed(JobKind.WARM, lines("s3://b/k\n", "nonsense\n"))
        assert bench.jobs.all() == []
        assert list((tmp_path / "jobs").iterdir()) == []


async def test_what_is_not_there_is_told_and_the_rest_comes(tmp_path: Path) -> None:
    """One missing object fails the job's outcome, not its work."""
    origin, _ = data_set(2, 1000)
    async with job_bench(tmp_path, origin) as bench:
        named = lines(*(f"s3://{BUCKET}/data/{name}\n" for name in ("0000", "gone", "0001")))
        job = await bench.ended(await bench.jobs.start_listed(JobKind.WARM, named))
        assert (job.state, job.objects_done, job.objects_failed) == (JobState.FAILED, 2, 1)
        assert job.errors == (f"s3://{BUCKET}/data/gone: the origin answered 404",)


async def test_an_object_that_changes_after_it_was_listed_is_fetched_as_it_is(tmp_path: Path) -> None:
    """If-Match finds out; the new version is asked for and fetched."""

    class Changing(MemoryOrigin):
        async def send(self, request: OriginRequest) -> OriginResponse:  # type: ignore[override]
            response = await super().send(request)
            if request.method == "GET" and request.key is None:
                stored(self, "data/0001", 2000, seed=9)
            return response

    origin = Changing(TestClock())
    data_set(3, 1000, origin)
    async with job_bench(tmp_path, origin) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        assert (job.state, job.objects_done) == (JobState.DONE, 3)
        etag = origin.buckets[BUCKET].objects["data/0001"].etag
        asked = gets(origin)
        version = ObjectVersion(ObjectKey(BUCKET, "data/0001"), etag, 2000)
        assert await read(bench.cache, version) == content_of(origin, version)
        assert gets(origin) == asked


@pytest.mark.parametrize("effect", [Answer(501), AlterHeaders({"etag": '"x-gzip"'}), AlterHeaders({"etag": None})])
async def test_objects_whose_ranges_are_withheld_are_left_out(tmp_path: Path, effect: Effect) -> None:
    """The catalog learns it, and the job ends well: nothing of them can be kept."""
    origin, versions = data_set(3, BLOCK + 1000)
    origin.faults = [Fault(lambda call: "if-match" in call.headers, effect, None)]
    async with job_bench(tmp_path, origin) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        assert (job.state, job.objects_failed) == (JobState.DONE, 0)
        habits = bench.catalog.habits(BUCKET)
        assert not any(habits.gives_ranges(version) for version in versions)


async def test_it_stops_when_going_on_would_evict_what_it_has_brought(tmp_path: Path) -> None:
    """A data set larger than its slot: the first part is warm, and the job says so."""
    origin, versions = data_set(30, BLOCK)
    async with job_bench(tmp_path, origin, capacity_bytes=10 * (BLOCK + 4096)) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        assert (job.state, job.full) == (JobState.DONE, True)
        await bench.cache.settle()
        asked = gets(origin)
        for version in versions[:9]:
            await read(bench.cache, version)
        assert gets(origin) == asked


async def test_a_data_set_that_fills_its_slot_to_the_last_block_is_not_too_large(tmp_path: Path) -> None:
    """`full` says that something was left out, and not that nothing more would fit."""
    origin, _ = data_set(9, BLOCK)
    async with job_bench(tmp_path, origin, capacity_bytes=10 * (BLOCK + 4096)) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        assert (job.state, job.full, job.bytes_done) == (JobState.DONE, False, 9 * BLOCK)


async def test_a_reader_at_the_same_time_shares_what_is_fetched(tmp_path: Path) -> None:
    """Each byte comes from the origin once."""
    origin, [version] = data_set(1, 4 * BLOCK)
    paced = PacedOrigin(origin, pause_after=BLOCK // 2)
    async with job_bench(tmp_path, origin, through=paced) as bench:
        job = await bench.jobs.start(JobKind.WARM, PREFIX)
        await paced.paused.wait()
        reading = asyncio.create_task(read(bench.cache, version))
        paced.go.set()
        assert await reading == content_of(origin, version)
        assert (await bench.ended(job)).state is JobState.DONE
        assert gets(origin) == 4


async def test_a_job_knows_what_has_come_of_blocks_that_are_not_done(tmp_path: Path) -> None:
    """How fast it goes is known long before the first of many large blocks is there."""
    origin, _ = data_set(1, 4 * BLOCK)
    paced = PacedOrigin(origin, pause_after=BLOCK // 2)
    async with job_bench(tmp_path, origin, through=paced) as bench:
        job = await bench.jobs.start(JobKind.WARM, PREFIX)
        [run] = bench.jobs._runs.values()
        await until(lambda: run.work.coming_bytes == 2 * BLOCK)
        assert run.work.job.bytes_done == 0
        paced.go.set()
        ended = await bench.ended(job)
        assert (ended.bytes_done, ended.bytes_fetched, run.work.coming_bytes) == (4 * BLOCK, 4 * BLOCK, 0)


async def test_a_job_goes_on_after_a_restart(tmp_path: Path) -> None:
    """From where it was; what it had brought is not fetched again, and the counts are those of one run."""
    origin, versions = data_set(60, BLOCK + 1000)
    paced = PacedOrigin(origin, pause_after=10 * BLOCK, piece_bytes=BLOCK)
    paced.go.set()
    async with job_bench(tmp_path, origin, through=paced) as bench:
        job = await bench.jobs.start(JobKind.WARM, PREFIX)
        await until(lambda: bench.now(job).objects_done >= 20)
    begun = gets(origin)
    assert begun < 120
    async with job_bench(tmp_path, origin) as bench:
        [carried_on] = bench.jobs.all()
        assert carried_on.id == job.id
        ended = await bench.ended(carried_on)
        assert (ended.state, ended.objects_done, ended.objects_found) == (JobState.DONE, 60, 60)
        assert ended.bytes_done == ended.bytes_found == sum(version.size_bytes for version in versions)
        await bench.cache.settle()
        assert bench.cache.usage().blocks == 120
        assert gets(origin) <= 120 + 32  # what was in flight is broken off and asked for again


async def test_a_job_goes_on_where_a_power_cut_took_the_end_of_its_list(tmp_path: Path) -> None:
    """The record is synced, the list of a listing is not: what it lost is listed again."""
    origin, versions = data_set(30, BLOCK + 1000)
    async with job_bench(tmp_path, origin) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
    store = JobStore(tmp_path / "jobs")
    store.save(replace(job, state=JobState.RUNNING))
    Worklist(store.objects(job.id)).add([(BUCKET, "data/0000", versions[0].etag, BLOCK + 1000)])
    asked = origin.count()
    async with job_bench(tmp_path, origin) as bench:
        again = bench.jobs.get(job.id)
        assert again is not None
        again = await bench.ended(again)
        assert (again.state, again.objects_done, again.bytes_done) == (JobState.DONE, 30, job.bytes_done)
        assert origin.count() - asked <= 2


async def test_a_cancelled_job_ends_and_stays_ended(tmp_path: Path) -> None:
    """What it has brought stays."""
    origin, _ = data_set(40, BLOCK + 1000)
    paced = PacedOrigin(origin, pause_after=BLOCK // 2)
    async with job_bench(tmp_path, origin, through=paced) as bench:
        job = await bench.jobs.start(JobKind.WARM, PREFIX)
        await paced.paused.wait()
        cancelled = await bench.jobs.cancel(job.id)
        assert cancelled is not None
        assert cancelled.state is JobState.CANCELLED
        paced.go.set()
    async with job_bench(tmp_path, origin) as bench:
        assert [one.state for one in bench.jobs.all()] == [JobState.CANCELLED]
        assert await bench.jobs.cancel("unheard of") is None


@pytest.mark.parametrize("size_bytes", [BLOCK, 200_000], ids=["blocks", "small blocks"])
async def test_a_cancelled_job_fetches_no_further(tmp_path: Path, size_bytes: int) -> None:
    """What is on its way ends there, and gives its room back; a job of before goes on where a reader waits."""
    origin, versions = data_set(12, size_bytes)
    paced = PacedOrigin(origin, pause_after=100_000)
    async with job_bench(tmp_path, origin, through=paced) as bench:
        job = await bench.jobs.start(JobKind.WARM, PREFIX)
        await until(lambda: gets(origin) >= 12)
        reading = asyncio.create_task(read(bench.cache, versions[3]))
        await until(lambda: any(fetch.is_awaited for fetch in bench.cache._dependencies.fetches._fetches.values()))
        cancelled = await bench.jobs.cancel(job.id)
        assert cancelled is not None
        assert (cancelled.state, cancelled.objects_done, cancelled.bytes_done) == (JobState.CANCELLED, 0, 0)
        paced.go.set()
        assert await reading == content_of(origin, versions[3])
        await bench.cache.settle()
        assert (bench.cache.usage().blocks, bench.cache.usage().reserved_bytes) == (1, 0)
        again = await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        assert (again.state, again.objects_done) == (JobState.DONE, 12)
        assert again.bytes_fetched == 11 * size_bytes


async def test_a_cancelled_job_counts_what_has_arrived(tmp_path: Path) -> None:
    """Also what the disk has not taken yet; of objects of which some parts lack, the parts that are here."""
    origin = make_origin()
    for number in range(6):
        stored(origin, f"data/{number}", 1000 if number % 2 else BLOCK + 1000)
    paced = PacedOrigin(origin, pause_after=2000)
    async with job_bench(tmp_path, origin, through=paced) as bench:
        job = await bench.jobs.start(JobKind.WARM, PREFIX)
        work = bench.jobs._runs[job.id].work
        assert isinstance(work, ObjectJob)
        await until(lambda: work.job.bytes_done + work.coming_bytes == 6000)
        cancelled = await bench.jobs.cancel(job.id)
        assert cancelled is not None
        assert (cancelled.objects_done, cancelled.bytes_done, cancelled.bytes_fetched) == (3, 6000, 6000)
        paced.go.set()
        await bench.cache.settle()
        assert bench.cache.usage().blocks == 6


async def test_an_eviction_counts_what_it_drops(tmp_path: Path) -> None:
    """All that was here, part of it, or nothing; of a prefix and of a manifest. What is beside it stays, and the
    objects stay at the origin."""
    origin, versions = data_set(6, BLOCK + 1000)
    other = stored(origin, "other", BLOCK)
    total = sum(version.size_bytes for version in versions)
    async with job_bench(tmp_path, origin) as bench:

        async def evicted() -> tuple[int, int, int]:
            job = await bench.ended(await bench.jobs.start(JobKind.EVICT, PREFIX))
            assert job.state is JobState.DONE
            return job.objects_done, job.bytes_done, job.bytes_found

        await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        await read(bench.cache, other, ByteRange(0, 9))
        await bench.cache.settle()
        assert bench.cache.usage().blocks == 13
        assert await evicted() == (6, total, total)
        assert bench.cache.usage().blocks == 1
        assert len(origin.buckets[BUCKET].objects) == 7
        assert await evicted() == (6, 0, total)
        for version in versions[:2]:
            await read(bench.cache, version)
        await bench.cache.settle()
        assert await evicted() == (6, 2 * versions[0].size_bytes, total)
        await read(bench.cache, versions[1])
        await bench.cache.settle()
        manifest = lines(f"s3://{BUCKET}/data/0001\ns3://{BUCKET}/data/0002\n")
        job = await bench.ended(await bench.jobs.start_listed(JobKind.EVICT, manifest))
        assert (job.objects_done, job.bytes_done) == (2, versions[1].size_bytes)


async def test_an_origin_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    """Half a minute of nothing does not fail a job of hours, neither its listing nor an object."""

    class Away(MemoryOrigin):
        left = 5

        async def send(self, request: OriginRequest) -> OriginResponse:  # type: ignore[override]
            if self.left:
                self.left -= 1
                raise OriginUnreachable("nobody there")
            return await super().send(request)

    class QuickClock(TestClock):
        async def sleep(self, seconds: float) -> None:
            if seconds == 1.0 and asyncio.current_task().get_name() == "job saving":  # type: ignore[union-attr]
                await super().sleep(3600)
            self.time += seconds
            await asyncio.sleep(0)

    origin = Away(TestClock())
    data_set(3, 1000, origin)
    async with job_bench(tmp_path, origin, clock=QuickClock()) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        assert (job.state, job.objects_done, job.objects_failed) == (JobState.DONE, 3, 0)


async def test_a_listing_that_is_refused_fails_the_job(tmp_path: Path) -> None:
    """With the origin's reason."""
    async with job_bench(tmp_path, make_origin()) as bench:
        job = await bench.ended(await bench.jobs.start(JobKind.WARM, "s3://nowhere/"))
        assert job.state is JobState.FAILED
        assert job.errors == ("the origin answered 404 NoSuchBucket",)


async def test_only_so_many_run(tmp_path: Path) -> None:
    """Each holds connections and memory."""
    origin, _ = data_set(1, BLOCK + 1000)
    paced = PacedOrigin(origin, pause_after=0)
    async with job_bench(tmp_path, origin, through=paced) as bench:
        for _ in range(RUNNING_MAX):
            await bench.jobs.start(JobKind.WARM, PREFIX)
        with pytest.raises(TooManyJobs):
            await bench.jobs.start(JobKind.WARM, PREFIX)
        paced.go.set()


async def test_what_is_not_published_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends before then takes the bytes with it: the job must not have gone on behind them."""
    publish, publishing = threading.Event(), threading.Event()
    finish = BlockDirectory.finish

    def held(*arguments: Any, **named: Any) -> Extent | None:
        publishing.set()
        assert publish.wait(30)
        return finish(*arguments, **named)

    monkeypatch.setattr(BlockDirectory, "finish", held)
    origin, _ = data_set(1, BLOCK)
    async with job_bench(tmp_path, origin) as bench:
        job = await bench.jobs.start(JobKind.WARM, PREFIX)
        await until(publishing.is_set)
        await asyncio.sleep(0.05)  # time for a job that does not wait to go on
        assert (bench.now(job).state, bench.now(job).bytes_done) == (JobState.RUNNING, 0)
        publish.set()
        assert (await bench.ended(job)).bytes_done == BLOCK


async def test_everything_is_asked_for_as_warm_up(tmp_path: Path) -> None:
    """LIST, HEAD and GET: the meter, and the row of requests that the origin would refuse, can tell them from what
    readers wait for."""
    purposes: set[tuple[str, Purpose]] = set()

    class Noting(MemoryOrigin):
        async def send(self, request: OriginRequest) -> OriginResponse:  # type: ignore[override]
            purposes.add((request.method, request.purpose))
            return await super().send(request)

    origin = Noting(TestClock())
    data_set(2, BLOCK + 1000, origin)
    slot = Slot("data", Prefix.parse(PREFIX), consistency="immutable")
    async with job_bench(tmp_path, origin, slots=[slot]) as bench:
        await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
    assert purposes == {("GET", Purpose.WARM), ("HEAD", Purpose.WARM)}

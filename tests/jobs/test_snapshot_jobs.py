"""Making snapshots in the background, comparing them, taking them out and bringing them in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway.core.errors import NoSuchSnapshot, SnapshotConflict, SnapshotError
from gateway.core.model import ObjectKey
from gateway.jobs.job import Job, JobKind, JobState
from gateway.jobs.snapshot_service import BadLine
from gateway.metadata.snapshots import staging as table_module
from gateway.metadata.snapshots.staging import ObjectTable
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support.blocks import BLOCK, BUCKET, TestClock, make_origin, pass_until, stored
from tests.support.jobs import JobBench, job_bench
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import Answer as Failure
from tests.support.memory_origin.faults import Hold, Unreachable, on
from tests.support.slots import Slot
from tests.support.snapshots import files_of, keys_of
from tests.support.waiting import until

PREFIX = f"s3://{BUCKET}/data/"
LISTS = on(Operation.LIST_OBJECTS_V2)
FROZEN = Slot("f", Prefix.parse(PREFIX), "read-only", "snapshot", snapshot="v1")


def data_set(count: int, size_bytes: int = 10) -> MemoryOrigin:
    origin = make_origin()
    for number in range(count):
        origin.put(BUCKET, f"data/{number:05d}", bytes(size_bytes))
    origin.put(BUCKET, "other", b"")
    return origin


def starts(origin: MemoryOrigin) -> list[str | None]:
    """Behind which key each page was asked for; with a token: None."""
    calls = (dict(call.query) for call in origin.calls if call.operation is Operation.LIST_OBJECTS_V2)
    return [None if "continuation-token" in query else query.get("start-after", "") for query in calls]


async def made(bench: JobBench, name: str = "v1", prefix: str = PREFIX) -> Job:
    job = await bench.ended(await bench.service.create(name, prefix))
    assert job.state is JobState.DONE, job.errors
    return job


async def joined(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


async def cut(content: bytes, piece_bytes: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(content), piece_bytes):
        yield content[start : start + piece_bytes]


async def compared(bench: JobBench, name: str, other: str | None = None) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in (await joined(await bench.service.compared(name, other))).splitlines()]


async def test_a_prefix_is_frozen(tmp_path: Path) -> None:
    """Every object under it, none beside it; the job tells how much that was; it says what it freezes."""
    async with job_bench(tmp_path, data_set(2500), slots=[FROZEN]) as bench:
        job = await made(bench)
        assert (job.objects_found, job.objects_done, job.bytes_done, job.found_all) == (2500, 2500, 25_000, True)
        (one,) = await bench.service.all()
        assert (one.objects, one.bytes, one.slots, one.problem) == (2500, 25_000, ["f"], None)
        assert one.started_at <= one.ended_at
        assert one.origin == "memory"
        assert len(keys_of(bench.snapshots, "v1")) == 2500
        assert files_of(bench.snapshots.root) == ["v1"]
        with pytest.raises(SnapshotConflict, match="already"):
            await bench.service.create("v1", PREFIX)


async def test_what_a_snapshot_lists_otherwise_is_forgotten(tmp_path: Path) -> None:
    """And what it lists as it is remembered stays."""
    origin, slot = data_set(2), Slot("t", Prefix.parse(PREFIX), "read-only", "ttl", 60.0)
    keys = [ObjectKey(BUCKET, key) for key in sorted(origin.buckets[BUCKET].objects) if key.startswith("data/")]
    async with job_bench(tmp_path, origin, slots=[slot]) as bench:
        for key in keys:
            await bench.catalog.current(key, slot, headers={})
        await bench.catalog.settle()
        origin.put(BUCKET, keys[0].key, b"others")
        await made(bench)
        assert [bench.catalog.last_known(key) is None for key in keys] == [True, False]


async def test_what_was_killed_is_gone_on_with(tmp_path: Path) -> None:
    """Behind the last page that was kept; it is not seen before its end, and one of its name is not begun twice."""
    origin, reached = data_set(2500), asyncio.Event()
    held = origin.inject(lambda call: LISTS(call) and len(starts(origin)) == 3, Hold(asyncio.Event(), reached))
    async with job_bench(tmp_path, origin) as bench:
        job = await bench.service.create("v1", PREFIX)
        await reached.wait()
        with pytest.raises(SnapshotConflict, match="being made"):
            await bench.service.create("v1", PREFIX)
        assert await bench.service.all() == []
    origin.faults.remove(held)
    origin.calls.clear()
    async with job_bench(tmp_path, origin) as bench:
        assert (await bench.ended(job)).objects_done == 2500
        assert starts(origin) == ["data/01999"]
        assert len(keys_of(bench.snapshots, "v1")) == 2500
        assert (await bench.service.one("v1")).bytes == 25_000


async def test_what_was_killed_just_behind_its_end_is_done(tmp_path: Path) -> None:
    """The snapshot is there, the job does not know yet: nothing is listed again."""
    origin = data_set(5)
    async with job_bench(tmp_path, origin) as bench:
        job = await made(bench)
        bench.store.save(replace(job, state=JobState.RUNNING, ended_at=None))
    origin.calls.clear()
    async with job_bench(tmp_path, origin) as bench:
        assert (await bench.ended(job)).state is JobState.DONE
        assert origin.calls == []


async def test_what_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    """Neither a snapshot nor what was kept for it."""
    origin, reached = data_set(1500), asyncio.Event()
    origin.inject(lambda call: LISTS(call) and len(starts(origin)) == 2, Hold(asyncio.Event(), reached))
    async with job_bench(tmp_path, origin) as bench:
        job = await bench.service.create("v1", PREFIX)
        await reached.wait()
        ended = await bench.jobs.cancel(job.id)
        assert ended is not None
        assert ended.state is JobState.CANCELLED
        assert files_of(bench.snapshots.root) == []


async def test_an_origin_that_refuses_fails_the_job(tmp_path: Path) -> None:
    """With what it said; nothing is left. One that is down for a while does not."""
    origin, clock = data_set(5), TestClock()
    async with job_bench(tmp_path, origin, clock=clock) as bench:
        origin.inject(LISTS, Failure(403, "AccessDenied"))
        job = await bench.ended(await bench.service.create("v1", PREFIX))
        assert (job.state, files_of(bench.snapshots.root)) == (JobState.FAILED, [])
        assert "403" in job.errors[0]
        origin.inject(LISTS, Unreachable(), times=2)
        job = await bench.service.create("v1", PREFIX)
        await pass_until(clock, lambda: bench.now(job).state is not JobState.RUNNING)
        assert bench.now(job).state is JobState.DONE


async def test_a_disk_that_takes_nothing_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing."""

    monkeypatch.setattr(table_module, "_MAP_BYTES", 64 * 1024)
    async with job_bench(tmp_path, data_set(2500)) as bench:
        job = await bench.ended(await bench.service.create("v1", PREFIX))
        assert (job.state, files_of(bench.snapshots.root)) == (JobState.FAILED, [])
        assert "cannot be written" in job.errors[0]


async def test_differences_to_the_origin_and_to_another(tmp_path: Path) -> None:
    """What was added, removed and changed, in the order of keys, and how many of each."""
    origin = data_set(1200)
    async with job_bench(tmp_path, origin) as bench:
        await made(bench)
        assert await compared(bench, "v1") == [{"added": 0, "removed": 0, "changed": 0, "same": 1200}]
        stored(origin, "data/00000", 99)
        stored(origin, "data/00001a", 10)
        origin.buckets[BUCKET].remove("data/01100")
        expected = [("changed", "data/00000"), ("added", "data/00001a"), ("removed", "data/01100")]
        *changes, counts = await compared(bench, "v1")
        assert [(one["change"], one["key"]) for one in changes] == expected
        assert counts == {"added": 1, "removed": 1, "changed": 1, "same": 1198}
        await made(bench, "v2")
        assert await compared(bench, "v1", "v2") == [*changes, counts]
        with pytest.raises(NoSuchSnapshot):
            await bench.service.compared("v1", "v3")


async def test_what_goes_out_comes_in_again(tmp_path: Path) -> None:
    """The same digest, whatever the order of the lines; and the same lines go out of it."""
    async with job_bench(tmp_path, data_set(1200)) as bench:
        await made(bench)
        lines = await joined(await bench.service.exported("v1"))
        header, *objects = lines.splitlines()
        backwards = b"\n".join([header, *reversed(objects)])
        imported = await bench.service.imported("v2", cut(backwards))
        one = await bench.service.one("v1")
        same = ("prefix", "objects", "bytes", "digest", "started_at", "ended_at", "origin")
        assert [getattr(imported, name) for name in same] == [getattr(one, name) for name in same]
        again = await joined(await bench.service.exported("v2"))
        assert again.splitlines()[1:] == objects
        assert orjson.loads(again.splitlines()[0]) == orjson.loads(header) | {"name": "v2"}
        assert (await compared(bench, "v1", "v2"))[-1]["same"] == 1200
        with pytest.raises(SnapshotConflict):
            await bench.service.imported("v2", cut(lines))


async def test_what_cannot_be_brought_in_leaves_nothing(tmp_path: Path) -> None:
    """A line that is wrong, a key that comes twice, lines that are missing, one that was changed."""
    async with job_bench(tmp_path, data_set(700)) as bench:
        await made(bench)
        lines = (await joined(await bench.service.exported("v1"))).splitlines(keepends=True)
        for content, kind, said in (
            ([*lines, b"{}"], BadLine, "line 702: "),
            ([*lines, lines[3]], BadLine, "line 702: the key 'data/00002' has come before"),
            ([*lines[:300], lines[3], *lines[300:]], BadLine, "line 301: the key 'data/00002' has come before"),
            (lines[:-1], SnapshotError, "missing or has been changed"),
            ([lines[0], lines[1].replace(b'"size":10', b'"size":11'), *lines[2:]], SnapshotError, "changed"),
            ([], BadLine, "line 1: "),
        ):
            with pytest.raises(kind, match=said):
                await bench.service.imported("v2", cut(b"".join(content)))
            assert files_of(bench.snapshots.root) == ["v1"]

        async def breaks_off() -> AsyncIterator[bytes]:
            yield b"".join(lines[:100])
            raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await bench.service.imported("v2", breaks_off())
        assert files_of(bench.snapshots.root) == ["v1"]


async def test_a_snapshot_that_freezes_a_slot_is_not_deleted_by_mistake(tmp_path: Path) -> None:
    """Only when that is insisted on; then the slot has a problem that says what to do."""
    async with job_bench(tmp_path, data_set(5), slots=[FROZEN]) as bench:
        (slot,) = await bench.service.slots(whole=True)
        assert "forebay snapshot create v1" in (slot.problem or "")
        await made(bench)
        assert (await bench.service.slots(whole=True))[0].problem is None
        with pytest.raises(SnapshotConflict, match="--force"):
            await bench.service.delete("v1", force=False)
        await bench.service.delete("v1", force=True)
        with pytest.raises(NoSuchSnapshot):
            await bench.service.delete("v1", force=True)
        with pytest.raises(NoSuchSnapshot):
            await bench.service.delete("v1", force=False)
        assert (await bench.service.slots())[0].problem is not None


async def test_a_frozen_slot_is_warmed_with_what_is_frozen(tmp_path: Path) -> None:
    """The frozen versions, pinned; what has come since is not fetched, what has changed is told."""
    origin = data_set(5, BLOCK)
    async with job_bench(tmp_path, origin, slots=[FROZEN]) as bench:
        await made(bench)
        origin.put(BUCKET, "data/00000", b"x" * BLOCK)
        stored(origin, "data/new", BLOCK)
        origin.calls.clear()
        job = await bench.ended(await bench.jobs.start(JobKind.WARM, PREFIX))
        assert (job.state, job.objects_failed, job.bytes_fetched) == (JobState.FAILED, 1, 4 * BLOCK)
        assert job.errors == (
            f"s3://{BUCKET}/data/00000: the origin does not have the version with ETag "
            f"{_etag(bench, 'data/00000')} any more",
        )
        gets = [call for call in origin.calls if call.method == "GET" and call.key]
        assert {call.key for call in gets} == {f"data/{number:05d}" for number in range(1, 5)}
        assert all("if-match" in call.headers for call in gets)


def _etag(bench: JobBench, key: str) -> str:
    with bench.snapshots.opened("v1") as snapshot:
        return next(one.etag for one in snapshot.data.part(key.encode(), b"\xff"))


async def test_whoever_is_cancelled_waits_for_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment that a thread writes to is not closed under it."""
    writing, closed_meanwhile = asyncio.Event(), []
    append, close = ObjectTable.append, ObjectTable.close
    busy = False
    loop = asyncio.get_running_loop()

    def slow_append(data: ObjectTable, entries: Any) -> None:
        nonlocal busy
        busy = True
        loop.call_soon_threadsafe(writing.set)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result()
        append(data, entries)
        busy = False

    def noted_close(data: ObjectTable) -> None:
        closed_meanwhile.append(busy)
        close(data)

    monkeypatch.setattr(ObjectTable, "append", slow_append)
    monkeypatch.setattr(ObjectTable, "close", noted_close)
    async with job_bench(tmp_path, data_set(5)) as bench:
        job = await bench.service.create("v1", PREFIX)
        await writing.wait()
        await bench.jobs.cancel(job.id)
        await until(lambda: bool(closed_meanwhile))
        assert files_of(bench.snapshots.root) == []
    assert closed_meanwhile == [False]


async def test_a_snapshot_of_no_object_fails_and_takes_no_name(tmp_path: Path) -> None:
    """A mistyped prefix leaves the name free for the right one, unless it is allowed to be empty."""
    async with job_bench(tmp_path, data_set(1)) as bench:
        empty = f"s3://{BUCKET}/typo/"
        job = await bench.ended(await bench.service.create("v1", empty))
        assert (job.state, job.errors) == (
            JobState.FAILED,
            (f"{empty} holds no object: check the name, or allow it to be empty",),
        )
        assert await bench.service.all() == []
        await made(bench)
        job = await bench.ended(await bench.service.create("v2", empty, allow_empty=True))
        assert (job.state, job.objects_done) == (JobState.DONE, 0)

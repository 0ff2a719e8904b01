"""Small blocks from first request to segment: one request each, and never a wrong byte."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.blocks import small_block_fetch
from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.blocks.small_block_fetch import (
    BUSY_GATHERING_SECONDS,
    GATHERING_SECONDS,
    HELD_BYTES_MAX,
    gathering_seconds,
)
from gateway.core.model import FileSpan, ObjectVersion
from gateway.origin.client import Purpose
from gateway.policy.slots import Prefix, Slots
from gateway.telemetry import metrics
from tests.support.blocks import (
    BUCKET,
    KIB,
    MIB,
    PacedOrigin,
    TestClock,
    block_files,
    content_of,
    drop_page_cache,
    make_origin,
    open_cache,
    pass_until,
    read,
    stored,
    take,
    whole,
)
from tests.support.counting import counted
from tests.support.fill_worker import FillWorker
from tests.support.memory_origin.faults import Answer, Call
from tests.support.memory_origin.response import MemoryResponse
from tests.support.slots import Slot
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import until

SEED = 20261121
PACKED = MIB
ONE_SEGMENT = 4096 * MIB
"""The capacity of which segments of full size are small enough a part."""


async def test_small_objects_share_a_file(tmp_path: Path) -> None:
    """Hundreds of objects, one file, one request each; the second reading asks nobody and opens nothing twice."""
    origin = make_origin()
    versions = [stored(origin, f"k{n}", 1 + 97 * n, seed=n) for n in range(250)]
    settings: dict[str, Any] = {"small_object_bytes_max": PACKED, "capacity_bytes": ONE_SEGMENT}
    async with open_cache(tmp_path / "c", origin, **settings) as cache:
        got = await asyncio.gather(*(read(cache, version) for version in versions))
        assert got == [content_of(origin, version) for version in versions]
        await cache.settle()
        assert origin.count() == len(versions) == counted(metrics.CACHE_FILLS, outcome="filled")
        hits = counted(metrics.CACHE_HIT_BYTES)
        for version in versions:
            assert await read(cache, version) == content_of(origin, version)
        assert counted(metrics.CACHE_HIT_BYTES) - hits == sum(version.size_bytes for version in versions)
        assert (origin.count(), counted(metrics.CACHE_FILLS, outcome="failed"), counted(metrics.CACHE_DAMAGED)) == (
            len(versions),
            0,
            0,
        )
        assert cache.usage().blocks == len(versions)
        assert len(block_files(tmp_path / "c")) == 1
        await until(lambda: cache.usage().reserved_bytes == 0)


async def test_a_warm_small_object_goes_out_of_its_segment_without_a_copy(tmp_path: Path) -> None:
    """Once verified, it is a span of the segment's file; many objects, one descriptor."""
    origin = make_origin()
    versions = [stored(origin, f"k{n}", 100_000, seed=n) for n in range(20)]
    async with open_cache(tmp_path / "c", origin, small_object_bytes_max=PACKED, capacity_bytes=ONE_SEGMENT) as cache:
        descriptors = set()
        for _ in range(3):
            for version in versions:
                await read(cache, version)
            await cache.settle()
        for version in versions:
            reader = await cache.open_range(version, whole(version))
            held = reader.whole()
            assert held is not None
            span = held.span
            descriptors.add(span.descriptor)
            assert os.pread(span.descriptor, span.count, span.offset) == content_of(origin, version)
            held.close()
        assert len(descriptors) == len(block_files(tmp_path / "c")) == 1


@pytest.mark.parametrize(("has_local_readers", "segments"), [(False, 1), (True, 2)])
async def test_segments_are_sealed_after_a_pause_for_local_readers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_local_readers: bool, segments: int
) -> None:
    """A descriptor shows what comes into its file later; without such readers, seldom reads share a file, too."""
    monkeypatch.setattr(small_block_fetch, "SEALED_SECONDS", 0.0)
    origin = make_origin()
    settings: dict[str, Any] = {"small_object_bytes_max": PACKED, "capacity_bytes": ONE_SEGMENT}
    async with open_cache(tmp_path / "c", origin, has_local_readers=has_local_readers, **settings) as cache:
        for key in ("a", "b"):
            version = stored(origin, key, 1000)
            await take(await cache.open_range(version, whole(version)))
            await cache.settle()
            for writer in cache._dependencies.writers:
                await until(lambda writer=writer: writer._pumping is None)  # type: ignore[misc]
            for _ in range(3):  # turns of the event loop: a timer that is due runs
                await asyncio.sleep(0)
        assert len(block_files(tmp_path / "c")) == segments


async def test_small_and_short_last_blocks_of_large_objects_are_packed_too(tmp_path: Path) -> None:
    """A slot of small blocks costs no file a block; each slot has blocks of its own size."""
    origin = make_origin()
    slots = Slots([Slot("fine", Prefix(BUCKET, "fine/"), block_size_bytes=64 * KIB)])
    fine, coarse = stored(origin, "fine/a", MIB + 5), stored(origin, "coarse", MIB + 5)
    settings: dict[str, Any] = {"small_object_bytes_max": 64 * KIB, "capacity_bytes": ONE_SEGMENT}
    async with open_cache(tmp_path / "c", origin, slots=slots, **settings) as cache:
        for version, slot in ((fine, "fine"), (coarse, "default")):
            for piece in cache.pieces(version, slot):
                await take(await cache.open_range(version, piece, slot=slot))
        await cache.settle()
        assert [call.headers["range"] for call in origin.calls][:2] == ["bytes=0-65535", "bytes=65536-131071"]
        assert cache.usage().slots["fine"].blocks == 17
        assert cache.usage().slots["default"].blocks == 5
        segments = [path for path in block_files(tmp_path / "c") if path.suffix == ".segment"]
        assert (len(segments), len(block_files(tmp_path / "c"))) == (2, 6)
        for version, slot in ((fine, "fine"), (coarse, "default")):
            reader = await cache.open_range(version, whole(version), slot=slot)
            assert (reader.outcome, await take(reader)) == ("hit", content_of(origin, version))


async def test_they_are_there_after_a_restart_and_after_an_unclean_boot(tmp_path: Path) -> None:
    """By the index, or by the records' own headers; a segment goes on being read, nothing is asked again."""
    origin = make_origin()
    versions = [stored(origin, f"k{n}", 3000 + n, seed=n) for n in range(40)]
    async with open_cache(tmp_path / "c", origin, small_object_bytes_max=PACKED) as cache:
        for version in versions:
            await read(cache, version)
    for boot in (False, True):
        if boot:
            (tmp_path / "c" / "CLEAN").unlink()
            (tmp_path / "c" / "BOOT").write_text("another boot\n")
        async with open_cache(tmp_path / "c", origin, small_object_bytes_max=PACKED) as cache:
            await cache.rebuild_index()
            for version in versions:
                assert await read(cache, version) == content_of(origin, version)
    assert origin.count() == len(versions)


@pytest.mark.parametrize("harm", ["flip", "truncate", "swap", "unlink", "foreign"])
@pytest.mark.parametrize("restart", [False, True])
async def test_what_is_not_as_it_was_written_is_a_miss(tmp_path: Path, harm: str, restart: bool) -> None:
    """Flipped, torn, exchanged or removed: every read gives the object's own bytes, and the damage heals."""
    origin, rng = make_origin(), random.Random(SEED)
    versions = [stored(origin, f"k{n}", 50_000 + n, seed=n) for n in range(30)]
    settings: dict[str, Any] = {"small_object_bytes_max": PACKED, "capacity_bytes": 16 * MIB}
    async with open_cache(tmp_path / "c", origin, **settings) as cache:
        for version in versions:
            await read(cache, version)
        await cache.settle()
        if not restart:
            harm_segments(block_files(tmp_path / "c"), harm, rng)
            for _ in range(2):
                for version in versions:
                    assert await read(cache, version) == content_of(origin, version)
    if restart:
        harm_segments(block_files(tmp_path / "c"), harm, rng)
    async with open_cache(tmp_path / "c", origin, **settings) as cache:
        for version in versions:
            assert await read(cache, version) == content_of(origin, version)
        await cache.settle()
        asked = origin.count()
        for version in versions:
            assert await read(cache, version) == content_of(origin, version)
        assert origin.count() == asked


def harm_segments(files: list[Path], harm: str, rng: random.Random) -> None:
    segments = [path for path in files if path.suffix == ".segment"]
    assert len(segments) > 1
    one, other = segments[:2]
    if harm == "flip":
        with one.open("r+b") as file:
            for _ in range(20):
                file.seek(position := rng.randrange(one.stat().st_size))
                byte = file.read(1)
                file.seek(position)
                file.write(bytes([byte[0] ^ 0x10]))
    elif harm == "truncate":
        os.truncate(one, one.stat().st_size // 3)
    elif harm == "swap":
        aside = one.with_name("aside")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)
    elif harm == "unlink":
        one.unlink()
    else:
        one.write_bytes(rng.randbytes(one.stat().st_size))
    for path in segments:
        if path.exists():
            drop_page_cache(path)


async def test_a_disk_that_takes_nothing_costs_readers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC while a segment is written: the bytes are served, nothing is kept, the accounts stay exact."""
    origin, clock = make_origin(), TestClock()
    versions = [stored(origin, f"k{n}", 10_000, seed=n) for n in range(10)]
    async with open_cache(tmp_path / "c", origin, small_object_bytes_max=PACKED, clock=clock) as cache:
        await read(cache, versions[0])
        await cache.settle()

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "no room")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", full)
            for version in versions[:-1]:
                assert await read(cache, version) == content_of(origin, version)
            fetched = await cache.fetch(versions[-1], whole(versions[-1]), slot="default", purpose=Purpose.WARM)
            assert not fetched[1]
            await cache.settle()
        assert 1 <= counted(metrics.CACHE_NOT_KEPT) == counted(metrics.CACHE_FILLS, outcome="failed") <= 9
        usage = cache.usage()
        assert (usage.blocks, usage.reserved_bytes) == (1, 0)
        assert usage.used_bytes == sum(
            path.stat().st_size + -path.stat().st_size % 4096 for path in block_files(tmp_path / "c")
        )
        await pass_until(clock, lambda: cache.isolation.writable)
        for version in versions:
            assert await read(cache, version) == content_of(origin, version)
        await cache.settle()
        assert cache.usage().blocks == 10


async def test_a_reader_joins_while_the_bytes_come_and_while_they_are_written(tmp_path: Path) -> None:
    """All readers of one small object share one request, from its first byte to its last moment in memory."""
    origin = make_origin()
    version = stored(origin, "k", 900 * KIB)
    paced = PacedOrigin(origin, pause_after=400 * KIB)
    async with open_cache(tmp_path / "c", paced, small_object_bytes_max=PACKED, block_size_bytes=MIB) as cache:
        readers = [asyncio.create_task(read(cache, version)) for _ in range(3)]
        await paced.paused.wait()
        early = await cache.open_range(version, whole(version))
        readers.append(asyncio.create_task(take(early)))
        paced.go.set()
        for reader in readers:
            assert await reader == content_of(origin, version)
        assert await read(cache, version) == content_of(origin, version)
        assert origin.count() == 1


@pytest.mark.slow
async def test_what_waits_for_the_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that stands still stops the fetching before the memory is full, and then all goes on."""
    standing, go = threading.Event(), threading.Event()
    pwritev = os.pwritev

    def stands_still(*arguments: Any) -> int:
        standing.set()
        assert go.wait(30)
        return pwritev(*arguments)

    origin = make_origin()
    versions = [stored(origin, f"k{n}", MIB - n, seed=n) for n in range(90)]
    settings: dict[str, Any] = {
        "small_object_bytes_max": PACKED,
        "block_size_bytes": MIB,
        "capacity_bytes": 256 * MIB,
    }
    async with open_cache(tmp_path / "c", origin, fills_max=32, **settings) as cache:
        monkeypatch.setattr(os, "pwritev", stands_still)
        reading = [asyncio.create_task(read(cache, version)) for version in versions]
        asked = HELD_BYTES_MAX // MIB + 32  # those that lie in memory, and those that wait for room
        await until(lambda: standing.is_set() and origin.count() >= asked)
        for _ in range(1000):  # whatever could go on without the disk goes on
            await asyncio.sleep(0)
        assert HELD_BYTES_MAX - MIB <= cache._dependencies.writers[0].held_bytes <= HELD_BYTES_MAX
        assert origin.count() == asked
        assert not all(reader.done() for reader in reading)
        go.set()
        for reader, version in zip(reading, versions, strict=True):
            assert await reader == content_of(origin, version)
        await cache.settle()
        assert (cache.usage().blocks, cache._dependencies.writers[0].held_bytes) == (len(versions), 0)


class ShortAnswer(MemoryResponse):
    """A body of 40 KiB at the beginning of a much larger buffer."""

    def __init__(self) -> None:
        super().__init__(200)
        self.buffer = bytearray(128 * KIB)

    def whole(self) -> memoryview | None:
        return memoryview(self.buffer)[: 40 * KIB]


async def test_what_waits_for_the_disk_counts_with_the_buffers_that_it_keeps(tmp_path: Path) -> None:
    """Bodies that are small beside their buffers: as many as there is memory for the buffers, and no more."""
    origin = make_origin()
    async with open_cache(tmp_path / "c", origin, small_object_bytes_max=PACKED) as cache:
        taken = 0
        for number in range(2 * HELD_BYTES_MAX // (128 * KIB)):
            version = stored(origin, f"k{number}", 40 * KIB, seed=number)
            get = cache.begin_unpinned_get(version.key, 0, {})
            assert get is not None
            with get:
                answer = UnpinnedResponse(get, whole(version), ShortAnswer())
                body = cache.inline_response(version, whole(version), slot="default", headers={}, answer=answer)
            taken += body is not None
        writer = cache._dependencies.writers[0]
        assert taken * 128 * KIB == writer.held_bytes
        assert HELD_BYTES_MAX - 128 * KIB <= writer.held_bytes <= HELD_BYTES_MAX + 128 * KIB
        await cache.settle()
        assert (cache.usage().blocks, writer.held_bytes) == (taken, 0)


@pytest.mark.slow
async def test_a_segment_that_is_evicted_is_let_go_of(tmp_path: Path) -> None:
    """Its room comes back though it was open; a reader under way reads it to the end."""
    origin = make_origin()
    versions = [stored(origin, f"k{n}", 100_000, seed=n) for n in range(60)]
    async with open_cache(tmp_path / "c", origin, small_object_bytes_max=PACKED, capacity_bytes=2 * MIB) as cache:
        await read(cache, versions[0])
        await cache.settle()
        await read(cache, versions[0])
        reader = await cache.open_range(versions[0], whole(versions[0]))
        for version in versions[1:]:
            await read(cache, version)
            await cache.settle()
        assert cache.usage().used_bytes <= 2 * MIB
        await cache._dependencies.open_files.drop_unlinked(cache._dependencies.threads.disk)
        spans: list[FileSpan] = []
        assert await take(reader, spans) == content_of(origin, versions[0])
        assert not [name for name in open_files() if ".segment (deleted)" in name]


def open_files() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(entry))
    return found


SLOW = 4e5
"""Bytes per second: a small object takes a quarter of a second."""


class Workers:
    """Workers on one directory that pack everything, and what the origin was asked."""

    def __init__(self, directory: Path, origin: StrictOrigin, stack: ExitStack) -> None:
        self.directory = directory
        self.origin = origin
        self._stack = stack

    def start(self, slot: int) -> FillWorker:
        worker = FillWorker(self.directory, slot, self.origin.endpoint_url, small_object_bytes_max=PACKED)
        return self._stack.enter_context(worker)

    def asked(self) -> list[str]:
        return sorted(str(call.key) for call in self.origin.model.calls)

    def wait_for_calls(self, count: int) -> None:
        pause = threading.Event()
        while len(self.origin.model.calls) < count:
            pause.wait(0.002)

    def stored(self, key: str) -> ObjectVersion:
        return stored(self.origin.model, key, 100_000)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with StrictOrigin() as origin, ExitStack() as stack:
        yield Workers(tmp_path / "c", origin, stack)


@pytest.mark.slow
def test_all_processes_together_ask_once(workers: Workers) -> None:
    """Many small objects, each asked of all processes at once, by several readers: one request each."""
    versions = [workers.stored(f"k{n}") for n in range(40)]
    crowd = [workers.start(slot) for slot in range(4)]
    for version in versions:
        for worker in crowd:
            worker.read(version, readers=2)
    for worker in crowd:
        assert [worker.answer() for _ in versions] == ["right"] * len(versions)
    assert workers.asked() == sorted(version.key.key for version in versions)
    assert [worker.stop() for worker in crowd] == [0] * 4
    assert {path.suffix for path in block_files(workers.directory)} == {".segment"}


async def test_5_3_a_fetch_that_ends_behind_the_look_for_it_is_not_made_again(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5.3 Another process may enter the object and give its lock back after this one has looked, and before it asks."""
    version, other = workers.stored("k"), workers.start(1)
    async with open_cache(workers.directory, make_origin(), small_object_bytes_max=PACKED) as cache:
        index, locks = cache._directory.index, cache._dependencies.locks
        look, looks = index.has_object, list[bool]()

        def overtaken(object_id: bytes) -> bool:
            looks.append(look(object_id))
            if len(looks) == 1:
                other.read(version)
                assert other.answer() == "right"
                while locks.others_fetch():
                    threading.Event().wait(0.002)
            return looks[-1]

        monkeypatch.setattr(index, "has_object", overtaken)
        assert cache.begin_unpinned_get(version.key, 0, {}) is None
        assert looks == [False, True]
        assert locks._held == {}


@pytest.mark.parametrize("when", ["asking", "fetching"])
def test_a_killed_process_is_succeeded_by_one_of_those_who_wait(workers: Workers, when: str) -> None:
    """The claim is taken over at once, by one: two requests in all, and every reader left gets the object."""
    workers.origin.bytes_per_second = SLOW
    version = workers.stored("k")
    first, *others = [workers.start(slot) for slot in range(3)]
    first.read(version)
    workers.wait_for_calls(1)
    for worker in others:
        worker.read(version, readers=3)
    if when == "fetching":
        threading.Event().wait(0.1)
    first.kill()
    assert [worker.answer() for worker in others] == ["right"] * 2
    assert workers.asked() == ["k", "k"]
    assert [worker.stop() for worker in others] == [0, 0]


def test_a_restarted_process_forgets_what_it_had_claimed(workers: Workers) -> None:
    """Who waited for a process that was killed and is back already does not wait for ever."""
    workers.origin.bytes_per_second = SLOW
    version = workers.stored("k")
    first, other = workers.start(0), workers.start(1)
    first.read(version)
    workers.wait_for_calls(1)
    other.read(version)
    first.kill()
    again = workers.start(0)
    assert other.answer() == "right"
    again.read(version)
    assert again.answer() == "right"
    assert workers.asked() == ["k", "k"]


def test_a_fetch_that_fails_lets_the_next_process_try(workers: Workers) -> None:
    """The origin's refusal is the first reader's alone; who waited in another process asks for itself."""
    version = workers.stored("k")
    workers.origin.latency_seconds = 0.3

    def is_first(_: Call) -> bool:
        return len(workers.origin.model.calls) == 1

    workers.origin.model.inject(is_first, Answer(403, "AccessDenied"))
    first, other = workers.start(0), workers.start(1)
    first.read(version)
    other.read(version)
    answers = sorted([first.answer(), other.answer()])
    assert answers[0] == "right"
    assert "403" in answers[1]
    assert workers.asked() == ["k", "k"]


def test_batches_gather_longer_under_load_while_memory_has_room_for_them() -> None:
    """Thirty blocks of 100 KiB in 10 ms are a load; a few are none, and blocks of a MiB would fill the memory."""
    usual, busy = GATHERING_SECONDS, BUSY_GATHERING_SECONDS
    assert gathering_seconds(30, 30 * 100 * KIB, usual) == busy
    assert gathering_seconds(90, 90 * 100 * KIB, busy) == busy
    assert gathering_seconds(15, 15 * 100 * KIB, usual) == usual
    assert gathering_seconds(40, 40 * 100 * KIB, busy) == usual
    assert gathering_seconds(16, 16 * MIB, usual) == usual

"""One fill for all processes: who leads, who follows, and what becomes of the others when one dies or leaves."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.blocks import fetch_locks
from gateway.blocks.block_file import read_verified
from gateway.blocks.cache import BlockCache
from gateway.blocks.large_block_fetch import FOLIO_BYTES_MAX, BlockWriter
from gateway.blocks.layout import block_at
from gateway.blocks.page_cache import Residency
from gateway.core.clock import SystemClock
from gateway.core.model import ByteRange, ObjectVersion
from gateway.disk.file_lease import FileLease, SharedFile
from gateway.origin.client import Purpose
from gateway.origin.receive_buffer import SocketReceiver, Take
from tests.origin.origins import s3_origin
from tests.support.blocks import (
    KIB,
    MIB,
    NotingOrigin,
    block_files,
    content_of,
    drop_page_cache,
    make_origin,
    open_cache,
    partial_files,
    read,
    stored,
)
from tests.support.fill_worker import BLOCK, FillWorker
from tests.support.memory_origin.faults import Answer, Call, Hold
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import until

SEED = 20261121
SLOW = 2e6
"""Bytes per second: a block takes a quarter of a second."""


class Workers:
    """Workers on one directory, and what the origin was asked."""

    def __init__(self, directory: Path, origin: StrictOrigin, stack: ExitStack) -> None:
        self.directory = directory
        self.origin = origin
        self._stack = stack

    def start(self, slot: int, *, capacity_bytes: int = 64 * 1024 * KIB, small_object_bytes_max: int = 0) -> FillWorker:
        worker = FillWorker(
            self.directory,
            slot,
            self.origin.endpoint_url,
            capacity_bytes=capacity_bytes,
            small_object_bytes_max=small_object_bytes_max,
        )
        return self._stack.enter_context(worker)

    def stored(self, key: str, blocks: float) -> ObjectVersion:
        return stored(self.origin.model, key, int(blocks * BLOCK))

    def ranges(self) -> list[tuple[int, int]]:
        """What was asked for, first and last byte, in order."""
        asked = [call.headers["range"].removeprefix("bytes=").split("-") for call in self.origin.model.calls]
        return sorted((int(first), int(last)) for first, last in asked)

    def wait_for_calls(self, count: int) -> None:
        pause = threading.Event()
        while len(self.origin.model.calls) < count:
            pause.wait(0.002)

    def check_left_in_order(self) -> None:
        """Nothing is reserved, no file is left over: whatever was killed, once its slot is opened again."""

        async def scenario() -> None:
            async with open_cache(self.directory, make_origin(), worker=9, block_size_bytes=BLOCK) as cache:
                files = list(cache._dependencies.directory.index.files())
                usage = cache.usage()
                assert (usage.blocks, usage.reserved_bytes) == (len(files), 0)
                assert usage.used_bytes == sum(file.disk_bytes for file in files)
                assert partial_files(self.directory) == []

        asyncio.run(scenario())


def tiles(ranges: list[tuple[int, int]], size_bytes: int) -> bool:
    """Whether the ranges hold every byte of an object once."""
    stop = 0
    for first, last in ranges:
        if first != stop:
            return False
        stop = last + 1
    return stop == size_bytes


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with StrictOrigin() as origin, ExitStack() as stack:
        origin.bytes_per_second = SLOW
        yield Workers(tmp_path / "c", origin, stack)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_readers_in_all_processes_cost_one_request_a_block(workers: Workers, count: int) -> None:
    """However many processes and readers want a cold object at once, the origin sends each byte once."""
    version = workers.stored("a", 3.4)
    crowd = [workers.start(slot) for slot in range(count)]
    for worker in crowd:
        worker.read(version, readers=8)
    assert [worker.answer() for worker in crowd] == ["right"] * count
    assert tiles(workers.ranges(), version.size_bytes)
    assert len(workers.ranges()) == 4
    assert [worker.stop() for worker in crowd] == [0] * count
    workers.check_left_in_order()


@pytest.mark.slow
def test_processes_that_begin_at_the_same_moment_agree_on_one_leader(workers: Workers) -> None:
    """Many small objects, each asked of all processes at once: one request each."""
    workers.origin.bytes_per_second = None
    versions = [workers.stored(f"k{n}", 0.1) for n in range(40)]
    crowd = [workers.start(slot) for slot in range(4)]
    for version in versions:
        for worker in crowd:
            worker.read(version)
    for worker in crowd:
        assert [worker.answer() for _ in versions] == ["right"] * len(versions)
    asked = [str(call.key) for call in workers.origin.model.calls]
    assert sorted(asked) == sorted(version.key.key for version in versions)


@pytest.mark.slow
@pytest.mark.parametrize("small_object_bytes_max", [0, BLOCK])
def test_a_reader_in_another_process_lends_a_fetch_his_priority(workers: Workers, small_object_bytes_max: int) -> None:
    """A job of the background process fetches a block, here; a worker's reader waits for it, leaves, and comes back."""
    version, released = workers.stored("a", 1), asyncio.Event()
    workers.origin.model.inject(lambda call: True, Hold(released), times=None)
    size, packed = BLOCK, small_object_bytes_max

    async def scenario() -> None:
        seen = list[tuple[Purpose, Callable[[], bool]]]()
        noting = NotingOrigin(workers.origin.model, seen)
        async with open_cache(
            workers.directory, noting, worker=7, block_size_bytes=size, small_object_bytes_max=packed
        ) as background:
            job = asyncio.create_task(
                background.fetch(version, ByteRange(0, BLOCK - 1), slot="default", purpose=Purpose.WARM)
            )
            await until(lambda: bool(seen))
            [(purpose, is_awaited)] = seen
            assert purpose is Purpose.WARM
            worker = await asyncio.to_thread(workers.start, 0, small_object_bytes_max=packed)
            worker.warm(version)  # a HEAD that warms has come there: nobody waits for that, either
            locks = background._dependencies.opened.locks
            [cell] = locks._held.values()
            await until(lambda: bool(locks._words[cell] & fetch_locks._AWAITED))
            assert not is_awaited()
            for _ in range(2):
                worker.read(version)
                await until(is_awaited)
                worker.leave()
                assert await asyncio.to_thread(worker.answer) == "left"
                await until(lambda: not is_awaited())
            worker.read(version)
            await until(is_awaited)
            released.set()
            assert await asyncio.to_thread(worker.answer) == "right"
            assert await job == (BLOCK, True)
            assert not is_awaited()
        assert len(seen) == 1

    asyncio.run(scenario())
    assert len(workers.origin.model.calls) == 1


def test_other_headers_make_another_fill(workers: Workers) -> None:
    """Readers whose requests the origin may answer differently do not share a fill, in whatever process they are."""
    version = workers.stored("a", 1)
    refused: Answer = Answer(403, "AccessDenied")
    workers.origin.model.inject(lambda call: "x-amz-request-payer" in call.headers, refused, times=None)
    first, second = workers.start(0), workers.start(1)
    first.read(version, owner="requester")
    second.read(version)
    assert second.answer() == "right"
    assert "403" in first.answer()


@pytest.mark.slow
def test_fills_that_change_places_are_not_followed(workers: Workers) -> None:
    """Two partial files swap their names: each is whole, and says itself that it is another block's."""
    workers.origin.bytes_per_second = SLOW / 3
    version = workers.stored("a", 2)
    leader, follower = workers.start(0), workers.start(1)
    leader.read(version)
    workers.wait_for_calls(2)
    one, other = wait_for_chunks(workers.directory, files=2)
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    follower.read(version)
    assert [follower.answer(), leader.answer()] == ["right", "right"]
    follower.read(version)
    assert follower.answer() == "right"


def wait_for_chunks(directory: Path, *, files: int) -> list[Path]:
    """The partial files, when there are so many of them and each holds a chunk or more."""
    pause = threading.Event()
    while True:
        found = [path for path in partial_files(directory) if path.stat().st_size > 100 * KIB]
        if len(found) == files:
            return found
        pause.wait(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("round_number", range(8))
def test_a_killed_leader_is_succeeded(workers: Workers, round_number: int) -> None:
    """SIGKILL at a random point of the fill: followers get every byte, and one of them fetches the block anew."""
    rng = random.Random(SEED + round_number)
    version = workers.stored("a", 1)
    leader, *followers = [workers.start(slot) for slot in range(3)]
    leader.read(version)
    workers.wait_for_calls(1)
    for follower in followers:
        follower.read(version, readers=4)
    threading.Event().wait(rng.uniform(0.0, 0.35))
    leader.kill()
    assert [follower.answer() for follower in followers] == ["right", "right"]
    first, *resumed = workers.origin.model.calls
    assert first.headers["range"] == f"bytes=0-{BLOCK - 1}"
    assert [call.headers["range"] for call in resumed] in ([], [first.headers["range"]])
    assert all(call.headers["if-match"] == version.etag for call in resumed)
    assert [follower.stop() for follower in followers] == [0, 0]
    workers.check_left_in_order()


@pytest.mark.slow
def test_leaders_killed_one_after_the_other_are_each_succeeded(workers: Workers) -> None:
    """As long as one process that waits lives, its readers get their bytes."""
    version = workers.stored("a", 3)
    rng = random.Random(SEED)
    crowd = [workers.start(slot) for slot in range(4)]
    for worker in crowd:
        worker.read(version, readers=2)
    workers.wait_for_calls(1)
    for worker in crowd[:3]:
        threading.Event().wait(rng.uniform(0.05, 0.15))
        worker.kill()
    assert crowd[3].answer() == "right"
    crowd[3].stop()
    workers.check_left_in_order()


def test_a_leader_that_ends_in_order_is_succeeded(workers: Workers) -> None:
    """A worker that is stopped in the middle of a fill leaves its followers unharmed."""
    version = workers.stored("a", 1)
    leader, follower = workers.start(0), workers.start(1)
    leader.read(version)
    workers.wait_for_calls(1)
    follower.read(version)
    wait_until_written(workers.directory, BLOCK // 4)
    leader.leave()
    assert leader.stop() == 0
    assert follower.answer() == "right"


@pytest.mark.parametrize("leaver", [0, 1])
def test_readers_that_leave_harm_nobody(workers: Workers, leaver: int) -> None:
    """The leader's reader, or a follower's, may go: the others get every byte of one request."""
    version = workers.stored("a", 1)
    pair = [workers.start(0), workers.start(1)]
    pair[0].read(version)
    workers.wait_for_calls(1)
    pair[1].read(version)
    wait_until_written(workers.directory, BLOCK // 4)
    pair[leaver].leave()
    pair[1 - leaver].read(version)
    answers = {pair[1 - leaver].answer(), pair[1 - leaver].answer()}
    assert answers == {"right"}
    assert len(workers.ranges()) == 1


@pytest.mark.slow
def test_a_failed_leader_does_not_fail_its_followers(workers: Workers) -> None:
    """What the origin says against the leader's request is not taken for its word on a follower's: that one asks."""
    version = workers.stored("a", 1)
    workers.origin.latency_seconds = 0.3

    def is_first(call: Call) -> bool:
        return len(workers.origin.model.calls) == 1

    workers.origin.model.inject(is_first, Answer(403, "AccessDenied"))
    leader, follower = workers.start(0), workers.start(1)
    leader.read(version)
    follower.read(version)
    answers = sorted([leader.answer(), follower.answer()])
    assert answers[0] == "right"
    assert "403" in answers[1]
    assert len(workers.ranges()) == 2


def test_bytes_that_are_not_what_the_leader_wrote_reach_no_follower(workers: Workers) -> None:
    """A growing file that somebody harms is not believed: the follower's reader is served by the origin."""
    version = workers.stored("a", 1)
    leader, follower = workers.start(0), workers.start(1)
    leader.read(version)
    wait_until_written(workers.directory, BLOCK // 4)
    leader.leave()
    harm(partial_files(workers.directory)[0], 4096 + 1000)
    follower.read(version)
    assert follower.answer() == "right"
    assert [first for first, _ in workers.ranges()] == [0, 0]


@pytest.mark.slow
def test_a_file_that_is_longer_than_what_was_written_is_not_believed(workers: Workers) -> None:
    """A follower in the middle of a block goes on from the origin where the file proves wrong."""
    version = workers.stored("a", 1)
    workers.origin.bytes_per_second = 0.5e6
    leader, follower = workers.start(0), workers.start(1)
    leader.read(version)
    workers.wait_for_calls(1)
    follower.read(version)
    wait_until_written(workers.directory, BLOCK // 4)
    os.truncate(partial_files(workers.directory)[0], BLOCK + 4096)
    assert follower.answer() == "right"
    assert leader.answer() == "right"
    assert len(workers.ranges()) == 2


async def test_the_thread_that_receives_a_large_block_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but what came with the head; readers and the disk get what the origin has."""
    received, receive = dict[str, int](), SocketReceiver.receive

    def noting(receiver: SocketReceiver, wire: FileLease[SharedFile], take: Take) -> None:
        receive(receiver, wire, take)
        name = threading.current_thread().name.partition("_")[0]
        received[name] = received.get(name, 0) + receiver.received_bytes

    monkeypatch.setattr(SocketReceiver, "receive", noting)
    block, size = 4 * MIB, 21 * MIB + 12_345
    with StrictOrigin() as strict:
        version, origin = stored(strict.model, "k", size), s3_origin(strict.endpoint_url)
        async with open_cache(tmp_path / "c", origin, clock=SystemClock(), block_size_bytes=block) as cache:
            content = content_of(strict.model, version)
            assert await read(cache, version) == content
            await cache.settle()
            strict.model.buckets.clear()
            for path in block_files(tmp_path / "c"):
                drop_page_cache(path)
            assert await read(cache, version) == content
        await origin.aclose()
    assert received.keys() == {"block-disk"}
    assert size // 2 < received["block-disk"] <= size


def harm(path: Path, offset: int) -> None:
    """Flip a bit."""
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), offset)


def wait_until_written(directory: Path, size_bytes: int) -> None:
    """Until a partial file is that long."""
    pause = threading.Event()
    while not any(path.stat().st_size > size_bytes for path in partial_files(directory)):
        pause.wait(0.002)


def writer_of(cache: BlockCache, version: ObjectVersion, block_size_bytes: int = BLOCK) -> BlockWriter:
    """Of the version's first block."""
    block, directory = block_at(version, 0, block_size_bytes), cache._dependencies.directory
    begun = directory.begin(block, "default")
    assert begun is not None
    return BlockWriter(directory, begun)


def play(directory: Path, use: Callable[[BlockWriter, bytes], None]) -> None:
    async def scenario() -> None:
        origin = make_origin()
        version = stored(origin, "a", BLOCK)
        async with open_cache(directory, origin) as cache:
            writer = writer_of(cache, version)
            use(writer, content_of(origin, version))
            writer.filled.file.close()

    asyncio.run(scenario())


class Folios:
    """As `Residency`: the kernel keeps files in units of FOLIO_BYTES_MAX, and a unit waits to be written as a whole."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()

    def written(self, *places: int) -> None:
        self.waiting |= {place // FOLIO_BYTES_MAX for place in places}

    def device_takes_first(self) -> None:
        """It may be read from there again from now on, by anybody."""
        self.waiting.discard(0)

    def unwritten(self, _descriptor: int, offset: int, count: int) -> bool:
        return set(range(offset // FOLIO_BYTES_MAX, (offset + count - 1) // FOLIO_BYTES_MAX + 1)) <= self.waiting

    def state(self, _descriptor: int) -> tuple[int, ...]:
        return (1,)


@pytest.mark.parametrize(("pieces", "publishes"), [(5, False), (1, True)], ids=["more is written", "it is published"])
async def test_what_lies_beside_the_header_may_have_come_from_the_device(
    tmp_path: Path, pieces: int, publishes: bool
) -> None:
    """1.4 Each write begins with the header, or ends with it: what lies beside it waits to be written again then."""
    origin = make_origin()
    version = stored(origin, "a", pieces * MIB)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=8 * MIB) as cache:
        folios, filled = Folios(), writer_of(cache, version, 8 * MIB).filled
        writer = BlockWriter(cache._dependencies.directory, filled, residency=cast(Residency, folios))
        for number in range(pieces - 1 + publishes):
            writer.write(filled.file, bytes(MIB))
            folios.written(0, filled.data_offset + number * MIB, filled.data_offset + (number + 1) * MIB - 1)
            assert writer.unwritten_from == 0
        folios.device_takes_first()
        if publishes:
            writer.publish(filled.file)
        else:
            writer.write(filled.file, bytes(MIB))
        assert writer.unwritten_from == (pieces - 1 + publishes) * MIB
        filled.file.close()


@pytest.mark.parametrize("publishes", [False, True], ids=["more is written", "it is published"])
async def test_what_lay_in_a_file_that_somebody_else_writes_to_does_not_count_as_written(
    tmp_path: Path, publishes: bool
) -> None:
    """1.4 Its readers have it checked, also the first."""
    origin = make_origin()
    version = stored(origin, "a", 5 * MIB)
    async with open_cache(tmp_path / "c", origin, block_size_bytes=8 * MIB) as cache:
        writer = writer_of(cache, version, 8 * MIB)
        file, first = writer.filled.file, writer.filled.data_offset
        residency = cache._dependencies.residency
        for _ in range(4 + publishes):
            writer.write(file, bytes(MIB))
        if not residency.unwritten(file.descriptor, first, MIB):
            pytest.skip("this system does not tell what waits to be written")
        harm(partial_files(tmp_path / "c")[0], first + 100)
        if publishes:
            writer.publish(file)
            assert not file.file.unwritten(residency, first, MIB)
        else:
            writer.write(file, bytes(MIB))
        assert writer.unwritten_from == (4 + publishes) * MIB
        file.close()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, BLOCK), max_size=6))
def test_the_file_holds_what_was_given(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    """Whatever the pieces; the checksums of complete chunks are there as soon as they are written."""
    directory = tmp_path_factory.mktemp("cache") / "c"

    def use(writer: BlockWriter, content: bytes) -> None:
        for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), BLOCK], strict=True):
            writer.write(writer.filled.file, content[start:stop])
            assert writer.checksums.complete_bytes <= stop
        assert writer.checksums.complete
        assert writer.publish(writer.filled.file)
        [path] = block_files(directory)
        descriptor = os.open(path, os.O_RDONLY)
        extent = writer.directory.index.lookup(writer.filled.block.id)
        assert extent is not None
        assert bytes(read_verified(descriptor, extent, 0, BLOCK)) == content
        os.close(descriptor)

    play(directory, use)

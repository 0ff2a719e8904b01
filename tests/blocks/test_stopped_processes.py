"""Processes that are stopped and do not die: nobody waits for them longer than a few seconds, whatever they hold."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from gateway.core.model import ObjectVersion
from gateway.origin.client import Purpose
from tests.support.blocks import KIB, MIB, content_of, make_origin, open_cache, read, stored, whole
from tests.support.fill_worker import BLOCK, FillWorker
from tests.support.strict_origin import StrictOrigin

pytestmark = pytest.mark.slow

PACKED = 64 * KIB
SIZES = {"small": 50_000, "large": BLOCK}

SECONDS_MAX = 6.0
"""A hung process is known after two seconds, looked for every second; the rest is for a busy machine."""

HOLDER = """
import os, signal, sys, lmdb
environment = lmdb.open(sys.argv[1], map_size=64 * 1024**3, max_dbs=32, max_readers=1024, sync=False)
with environment.begin(write=True):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


class Workers:
    """Workers on one directory, and what the origin was asked."""

    def __init__(self, directory: Path, origin: StrictOrigin, stack: ExitStack) -> None:
        self.directory = directory
        self.origin = origin
        self._stack = stack

    def start(self, slot: int) -> FillWorker:
        worker = FillWorker(self.directory, slot, self.origin.endpoint_url, small_object_bytes_max=PACKED)
        return self._stack.enter_context(worker)

    def stored(self, key: str, size_bytes: int) -> ObjectVersion:
        return stored(self.origin.model, key, size_bytes)

    def wait_for_calls(self, count: int) -> None:
        pause = threading.Event()
        while len(self.origin.model.calls) < count:
            pause.wait(0.002)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with StrictOrigin() as origin, ExitStack() as stack:
        yield Workers(tmp_path / "c", origin, stack)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("after_seconds", [0.0, 0.5])
def test_a_stopped_leader_is_not_waited_for(workers: Workers, size: str, after_seconds: float) -> None:
    """Its followers fetch for themselves, once for all of them; when it wakes up, its own readers are served, too."""
    workers.origin.bytes_per_second = SIZES[size] * 1.0
    version = workers.stored("k", SIZES[size])
    leader, *followers = [workers.start(slot) for slot in range(3)]
    leader.read(version)
    workers.wait_for_calls(1)
    threading.Event().wait(after_seconds)
    leader.freeze()
    workers.origin.bytes_per_second = None
    started = time.monotonic()
    for follower in followers:
        follower.read(version, readers=2)
    assert [follower.answer() for follower in followers] == ["right", "right"]
    assert time.monotonic() - started < SECONDS_MAX
    assert len(workers.origin.model.calls) == 2
    leader.thaw()
    assert leader.answer() == "right"
    leader.read(version)
    followers[0].read(version)
    assert [leader.answer(), followers[0].answer()] == ["right", "right"]
    assert len(workers.origin.model.calls) <= 3  # a connection that broke while the leader stood still
    assert [worker.stop() for worker in (leader, *followers)] == [0, 0, 0]
    check_left_in_order(workers.directory)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", SIZES)
def test_followers_of_a_leader_that_is_stopped_later_go_on(workers: Workers, size: str) -> None:
    """They were waiting already, some of the block in their hands: they get every byte of it."""
    workers.origin.bytes_per_second = SIZES[size] * 1.0
    version = workers.stored("k", SIZES[size])
    leader, follower = [workers.start(slot) for slot in range(2)]
    leader.read(version)
    workers.wait_for_calls(1)
    follower.read(version, readers=3)
    threading.Event().wait(0.5)
    leader.freeze()
    workers.origin.bytes_per_second = None
    started = time.monotonic()
    assert follower.answer() == "right"
    assert time.monotonic() - started < SECONDS_MAX
    leader.thaw()
    assert leader.answer() == "right"
    assert [worker.stop() for worker in (leader, follower)] == [0, 0]
    check_left_in_order(workers.directory)


def check_left_in_order(directory: Path) -> None:
    """Nothing is reserved, and every block is there once."""

    async def scenario() -> None:
        async with open_cache(directory, make_origin(), worker=9, block_size_bytes=BLOCK) as cache:
            usage = cache.usage()
            assert (usage.blocks, usage.reserved_bytes) == (1, 0)
            assert usage.used_bytes == sum(file.disk_bytes for file in cache._dependencies.directory.index.files())

    asyncio.run(scenario())


@contextmanager
def stopped_while_writing(index: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped within a write transaction of the index."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(index)]) as holder:
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        try:
            yield holder
        finally:
            holder.send_signal(signal.SIGKILL)


@pytest.mark.timeout(60)
async def test_a_process_stopped_while_it_writes_the_index_keeps_no_reader_waiting(tmp_path: Path) -> None:
    """Reads, own writes and warm-up do without the index; when the process is gone, blocks are kept again."""
    origin = make_origin()
    versions = [stored(origin, f"k{number}", 50_000 + number, seed=number) for number in range(40)]
    large = [stored(origin, f"l{number}", 256 * KIB, seed=number) for number in range(8)]
    async with open_cache(tmp_path / "c", origin, small_object_bytes_max=PACKED, capacity_bytes=64 * MIB) as cache:
        await asyncio.gather(read(cache, versions[0]), read(cache, large[0]))
        await cache.settle()
        with stopped_while_writing(tmp_path / "c" / "index"):
            first = [*versions[:10], *large[:4]]
            bodies = await in_time(*(read(cache, version) for version in first))
            assert bodies == [content_of(origin, version) for version in first]
            await in_time(cache.invalidate(large[0].key))
            # It is known by now, and nobody waits for it any more.
            await asyncio.sleep(2.5)
            started = time.monotonic()
            for version in [*versions[10:], *large[4:]]:
                assert await read(cache, version) == content_of(origin, version)
            await cache.invalidate(versions[0].key)
            fetched = await cache.fetch(large[7], whole(large[7]), slot="default", purpose=Purpose.WARM)
            assert fetched == (0, False)
            assert time.monotonic() - started < 2.0
        await asyncio.wait_for(cache.settle(), 20)
        asked = origin.count()
        for version in (versions[30], large[6]):
            await read(cache, version)
            await cache.settle()
            await read(cache, version)
        assert origin.count() == asked + 2
        usage = cache.usage()
        assert usage.reserved_bytes == 0


async def in_time(*work: object) -> list[object]:
    return await asyncio.wait_for(asyncio.gather(*work), SECONDS_MAX)  # type: ignore[call-overload]

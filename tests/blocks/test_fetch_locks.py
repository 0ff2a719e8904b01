"""Which process fetches a block: at most one that turns has its lock, and whoever waits for it is told."""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.blocks import fetch_locks
from gateway.blocks.block_file import BlockLease, lease_of
from gateway.blocks.fetch_locks import (
    AWAITED_SECONDS,
    CELLS,
    UNKNOWN,
    WAYS,
    FetchLocks,
    FileWatcher,
    LockKey,
    lock_of_block,
    lock_of_place,
)
from gateway.blocks.layout import block_at, object_id
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.shared.heartbeats import HUNG_SECONDS, Heartbeats

WORKERS = 3


def key(number: int, place: int, version: int) -> LockKey:
    return LockKey(number, place << 26 | version)


KEYS = [key(5, 1, 8), key(5, 1, 9), key(5, 2, 8), key(6, 1, 8)]
"""Two versions at one place, another place in the same set, and one in another set."""

PLACE, OTHER_PLACE = key(5, 1, UNKNOWN), key(6, 2, UNKNOWN)


class Processes:
    """Locks of several workers of one directory, and the time by which they beat."""

    def __init__(self, directory: Path, workers: int = WORKERS, *, has_one_worker: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.has_one_worker = has_one_worker
        self.directory = directory
        self.now_ns = time.monotonic_ns()
        self.heartbeats = Heartbeats(directory / "heartbeats", lambda: self.now_ns)
        self.locks = [self.open(worker) for worker in range(workers)]

    def open(self, worker: int) -> FetchLocks:
        self.heartbeats.beat(worker)
        return FetchLocks(self.directory, worker, self.heartbeats, has_one_worker=self.has_one_worker)

    def pass_time(self, seconds: float, *, hung: int | None = None) -> None:
        """All beat when it has passed, but the one that hangs."""
        self.now_ns += int(seconds * 1e9)
        for worker in range(len(self.locks)):
            if worker != hung:
                self.heartbeats.beat(worker)

    def close(self) -> None:
        for one in self.locks:
            one.close()
        self.heartbeats.close()


@contextmanager
def processes(directory: Path, workers: int = 2, *, has_one_worker: bool = False) -> Iterator[Processes]:
    opened = Processes(directory / "shared", workers, has_one_worker=has_one_worker)
    try:
        yield opened
    finally:
        opened.close()


class LocksOfThree(RuleBasedStateMachine):
    """What three workers take, give back and leave behind, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp())
        self.processes = Processes(self.base / "c")
        self.dead: set[int] = set()
        self.held: dict[LockKey, int] = {}

    def of(self, worker: int) -> FetchLocks:
        return self.processes.locks[worker]

    @rule(worker=st.integers(0, WORKERS - 1), key=st.sampled_from(KEYS))
    def take(self, worker: int, key: LockKey) -> None:
        if worker not in self.dead:
            assert self.of(worker).take(key) == self.held.setdefault(key, worker)

    @rule(worker=st.integers(0, WORKERS - 1), key=st.sampled_from(KEYS))
    def inherit(self, worker: int, key: LockKey) -> None:
        """From a holder that is seen dead, and from no other."""
        holder = self.held.get(key)
        if worker in self.dead or holder is None or holder == worker:
            return
        assert self.of(worker).turns(holder) is (holder not in self.dead)
        if holder in self.dead:
            assert self.of(worker).take(key, holder) == worker
            self.held[key] = worker

    @rule(worker=st.integers(0, WORKERS - 1), key=st.sampled_from(KEYS))
    def release(self, worker: int, key: LockKey) -> None:
        """Giving back what another has changes nothing."""
        if worker in self.dead:
            return
        self.of(worker).release(key)
        if self.held.get(key) == worker:
            del self.held[key]

    @rule(worker=st.integers(0, WORKERS - 1))
    def exchange(self, worker: int) -> None:
        """One lock for another of the same place, without a moment between; nothing for who has not got it."""
        if worker in self.dead or KEYS[1] in self.held:
            return
        self.of(worker).exchange(KEYS[0], KEYS[1])
        if self.held.get(KEYS[0]) == worker:
            self.held[KEYS[1]] = self.held.pop(KEYS[0])

    @rule(worker=st.integers(0, WORKERS - 1), nonce=st.integers(1, 2**64 - 1), key=st.sampled_from(KEYS))
    def show_file(self, worker: int, nonce: int, key: LockKey) -> None:
        """Only the holder's word counts, and it is gone with the lock."""
        if worker in self.dead:
            return
        self.of(worker).show_file(key, nonce)
        for other in range(WORKERS):
            shown = self.of(worker).shown_file(key, other)
            assert (shown == nonce) if self.held.get(key) == worker == other else (shown != nonce)

    @rule(worker=st.integers(0, WORKERS - 1), key=st.sampled_from(KEYS))
    def look(self, worker: int, key: LockKey) -> None:
        """Who holds a lock can be seen without taking it."""
        if worker not in self.dead:
            assert self.of(worker).holder(key) == self.held.get(key)

    @rule(worker=st.integers(0, WORKERS - 1), key=st.sampled_from(KEYS), holder=st.integers(0, WORKERS - 1))
    def wait(self, worker: int, key: LockKey, holder: int) -> None:
        if worker not in self.dead:
            assert self.of(worker).await_change(key, holder) is (self.held.get(key) == holder)

    @rule(worker=st.integers(0, WORKERS - 1))
    def kill(self, worker: int) -> None:
        if worker not in self.dead:
            self.of(worker).close()
            self.dead.add(worker)

    @rule(worker=st.integers(0, WORKERS - 1))
    def restart(self, worker: int) -> None:
        """What a process of before has left is nobody's."""
        if worker in self.dead:
            self.processes.locks[worker] = self.processes.open(worker)
            self.of(worker).forget(worker)
            self.dead.discard(worker)
            self.held = {key: held for key, held in self.held.items() if held != worker}

    @invariant()
    def whether_others_fetch_is_known(self) -> None:
        if self.dead:
            return  # those of dead workers count until their slots are opened again
        for worker in range(WORKERS):
            assert self.of(worker).others_fetch() is any(held != worker for held in self.held.values())

    def teardown(self) -> None:
        self.processes.close()
        shutil.rmtree(self.base)


TestFetchLocks = LocksOfThree.TestCase
TestFetchLocks.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_several_workers_have_no_unlisted_locks(tmp_path: Path) -> None:
    with processes(tmp_path) as opened:
        assert not opened.locks[0].take_unlisted(PLACE)
        assert not opened.locks[0].has(PLACE)


def test_who_begins_to_fetch_waits_for_unlisted_locks_and_sees_all_later_ones(tmp_path: Path) -> None:
    """So no bytes are fetched by two, though the only worker says nothing of its locks while it is alone."""

    async def scenario() -> None:
        with processes(tmp_path, has_one_worker=True) as opened:
            worker, background = opened.locks
            assert worker.take_unlisted(PLACE)
            assert worker.has(PLACE)
            assert background.holder(PLACE) is None
            assert background.others_fetch()
            assert background.take(KEYS[3]) == 1
            waiting = asyncio.create_task(background.all_listed())
            await asyncio.sleep(0)
            assert not waiting.done()
            assert not worker.take_unlisted(OTHER_PLACE)
            assert not worker.has(OTHER_PLACE)
            assert worker.take(OTHER_PLACE) == 0
            assert not waiting.done()
            worker.release(PLACE)
            await asyncio.wait_for(waiting, 5)
            assert background.take(OTHER_PLACE) == 0
            background.release(KEYS[3])
            assert worker.take_unlisted(PLACE)

    asyncio.run(scenario())


def test_an_unlisted_lock_is_listed_when_it_becomes_that_of_a_block(tmp_path: Path) -> None:
    """A longer fetch is one that others can wait for."""
    with processes(tmp_path, has_one_worker=True) as opened:
        worker, background = opened.locks
        assert worker.take_unlisted(PLACE)
        worker.exchange(PLACE, PLACE.of_version(8))
        assert (worker.has(PLACE), background.holder(PLACE.of_version(8))) == (False, 0)
        worker.release(PLACE.of_version(8))
        assert not background.others_fetch()


def test_unlisted_locks_of_a_process_that_hangs_are_not_waited_for(tmp_path: Path) -> None:
    with processes(tmp_path, has_one_worker=True) as opened:
        worker, background = opened.locks
        assert worker.take_unlisted(PLACE)
        opened.pass_time(HUNG_SECONDS + 0.1, hung=0)
        asyncio.run(asyncio.wait_for(background.all_listed(), 1))
        background.forget(0)
        assert not background.others_fetch()


def test_unlisted_locks_that_are_kept_too_long_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_locks, "HOLDER_SECONDS_MAX", 0.05)
    with processes(tmp_path, has_one_worker=True) as opened:
        worker, background = opened.locks
        assert worker.take_unlisted(PLACE)
        asyncio.run(background.all_listed())


def test_blocks_of_one_set_do_not_keep_each_other_out(tmp_path: Path) -> None:
    """Four at a time have locks of their own; the fifth is fetched without, until one is given back."""
    with processes(tmp_path) as opened:
        one, other = opened.locks
        places = [key(7, place, 8) for place in range(1, WAYS + 2)]
        assert [one.take(place) for place in places] == [0] * WAYS + [None]
        assert [other.take(place) for place in places] == [0] * WAYS + [None]
        one.release(places[1])
        assert other.take(places[-1]) == 1


def test_a_full_set_takes_the_place_of_a_holder_that_hangs(tmp_path: Path) -> None:
    """What a stopped process holds keeps no other block without a lock."""
    with processes(tmp_path) as opened:
        one, other = opened.locks
        for place in range(1, WAYS + 1):
            one.take(key(7, place, 8))
        opened.pass_time(HUNG_SECONDS + 0.1, hung=0)
        assert other.take(key(7, 9, 8)) == 1


def test_a_hung_holder_that_wakes_up_harms_nobody(tmp_path: Path) -> None:
    """Its lock is another's by then: what it shows, exchanges and gives back is its own no more."""
    with processes(tmp_path) as opened:
        one, other = opened.locks
        assert one.take(KEYS[0]) == 0
        assert other.take(KEYS[0]) == 0
        assert other.turns(0)
        opened.pass_time(HUNG_SECONDS + 0.1, hung=0)
        assert not other.turns(0)
        assert other.take(KEYS[0], 0) == 1
        one.show_file(KEYS[0], 77)
        one.exchange(KEYS[0], KEYS[1])
        one.release(KEYS[0])
        assert (other.holder(KEYS[0]), other.shown_file(KEYS[0], 1)) == (1, 0)
        one.release(KEYS[1])
        assert other.holder(KEYS[0]) == 1
        assert not other.others_fetch()
        other.release(KEYS[0])
        assert one.take(KEYS[0]) == 0


def test_a_lock_is_waited_for_while_its_holder_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that hangs, or that turns and has the lock for too long, is given up."""
    monkeypatch.setattr(fetch_locks, "LOOK_SECONDS", 0.01)

    async def scenario(*, hung: bool) -> bool:
        with processes(tmp_path) as opened:
            one, other = opened.locks
            assert one.take(KEYS[0]) == 0
            opened.pass_time(HUNG_SECONDS + 0.1 if hung else 0.0, hung=0 if hung else None)
            watcher = FileWatcher()
            try:
                return await other.released(KEYS[0], 0, watcher)
            finally:
                one.release(KEYS[0])
                watcher.close()

    assert asyncio.run(scenario(hung=True)) is False
    monkeypatch.setattr(fetch_locks, "HOLDER_SECONDS_MAX", 0.05)
    assert asyncio.run(scenario(hung=False)) is False


def test_a_holder_knows_whether_a_reader_waits(tmp_path: Path) -> None:
    """As long as the reader says so; who is gone without a word is forgotten a second later, and with the lock."""
    with processes(tmp_path, workers=3) as opened:
        one, other, third = opened.locks
        assert one.take(KEYS[0]) == 0
        assert other.await_change(KEYS[0], 0)
        assert not one.is_awaited(KEYS[0])
        assert other.await_change(KEYS[0], 0, is_reader=True)
        assert one.is_awaited(KEYS[0])
        opened.pass_time(AWAITED_SECONDS - 0.1)
        assert one.is_awaited(KEYS[0])
        assert third.await_change(KEYS[0], 0, is_reader=True)
        opened.pass_time(0.2)
        assert one.is_awaited(KEYS[0])
        opened.pass_time(AWAITED_SECONDS)
        assert not one.is_awaited(KEYS[0])
        assert other.await_change(KEYS[0], 0, is_reader=True)
        assert not one.is_awaited(KEYS[1])
        one.exchange(KEYS[0], KEYS[1])
        assert one.is_awaited(KEYS[1])  # of the same place: he has waited for the version, and needs its bytes
        one.release(KEYS[1])
        assert one.take(KEYS[0]) == 0
        assert not one.is_awaited(KEYS[0])


def test_whose_lock_was_taken_over_is_waited_for_by_nobody(tmp_path: Path) -> None:
    """The reader waits for who has it now."""
    with processes(tmp_path) as opened:
        one, other = opened.locks
        assert one.take(KEYS[0]) == 0
        opened.pass_time(HUNG_SECONDS + 0.1, hung=0)
        assert other.take(KEYS[0], 0) == 1
        assert one.await_change(KEYS[0], 1, is_reader=True)
        assert other.is_awaited(KEYS[0])
        assert not one.is_awaited(KEYS[0])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("end", ["release", "show", "kill", "restart"])
async def test_who_waits_is_woken_at_once(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the wake file, or by the kernel when the holder dies: nobody asks again and again, nobody sleeps a second."""
    monkeypatch.setattr(fetch_locks, "LOOK_SECONDS", 3600.0)  # who is not woken sleeps beyond the test's time limit
    with processes(tmp_path) as opened:
        holder, waiter = opened.locks
        watcher = FileWatcher()
        assert holder.take(KEYS[0]) == 0
        with watcher.watch(waiter.wake_file(0)) as watch:
            watch.clear()
            assert waiter.await_change(KEYS[0], 0)
            if end == "release":
                holder.release(KEYS[0])
            elif end == "show":
                holder.show_file(KEYS[0], 5)
            else:
                holder.close()
            if end == "restart":
                opened.locks[0] = opened.open(0)
                opened.locks[0].forget(0)
            await watch.changed()
        assert waiter.turns(0) is (end != "kill")
        assert waiter.take(KEYS[0], 0 if end == "kill" else None) == (0 if end == "show" else 1)
        watcher.close()


def _stop_in_set(path: str, number: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    fcntl.lockf(descriptor, fcntl.LOCK_EX, fetch_locks._SET_BYTES, number * fetch_locks._SET_BYTES)
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_process_stopped_in_the_midst_of_a_change_holds_nobody_up(tmp_path: Path) -> None:
    """The others do without a lock of that set, at once, and give back later what they could not give back then."""
    with processes(tmp_path) as opened, ExitStack() as stack:
        one, other = opened.locks
        assert one.take(KEYS[0]) == 0
        context = multiprocessing.get_context("spawn")
        stopped = context.Process(
            target=_stop_in_set, args=(str(tmp_path / "shared" / "fetch-locks"), KEYS[0].set), daemon=True
        )
        stopped.start()
        stack.callback(stopped.join)
        stack.callback(stopped.kill)
        assert stopped.pid is not None
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        assert other.take(KEYS[2]) is None
        assert other.take(KEYS[3]) == 1
        one.release(KEYS[0])
        assert other.holder(KEYS[0]) == 0
        stopped.kill()
        stopped.join()
        one.release_late()
        assert other.take(KEYS[0]) == 1


def test_a_lock_that_could_not_be_given_back_and_is_taken_again_is_given_back_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its set was not to be had just then."""
    with processes(tmp_path) as opened:
        one, other = opened.locks
        assert one.take(KEYS[0]) == 0
        lock = one._lock
        for last in (False, True):
            monkeypatch.setattr(one, "_lock", lambda number: False)
            one.release(KEYS[0])
            if last:
                break
            tries = iter([False])
            monkeypatch.setattr(one, "_lock", lambda number: next(tries, True) and lock(number))  # noqa: B023
            assert one.take(KEYS[0]) == 0
        monkeypatch.setattr(one, "_lock", lock)
        one.release_late()
        assert other.take(KEYS[0]) == 1


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    """Record locks do not: what two threads change in one set at the same time is all there."""
    rounds, entered = 300, threading.Semaphore(1)

    with processes(tmp_path, workers=1) as opened:
        [locks] = opened.locks
        overlaps = []
        unlock = locks._unlock

        def changing(number: int) -> None:
            if not entered.acquire(blocking=False):
                overlaps.append(number)
            else:
                time.sleep(0)
                entered.release()
            unlock(number)

        locks._unlock = changing  # type: ignore[method-assign]

        def take_and_release(place: int) -> None:
            for _ in range(rounds):
                assert locks.take(key(9, place, 8)) == 0
                locks.release(key(9, place, 8))

        threads = [threading.Thread(target=take_and_release, args=(place,)) for place in range(1, WAYS + 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert overlaps == []
        assert not any(locks._words[: CELLS * 2])


def test_keys_spread_and_tell_headers_apart() -> None:
    """Blocks that differ in object, version, place or headers hardly ever share set and tags."""
    versions = [ObjectVersion(ObjectKey("bucket", f"k{key}"), etag, 2**30) for key in range(16) for etag in ("a", "b")]
    blocks = [block_at(version, number, 2**20) for version in versions for number in range(8)]
    keys = {
        lock_of_block(block, lock_of_place(object_id(block.version.key), block.offset, headers))
        for block in blocks
        for headers in ({}, {"x-amz-request-payer": "a"})
    }
    assert len(keys) == 2 * len(blocks)
    assert len({key.set for key in keys}) > len(keys) * 0.4


@pytest.mark.parametrize("headers", [{}, {"x-amz-request-payer": "requester"}])
@pytest.mark.parametrize("number", [0, 1, 77])
def test_who_finds_out_the_version_keeps_out_who_would_too(
    tmp_path: Path, headers: dict[str, str], number: int
) -> None:
    """The version at a place is not found out while a block that begins there is fetched, of whichever version."""
    object_key = ObjectKey("bucket", "k")
    blocks = [block_at(ObjectVersion(object_key, etag, 2**30), number, 2**20) for etag in ("a", "b")]
    place = lock_of_place(object_id(object_key), blocks[0].offset, headers)
    assert place.version == UNKNOWN
    with processes(tmp_path) as opened:
        one, other = opened.locks
        for block in blocks:
            lock = lock_of_block(block, place)
            assert one.take(lock) == 0
            assert other.take(place) is None
            one.release(lock)
            assert other.take(place) == 1
            other.exchange(place, lock)
            assert (one.take(lock), one.take(place)) == (1, None)
            other.release(lock)
        assert len({lock_of_block(block, place) for block in blocks}) == 2


WRITER = """
import fcntl, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[BlockLease]:
    path = tmp_path / "file"
    path.touch()
    file = lease_of(os.open(path, os.O_RDWR))
    yield file
    file.close()


@pytest.fixture
def no_safety_net(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_locks, "LOOK_SECONDS", 10_000.0)


@pytest.mark.usefixtures("no_safety_net")
async def test_every_kind_of_change_wakes(tmp_path: Path, file: BlockLease) -> None:
    """Growth, a new name, removal and a touch each end the wait, for every watcher of the file."""
    path, renamed = tmp_path / "file", tmp_path / "renamed"
    watcher = FileWatcher()
    with watcher.watch(file.descriptor) as one, watcher.watch(file.descriptor) as other:
        for change in (
            lambda: os.pwrite(file.descriptor, b"x", 0),
            lambda: os.rename(path, renamed),
            lambda: os.unlink(renamed),
            lambda: os.utime(file.descriptor),
        ):
            one.clear()
            other.clear()
            waiting = asyncio.gather(one.changed(), other.changed())
            await asyncio.sleep(0)
            assert not waiting.done()
            change()
            await waiting
    watcher.close()


@pytest.mark.usefixtures("no_safety_net")
async def test_a_change_between_looking_and_waiting_is_not_missed(file: BlockLease) -> None:
    """A change after `clear` ends a wait that begins later."""
    watcher = FileWatcher()
    with watcher.watch(file.descriptor) as watch:
        watch.clear()
        os.pwrite(file.descriptor, b"x", 0)
        await watch.changed()
    watcher.close()


def is_led(file: BlockLease) -> bool:
    """Return whether a process has the file locked."""
    try:
        fcntl.flock(file.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file.descriptor, fcntl.LOCK_UN)
    return False


@pytest.mark.usefixtures("no_safety_net")
def test_a_killed_writer_is_noticed_at_once(tmp_path: Path, file: BlockLease) -> None:
    """SIGKILL frees the writer's lock, and a watcher learns of it sooner than by the slow look of the safety net."""

    async def scenario(writer: subprocess.Popen[bytes]) -> None:
        watcher = FileWatcher()
        with watcher.watch(file.descriptor) as watch:
            assert is_led(file)
            writer.kill()
            while True:
                watch.clear()
                if not is_led(file):
                    break
                await watch.changed()
        watcher.close()

    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"locked\n"
        asyncio.run(asyncio.wait_for(scenario(writer), 30))


@pytest.mark.slow
async def test_nothing_is_looked_at_hot(file: BlockLease, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the writer's end the looks come further and further apart, down to the safety net's pace."""
    monkeypatch.setattr(fetch_locks, "LOOK_SECONDS", 0.2)
    watcher = FileWatcher()
    with watcher.watch(file.descriptor) as watch:
        watch.notify(writer_closed=True)
        watch.clear()
        started, looks = asyncio.get_running_loop().time(), 0
        while asyncio.get_running_loop().time() < started + 1.0:
            await watch.changed()
            looks += 1
        assert looks <= 14
    watcher.close()


def test_without_inotify_the_file_is_looked_at_now_and_then(file: BlockLease) -> None:
    """A wait ends although the system has no inotify instance left."""

    async def scenario() -> None:
        watcher = FileWatcher()
        watcher.close()
        with watcher.watch(file.descriptor) as watch:
            await watch.changed()

    asyncio.run(asyncio.wait_for(scenario(), 30))


async def test_nothing_stays_behind_a_watch(file: BlockLease) -> None:
    """Changes to a file that nobody watches any more are nobody's business, and its watch is free."""
    watcher = FileWatcher()
    for _ in range(3):
        with watcher.watch(file.descriptor) as watch:
            watch.clear()
        os.pwrite(file.descriptor, b"x", 0)
        await asyncio.sleep(0)
    assert watcher._watches == {}
    watcher.close()


def test_looking_at_the_lock_takes_it_from_nobody(tmp_path: Path, file: BlockLease) -> None:
    """Two who look at once do not take each other for the leader."""
    other = lease_of(os.open(tmp_path / "file", os.O_RDONLY))
    fcntl.flock(other.descriptor, fcntl.LOCK_SH)
    assert not is_led(file)
    other.close()

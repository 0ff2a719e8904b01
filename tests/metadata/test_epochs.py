"""Invalidation epochs: no change is ever missed, whoever makes it, stops or dies; and few are taken for another's.

Writes in doubt: each is ended once, in time, and they are bounded.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from gateway.core.model import ObjectKey
from gateway.metadata import entries as epochs_module
from gateway.metadata.entries import (
    IN_DOUBT_SECONDS,
    InDoubtWrites,
    InvalidationEpochs,
    ObservedAt,
    catalog_key,
    create,
)
from tests.support.manual_clock import ManualClock
from tests.support.prepared_process import PreparedProcess

ROOT = Path(__file__).parents[2]
KEY = ObjectKey("bucket", "k")
PLACE = catalog_key(KEY)


@contextmanager
def opened(path: Path, process: int = 0) -> Iterator[InvalidationEpochs]:
    if not path.exists():
        create(path)
    epochs = InvalidationEpochs(path, process)
    try:
        yield epochs
    finally:
        epochs.close()


def now(epochs: InvalidationEpochs, key: ObjectKey = KEY) -> ObservedAt:
    return ObservedAt(epochs.of_bucket(key.bucket), 0.0, 0, epochs.of_key(catalog_key(key)))


def race(epochs: InvalidationEpochs, rounds: int) -> int:
    """Changes the key, as others do, in four threads; how often something of before a change counted after it."""

    def change() -> int:
        missed, before = 0, deque[ObservedAt](maxlen=8)
        for _ in range(rounds):
            before.append(now(epochs))
            epochs.change_key(KEY)
            missed += sum(epochs.is_current(one, KEY.bucket, PLACE) for one in before)
        return missed

    with ThreadPoolExecutor(4) as threads:
        return sum(changing.result() for changing in [threads.submit(change) for _ in range(4)])


OTHER = """
import sys
from pathlib import Path
from tests.metadata.test_epochs import opened, race
sys.setswitchinterval(1e-6)
with opened(Path(sys.argv[1])) as epochs:
    print("ready", flush=True)
    sys.stdin.readline()
    print(race(epochs, 4000))
"""


def test_no_change_is_missed_by_threads_and_processes_at_once(tmp_path: Path) -> None:
    """What was observed before a change is void after it, for good: no number comes back."""
    path = tmp_path / "epochs"
    create(path)
    processes = []
    for _ in range(3):
        process = PreparedProcess(["-c", OTHER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"  # one after the other, as catalogs are opened
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[0] for process in processes] == ["0\n"] * 3


def test_a_stopped_process_holds_up_no_change(tmp_path: Path) -> None:
    """Whatever it has locked: changes wait for nobody."""
    path = tmp_path / "epochs"
    with opened(path) as epochs:
        holder = os.fork()
        if not holder:
            fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX)
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        try:
            os.waitpid(holder, os.WUNTRACED)
            before = now(epochs)
            changing = threading.Thread(target=epochs.change_key, args=(KEY,), daemon=True)
            changing.start()
            changing.join(timeout=10)
            assert not changing.is_alive()
            assert not epochs.is_current(before, KEY.bucket, PLACE)
        finally:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)


@pytest.mark.slow
def test_a_write_voids_next_to_nothing_else(tmp_path: Path) -> None:
    """Of 200,000 keys that were not written, none is void after 1,000 writes of others. (One cell each: 95.)"""
    with opened(tmp_path / "epochs") as epochs:
        keys = [ObjectKey("bucket", f"set/{number:08}.jpg") for number in range(200_000)]
        before = [now(epochs, key) for key in keys]
        for number in range(1000):
            epochs.change_key(ObjectKey("bucket", f"checkpoints/{number:05}.pt"))
        void = [
            key
            for key, observed in zip(keys, before, strict=True)
            if not epochs.is_current(observed, key.bucket, catalog_key(key))
        ]
        assert void == []


def test_numbers_do_not_come_back_when_the_file_is_opened_again(tmp_path: Path) -> None:
    """What was observed before a restart is void after a write behind it; another bucket's writes change nothing."""
    path = tmp_path / "epochs"
    with opened(path) as epochs:
        epochs.change_key(KEY)
        before = now(epochs)
    with opened(path) as epochs:
        epochs.change_bucket("another")
        epochs.change_key(ObjectKey("bucket", "another"))
        assert epochs.is_current(before, KEY.bucket, PLACE)
        epochs.change_key(KEY)
        assert not epochs.is_current(before, KEY.bucket, PLACE)
        for change in (partial(epochs.change_bucket, "bucket"), epochs.change_everything):
            before = now(epochs)
            change()
            assert not epochs.is_current(before, KEY.bucket, PLACE)


def test_an_absence_is_void_once_an_object_was_shown_after_the_question(tmp_path: Path) -> None:
    """In every process, also after a restart, and not for what is asked later, of another boot, or of other keys."""
    path = tmp_path / "epochs"

    def asked(seconds: float, boot: int = 2**31 + 7) -> ObservedAt:
        return ObservedAt(0, seconds, boot)

    with opened(path) as epochs, opened(path, 1) as other:
        assert not other.is_shown_since(asked(0.0), KEY)
        assert not other.is_shown_since(asked(0.0, boot=0), KEY)
        epochs.show(KEY, 100.0, 2**31 + 7)
        for seconds, is_void in [(0.0, True), (99.999, True), (100.0, True), (100.001, False), (1e6, False)]:
            assert other.is_shown_since(asked(seconds), KEY) is is_void
        assert not other.is_shown_since(asked(0.0, boot=5), KEY)
        assert not other.is_shown_since(asked(0.0), ObjectKey("bucket", "another"))
    with opened(path) as epochs:
        assert epochs.is_shown_since(asked(100.0), KEY)
        assert epochs.left_behind == []


MANY = [ObjectKey("bucket", f"many/{number}") for number in range(1000)]


@pytest.mark.parametrize("writes", [[[KEY]], [[*MANY, KEY]], [[one] for one in [*MANY, KEY]], [None]])
@pytest.mark.parametrize("bucket", ["bucket", None])
def test_a_write_that_its_process_was_killed_in_is_voided_by_the_next(
    tmp_path: Path, writes: list[list[ObjectKey] | None], bucket: str | None
) -> None:
    """One key, a thousand in one write or in as many, a bucket, all buckets: whatever was asked of them meanwhile."""
    path = tmp_path / "epochs"
    with opened(path) as epochs, opened(path, 1) as other:
        for keys in writes:
            epochs.begin_write(bucket, keys)
        meanwhile = now(other)
        with opened(path) as successor:
            successor.void(successor.left_behind)
            assert not other.is_current(meanwhile, KEY.bucket, PLACE)
            after = now(other)
            with opened(path) as another:  # the first was killed before it had ended what it found
                assert another.left_behind == successor.left_behind
                another.void(another.left_behind)
                assert not other.is_current(after, KEY.bucket, PLACE)
                another.end_write(another.left_behind)
    with opened(path) as epochs:
        assert epochs.left_behind == []


def test_a_write_that_has_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    """However many there are at once, in whatever order they end; a thousand keys that were not written stay."""
    path = tmp_path / "epochs"
    with opened(path) as epochs:
        places = [epochs.begin_write("bucket", [key]) for key in MANY]
        before = now(epochs)
        for place in [*places[500:], *places[:500]]:
            epochs.end_write(place)
        with opened(path) as successor:
            assert successor.left_behind == []
            epochs.begin_write("bucket", MANY[:3])
        with opened(path) as successor:
            successor.void(successor.left_behind)
            assert len(successor.left_behind) == 3
        assert epochs.is_current(before, KEY.bucket, PLACE)


def test_processes_have_their_own_places(tmp_path: Path) -> None:
    """One that starts beside others lets their writes be."""
    path = tmp_path / "epochs"
    with opened(path, 3) as epochs:
        epochs.begin_write("bucket", [KEY])
        for process in (2, 4, 256):
            with opened(path, process) as other:
                assert other.left_behind == []


def test_a_file_that_has_no_more_numbers_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made anew, with all that was held against it, before a number comes twice."""
    monkeypatch.setattr(epochs_module, "_OPENINGS_MAX", 1)
    path = tmp_path / "epochs"
    with opened(path):
        pass
    with pytest.raises(FileNotFoundError):
        InvalidationEpochs(path)


def ending(ended: list[int], number: int) -> Callable[[], Awaitable[None]]:
    async def end() -> None:
        ended.append(number)

    return end


async def test_each_is_ended_when_its_time_is_over() -> None:
    """Once, not before; and one that comes when all others are over, too."""
    clock, ended = ManualClock(), list[int]()
    writes = InDoubtWrites(clock)
    writes.add(ending(ended, 1))
    await clock.advance(IN_DOUBT_SECONDS / 2)
    writes.add(ending(ended, 2))
    await clock.advance(IN_DOUBT_SECONDS / 2 - 0.5)
    assert ended == []
    await clock.advance(1.0)
    assert ended == [1]
    await clock.advance(IN_DOUBT_SECONDS)
    writes.add(ending(ended, 3))
    await clock.advance(IN_DOUBT_SECONDS + 1)
    assert ended == [1, 2, 3]
    await writes.close()


async def test_one_that_cannot_be_ended_keeps_none_of_the_others() -> None:
    """The disk may fail at any of them."""
    clock, ended = ManualClock(), list[int]()
    writes = InDoubtWrites(clock)

    async def fail() -> None:
        raise OSError("the disk is gone")

    writes.add(fail)
    writes.add(ending(ended, 1))
    await clock.advance(IN_DOUBT_SECONDS + 1)
    assert ended == [1]
    await writes.close()


async def test_there_are_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more, the oldest is ended sooner; what is left is not ended when the gateway stops."""
    monkeypatch.setattr(epochs_module, "IN_DOUBT_MAX", 10)
    clock, ended = ManualClock(), list[int]()
    writes = InDoubtWrites(clock)
    for number in range(50):
        writes.add(ending(ended, number))
    await clock.advance(1.0)
    assert ended == list(range(40))
    await writes.close()
    await clock.advance(IN_DOUBT_SECONDS + 1)
    assert ended == list(range(40))

"""Where the files lie that the processes of a gateway share, and whose they are."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import mmap_key

from gateway.serve.shared_directory import SharedFiles, SharedMemory, in_memory_directory, make_shared_files
from gateway.telemetry.metric_kinds import SharedValues

ROOM_BYTES = 2**20


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """Stands in for /dev/shm."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


def made(cache: Path, memory: Path, room_bytes: int = ROOM_BYTES) -> SharedFiles:
    return make_shared_files(cache, room_bytes, memory)


def test_they_lie_in_memory_and_begin_empty(cache: Path, memory: Path) -> None:
    """What a killed run left is gone."""
    left = in_memory_directory(cache, memory)
    left.mkdir(mode=0o755)
    (left / "counter_worker0.db").touch()
    files = made(cache, memory)
    assert files.path == left
    assert os.listdir(left) == ["heartbeats"]
    assert left.stat().st_mode & 0o777 == 0o700
    files.remove()
    assert os.listdir(memory) == []


def test_gateways_on_other_directories_have_others(tmp_path: Path, memory: Path) -> None:
    """Two gateways on one machine do not count into each other's files."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert made(tmp_path / "a", memory).path != made(tmp_path / "b", memory).path


def test_gateways_on_other_directories_of_the_same_path_have_others(cache: Path, memory: Path) -> None:
    """Containers that share /dev/shm each have a cache directory of their own at the same path."""
    first = made(cache, memory)
    cache.rename(cache.with_name("of-another-container"))
    cache.mkdir()
    second = made(cache, memory)
    assert first.path != second.path
    assert not first.is_lost()


def test_no_gateway_takes_the_directory_of_one_that_lives(cache: Path, memory: Path) -> None:
    """Whatever it is named: it is locked."""
    first = made(cache, memory)
    second = made(cache, memory)
    assert second.path == cache / "run" / "metrics"
    assert not first.is_lost()
    first.remove()


def test_what_killed_gateways_left_is_removed_by_the_next(tmp_path: Path, cache: Path, memory: Path) -> None:
    """Containers leave one each, with another name every time: nothing grows. One that is used stays."""
    (tmp_path / "other").mkdir()
    living, dead = made(tmp_path / "other", memory), made(cache, memory)
    dead.give_up()
    cache.rename(cache.with_name("gone"))
    cache.mkdir()
    next_one = made(cache, memory)
    assert set(memory.iterdir()) == {living.path, next_one.path}


def test_without_room_in_memory_they_lie_in_the_cache_directory(cache: Path, memory: Path) -> None:
    """Containers often have 64 MiB of shared memory."""
    files = made(cache, memory, 2**60)
    assert files.path == cache / "run" / "metrics"
    assert files.path.stat().st_mode & 0o777 == 0o700


def test_without_shared_memory_they_lie_in_the_cache_directory(cache: Path, tmp_path: Path) -> None:
    """Not every machine has it."""
    assert made(cache, tmp_path / "absent").path == cache / "run" / "metrics"


def test_what_another_put_in_that_place_is_not_followed(tmp_path: Path, cache: Path, memory: Path) -> None:
    """Everybody may write to shared memory: a link of that name leads where its maker wants."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").touch()
    in_memory_directory(cache, memory).symlink_to(target)
    assert made(cache, memory).path == cache / "run" / "metrics"
    assert (target / "precious").exists()


def _replace(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize(
    "harm",
    [
        shutil.rmtree,
        _replace,
        lambda path: (path / "heartbeats").unlink(),
        lambda path: os.replace(path / "other", path / "heartbeats"),
        lambda path: (path / "other").unlink(),
    ],
    ids=["removed", "replaced", "a file removed", "a file replaced", "another file removed"],
)
def test_what_is_lost_is_made_anew(cache: Path, memory: Path, harm: Callable[[Path], None]) -> None:
    """Once, and for all who ask at that moment; a mapping that somebody still has stays good."""

    async def lose() -> None:
        told: list[SharedFiles] = []
        shared = SharedMemory(cache, ROOM_BYTES, told.append, memory)
        before = shared.files
        (before.path / "other").touch()
        (before.path / "gauge_livesum_worker0.db").touch()
        assert await shared.whole_files() is before
        (before.path / "gauge_livesum_worker0.db").unlink()  # as when a worker has died
        (before.path / "counter_worker0.new").touch()
        assert await shared.whole_files() is before
        (before.path / "counter_worker0.new").rename(before.path / "other")  # as when slots are removed
        assert await shared.whole_files() is before
        harm(before.path)
        after, same = await asyncio.gather(shared.whole_files(), shared.whole_files())
        assert after is same is not before
        assert told == [after]
        assert os.listdir(after.path) == ["heartbeats"]
        before.heartbeats.beat(3)
        assert after.heartbeats.stamp(3) == 0
        shared.remove()
        assert os.listdir(memory) == []

    asyncio.run(lose())


def test_what_the_gateway_itself_replaces_is_not_lost(cache: Path, memory: Path) -> None:
    """However often slots are removed, and whenever somebody looks."""
    files = made(cache, memory)
    values = SharedValues(files.path, "worker0")
    values.value("counter", mmap_key("metric", "metric", ["slot"], ["a"], "")).inc(1)

    def fold() -> None:
        for _ in range(200):
            values.fold(lambda _, labels: {"slot": "b" if labels["slot"] == "a" else "a"})

    folding = threading.Thread(target=fold)
    folding.start()
    looks = [files.is_lost()]
    while folding.is_alive():
        looks.append(files.is_lost())
    folding.join()
    assert not any(looks)
    values.close()
    files.remove()


def test_a_gateway_that_leaves_does_not_remove_what_another_has_put_there(cache: Path, memory: Path) -> None:
    """Only its own."""
    files = made(cache, memory)
    _replace(files.path)
    files.remove()
    assert files.path.exists()


def test_who_can_start_no_thread_goes_on_with_the_files(
    cache: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of processes is reached: nobody knows whether they are lost, and the gateway must not end for that."""

    async def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        shared = SharedMemory(cache, ROOM_BYTES, lambda _: None, memory)
        monkeypatch.setattr(asyncio, "to_thread", no_thread)
        assert await shared.whole_files() is shared.files
        shared.remove()

    asyncio.run(scenario())

"""Waiting for what another process does to a file: woken by it, quiet without it, never stuck."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.blocks import fetch_locks
from gateway.blocks.block_file import BlockLease, lease_of
from gateway.blocks.fetch_locks import FileWatcher

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
def test_every_kind_of_change_wakes(tmp_path: Path, file: BlockLease) -> None:
    """Growth, a new name, removal and a touch each end the wait, for every watcher of the file."""

    async def scenario() -> None:
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

    asyncio.run(scenario())


@pytest.mark.usefixtures("no_safety_net")
def test_a_change_between_looking_and_waiting_is_not_missed(file: BlockLease) -> None:
    """What happens after `clear` ends a wait that begins later."""

    async def scenario() -> None:
        watcher = FileWatcher()
        with watcher.watch(file.descriptor) as watch:
            watch.clear()
            os.pwrite(file.descriptor, b"x", 0)
            await watch.changed()
        watcher.close()

    asyncio.run(scenario())


def is_led(file: BlockLease) -> bool:
    """Whether somebody has the file locked."""
    try:
        fcntl.flock(file.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file.descriptor, fcntl.LOCK_UN)
    return False


@pytest.mark.usefixtures("no_safety_net")
def test_a_killed_writer_is_noticed_at_once(tmp_path: Path, file: BlockLease) -> None:
    """SIGKILL frees the writer's lock, and whoever watches sees it free without the slow look of the safety net."""

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


def test_nothing_is_looked_at_hot(file: BlockLease, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the writer's end the looks come further and further apart, down to the safety net's pace."""
    monkeypatch.setattr(fetch_locks, "LOOK_SECONDS", 0.2)

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_without_inotify_the_file_is_looked_at_now_and_then(file: BlockLease) -> None:
    """Where no instance is left, waiting still ends."""

    async def scenario() -> None:
        watcher = FileWatcher()
        watcher.close()
        with watcher.watch(file.descriptor) as watch:
            await watch.changed()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_nothing_stays_behind_a_watch(file: BlockLease) -> None:
    """Changes to a file that nobody watches any more are nobody's business, and its watch is free."""

    async def scenario() -> None:
        watcher = FileWatcher()
        for _ in range(3):
            with watcher.watch(file.descriptor) as watch:
                watch.clear()
            os.pwrite(file.descriptor, b"x", 0)
            await asyncio.sleep(0)
        assert watcher._watches == {}
        watcher.close()

    asyncio.run(scenario())


def test_looking_at_the_lock_takes_it_from_nobody(tmp_path: Path, file: BlockLease) -> None:
    """Two who look at once do not take each other for the leader."""
    other = lease_of(os.open(tmp_path / "file", os.O_RDONLY))
    fcntl.flock(other.descriptor, fcntl.LOCK_SH)
    assert not is_led(file)
    other.close()

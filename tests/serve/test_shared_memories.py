"""Memory that all processes share, while settings change: all end in the same one."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from gateway.app.bandwidth import ceilings_of, make_shared_bandwidth, shares_of
from gateway.config import OriginSettings, Settings
from gateway.config.live import SharedMemoryName
from gateway.core.errors import StartupError
from gateway.serve.shared_memories import MEMORIES_KEPT, SharedMemories

BANDWIDTHS = (None, *(number * 2**20 for number in range(1, 8)))


def settings_with(bandwidth: int | None) -> Settings:
    return Settings(origin=OriginSettings(read_bandwidth_bytes_per_second=bandwidth))


@pytest.fixture
def memories() -> Iterator[SharedMemories]:
    made = SharedMemories(make_shared_bandwidth, lambda settings: (ceilings_of(settings), shares_of(settings)))
    yield made
    made.close()


class Process:
    """Opens what it is told of where it has another name than before."""

    def __init__(self) -> None:
        self.name: SharedMemoryName | None = None
        self.opened = 0

    def apply_settings(self, name: SharedMemoryName | None) -> None:
        if name != self.name:
            self.opened = os.stat(name).st_ino if name is not None else 0
            self.name = name


@pytest.mark.parametrize("seed", range(50))
def test_all_processes_end_in_the_same_memory(memories: SharedMemories, seed: int) -> None:
    """Whichever changes each of them has not seen, and whatever was tried and refused meanwhile."""
    dice = random.Random(seed)
    processes = [Process() for _ in range(3)]
    in_force: dict[int | None, SharedMemoryName | None] = {}
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(60):
        for bandwidth in dice.choices(BANDWIDTHS, k=dice.randrange(6)):
            memories.made(settings_with(bandwidth))  # refused for something else
        bandwidth = dice.choice(BANDWIDTHS)
        name = memories.made(settings_with(bandwidth))
        memories.told(name)
        assert (name is None) == (bandwidth is None)
        recent = list(in_force)[1 - MEMORIES_KEPT :]
        if bandwidth in recent:
            assert in_force[bandwidth] == name, "settings that come back keep their memory"
        in_force.pop(bandwidth, None)
        in_force[bandwidth] = name
        for process in processes[: dice.randrange(3)]:
            process.apply_settings(name)
    for process in processes:
        process.apply_settings(name)
    assert len({(one.name, one.opened) for one in processes}) == 1
    assert len(os.listdir("/proc/self/fd")) <= descriptors + MEMORIES_KEPT + 1


def test_the_memory_in_force_stays_while_others_are_refused(memories: SharedMemories) -> None:
    """However many are."""
    name = memories.made(settings_with(BANDWIDTHS[1]))
    memories.told(name)
    assert name is not None
    inode = os.stat(name).st_ino
    for _ in range(3):
        for bandwidth in BANDWIDTHS:
            memories.made(settings_with(bandwidth))
    assert memories.made(settings_with(BANDWIDTHS[1])) == name
    assert os.stat(name).st_ino == inode


def test_memory_that_no_process_could_open_is_not_made(
    memories: SharedMemories, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has mounted /proc: the start says so, and not each process for itself."""

    def no_such_file(path: str) -> str:
        raise FileNotFoundError(path)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "readlink", no_such_file)
    with pytest.raises(StartupError, match="/proc is not mounted here"):
        memories.made(settings_with(2**20))
    assert memories.made(settings_with(None)) is None
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_is_found_from_another_namespace(memories: SharedMemories, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc is of another one, the supervisor has another id there than it knows."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    name = memories.made(settings_with(2**20))
    assert name is not None
    assert os.readlink(name).startswith("/memfd:forebay-bandwidth")

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import loadtests.harness
from loadtests.harness import machine
from loadtests.harness.cold import Memory, WorkerThreads
from loadtests.harness.gateway import Gateway

NAMED = Path(loadtests.harness.__file__).parent / "named_threads"
WORK = """
import threading, time

def use(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

both = [threading.Thread(target=use, args=(0.05,), name=f"block disk_{number}") for number in range(2)]
idle = threading.Thread(target=time.sleep, args=(600,), name="catalog", daemon=True)
idle.start()
waiting = threading.Event()
for one in both:
    one.run = lambda run=one.run: (run(), waiting.wait())
    one.start()
use(0.1)
while sum(1 for one in both if one.is_alive()) and time.process_time() < 0.2:
    time.sleep(0.01)
print("done", flush=True)
input()
"""


class _Workers:
    """A gateway whose worker is one process."""

    def __init__(self, pid: int) -> None:
        self.process = self
        self._pid = pid

    def worker_pids(self) -> list[int | None]:
        return [self._pid, None]


def _threads(pid: int) -> WorkerThreads:
    return WorkerThreads(cast(Gateway, cast(Any, _Workers(pid))))


def test_cpu_time_is_told_by_the_names_of_threads() -> None:
    """Threads of a pool count together, the first thread is the loop; each has what it used."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(NAMED)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        used = machine.cpu_nanoseconds_by_thread(process.pid)
    finally:
        process.kill()
        process.communicate()
    assert set(used) == {"loop", "block-disk", "catalog"}
    assert used["block-disk"] >= 2 * 0.05 * 1e9
    assert used["loop"] >= 0.1 * 1e9
    assert used["catalog"] < 0.05 * 1e9


def test_a_round_is_what_threads_have_used_since_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the unit asked for, the busiest first; a thread that was idle in a round is in the total alone."""
    used = Counter({"loop": 10**9, "index": 5 * 10**8})
    monkeypatch.setattr(machine, "cpu_nanoseconds_by_thread", lambda _: used)
    threads = _threads(1)
    for more in ({"loop": 2 * 10**9, "index": 10**8, "new": 10**8}, {"loop": 10**9, "index": 3 * 10**8}):
        threads.begin()
        used.update(more)
        threads.end(0.5)
    assert threads.totals() == pytest.approx([4.4, 2.6])
    table = threads.table("CPU", "s")
    assert list(table.series) == ["all threads", "loop", "index"]
    assert table.series["index"] == pytest.approx([0.2, 0.6])


def _free(size_bytes: int) -> Callable[[], int]:
    return lambda: size_bytes


def test_what_was_touched_stands_beside_the_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where less memory is free than a round takes, only a part of that is touched, and the figure says so."""
    memory = Memory()
    memory.touch(1024 * 1024)
    assert memory.of("rate") == "rate (memory touched)"
    monkeypatch.setattr(machine, "free_bytes", _free(1024 * 1024))
    memory.touch(1024 * 1024)
    assert memory.of("rate") == "rate (memory touched in part)"
    monkeypatch.setattr(machine, "free_bytes", _free(1000))
    assert not machine.touch_memory(1024 * 1024)


def test_free_memory_is_what_the_system_says() -> None:
    """Bytes, and no more than there are."""
    assert 0 < machine.free_bytes() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""One request for a small block over all processes: who waits, who is succeeded, who is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gateway.core.model import ObjectVersion
from tests.support.blocks import MIB, block_files, stored
from tests.support.fill_worker import FillWorker
from tests.support.memory_origin.faults import Answer, Call
from tests.support.strict_origin import StrictOrigin

PACKED = MIB
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

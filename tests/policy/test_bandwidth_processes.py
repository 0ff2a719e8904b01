"""Real processes at one ceiling: some are stopped or killed, wherever they are, and the others have the ceiling."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest

from gateway.core.clock import SystemClock
from gateway.policy.bandwidth import numbering_of, rows_for
from gateway.policy.token_bucket import BURST_SECONDS
from gateway.shared.arena import make_shared_memory
from tests.support.bandwidth_worker import SHARES, ceilings_of
from tests.support.prepared_process import PreparedProcess
from tests.support.rest_is_slow import rest_is_slow
from tests.support.waiting import eventually

RATE = 4e6
PIECE = 50_000
PROCESSES = 4
TOLERANCE = 0.03
"""Of what passes in a second: a process may be held up between passing a piece and telling of it."""

POINTS = [
    f"{when} {what}"
    for what in ("taken", "anchors")
    for when in ("before reading", "behind reading", "before writing", "behind writing")
] + ["behind reading its own taken"]


class Crowd:
    """Processes that share one bucket, and what they have passed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._readers: list[threading.Thread] = []
        self.processes: list[subprocess.Popen[str]] = []
        self.passed: list[list[tuple[float, int]]] = []

    def start(self, own: int, point: str = "-", after: int = 0, slot: str = "a") -> int:
        """Another one; its number here."""
        arguments = [self._descriptor, own, PROCESSES, RATE, PIECE, point, after, slot]
        process = PreparedProcess(
            ["tests.support.bandwidth_worker", *arguments], stdout=subprocess.PIPE, pass_fds=[self._descriptor]
        )
        assert process.stdout is not None
        self.processes.append(process)
        self.passed.append([])
        self._readers.append(threading.Thread(target=_read, args=(process.stdout, self.passed[-1])))
        self._readers[-1].start()
        return len(self.processes) - 1

    def wait_for(self, number: int, pieces: int) -> None:
        """Until a process has passed so many more."""
        goal = len(self.passed[number]) + pieces
        eventually(lambda: len(self.passed[number]) >= goal, "it passes nothing any more")

    def wait_for_stop(self, number: int) -> None:
        """Until a process has stopped itself."""
        deadline, status = time.monotonic() + 60, 0
        while not status:
            assert time.monotonic() < deadline, "it does not come to that point"
            _, status = os.waitpid(self.processes[number].pid, os.WUNTRACED | os.WNOHANG)
            time.sleep(0.01)
        assert os.WIFSTOPPED(status)

    def end(self) -> list[tuple[float, int]]:
        """Kill them all; what all have passed, in order."""
        for process in self.processes:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()
        for process in self.processes:
            assert process.stdout is not None
            process.stdout.close()
        return sorted(one for row in self.passed for one in row)


def _read(lines: IO[str], passed: list[tuple[float, int]]) -> None:
    for line in lines:
        when, count = line.split()
        passed.append((float(when), int(count)))


@contextmanager
def crowd() -> Iterator[Crowd]:
    rows = rows_for(numbering_of(ceilings_of(RATE), SHARES).most)
    descriptor = make_shared_memory(rows, PROCESSES, SystemClock().monotonic())
    one = Crowd(descriptor)
    try:
        yield one
    finally:
        one.end()
        os.close(descriptor)


def assert_never_above(passed: list[tuple[float, int]]) -> None:
    """In no span of a second or more."""
    slack = RATE * BURST_SECONDS + PROCESSES * PIECE
    for i, (start, _) in enumerate(passed):
        sum_bytes = 0
        for when, count in passed[i:]:
            sum_bytes += count
            seconds = when - start
            if seconds >= 1:
                assert sum_bytes <= RATE * seconds * (1 + TOLERANCE) + slack


def rate_between(passed: list[tuple[float, int]], start: float, end: float) -> float:
    return sum(count for when, count in passed if start <= when < end) / (end - start)


@pytest.mark.slow
@pytest.mark.parametrize("point", rest_is_slow(POINTS, *list(POINTS)[::3]))
def test_a_process_that_stops_within_the_arithmetic_holds_nobody_up(point: str) -> None:
    """Wherever that is; and what it does when it goes on lets nobody above the ceiling."""
    rates = list[float]()
    while not rates or (rates[-1] <= 0.5 * RATE and len(rates) < 5):  # a machine that is busy for long fails none
        rates.append(_rate_beside_a_stopped_process(point))
    assert rates[-1] > 0.5 * RATE, rates


def _rate_beside_a_stopped_process(point: str) -> float:
    with crowd() as one:
        stopped = one.start(1, point, after=5)
        one.wait_for_stop(stopped)
        well = one.start(0)
        one.wait_for(well, 1)
        began = SystemClock().monotonic()
        one.wait_for(well, int(1.5 * RATE / PIECE))
        ended = SystemClock().monotonic()
        os.kill(one.processes[stopped].pid, signal.SIGCONT)
        one.wait_for(stopped, 5)
        one.wait_for(well, 5)
        passed = one.end()
    assert_never_above(passed)
    return rate_between(one.passed[well], began, ended)


@pytest.mark.slow
def test_killed_stopped_and_new_processes_keep_the_ceiling_together() -> None:
    """At random moments; who is there has what the others leave, and gets it at once."""
    dice = random.Random(1)
    with crowd() as one:
        steady = one.start(0)
        one.wait_for(steady, 1)
        began = SystemClock().monotonic()
        for _ in range(3):
            killed, stopped = one.start(1), one.start(2)
            one.wait_for(killed, 2)
            one.wait_for(stopped, 2)
            for _ in range(5):
                time.sleep(dice.uniform(0.01, 0.05))
                one.processes[stopped].send_signal(signal.SIGSTOP)
                time.sleep(dice.uniform(0.01, 0.1))
                one.processes[stopped].send_signal(signal.SIGCONT)
            one.processes[killed].kill()
            one.processes[stopped].send_signal(signal.SIGSTOP)
            one.wait_for(steady, 10)
            one.processes[stopped].kill()
        ended = SystemClock().monotonic()
        passed = one.end()
    assert_never_above(passed)
    assert rate_between(passed, began, ended) > 0.7 * RATE


@pytest.mark.slow
def test_10_4_slots_of_real_processes_share_by_weight_and_take_over_from_those_that_are_stopped() -> None:
    """10.4 Weights of 3 and 1, a reader and a process each; the heavy one is stopped, goes on, and is killed."""
    with crowd() as one:
        heavy, light = one.start(0), one.start(1, slot="b")
        one.wait_for(heavy, 10)
        one.wait_for(light, 30)
        moments = [SystemClock().monotonic()]

        def pass_time(seconds: float) -> None:
            time.sleep(seconds)
            moments.append(SystemClock().monotonic())

        pass_time(5.0)
        one.processes[heavy].send_signal(signal.SIGSTOP)
        pass_time(1.0)
        one.processes[heavy].send_signal(signal.SIGCONT)
        pass_time(0.5)
        pass_time(5.0)
        one.processes[heavy].kill()
        pass_time(1.0)
        one.wait_for(light, 1)
        passed = one.end()
        rates = [[rate_between(row, *span) for span in itertools.pairwise(moments)] for row in one.passed]
    assert_never_above(passed)
    of_heavy, of_light = rates
    for both in (0, 3):
        assert of_heavy[both] == pytest.approx(0.75 * RATE, rel=0.1)
        assert of_light[both] == pytest.approx(0.25 * RATE, rel=0.1)
    for alone in (1, 4):
        assert of_light[alone] > 0.85 * RATE

"""How fast a job goes, and how long the rest takes: of late, not since it began, and only once that is known."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.jobs.job import Job, JobKind
from gateway.jobs.runner import RATE_SECONDS, UNKNOWN_PACE, _JobRun

MIB = 2**20


def running(job: Job) -> _JobRun:
    """A run of which nothing runs."""
    work: Any = SimpleNamespace(job=job, coming_bytes=0)
    doing: Any = asyncio.Future(loop=asyncio.new_event_loop())
    doing.get_loop().close()
    return _JobRun(work, doing)


def stand(run: _JobRun, now: float, *, fetched: int, coming: int = 0, passed: int = 0) -> None:
    """So it stands at a time."""
    job = replace(run.work.job, bytes_done=passed + fetched, bytes_fetched=fetched)
    work: Any = SimpleNamespace(job=job, coming_bytes=coming)
    run.work = work
    run.note_rate(now)


WARM = Job("1", JobKind.WARM, "s3://b/", bytes_found=1000 * MIB, found_all=True)


def test_the_time_left_is_right_as_soon_as_it_is_said() -> None:
    """Thirty-two blocks of 8 MiB share 2 MiB/s: for two minutes none is done, and what comes of them tells the rate."""
    run = running(WARM)
    for second in range(128):
        stand(run, float(second), fetched=0, coming=2 * MIB * second)
        left = run.pace().seconds_left
        assert (left is None) is (second < 5)
        assert left is None or left == pytest.approx(500 - second)
    stand(run, 128.0, fetched=256 * MIB)
    assert run.pace().seconds_left == pytest.approx(372)


def test_what_was_here_tells_nothing_of_what_is_to_come() -> None:
    """A job begun once more passes 800 MiB in two seconds, and then goes on as fast as the slot lets it."""
    run, said = running(WARM), []
    for second in range(60):
        passed = min(second, 2) * 400 * MIB
        stand(run, float(second), fetched=0, coming=2 * MIB * max(0, second - 2), passed=passed)
        said.append(run.pace().seconds_left)
    assert said[:7] == [None] * 7
    assert said[7:] == [pytest.approx((200 - 2 * (second - 2)) / 2) for second in range(7, 60)]


def test_a_piece_that_is_tried_again_is_no_step_back() -> None:
    """What has come of it is lost, and comes once more."""
    run = running(WARM)
    for second in range(20):
        stand(run, float(second), fetched=0, coming=MIB * (second if second != 12 else 3))
        assert (run.pace().seconds_left is None) is (second < 5)


def test_a_job_that_stands_has_no_end_in_sight() -> None:
    """However fast it was an hour ago."""
    run = running(WARM)
    for second in range(100):
        stand(run, float(second), fetched=second * MIB)
    assert run.pace().bytes_per_second == pytest.approx(MIB)
    for second in range(100, 100 + int(RATE_SECONDS) + 1):
        stand(run, float(second), fetched=99 * MIB)
    assert (run.pace().bytes_per_second, run.pace().seconds_left) == (0, None)


@pytest.mark.parametrize("change", [{"found_all": False}, {"manifest": True}])
def test_how_much_is_left_must_be_known(change: dict[str, Any]) -> None:
    """While the listing goes on, and of a manifest, which tells no sizes."""
    run = running(replace(WARM, **change))
    for second in range(20):
        stand(run, float(second), fetched=second * MIB)
    assert run.pace().bytes_per_second == pytest.approx(MIB)
    assert run.pace().seconds_left is None


def test_a_snapshot_moves_no_bytes() -> None:
    """Though it says how many it has found."""
    run = running(replace(WARM, kind=JobKind.SNAPSHOT))
    for second in range(20):
        stand(run, float(second), fetched=second * MIB)
    assert run.pace() == UNKNOWN_PACE

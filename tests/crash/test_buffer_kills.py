"""Processes that write to the write-back buffer are killed with -9 at any moment (docs/semantics.md, clause 5).

What was acknowledged is there, byte for byte; what was not is as before or as it was to be; nothing else is left. The
schedule comes from a seed, which a failure prints; FOREBAY_KILL_SEED and FOREBAY_BUFFER_KILLS repeat or lengthen a run,
FOREBAY_BUFFER_KILL_POINTS one in which each kill is at a chosen call (kill_points.py, which takes `cc`).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.writeback.opening import recover
from tests.support.buffer_history import Expected, Hearing, check, start_writers
from tests.support.kill_points import KillPoints

KILLS = int(os.environ.get("FOREBAY_BUFFER_KILLS", "3"))
SEED = int(os.environ.get("FOREBAY_KILL_SEED", random.SystemRandom().randrange(2**32)))
POINTS = int(os.environ.get("FOREBAY_BUFFER_KILL_POINTS", "4"))
CALLS_MAX = 300
WORKERS = 2
LINES_MAX = 60
LEFT_MAX = 4
"""Of a worker: a file that is not in the journal yet, and the parts of an object that is not any more."""


@pytest.mark.slow
def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Again and again on one buffer, with several workers at once."""
    print(f"FOREBAY_KILL_SEED={SEED}")
    dice, expected = random.Random(SEED), [Expected() for _ in range(WORKERS)]
    recover(tmp_path, now=Moment(2.0))  # as the supervisor does before there are workers
    for _ in range(KILLS):
        hearings = list(map(Hearing, start_writers(tmp_path, dice, WORKERS), expected))
        for hearing in hearings:
            hearing.lines(dice.randrange(1, LINES_MAX))
            hearing.writer.send_signal(signal.SIGKILL)
        for hearing, of in zip(hearings, expected, strict=True):
            hearing.rest(of.hear)
        recovered = recover(tmp_path, now=Moment(2.0))
        asyncio.run(check(tmp_path, expected))
        assert recovered.removed_files <= WORKERS * LEFT_MAX


@pytest.mark.slow
@pytest.mark.timeout(120 + 5 * POINTS)
def test_kills_at_any_call_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Again and again on one buffer: while it is opened, and while it is written to."""
    dice, expected, buffer = random.Random(SEED), Expected(), tmp_path / "buffer"
    with KillPoints.made(tmp_path, buffer) as points:
        environment = {**os.environ, **points.environment}
        for number in range(POINTS):
            calls, after = dice.randrange(1, CALLS_MAX), dice.random() < 0.5
            print(f"FOREBAY_KILL_SEED={SEED}, {number}: {'after' if after else 'before'} call {calls}", end=" ")
            points.arm("supervisor", calls, after=after)
            (writer,) = start_writers(buffer, dice, 1, environment=environment)
            Hearing(writer, expected).rest(expected.hear)
            assert points.fired is not None
            print(points.fired.call, points.fired.object)
            recovered = recover(buffer, now=Moment(2.0))
            asyncio.run(check(buffer, [expected]))
            assert recovered.removed_files <= LEFT_MAX

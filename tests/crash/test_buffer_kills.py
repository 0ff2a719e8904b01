"""Processes that write to the write-back buffer are killed with -9 at any moment (docs/semantics.md, clause 5).

What was acknowledged is there, byte for byte; what was not is as before or as it was to be; nothing else is left. The
schedule comes from a seed, which a failure prints; FOREBAY_KILL_SEED and FOREBAY_BUFFER_KILLS repeat or lengthen a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

from gateway.writeback.opening import recover
from tests.support.buffer_history import Expected, Hearing, check, start_writers

KILLS = int(os.environ.get("FOREBAY_BUFFER_KILLS", "12"))
SEED = int(os.environ.get("FOREBAY_KILL_SEED", random.SystemRandom().randrange(2**32)))
WORKERS = 2
LINES_MAX = 60


def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Again and again on one buffer, with several workers at once."""
    print(f"FOREBAY_KILL_SEED={SEED}")
    dice, expected = random.Random(SEED), [Expected() for _ in range(WORKERS)]
    for _ in range(KILLS):
        hearings = list(map(Hearing, start_writers(tmp_path, dice, WORKERS), expected))
        for hearing in hearings:
            hearing.lines(dice.randrange(1, LINES_MAX))
            hearing.writer.send_signal(signal.SIGKILL)
        for hearing, of in zip(hearings, expected, strict=True):
            hearing.rest(of.hear)
        recovered = recover(tmp_path, now=2.0)
        asyncio.run(check(tmp_path, expected))
        assert recovered.removed_files <= WORKERS

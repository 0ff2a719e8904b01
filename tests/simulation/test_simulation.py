"""A short sample of the simulation, and that it is one: a seed replays, and what is wrong is found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.invariants import Judge
from tests.simulation.origins import DIALECTS
from tests.simulation.world import play

SEED = int(os.environ.get("FOREBAY_SIMULATION_SEED", "20261123"))
HISTORIES = int(os.environ.get("FOREBAY_SIMULATION_HISTORIES", "10"))
"""Of each dialect."""

KEPT = (
    "reads see the last write",
    "acknowledged soon",
    "writes are taken while the bucket is away",
    "requests end",
    "clients",
)
"""The rules that hold, but for opaque ETags. Decision 28 says which do not yet."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dialect", [one for one in DIALECTS if one != "opaque-etags"])
def test_rules_hold(dialect: str) -> None:
    """Whatever the origin is like, and whatever happens."""
    for seed in range(SEED, SEED + HISTORIES):
        world = play(seed, dialect, 100, KEPT)
        assert not world.judge.violations, "\n".join([*world.said[-60:], f"seed {seed}: {world.judge.violations[0]}"])


def test_a_seed_replays() -> None:
    """In another process, whose strings have other hashes, too."""
    script = "from tests.simulation.world import play; print('=====', *play(7, 'aws', 40, ['none']).said, sep='\\n')"
    told = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(["."])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    ]
    said = [one.partition("=====")[2] for one in told]
    assert said[0] == said[1]
    assert said[0].count("\n") > 40


def test_what_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge who is told of a write that nobody has made misses it in the end."""
    made = Judge.check_end

    def check_end(judge: Judge) -> None:
        attempt = judge.of("bucket", "nowhere").begin(b"never written", judge.origin.clock.monotonic())
        attempt.ended, attempt.acknowledged = judge.origin.clock.monotonic(), True
        made(judge)

    monkeypatch.setattr(Judge, "check_end", check_end)
    assert [one.rule for one in play(1, "aws", 5, ["nothing is lost"]).judge.violations] == ["nothing is lost"]

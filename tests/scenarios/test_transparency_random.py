"""Random histories, told to an origin and to a gateway in front of a like one: after each step both answer the same.

A failure prints its seed. FOREBAY_TRANSPARENCY_SEED repeats a run, FOREBAY_TRANSPARENCY_HISTORIES lengthens it.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.scenarios.transparency.chance import History
from tests.scenarios.transparency.comparison import Comparison
from tests.scenarios.transparency.sides import running_pair

SEED = int(os.environ.get("FOREBAY_TRANSPARENCY_SEED", random.SystemRandom().randrange(2**32)))
STEPS = 40


def compare(directory: Path, histories: int) -> None:
    with running_pair("strict", directory) as pair:
        comparison = Comparison(pair)
        for number in range(histories):
            told = _differences_of_one(comparison, SEED + number)
            assert not told, f"replay with FOREBAY_TRANSPARENCY_SEED={SEED + number}:\n" + "\n".join(told)
        assert comparison.outcomes["warm", "hit"] > 0


def _differences_of_one(comparison: Comparison, seed: int) -> list[str]:
    """The steps up to the first that differs, and how it differs; empty when none does."""
    comparison.pair.fresh_bucket()
    told: list[str] = []
    for step in History(random.Random(seed)).steps(STEPS):
        told.append(f"{step.method} {step.target} {step.auth} {step.payload} {len(step.body)} bytes {step.headers}")
        if found := comparison.differences_at(step):
            return told + found
    return []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_histories(tmp_path: Path) -> None:
    """Clause 7, in whatever order things happen."""
    compare(tmp_path, int(os.environ.get("FOREBAY_TRANSPARENCY_HISTORIES", "15")))

"""A gateway's processes are killed at every call by which they make, write, sync or remove a file, or send something,
before and after it, one process or all at once (docs/semantics.md, clause 5).

What was acknowledged is there with its ETag, on every worker, and in the end at the origin; of what was not, all is as
before or as it was to be; what was deleted stays deleted; nothing is left here, and no upload at the origin. Which
points there are is found by counting. FOREBAY_KILL_SEED, FOREBAY_KILL_POINTS (how many) and FOREBAY_KILL_RECORD (a file
of those that were passed, which are not run again) repeat, lengthen and resume a run; FOREBAY_KILL_ONLY runs the points
that it names. A failure prints all of that. Compiling the library that kills takes `cc`.
"""

from __future__ import annotations

import os
import random
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.crash.points.field import BY_NAME, Field, Point
from tests.crash.points.finding import find_lost_uploads
from tests.crash.points.scenarios import SCENARIOS

POINTS = int(os.environ.get("FOREBAY_KILL_POINTS", "8"))
SEED = int(os.environ.get("FOREBAY_KILL_SEED", random.SystemRandom().randrange(2**32)))
ONLY = os.environ.get("FOREBAY_KILL_ONLY", "")
RECORD = os.environ.get("FOREBAY_KILL_RECORD", "")
SECONDS_MAX = 120 + 10 * POINTS

POINTS_BETWEEN_LOOKS = 20
LOOKS_PER_GATEWAY = 10
FAILURES_MAX = 5
"""A long run goes on after the first."""

CALLS_PER_SCENARIO_MAX = 100
WAYS = ((False, False), (True, False), (False, True))
"""Before the call or after it, one process or all. All after one call is all before the next one."""

BEHIND_THE_LAST = 2
"""Calls that follow the answer may be counted or not."""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_kills_at_every_call_lose_nothing(tmp_path: Path) -> None:
    """5.1 In order of the seed; a point whose call is not reached this time is not counted."""
    print(f"FOREBAY_KILL_SEED={SEED} FOREBAY_KILL_POINTS={POINTS}")
    points = [Point.parsed(text) for text in ONLY.split(",") if text] or all_points(tmp_path)
    left = deque([point for point in points if str(point) not in done()][:POINTS])
    wanted, passed, failures = len(left), 0, 0
    while left and failures < FAILURES_MAX:
        try:
            passed += run(Path(mkdtemp(dir=tmp_path)), left)
        except Exception:
            failures += 1
            traceback.print_exc()
    print(f"{passed} of {len(points)} points passed")
    assert not failures, "what is printed above"
    assert passed > wanted * 0.5, "hardly any kill was carried out: this run shows nothing"


def all_points(tmp_path: Path) -> list[Point]:
    """In the order of the seed."""
    with Field.opened(tmp_path, tmp_path / "counting", SEED) as field:
        field.count(BY_NAME["flush-parts"])  # the first flush has more to do
        counts = {one.name: field.count(one) for one in SCENARIOS}
        field.check_all()
    print(f"calls: {counts}")
    dice = random.Random(SEED)
    points = [
        Point(name, number, after, everybody)
        for name, count in counts.items()
        for number in chosen(dice, count + BEHIND_THE_LAST)
        for after, everybody in WAYS
        if not (everybody and name.startswith("start"))
    ]
    dice.shuffle(points)
    return points


def chosen(dice: random.Random, count: int) -> list[int]:
    """Every call, but for those scenarios that do the same things again and again."""
    return sorted(dice.sample(range(1, count + 1), min(count, CALLS_PER_SCENARIO_MAX)))


def run(scratch: Path, left: deque[Point]) -> int:
    """On one gateway, as long as all is well; how many points came to it."""
    passed = 0
    with Field.opened(scratch, scratch / "cache", SEED) as field:
        for _ in range(LOOKS_PER_GATEWAY):
            some = [left.popleft() for _ in range(min(POINTS_BETWEEN_LOOKS, len(left)))]
            try:
                passed += sum(passes(field, point) for point in some)
                field.check_all()
            except BaseException:
                print(f"\nFOREBAY_KILL_SEED={SEED} FOREBAY_KILL_ONLY={','.join(map(str, some))}")
                raise
            note(some)
        assert field.gateway.terminate() == 0
        find_lost_uploads(field)
    return passed


def passes(field: Field, point: Point) -> bool:
    print(point, end=" ", flush=True)
    fired = field.kill(point)
    print(f"{fired.call} {fired.object}" if fired else "was not reached", flush=True)
    return fired is not None


def done() -> set[str]:
    return set(Path(RECORD).read_text().split()) if RECORD and Path(RECORD).exists() else set()


def note(points: Sequence[Point]) -> None:
    if RECORD:
        with Path(RECORD).open("a") as file:
            file.writelines(f"{point}\n" for point in points)

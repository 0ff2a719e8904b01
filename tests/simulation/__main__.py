"""Many histories, one after the other; the first that fails is told, and how to see it again."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter

import structlog

from tests.simulation.origins import DIALECTS
from tests.simulation.world import play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"), help="of the first history")
    parser.add_argument("--steps", type=int, default=2000, help="of all histories together")
    parser.add_argument("--history", type=int, default=100, help="steps of one history")
    parser.add_argument("--dialect", action="append", choices=[*DIALECTS], help="all, by turns, where none is given")
    parser.add_argument("--only", action="append", default=[], help="a rule; all where none is given")
    parser.add_argument("--skew", type=float, help="how far the node's clock is ahead, in seconds; else the dice say")
    parser.add_argument("--survey", action="store_true", help="go on behind what fails, and count it by rule")
    options = parser.parse_args()
    level = logging.INFO if os.environ.get("SIMULATION_LOG") else logging.CRITICAL
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    dialects, found = options.dialect or list(DIALECTS), Counter[str]()
    begun, steps, number = time.monotonic(), 0, 0
    while steps < options.steps:
        seed, dialect = options.seed + number, dialects[number % len(dialects)]
        world = play(seed, dialect, options.history, options.only, options.skew)
        steps, number = steps + world.steps, number + 1
        if world.judge.violations:
            first = world.judge.violations[0]
            again = (
                f"python -m tests.simulation --seed {seed} --dialect {dialect} --steps 1 --history {options.history}"
            )
            if not options.survey:
                sys.stdout.write("\n".join(world.said[-60:]) + f"\n{first}\nagain: {again}\n")
                return 1
            if not found[first.rule]:
                sys.stdout.write(f"{first}\n  again: {again}\n")
                sys.stdout.flush()
            found[first.rule] += 1
    seconds = time.monotonic() - begun
    told = ", ".join(f"{rule} {times}" for rule, times in found.most_common()) or "nothing is violated"
    sys.stdout.write(f"{steps:,} steps in {number:,} histories, {seconds:.0f} s: {told}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

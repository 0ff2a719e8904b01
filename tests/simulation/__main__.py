"""Many histories; the first that fails is told, and how to see it again. With `--record` a line of each is kept in a
file, and those that the file has are not played again: a campaign that was ended goes on from there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from shlex import quote

from tests.simulation.campaign import Outcome, known, left_of, played, write
from tests.simulation.cluster.judge import CLUSTER_RULES
from tests.simulation.cluster.world import ACTIONS as CLUSTER_ACTIONS
from tests.simulation.dialects import CLUSTER, DIALECTS, WRITING
from tests.simulation.invariants import RULES
from tests.simulation.world import ACTIONS, Setting
from tests.simulation.writing.judge import WRITING_RULES
from tests.simulation.writing.world import ACTIONS as WRITING_ACTIONS

KINDS = (*DIALECTS, CLUSTER, WRITING)
ALL_RULES = tuple(dict.fromkeys((*RULES, *CLUSTER_RULES, *WRITING_RULES)))
ALL_ACTIONS = sorted({*ACTIONS, *CLUSTER_ACTIONS, *WRITING_ACTIONS})


def main() -> int:
    options = _parsed()
    often = {name: float(weight) for name, _, weight in (one.partition("=") for one in options.often)}
    like = Setting(options.seed, "", options.history, _rules(options), options.skew, options.lies, often or None)
    names = options.dialect or list(KINDS)
    settings = (
        replace(like, seed=options.seed + number, dialect=names[number % len(names)])
        for number in range(-(-options.steps // options.history))
    )
    before = list(known(options.record, like))
    begun, steps, found = time.monotonic(), 0, Counter(one.rule for one in before if one.rule)
    with options.record.open("a") if options.record else nullcontext() as record:
        for outcome in played(left_of(settings, before), options.processes):
            steps += outcome.steps
            write(record, outcome, like)
            if not outcome.rule:
                continue
            again = f"again: {_again(outcome, options)}"
            if not options.survey:
                sys.stdout.write("\n".join((*outcome.said, f"{outcome.rule}: {outcome.text}", again)) + "\n")
                return 1
            if not found[outcome.rule]:
                sys.stdout.write(f"{outcome.rule}: {outcome.text}\n  {again}\n")
                sys.stdout.flush()
            found[outcome.rule] += 1
    seconds = time.monotonic() - begun
    told = ", ".join(f"{rule} {times}" for rule, times in found.most_common()) or "nothing is violated"
    earlier = f", and {sum(one.steps for one in before):,} before" if before else ""
    sys.stdout.write(f"{steps:,} steps in {seconds:.0f} s{earlier}: {told}\n")
    return 1 if found else 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"), help="of the first history")
    parser.add_argument("--steps", type=int, default=2000, help="of all histories together")
    parser.add_argument("--history", type=int, default=100, help="steps of one history")
    parser.add_argument("--dialect", action="append", choices=KINDS, help="all by turns, if none is given")
    parser.add_argument("--only", action="append", default=[], choices=ALL_RULES, help="a rule; all if none is given")
    parser.add_argument("--but", action="append", default=[], choices=ALL_RULES, help="a rule that is not looked at")
    parser.add_argument(
        "--often",
        action="append",
        default=[],
        metavar="ACTION=WEIGHT",
        help=f"those that are not named never happen, where one is: {', '.join(ALL_ACTIONS)}",
    )
    parser.add_argument("--skew", type=float, help="how far the node's clock is ahead, in seconds; else the dice say")
    parser.add_argument(
        "--lies", action="store_true", help="the disk's syncs do nothing: what is lost then is expected"
    )
    parser.add_argument("--survey", action="store_true", help="go on behind what fails, and count it by rule")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--record", type=Path, help="a file of the histories that were played")
    return parser.parse_args()


def _rules(options: argparse.Namespace) -> tuple[str, ...]:
    return tuple(one for one in options.only or ALL_RULES if one not in options.but)


def _again(outcome: Outcome, options: argparse.Namespace) -> str:
    asked = f"--seed {outcome.seed} --dialect {outcome.dialect} --steps 1 --history {options.history}"
    rules = "".join(f" --only {quote(one)}" for one in options.only) + "".join(
        f" --but {quote(one)}" for one in options.but
    )
    often = "".join(f" --often {one}" for one in options.often)
    skew = f" --skew {options.skew:g}" if options.skew is not None else ""
    return f"python -m tests.simulation {asked}{rules}{often}{skew}{' --lies' * options.lies}"


if __name__ == "__main__":
    sys.exit(main())

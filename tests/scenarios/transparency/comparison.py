"""Runs a case on both sides, step by step, and collects what differs."""

from __future__ import annotations

from collections import Counter

from tests.scenarios.transparency.comparing import differences, status_and_code, warm_differences
from tests.scenarios.transparency.sides import Pair
from tests.scenarios.transparency.steps import Case, Step
from tests.scenarios.transparency.wire import Answer

_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class Comparison:
    """What a table run has seen.

    `outcomes` counts the x-forebay-cache values of first and of repeated answers, `judged` the steps in which the
    gateway held to S3's rule and the origin did not.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.steps = 0
        self.judged = 0
        self.outcomes: Counter[tuple[str, str | None]] = Counter()

    def differences_of(self, case: Case, *, domain: str | None = None) -> list[str]:
        """Everything in which the gateway's answers to this case differ; empty when it is transparent.

        With `domain` the gateway is addressed in virtual-hosted style.
        """
        self.pair.fresh_bucket(case.given)
        found: list[str] = []
        for number, step in enumerate(case.steps):
            told = f"step {number}, {step.method} {step.target} {' | '.join(step.headers)}"
            judged = self.judged
            said = step if domain is None else step.virtual_hosted(domain)
            found += [f"{told}\n   {one}" for one in self.differences_at(step, said)]
            if self.judged > judged and step.method not in _READS:
                break  # the lax origin has done what the gateway has refused: from here on they hold different things
        return found

    def differences_at(self, step: Step, said: Step | None = None) -> list[str]:
        """Send one step to both sides, reads to the gateway twice, and compare. The gateway gets it as `said`."""
        said = step if said is None else said
        self.steps += 1
        direct = None if step.only_gateway else self.pair.direct.ask(step.plain())
        before = dict(self.pair.through.variables)
        through = self.pair.through.ask(said)
        self.outcomes["cold", _label(through)] += 1
        found = self._judged(step, direct, through)
        if step.method in _READS:
            warm = self.pair.through.ask_again(said, before)
            self.outcomes["warm", _label(warm)] += 1
            found += warm_differences(through, warm)
        return found

    def _judged(self, step: Step, direct: Answer | None, through: Answer) -> list[str]:
        if step.rule is not None:
            answered = status_and_code(through)
            if answered != step.rule:
                return [f"S3 answers {step.rule}, the gateway {answered}"]
            if direct is None or status_and_code(direct) != step.rule:
                self.judged += 1
                return []
        assert direct is not None, f"{step} cannot be sent to the origin and has no rule"
        return list(differences(step.method, direct, through, self.pair.names()))


def _label(answer: Answer) -> str | None:
    """Where it came from, without the reason of a miss."""
    told = answer.header("x-forebay-cache")
    return told.partition(";")[0] if told is not None else None

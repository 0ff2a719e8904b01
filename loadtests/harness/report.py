"""What a load test found: measured series, comparisons with their targets, notes; as text, markdown and a picture."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loadtests.harness.intervals import Interval, mean_of, number


@dataclass(frozen=True, slots=True)
class Target:
    """A bound for a figure: `at_most` or `at_least`. With `whole_interval` the interval's far end must keep it too."""

    bound: float
    at_most: bool
    whole_interval: bool = False

    def met_by(self, value: Interval) -> bool:
        far = value.high if self.at_most else value.low
        judged = far if self.whole_interval and far is not None else value.middle
        return judged <= self.bound if self.at_most else judged >= self.bound

    def __str__(self) -> str:
        whole = " (whole interval)" if self.whole_interval else ""
        return f"{'at most' if self.at_most else 'at least'} {self.bound:g}{whole}"


def at_most(bound: float, *, whole_interval: bool = False) -> Target:
    return Target(bound, True, whole_interval)


def at_least(bound: float, *, whole_interval: bool = False) -> Target:
    return Target(bound, False, whole_interval)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure and, where there is one, its target."""

    what: str
    value: Interval
    target: Target | None = None

    @property
    def outcome(self) -> str:
        if self.target is None:
            return "no target"
        return "met" if self.target.met_by(self.value) else "**missed**"


@dataclass(frozen=True, slots=True)
class Measured:
    """One table: values by contender and round, in `unit`."""

    what: str
    unit: str
    series: Mapping[str, Sequence[float]]


@dataclass(slots=True)
class Report:
    """Everything one load test has to say."""

    name: str
    title: str
    command: str
    tables: list[Measured] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        """A section for RESULTS.md."""
        parts = [f"### {self.title}", f"`{self.command}`", _verdict_table(self.verdicts)]
        parts += [_measured_table(table) for table in self.tables]
        parts += ["\n".join(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n\n".join(parts) + "\n"


def machine_line() -> str:
    """What ran it, in one line."""
    now = datetime.datetime.now(datetime.UTC)
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{now:%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, {system}"


def _verdict_table(verdicts: Sequence[Verdict]) -> str:
    lines = ["| figure | value [95% interval] | target | |", "|---|---|---|---|"]
    lines += [f"| {one.what} | {one.value} | {one.target or 'none'} | {one.outcome} |" for one in verdicts]
    return "\n".join(lines)


def _measured_table(table: Measured) -> str:
    lines = [f"| {table.what}, {table.unit} | mean [95% interval] | rounds |", "|---|---|---|"]
    for name, values in table.series.items():
        lines.append(f"| {name} | {mean_of(values)} | {', '.join(map(number, values))} |")
    return "\n".join(lines)

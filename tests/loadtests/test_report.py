from __future__ import annotations

import pytest

from loadtests.harness.intervals import Interval, mean_of
from loadtests.harness.report import Measured, Report, Target, Verdict, at_least, at_most, machine_line


@pytest.mark.parametrize(
    ("target", "value", "met"),
    [
        (at_most(1.15), Interval(1.1, 0.9, 1.3), True),
        (at_most(1.15, whole_interval=True), Interval(1.1, 0.9, 1.3), False),
        (at_most(1.15, whole_interval=True), Interval(1.1, 1.05, 1.15), True),
        (at_most(1.15, whole_interval=True), Interval(1.1, None, None), True),
        (at_most(1.15), Interval(1.16, 1.0, 1.3), False),
        (at_least(0.9), Interval(0.9, 0.5, 1.3), True),
        (at_least(0.9, whole_interval=True), Interval(1.0, 0.89, 1.1), False),
        (at_least(0.9), Interval(0.89, 0.5, 1.3), False),
    ],
)
def test_a_target_is_met_by_the_mean_or_by_the_whole_interval(target: Target, value: Interval, met: bool) -> None:
    """The mean is judged; where a target says so, the end of the interval that lies on the wrong side."""
    assert target.met_by(value) is met


def test_a_missed_target_stands_out() -> None:
    """A table shows at a glance what was met, what was missed, and what nobody asked for."""
    value = mean_of([2.0])
    outcomes = [Verdict("x", value, target).outcome for target in (at_most(2), at_most(1), None)]
    assert outcomes == ["met", "**missed**", "no target"]


def test_a_report_tells_everything_that_was_found() -> None:
    """Title, command, verdict with interval and target, every round of every contender, and the notes."""
    report = Report("small", "Small objects", "python -m loadtests.small")
    report.verdicts = [Verdict("CPU, ours / theirs", mean_of([1.0, 1.0]), at_most(3, whole_interval=True))]
    report.tables = [Measured("CPU", "µs", {"ours": [10.0, 20.0], "theirs": [1000.0, 2000.0]})]
    report.notes = ["varnishd is missing: apt-get install varnish"]
    assert report.markdown() == (
        "### Small objects\n\n`python -m loadtests.small`\n\n"
        "| figure | value [95% interval] | target | |\n|---|---|---|---|\n"
        "| CPU, ours / theirs | 1 [1, 1] | at most 3 (whole interval) | met |\n\n"
        "| CPU, µs | mean [95% interval] | rounds |\n|---|---|---|\n"
        f"| ours | {mean_of([10, 20])} | 10, 20 |\n"
        f"| theirs | {mean_of([1000, 2000])} | 1,000, 2,000 |\n\n"
        "- varnishd is missing: apt-get install varnish\n"
    )


def test_results_say_what_ran_them() -> None:
    """A figure without its machine means nothing."""
    line = machine_line()
    assert "cores" in line
    assert "Linux" in line
    assert "Python 3." in line

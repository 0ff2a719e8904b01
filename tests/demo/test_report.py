"""The table and the JSON say what was measured, and nothing else."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from rich.console import Console

from gateway.demo.clients import hit_ratio
from gateway.demo.epochs import Reading
from gateway.demo.report import Comparison, Report
from gateway.demo.workload import Workload


def _reading(seconds: float, **cache: int) -> Reading:
    return Reading(seconds, 100_000_000, Counter(cache))


def _comparison(second: Reading, *, rereads: bool = True) -> Comparison:
    direct = [_reading(3.0, none=4), _reading(5.0, none=4)]
    return Comparison("read 4 tar shards", direct, [_reading(4.2, miss=4), second], rereads)


def _text(report: Report) -> str:
    output = io.StringIO()
    Console(file=output, width=120).print(report.table())
    return output.getvalue()


def test_the_table_shows_times_rates_ratio_and_hits() -> None:
    """Direct is the mean of its two rounds, the ratio compares it with the second round through Forebay."""
    text = _text(Report(Workload(), [_comparison(_reading(0.5, hit=3, partial=1))]))
    row = next(line for line in text.splitlines() if "tar shards" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "read 4 tar shards",
        "4.00 s, 25 MB/s",
        "4.20 s, 24 MB/s",
        "0.50 s, 200 MB/s",
        "8.0 x",
        "75%",
    ]


def test_a_slower_second_read_is_shown_as_slower() -> None:
    """Nothing turns a ratio below one into a success."""
    assert "0.5 x" in _text(Report(Workload(), [_comparison(_reading(8.0, hit=4))]))


@pytest.mark.parametrize(
    ("second", "rereads", "missed"),
    [
        (_reading(1.0, hit=4), True, False),
        (_reading(1.0, hit=3, miss=1), True, True),
        (_reading(1.0, hit=3, partial=1), True, True),
        (_reading(1.0), True, True),
        (_reading(1.0, miss=4), False, False),
    ],
)
def test_a_second_read_that_was_not_from_cache_is_reported(second: Reading, rereads: bool, missed: bool) -> None:
    """One GET of a second read that reached for the bucket's bytes fails the demo; first reads and writes never do."""
    report = Report(Workload(), [_comparison(second, rereads=rereads)])
    assert bool(report.not_from_cache()) is missed


def test_json_carries_every_round() -> None:
    """Programs get the single measurements, so that they can compute what they like."""
    result = _comparison(_reading(0.5, hit=4)).as_dict()
    assert result["direct_seconds"] == [3.0, 5.0]
    assert result["forebay_seconds"] == [4.2, 0.5]
    assert result["cache"] == [{"miss": 4}, {"hit": 4}]
    assert result["second_hit_ratio"] == 1.0


def test_no_answer_is_no_hit() -> None:
    """The hit ratio of nothing is 0, and only whole answers from disk count."""
    assert hit_ratio({}) == 0.0
    assert hit_ratio({"hit": 1, "partial": 1, "miss": 1, "bypass": 1}) == 0.25

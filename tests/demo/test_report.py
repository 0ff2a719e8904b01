"""The table and the JSON say what was measured, and nothing else."""

from __future__ import annotations

import io
from collections import Counter

import pytest
from rich.console import Console

from gateway.demo.clients import Reading, hit_ratio
from gateway.demo.dataset import Workload
from gateway.demo.report import TABLE_WIDTH, Comparison, Report, Spread


def _reading(seconds: float, **cache: int) -> Reading:
    return Reading(seconds, 100_000_000, Counter(cache))


def _comparison(last: Reading, *, rereads: bool = True) -> Comparison:
    return Comparison(
        "read 4 shards",
        direct=[_reading(3.0), _reading(5.0), _reading(4.0)],
        first=_reading(4.2, miss=4),
        forebay=[_reading(1.0, hit=4), _reading(0.25, hit=4), last],
        strict=[_reading(12.5, hit=4)],
        rereads=rereads,
    )


def _text(report: Report) -> str:
    output = io.StringIO()
    Console(file=output, width=TABLE_WIDTH).print(report.table())
    return output.getvalue()


def test_the_table_shows_the_median_and_the_spread_of_rounds() -> None:
    """The ratio is that of the medians; the first time stands by itself."""
    lines = _text(Report(Workload(), [_comparison(_reading(0.5, hit=4))])).splitlines()
    above = next(number for number, line in enumerate(lines) if "shards" in line)
    assert lines[above].split() == ["read", "4", "shards", "4.00", "s", "4.20", "s", "0.50", "s", "8.0", "12.5", "s"]
    assert lines[above + 1].split() == ["100", "MB", "[3.00,", "5.00]", "[0.25,", "1.00]", "[12.5,", "12.5]"]


def test_the_table_fits_a_terminal_that_nobody_has_widened() -> None:
    """Nothing is cut off or folded, however long the times are."""
    slow = Comparison(
        "until bucket has it",
        direct=[_reading(123.4), _reading(1234.5)],
        first=_reading(1234.5),
        forebay=[_reading(1.0123), _reading(120.5)],
        strict=[_reading(12.34), _reading(99.99)],
    )
    text = _text(Report(Workload(), [slow, _comparison(_reading(0.5, hit=4))]))
    assert max(map(len, text.splitlines())) <= TABLE_WIDTH
    assert "…" not in text
    for cell in ("679 s", "[123, 1234]", "[1.01, 120]", "[12.3, 100]", "until bucket has it"):
        assert cell in text


def test_a_slower_second_read_is_shown_as_slower() -> None:
    """Nothing turns a ratio below one into a success."""
    slow = [_reading(8.0, hit=4)]
    assert "0.5" in _text(Report(Workload(), [Comparison("read", [_reading(4.0)], slow)])).split()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ([0.0682, 0.0601, 0.0755], "68.2 ms\n[60.1, 75.5]"),
        ([1.0, 2.0], "1.50 s\n[1.00, 2.00]"),
        ([123.4], "123 s\n[123, 123]"),
    ],
)
def test_the_unit_is_that_of_the_median(seconds: list[float], shown: str) -> None:
    """Milliseconds below a tenth of a second."""
    assert str(Spread.of(seconds)) == shown


@pytest.mark.parametrize(
    ("last", "rereads", "missed"),
    [
        (_reading(1.0, hit=4), True, False),
        (_reading(1.0, hit=3, miss=1), True, True),
        (_reading(1.0, hit=3, partial=1), True, True),
        (_reading(1.0), True, True),
        (_reading(1.0, miss=4), False, False),
    ],
)
def test_a_reread_that_was_not_from_cache_is_reported(last: Reading, rereads: bool, missed: bool) -> None:
    """One GET of a round that reached for the bucket's bytes fails the demo; first reads and writes never do."""
    report = Report(Workload(), [_comparison(last, rereads=rereads)])
    assert bool(report.not_from_cache()) is missed


def test_json_carries_every_round() -> None:
    """Programs get the single measurements, so that they can compute what they like."""
    result = _comparison(_reading(0.5, hit=4)).as_dict()
    assert result["direct_seconds"] == [3.0, 5.0, 4.0]
    assert result["first_seconds"] == 4.2
    assert result["forebay_seconds"] == [1.0, 0.25, 0.5]
    assert result["strict_seconds"] == [12.5]
    assert result["hit_ratio"] == 1.0


def test_no_answer_is_no_hit() -> None:
    """The hit ratio of nothing is 0, and only whole answers from disk count."""
    assert hit_ratio({}) == 0.0
    assert hit_ratio({"hit": 1, "partial": 1, "miss": 1, "bypass": 1}) == 0.25

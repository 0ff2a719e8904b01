from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from loadtests.harness.intervals import Interval, mean_of
from loadtests.harness.picture import draw
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most

SVG = "{http://www.w3.org/2000/svg}"


def report() -> Report:
    verdicts = [
        Verdict("met", Interval(1.0, 0.9, 1.1), at_most(1.15)),
        Verdict("missed", Interval(0.5, 0.4, 0.6), at_least(0.9)),
        Verdict("wild", Interval(1.0, 0.0001, 5000.0), at_most(3)),
        Verdict("without a target", mean_of([2.0])),
    ]
    tables = [Measured("CPU <per request>", "µs", {"ours & mine": [10.0, 10.0], "theirs": [40.0, 40.0]})]
    return Report("small", "Small & smaller", "command", tables, verdicts)


def elements(name: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(draw(report())).iter(SVG + name))


def test_the_picture_names_everything() -> None:
    """Title, figures, tables and contenders stand in the picture, whatever characters they hold."""
    texts = {element.text for element in elements("text")}
    assert {"Small & smaller", "met", "wild", "CPU <per request>, µs", "ours & mine", "theirs", "40"} <= texts


def test_bars_are_as_long_as_their_figures() -> None:
    """Within a table, four times the figure is four times the bar."""
    ours, theirs = [float(element.attrib["width"]) for element in elements("rect")[-2:]]
    assert theirs / ours == pytest.approx(4, rel=0.01)


def test_met_and_missed_differ_in_colour() -> None:
    """Met, missed and without a target are three colours."""
    met, missed, _, without = [element.attrib["fill"] for element in elements("rect")][1:5]
    assert len({met, missed, without}) == 3


def test_every_target_is_a_line() -> None:
    """Three of the four figures have a target, drawn dashed; so no other line is."""
    assert sum("stroke-dasharray" in element.attrib for element in elements("line")) == 3


def test_nothing_is_drawn_outside() -> None:
    """However wild an interval is, bars and lines stay in the picture."""
    root = ElementTree.fromstring(draw(report()))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in root.iter(SVG + "line"):
        assert 0 <= float(line.attrib["x1"]) <= float(line.attrib["x2"]) <= width
        assert 0 <= float(line.attrib["y1"]) <= float(line.attrib["y2"]) <= height
    for bar in list(root.iter(SVG + "rect"))[1:]:
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width


def test_rows_do_not_overlap() -> None:
    """Every bar stands below the one before it."""
    tops = [float(element.attrib["y"]) for element in elements("rect")[1:]]
    assert all(below - above >= 16 for above, below in pairwise(tops))

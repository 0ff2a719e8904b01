"""README's picture and table, from the figures that one run of `forebay demo --json` has printed.

`forebay demo --json > loadtests/results/demo.json`, then `python -m tools.demo_picture` draws
loadtests/results/demo.svg and rewrites README's table; a test fails when either was not done.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from gateway.demo.report import TABLE_WIDTH, Spread, table_of

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "loadtests" / "results" / "demo.json"
PICTURE = ROOT / "loadtests" / "results" / "demo.svg"
README = ROOT / "README.md"

_TABLE = re.compile(r"(<!-- generated: demo -->\n```\n).*?(```\n<!-- end -->)", re.DOTALL)
_WIDTH, _LEFT, _BAR, _ROW = 800, 190, 400, 30
_INK, _BUCKET, _FOREBAY = "#222", "#9aa5b1", "#2a7f62"
_SHOWN = (
    (r"read \d+ shards", "Read an epoch of the data set again", "immutable slot"),
    (r"save a checkpoint", "Save a checkpoint", "write-back slot"),
)


def picture(report: Mapping[str, Any]) -> str:
    """Two comparisons: a bar for the median, a whisker from the shortest to the longest round."""
    parts: list[str] = []
    y = 30
    for pattern, title, slot in _SHOWN:
        one = next(one for one in report["results"] if re.fullmatch(pattern, one["what"]))
        y = _comparison(parts, y, f"{title} ({one['bytes'] / 1e6:.0f} MB)", slot, one)
    rounds = f"Median of {report['rounds']} rounds, with the shortest and the longest; seconds, shorter is better."
    parts.append(f'<text x="16" y="{y}" font-size="12">{rounds}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 16}" viewBox="0 0 {_WIDTH} {y + 16}" '
        f'font-family="sans-serif" font-size="14" fill="{_INK}"><rect width="100%" height="100%" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _comparison(parts: list[str], y: int, title: str, slot: str, one: Mapping[str, Any]) -> int:
    parts.append(f'<text x="16" y="{y}" font-size="16" font-weight="bold">{title}</text>')
    top = max(*one["direct_seconds"], *one["forebay_seconds"])
    for name, key, colour in (
        ("bucket", "direct_seconds", _BUCKET),
        (f"Forebay, {slot}", "forebay_seconds", _FOREBAY),
    ):
        y += _ROW
        _bar(parts, y, name, Spread.of(one[key]), top, colour)
    return y + 44


def _bar(parts: list[str], y: int, name: str, spread: Spread, top: float, colour: str) -> None:
    def x(seconds: float) -> float:
        return round(_LEFT + _BAR * seconds / top, 1)

    low, high, middle = x(spread.low), x(spread.high), y - 5
    shown = str(spread).replace("\n", " ")
    parts += [
        f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{name}</text>',
        f'<rect x="{_LEFT}" y="{y - 15}" width="{x(spread.median) - _LEFT:.1f}" height="20" fill="{colour}"/>',
        *(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{_INK}" stroke-width="1.5"/>'
            for x1, y1, x2, y2 in (
                (low, middle, high, middle),
                (low, middle - 4, low, middle + 4),
                (high, middle - 4, high, middle + 4),
            )
        ),
        f'<text x="{_LEFT + _BAR + 12}" y="{y}">{shown}</text>',
    ]


def table(report: Mapping[str, Any]) -> str:
    """As `forebay demo` prints it."""
    output = io.StringIO()
    Console(file=output, width=TABLE_WIDTH).print(table_of(report))
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


def with_table(document: str, report: Mapping[str, Any]) -> str:
    """`document` with the table between its markers as it should be."""
    return _TABLE.sub(lambda match: f"{match[1]}{table(report)}{match[2]}", document)


def main() -> None:
    """Draw the picture and rewrite README's table."""
    report = json.loads(FIGURES.read_text(encoding="utf-8"))
    PICTURE.write_text(picture(report), encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8"), report), encoding="utf-8")


if __name__ == "__main__":
    main()

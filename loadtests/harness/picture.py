"""The comparisons of a load test as a picture: one bar a figure, its interval, its target as a line. Plain SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from loadtests.harness.intervals import Interval, mean_of, number
from loadtests.harness.report import Measured, Report, Verdict

_WIDTH, _LEFT, _BAR, _ROW = 1120, 560, 440, 26
_INK, _MET, _MISSED, _PLAIN = "#222", "#2a7f62", "#c0392b", "#5b7fa6"


def draw(report: Report) -> str:
    """The whole picture as an SVG document."""
    parts: list[str] = []
    y = _heading(parts, 24, report.title, size=16)
    y = _heading(parts, y, "Compared (line: target)", size=12)
    for verdict in report.verdicts:
        y = _verdict(parts, y, verdict)
    for table in report.tables:
        y = _table(parts, y + 10, table)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 10}" viewBox="0 0 {_WIDTH} {y + 10}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}"><rect width="100%" height="100%" fill="#fff"/>'
        + "".join(parts)
        + "</svg>\n"
    )


def _heading(parts: list[str], y: int, text: str, *, size: int) -> int:
    parts.append(f'<text x="16" y="{y}" font-size="{size}" font-weight="bold">{escape(text)}</text>')
    return y + _ROW


def _verdict(parts: list[str], y: int, verdict: Verdict) -> int:
    bound = verdict.target.bound if verdict.target else None
    top = max(_far(verdict.value), bound or 0.0, 1e-9) * 1.05
    colour = _PLAIN if verdict.target is None else _MET if verdict.target.met_by(verdict.value) else _MISSED
    return _bar(parts, y, verdict.what, verdict.value, top, colour, bound)


def _table(parts: list[str], y: int, table: Measured) -> int:
    y = _heading(parts, y + 8, f"{table.what}, {table.unit}", size=12)
    means = {name: mean_of(values) for name, values in table.series.items()}
    top = max(map(_far, means.values()), default=1.0) * 1.05
    for name, value in means.items():
        y = _bar(parts, y, name, value, top, _PLAIN, None)
    return y


def _bar(parts: list[str], y: int, name: str, value: Interval, top: float, colour: str, bound: float | None) -> int:
    def x(number: float) -> float:
        return round(_LEFT + _BAR * max(0.0, number) / top, 1)

    middle = y - 4
    parts.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{escape(name)}</text>')
    parts.append(f'<rect x="{_LEFT}" y="{y - 13}" width="{x(value.middle) - _LEFT:.1f}" height="16" fill="{colour}"/>')
    if value.low is not None and value.high is not None:
        parts.append(_line(x(value.low), middle, x(min(value.high, top)), middle))
        parts += [_line(x(min(end, top)), middle - 4, x(min(end, top)), middle + 4) for end in (value.low, value.high)]
    if bound is not None:
        parts.append(_line(x(bound), y - 16, x(bound), y + 6, dashed=True))
    parts.append(f'<text x="{_LEFT + _BAR + 12}" y="{y}">{number(value.middle)}</text>')
    return y + _ROW


def _line(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{_INK}" stroke-width="1.5"{dash}/>'


def _far(value: Interval) -> float:
    """How far right a bar is drawn; an interval of two wild rounds must not squeeze everything else."""
    ends: Sequence[float] = [value.middle] if value.high is None else [value.middle, min(value.high, 3 * value.middle)]
    return max(ends)

"""Tables as commands print them, and bars of long work, on standard error and on a terminal alone.

A table has a line an entry. On a terminal that is too narrow, names and keys are shortened in the middle, and columns
that are needed least leave the line: what they say follows on lines of its own, up to LINES_MAX for an entry in all. In
a pipe nothing is cut.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, islice
from typing import Any, Generic, TypeAlias, TypeVar

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from gateway.admin.formatting import size_text
from gateway.core.progress_rate import ProgressRate

LINES_MAX = 5
"""For one entry."""

NOTHING = "-"
_GAP = 2
_COMFORTABLE = 44
"""So wide a name is before columns leave for it."""

_LEAST = 8
_MEASURED_ROWS = 1000
"""Widths are those of the first rows: a list may have millions."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """`cell` gives the text of an entry; a `shortened` one may be cut in the middle.

    Columns of the greatest `rank` leave first, those of 0 never.
    """

    title: str
    cell: Callable[[T], str] = str
    right: bool = False
    shortened: bool = False
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A cell for each column; `style` is one of rich."""

    cells: Sequence[str]
    style: str = ""


def terminal_width(*, stderr: bool = False) -> int | None:
    """Return the width of the terminal written to; None without a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return shutil.get_terminal_size().columns if stream.isatty() else None


Columns: TypeAlias = Sequence[Column[T]]


def rows_of(columns: Columns[T], entries: Iterable[T], style: Callable[[T], str] = lambda _: "") -> Iterator[Row]:
    return (Row([column.cell(one) for column in columns], style(one)) for one in entries)


def print_table(
    columns: Columns[T], entries: Iterable[T], style: Callable[[T], str] = lambda _: "", *, stderr: bool = False
) -> None:
    """Write a table as entries come; nothing without any."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    for text, line_style in table_lines(columns, rows_of(columns, entries, style), terminal_width(stderr=stderr)):
        console.print(Text(text, line_style), soft_wrap=True)


def some_bytes_text(size_bytes: int | None) -> str:
    return size_text(size_bytes) if size_bytes else NOTHING


def rate_text(bytes_per_second: float | None) -> str:
    return NOTHING if bytes_per_second is None else f"{size_text(bytes_per_second)}/s"


def duration_text(seconds: float | None) -> str:
    """Return `0:12:05`."""
    return NOTHING if seconds is None else str(timedelta(seconds=round(seconds)))


def table_lines(
    columns: Columns[Any], rows: Iterable[Row], width: int | None, *, fold: bool = True, comfortable: int = _COMFORTABLE
) -> Iterator[tuple[str, str]]:
    """Yield lines and their styles, the head first; `width` None: nothing is cut.

    Without `fold` removed columns are not mentioned; names are `comfortable` wide before they leave.
    """
    left = iter(rows)
    first = list(islice(left, _MEASURED_ROWS))
    if not first:
        return
    widths = [
        max(cell_len(column.title), *(cell_len(row.cells[i]) for row in first)) for i, column in enumerate(columns)
    ]
    layout = _layout(columns, widths, width, comfortable)
    common = [_common([row.cells[i] for row in first]) for i in range(len(columns))]
    yield _line(columns, [column.title for column in columns], layout, width, [0] * len(columns)), "bold"
    hidden = [i for i in range(len(columns)) if i not in layout]
    for row in chain(first, left):
        yield _line(columns, row.cells, layout, width, common), row.style
        if width is not None and fold:
            told = [f"{columns[i].title}: {row.cells[i]}" for i in hidden if row.cells[i] not in (NOTHING, "")]
            for line in folded(told, width):
                yield line, row.style


def _common(cells: Sequence[str]) -> int:
    """Return the length of the common beginning of all cells, up to its last slash."""
    first, last = min(cells), max(cells)
    same = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), len(first))
    return max(0, first.rfind("/", 0, same))


def _layout(columns: Columns[Any], widths: Sequence[int], width: int | None, comfortable: int) -> dict[int, int]:
    """Return the columns that stay on the line, and their widths."""
    shown = dict(enumerate(widths))
    if width is None:
        return shown
    while True:
        fitted = _shrunk(columns, shown, width, comfortable)
        ranks = {i: columns[i].rank for i in shown if columns[i].rank}
        if _total(fitted) <= width or not ranks:
            return _shrunk(columns, shown, width, _LEAST) if not ranks else fitted
        highest = max(ranks.values())
        del shown[max(i for i, rank in ranks.items() if rank == highest)]


def _total(widths: dict[int, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _shrunk(columns: Columns[Any], widths: dict[int, int], width: int, least: int) -> dict[int, int]:
    """Shorten the widest of those that may be shortened first."""
    found = dict(widths)
    while _total(found) > width:
        wide = [i for i in found if columns[i].shortened and found[i] > least]
        if not wide:
            break
        found[max(wide, key=found.__getitem__)] -= 1
    return found


def _line(
    columns: Columns[Any], cells: Sequence[str], layout: dict[int, int], width: int | None, common: Sequence[int]
) -> str:
    parts = []
    for i, wide in layout.items():
        text = cells[i]
        if width is not None and columns[i].shortened:
            text = shortened(text, wide, common[i])
        padding = " " * max(0, wide - cell_len(text))
        parts.append(padding + text if columns[i].right else text + padding)
    line = (" " * _GAP).join(parts).rstrip()
    return line if width is None else cut(line, width)


def cut(line: str, width: int) -> str:
    """Without its end where it is too long."""
    return line if cell_len(line) <= width else set_cell_size(line, max(1, width - 1)) + "…"


def shortened(text: str, width: int, common: int = 0) -> str:
    """Return a text that is too long without its middle: beginning and end tell names apart.

    If its first `common` characters are those of its neighbours, leave those out.
    """
    if cell_len(text) <= width:
        return text
    first = common - (len(text) - width + 1)
    if first >= 0 and common < len(text) == cell_len(text):
        return f"{text[:first]}…{text[common:]}"
    if width < 2:
        return "…"[:width]
    head = (width - 1) * 2 // 5
    tail = width - 1 - head
    reverse = text[::-1]
    return set_cell_size(text, head) + "…" + chop_cells(reverse, tail)[0][::-1]


def folded(told: Sequence[str], width: int, lines_max: int = LINES_MAX - 1) -> list[str]:
    """Return further texts on indented lines; the last line ends in … if there are more."""
    lines: list[str] = []
    for text in told:
        if lines and cell_len(lines[-1]) + cell_len(text) + 2 <= width:
            lines[-1] += f", {text}"
        else:
            lines.append(shortened(f"  {text}", width))
    if len(lines) > lines_max:
        last = lines[lines_max - 1]
        lines = [*lines[: lines_max - 1], set_cell_size(last, min(cell_len(last), width - 2)) + " …"]
    return lines


def print_text(text: str, style: str = "", *, indent: int = 2) -> None:
    """Print a sentence: on a terminal in lines that fit, the later ones indented; elsewhere one line."""
    console = Console(highlight=False, markup=False, emoji=False)
    for line in wrapped(text, indent):
        console.print(Text(line, style), soft_wrap=True)


def wrapped(text: str, indent: int) -> list[str]:
    """Return the lines of a sentence, as `print_text` prints it."""
    width = terminal_width()
    if width is None:
        return [text]
    width = max(width, indent + _LEAST)
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_on_hyphens=False) or [""]


def fitted(text: str, *, stderr: bool = False) -> str:
    """Return a name that stands on a line of its own: shortened on a terminal, whole elsewhere."""
    width = terminal_width(stderr=stderr)
    return text if width is None else shortened(text, width)


_WINDOW_SECONDS = 60.0


class RateColumn(ProgressColumn):
    """Bytes per second, in the units of all else here: the task's field `bytes_per_second`, if it has one."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.fields.get("bytes_per_second", task.speed)
        return Text("" if speed is None else f"{size_text(speed)}/s", style="progress.data.speed")


class LeftColumn(ProgressColumn):
    """Seconds until the end, once known: the task's field `seconds_left`, if it has one. For one task."""

    def __init__(self) -> None:
        super().__init__()
        self._rate = ProgressRate(_WINDOW_SECONDS)

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text("")
        self._rate.note(task.get_time(), int(task.completed))
        left_seconds = None
        if "seconds_left" in task.fields:
            left_seconds = task.fields["seconds_left"]
        elif task.total is not None:
            left_seconds = self._rate.seconds_left(max(0, int(task.total - task.completed)))
        left = "-:--:--" if left_seconds is None else str(timedelta(seconds=round(left_seconds)))
        return Text(left, style="progress.remaining")


def bytes_progress(*, quiet: bool) -> Progress:
    """Return a progress bar of work whose bytes are known."""
    moved = DownloadColumn(binary_units=True)
    return _progress(TextColumn("{task.description}"), BarColumn(), moved, RateColumn(), LeftColumn(), quiet=quiet)


def listing_progress(*, quiet: bool) -> Progress:
    """Return a progress bar of a listing: its size is known at the end, and no bytes are moved."""
    return _progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), quiet=quiet)


def _progress(*columns: ProgressColumn, quiet: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=quiet or not console.is_terminal)

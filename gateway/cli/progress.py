"""Bars of long work, on standard error and on a terminal alone."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from gateway.control.formatting import size_text


class _RateColumn(ProgressColumn):
    """Bytes per second, in the units that everything else here has."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{size_text(speed)}/s", style="progress.data.speed")


def bytes_progress(*, quiet: bool) -> Progress:
    """Of work whose bytes are known."""
    moved = DownloadColumn(binary_units=True)
    return _progress(
        TextColumn("{task.description}"), BarColumn(), moved, _RateColumn(), TimeRemainingColumn(), quiet=quiet
    )


def listing_progress(*, quiet: bool) -> Progress:
    """Of a listing: how many there are is known at the end, and no bytes are moved."""
    return _progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), quiet=quiet)


def _progress(*columns: ProgressColumn, quiet: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=quiet or not console.is_terminal)

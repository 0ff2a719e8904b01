"""Bars of long work, on standard error and on a terminal alone."""

from __future__ import annotations

from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from gateway.admin.formatting import size_text
from gateway.core.progress_rate import ProgressRate

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

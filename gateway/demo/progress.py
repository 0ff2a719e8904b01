"""Progress on stderr: bars on a terminal, one line per finished step anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gateway.demo.epochs import Advance


class Narrator:
    """Shows the steps of the demo one after the other; before each, `check` may raise."""

    def __init__(self, console: Console | None = None, check: Callable[[], None] = lambda: None) -> None:
        self._console = console or Console(stderr=True)
        self._check = check

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, title: str, total_bytes: int | None = None) -> Iterator[Advance]:
        """Show `title` until the block ends, with a bar where the number of bytes is known, then how long it took."""
        self._check()
        begun = time.perf_counter()
        if self._console.is_terminal:
            with self._bar(total_bytes) as progress:
                task = progress.add_task(title, total=total_bytes)
                yield lambda count: progress.advance(task, count)
        else:
            yield lambda _count: None
        self.say(f"  [green]✓[/] {title} [dim]{time.perf_counter() - begun:.1f} s[/]")

    def _bar(self, total_bytes: int | None) -> Progress:
        measures = (BarColumn(), DownloadColumn()) if total_bytes else ()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), *measures, TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True)

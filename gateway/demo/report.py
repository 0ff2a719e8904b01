"""The demo's progress on stderr, and its figures as a table for people and as JSON for programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from gateway.demo.clients import Advance, Reading, hit_ratio
from gateway.demo.dataset import Workload


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


TABLE_WIDTH = 80
"""The default width of a terminal, in columns: the table must fit."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        return cls(median(seconds), min(seconds), max(seconds))

    def __str__(self) -> str:
        """Two lines: the median with its unit, and [shortest, longest] in that unit."""
        scale, unit = (1000, "ms") if self.median < 0.1 else (1, "s")
        return f"{_digits(self.median * scale)} {unit}\n[{_digits(self.low * scale)}, {_digits(self.high * scale)}]"


def _digits(value: float) -> str:
    """Three digits that count, or all before the point."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rounds of one job: straight to the bucket, through Forebay, and through Forebay's strict slots.

    `first` is the time before the rounds, with nothing cached. `rereads`: the rounds through Forebay read the same
    objects again, so that all of them can come from the cache. `strict` is empty where strictness changes nothing.
    """

    what: str
    direct: Sequence[Reading]
    forebay: Sequence[Reading]
    first: Reading | None = None
    strict: Sequence[Reading] = ()
    rereads: bool = False

    @property
    def speedup(self) -> float:
        """The median round straight to the bucket divided by the median round through Forebay."""
        return _spread(self.direct).median / _spread(self.forebay).median

    @property
    def hit_ratio(self) -> float:
        """The least of all rounds through Forebay and its strict slots: the share of GETs that the cache answered."""
        return min(hit_ratio(one.cache) for one in (*self.forebay, *self.strict))

    def as_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "bytes": self.direct[-1].size_bytes,
            "direct_seconds": _seconds(self.direct),
            "first_seconds": self.first.seconds if self.first else None,
            "forebay_seconds": _seconds(self.forebay),
            "strict_seconds": _seconds(self.strict),
            "speedup": self.speedup,
            "hit_ratio": self.hit_ratio if self.rereads else None,
        }


def _spread(readings: Sequence[Reading]) -> Spread:
    return Spread.of(_seconds(readings))


def _seconds(readings: Sequence[Reading]) -> list[float]:
    return [reading.seconds for reading in readings]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the demo measured."""

    workload: Workload
    comparisons: Sequence[Comparison]

    def not_from_cache(self) -> list[Comparison]:
        """Return the rereads that the cache did not answer throughout. There must be none."""
        return [one for one in self.comparisons if one.rereads and one.hit_ratio < 1.0]

    def as_dict(self) -> dict[str, Any]:
        return {
            "first_byte_seconds": self.workload.first_byte_seconds,
            "connection_bytes_per_second": self.workload.connection_bytes_per_second,
            "readers": self.workload.readers,
            "rounds": self.workload.rounds,
            "results": [one.as_dict() for one in self.comparisons],
        }

    def table(self) -> Table:
        return table_of(self.as_dict())


def table_of(report: Mapping[str, Any]) -> Table:
    """Return the table of a `Report.as_dict()`, measured now or loaded from a file."""
    table = Table(
        title="The same job, straight to the bucket and through Forebay",
        caption=Text(_caption(report)),
        caption_justify="left",
        box=box.SIMPLE,
        show_lines=True,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for heading in ("bucket", "first\ntime", "Forebay", "times\nas fast", "strict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in report["results"]:
        table.add_row(*_row(one))
    return table


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    size = f"\n{one['bytes'] / 1e6:.0f} MB" if one["bytes"] else ""
    first = one["first_seconds"]
    return (
        one["what"] + size,
        str(Spread.of(one["direct_seconds"])),
        str(Spread.of([first])).partition("\n")[0] if first else "",
        str(Spread.of(one["forebay_seconds"])),
        f"{one['speedup']:.1f}",
        str(Spread.of(one["strict_seconds"])) if one["strict_seconds"] else "",
    )


def _caption(report: Mapping[str, Any]) -> str:
    return (
        f"Median of {report['rounds']} rounds [shortest, longest]. Every byte was verified.\n"
        f"The bucket answers after {report['first_byte_seconds'] * 1000:.0f} ms, with "
        f"{report['connection_bytes_per_second'] / 1e6:.0f} MB/s per connection; {report['readers']} readers.\n"
        "Forebay: data in a read-only slot with consistency = immutable, checkpoints in\n"
        "a slot with write = back. First time: nothing was cached. Strict: the same with\n"
        "consistency = strict, so Forebay asks the bucket before each GET and LIST."
    )


def next_steps(command: str) -> str:
    """Return the steps to try after the demo. `command` is how the user called `forebay`."""
    return f"""\
Next:
  1. Start Forebay in front of your own bucket (it takes credentials and region from your AWS settings):
       {command} serve
  2. In the shell of a job, with the same credentials:
       export AWS_ENDPOINT_URL_S3=http://127.0.0.1:9000
  3. Read something twice, and look at what happened:
       aws s3 cp s3://YOUR-BUCKET/SOME-OBJECT - | wc -c
       {command} requests
README.md shows the ten lines of configuration that the figures above come from."""

"""The command line that every load test shares, and what becomes of its report."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loadtests.harness import machine
from loadtests.harness.picture import draw
from loadtests.harness.report import Report, machine_line
from loadtests.harness.tools import Missing

_DIRECTORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Options:
    """`scale` shrinks objects and counts: 1 is the size that the target is stated for."""

    seconds: float
    rounds: int
    scale: float

    def of(self, full: int, least: int = 1) -> int:
        """`full`, scaled, and at least `least`."""
        return max(least, round(full * self.scale))

    def command(self, name: str) -> str:
        return f"python -m loadtests.{name} --seconds {self.seconds:g} --rounds {self.rounds} --scale {self.scale:g}"


Test = Callable[[Options], Report]


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows a module's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def options_of(parser: argparse.ArgumentParser) -> tuple[Options, bool]:
    """The shared options, and whether the results are to be kept."""
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement, where it has a length")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    parser.add_argument("--scale", type=float, default=1.0, help="of object sizes and counts; 1 is the stated size")
    parser.add_argument("--record", action="store_true", help="append to RESULTS.md and draw into results/")
    arguments = parser.parse_args()
    return Options(arguments.seconds, arguments.rounds, arguments.scale), arguments.record


def main(test: Test, description: str | None) -> None:
    """Run one load test from the command line."""
    machine.prepare_client()
    options, record = options_of(parser_of(description))
    try:
        report = test(options)
    except Missing as error:
        sys.exit(str(error))
    tell(report)
    if record:
        begin_record()
        keep(report)


def progress(text: str) -> None:
    """One line on standard error: what is being done now, and since when."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def tell(report: Report) -> None:
    print(report.markdown(), flush=True)


def begin_record() -> None:
    """A heading in RESULTS.md with the date and the machine."""
    _append(f"\n## {machine_line()}\n")


def keep(report: Report) -> None:
    """Append the tables to RESULTS.md, and draw the picture in place of the one before."""
    pictures = _DIRECTORY / "results"
    pictures.mkdir(exist_ok=True)
    (pictures / f"{report.name}.svg").write_text(draw(report), encoding="utf-8")
    _append(f"\n{report.markdown()}\n![{report.title}](results/{report.name}.svg)\n")


def _append(text: str) -> None:
    with (_DIRECTORY / "RESULTS.md").open("a", encoding="utf-8") as results:
        results.write(text)

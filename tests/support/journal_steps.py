"""How much SQLite does for what is asked of the journal: steps of its virtual machine, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.transaction import JournalTransaction

R = TypeVar("R")


@contextmanager
def steps_of_reads(journal: Journal) -> Iterator[list[int]]:
    """A list to which every read of the journal appends the steps that it took."""
    counted: list[int] = []
    steps = 0
    read = journal.read

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    def counting(look: Callable[[JournalTransaction], R]) -> R:
        nonlocal steps
        steps = 0
        try:
            return read(look)
        finally:
            counted.append(steps)

    journal._reader.set_progress_handler(step, 1)
    journal.read = counting  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        journal.read = read  # type: ignore[method-assign]
        journal._reader.set_progress_handler(None, 1)

"""Work in steps, between which others have their turn: for what would hold the event loop too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

Steps = Generator[None, None, T]
"""Work that can wait at each `yield`. Its return value is the outcome."""

ENTRIES = 100
"""Entries of a list in one step."""


def at_once(steps: Steps[T]) -> T:
    """Return the outcome, without waiting."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            outcome: T = end.value
            return outcome


async def in_steps(steps: Steps[T]) -> T:
    """Return the outcome; others have their turn on the event loop between the steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            outcome: T = end.value
            return outcome
        await asyncio.sleep(0)


def each(convert: Callable[[T], U], entries: Sequence[T]) -> Steps[list[U]]:
    converted: list[U] = []
    for first in range(0, len(entries), ENTRIES):
        if first:
            yield
        converted += map(convert, entries[first : first + ENTRIES])
    return converted

"""Asking the origin for an upload so that it is never forgotten, whenever the process dies.

    written down → asked → noted: the upload is known of, and the intent gone, in one transaction

Where no such transaction comes, nobody knows what the origin has done: it is found out later (lost_uploads.py).
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from gateway.clock import Clock
from gateway.errors import BufferUnavailable
from gateway.objects import ObjectKey
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Intent

R = TypeVar("R")


@asynccontextmanager
async def asking(journal: Journal, key: ObjectKey, clock: Clock) -> AsyncIterator[Asking]:
    """Written down when this has begun. BufferUnavailable where that cannot be: then nothing is asked."""
    intent = Intent(secrets.token_hex(16), journal.worker, key, clock.now())
    one = Asking(journal, intent.token)
    try:
        await journal.change(lambda book: book.intend(intent))
        yield one
    finally:
        if not one.is_over:
            with suppress(BufferUnavailable):  # then it is of a process that is dead, some day
                await journal.change(lambda book: one.leave(book, clock.now()))


class Asking:
    """One upload that the origin is asked for."""

    def __init__(self, journal: Journal, token: str) -> None:
        self._journal = journal
        self._token = token
        self._may_be_there = False
        self.is_over = False

    def sent(self) -> None:
        """From now on the origin may have it."""
        self._may_be_there = True

    def refused(self) -> None:
        """The origin has answered that it has not done it."""
        self._may_be_there = False

    async def note(self, step: Callable[[Book], R]) -> R:
        """Carry out the change by which the upload is known of, or needs to be known of by nobody here."""
        return await self._end(step, lambda book: book.forget_intent(self._token))

    async def end(self, step: Callable[[Book], R], now: float) -> R:
        """Carry out a change by which things go on without it: whether the origin has it is to be found out, unless it
        has refused."""
        return await self._end(step, lambda book: self.leave(book, now))

    async def _end(self, step: Callable[[Book], R], end: Callable[[Book], None]) -> R:
        def both(book: Book) -> R:
            end(book)
            return step(book)

        result = await self._journal.change(both)
        self.is_over = True
        return result

    def leave(self, book: Book, now: float) -> None:
        """Nothing was noted, and nobody asks any more."""
        if self._may_be_there:
            book.suspect(self._token, now)
        else:
            book.forget_intent(self._token)

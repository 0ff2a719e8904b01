"""Rows of the journal that are not what was written: each is told of once, and stops nothing but what it is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import structlog

from gateway.errors import BufferDamaged
from gateway.writeback.journal.book import Book
from gateway.writeback.journal.journal import Journal

R = TypeVar("R")

_log = structlog.get_logger("forebay.writeback")


class DamagedRows:
    """As one task of the process that flushes meets them."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._told: set[str] = set()

    def read(self, look: Callable[[Book], R]) -> R | None:
        """What a look finds; None where it meets one. BufferUnavailable."""
        try:
            return self._journal.read(look)
        except BufferDamaged as error:
            self.tell(error)
            return None

    def tell(self, error: BufferDamaged) -> None:
        """It stays where it is."""
        if str(error) not in self._told:
            self._told.add(str(error))
            _log.error("DAMAGED: a row of the write-back journal is not used, and left where it is", reason=str(error))

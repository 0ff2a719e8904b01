"""Collects the journal's garbage: hash slots without pending writes, and records that have served their time."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from gateway.core.clock import Clock, Moment
from gateway.core.errors import BufferUnavailable
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.transaction import JournalTransaction

TIDY_SECONDS = 2.0
"""Seconds after flushes. Writers wait meanwhile, so it takes at most a fiftieth of their time."""

UNASKED_SECONDS = 60.0
"""Seconds between two runs in any case: something may have left without a flush."""

FORGET_SECONDS = 600.0

_SHARE = 50.0


class JournalGC:
    """The collector of one buffer, in the process that flushes. `needed`: something was flushed since its last run."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal = journal
        self._clock = clock
        self.needed = True

    async def run(self) -> None:
        pause_seconds, began = TIDY_SECONDS, self._clock.monotonic()
        unasked_at, forget_at = began + UNASKED_SECONDS, began
        while True:
            with suppress(BufferUnavailable):  # the journal's writers report it
                if self.needed or self._clock.monotonic() >= unasked_at:
                    unasked_at = self._clock.monotonic() + UNASKED_SECONDS
                    pause_seconds = max(TIDY_SECONDS, _SHARE * await self._tidy())
                if self._clock.monotonic() >= forget_at:
                    forget_at = self._clock.monotonic() + FORGET_SECONDS
                    await self._forget()
            await self._clock.sleep(pause_seconds)

    async def _tidy(self) -> float:
        self.needed = False
        began = self._clock.monotonic()
        await self._journal.tidy()
        return self._clock.monotonic() - began

    async def _forget(self) -> None:
        while await self._journal.change(partial(JournalTransaction.forget_ended, now=Moment.of(self._clock))):
            pass

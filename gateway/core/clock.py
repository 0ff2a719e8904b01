"""Time as an argument, so that tests own it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Protocol, Self


@cache
def boot_id() -> str:
    """Which boot of the machine this is: monotonic times can be compared within one. Empty: unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Moment:
    """A time to compare later, also by another process and after the wall clock was set.

    Seconds since 1970, and by the monotonic clock of one boot of the machine.
    """

    at: float
    monotonic: float = 0.0
    boot_id: str = ""

    @classmethod
    def of(cls, clock: Clock) -> Self:
        return cls(clock.now(), clock.monotonic(), boot_id())

    def since(self, before: Moment) -> tuple[float, bool]:
        """Seconds since another one; whether that is certain: the wall clock alone may have been set meanwhile."""
        if before.boot_id and before.boot_id == self.boot_id:
            return self.monotonic - before.monotonic, True
        return self.at - before.at, False

    def passed_since(self, before: Moment) -> float:
        """Seconds that have passed since another one for certain, for what cannot be taken back.

        Of an earlier boot only the time since this one began counts: the wall clock may be wrong until it is set.
        """
        seconds, is_certain = self.since(before)
        return seconds if is_certain or not self.boot_id else min(seconds, self.monotonic)


class Clock(Protocol):
    """The gateway's time. Durations are monotonic; only signatures and answers need the wall."""

    def now(self) -> float:
        """Wall clock: seconds since 1970-01-01 UTC."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, the same for all processes until the next boot; never goes backwards."""

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task for `seconds`."""


class SystemClock:
    now = staticmethod(time.time)
    monotonic = staticmethod(partial(time.clock_gettime, time.CLOCK_BOOTTIME))
    """It goes on while the machine is suspended."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

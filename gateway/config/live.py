"""The settings of a running process, and the steps to take when they change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.config.settings import Settings

Step = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SharedMemoryName:
    """Memory of all processes: a path, which may later name another memory, and a number, which never does."""

    path: str
    number: int

    def __fspath__(self) -> str:
        return self.path


class LiveSettings:
    """The settings in force. Event loop only.

    `bandwidth` is the memory of the ceilings of all processes (app/bandwidth.py), `callers` that of the limits of
    callers, `request_rates` that of the origin's request rates; None: there is none.
    """

    def __init__(
        self,
        now: Settings,
        bandwidth: SharedMemoryName | None = None,
        callers: SharedMemoryName | None = None,
        request_rates: SharedMemoryName | None = None,
    ) -> None:
        self.now = now
        self.bandwidth = bandwidth
        self.callers = callers
        self.request_rates = request_rates
        self._steps: list[Step] = []

    @contextmanager
    def following(self, step: Step) -> Iterator[None]:
        """Take `step` after each change while this lasts, in the order of these calls."""
        self._steps.append(step)
        try:
            yield
        finally:
            self._steps.remove(step)

    async def change(
        self,
        settings: Settings,
        bandwidth: SharedMemoryName | None,
        callers: SharedMemoryName | None,
        request_rates: SharedMemoryName | None,
    ) -> None:
        """Put these in force. Raises the errors of steps: some parts may then keep the earlier settings."""
        self.now, self.bandwidth, self.callers = settings, bandwidth, callers
        self.request_rates = request_rates
        for step in list(self._steps):
            await step()

"""The settings of a process that is at work, and who is to be told when they change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.config.settings import Settings

Step = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SharedMemoryName:
    """Memory that all processes of a gateway share: where it can be opened, and which of all that were made it is. By
    and by a path is that of another memory; the number never is."""

    path: str
    number: int

    def __fspath__(self) -> str:
        return self.path


class LiveSettings:
    """What is in force now. Event loop only.

    `bandwidth` is the memory in which all processes keep the ceilings (app/bandwidth.py), `callers` that
    of the limits of callers, `request_rates` that of what the origin takes; None: there is none.
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
        """While this lasts, `step` is taken after each change, in the order of these calls."""
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
        """These are in force from now on. Raises what a step raises: some parts may keep to what was before then."""
        self.now, self.bandwidth, self.callers = settings, bandwidth, callers
        self.request_rates = request_rates
        for step in list(self._steps):
            await step()

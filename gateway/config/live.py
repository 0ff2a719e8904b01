"""The settings of a running process, and the steps to take when they change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gateway.config.settings import Settings
from gateway.shared.arena import Numbering

Step = Callable[[], Awaitable[None]]

_CLASSES_MORE = 8
"""Each takes much memory, for all credentials that take turns in it."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers by which all processes find slots, credentials and classes of callers in their shared memory."""

    slots: Numbering
    credentials: Numbering
    classes: Numbering

    @classmethod
    def begin(cls, settings: Settings) -> Self:
        """Return numbers with room for more than there are: no name beyond that may come while the gateway runs."""
        slots, credentials, classes = _names(settings)
        return cls(Numbering.begin(slots), Numbering.begin(credentials), Numbering.begin(classes, _CLASSES_MORE))

    def changed(self, settings: Settings) -> Self:
        """Return the numbers for other settings; what stays keeps its number. ValueError: there is no room."""
        slots, credentials, classes = _names(settings)
        return type(self)(
            self.slots.changed(slots), self.credentials.changed(credentials), self.classes.changed(classes)
        )


def _names(settings: Settings) -> tuple[list[str], list[str], list[str]]:
    return (
        [slot.name for slot in settings.slots],
        [one.access_key_id for one in settings.credentials],
        [one.name for one in settings.caller_classes],
    )


class LiveSettings:
    """The settings in force, and which change of them they are. Event loop only.

    `memory` is the path of the memory that all processes share (shared/arena.py); None: this process is the only one.
    """

    def __init__(
        self, now: Settings, numbers: Numbers | None = None, memory: Path | None = None, generation: int = 0
    ) -> None:
        self.now = now
        self.numbers = numbers or Numbers.begin(now)
        self.memory = memory
        self.generation = generation
        self._steps: list[Step] = []

    @contextmanager
    def following(self, step: Step) -> Iterator[None]:
        """Take `step` after each change while this lasts, in the order of these calls."""
        self._steps.append(step)
        try:
            yield
        finally:
            self._steps.remove(step)

    async def change(self, settings: Settings, numbers: Numbers | None = None, generation: int | None = None) -> None:
        """Put these in force. Raises the errors of steps: some parts may then keep the earlier settings."""
        self.numbers = numbers or self.numbers.changed(settings)
        self.generation = self.generation + 1 if generation is None else generation
        self.now = settings
        for step in list(self._steps):
            await step()

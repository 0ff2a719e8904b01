"""What only this node has, told from time to time: for metrics, and for whoever is to be alarmed by them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from gateway.clock import Clock
from gateway.errors import BufferUnavailable
from gateway.writeback.bounds.bounds import Bounds, SlotBounds

LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SlotExposure:
    """Of one slot. `used_bytes` are the pending ones and room for bodies that are arriving; `oldest_seconds` 0: nothing
    is on its way to the origin."""

    buffer_bytes: int
    used_bytes: int
    pending_bytes: int
    pending_objects: int
    oldest_seconds: float


class ExposureObserver(Protocol):
    """For metrics."""

    def exposed(self, slot: str, exposure: SlotExposure) -> None: ...


def exposure_of(bounds: SlotBounds) -> SlotExposure:
    """As it is now. BufferUnavailable."""
    usage = bounds.usage()
    return SlotExposure(
        bounds.slot.buffer_bytes or 0,
        bounds.used_bytes(),
        usage.staged_bytes,
        usage.objects,
        bounds.age_seconds() or 0.0,
    )


class Exposure:
    """Of all slots; in one process of a gateway."""

    def __init__(self, bounds: Bounds, clock: Clock, observer: ExposureObserver) -> None:
        self._bounds = bounds
        self._clock = clock
        self._observer = observer

    async def run(self) -> None:
        """For ever."""
        while True:
            with suppress(BufferUnavailable):  # whoever writes to the journal learns of it
                self._tell()
            await self._clock.sleep(LOOK_SECONDS)

    def _tell(self) -> None:
        for one in self._bounds.all():
            self._observer.exposed(one.slot.name, exposure_of(one))

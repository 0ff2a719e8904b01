"""A process that passes pieces as fast as its shared bucket lets it, and tells when it passed them.

    argv: DESCRIPTOR OWN PROCESSES RATE PIECE_BYTES POINT AFTER_PIECES SLOT

At `POINT`, a step within the arithmetic of the bucket, it stops itself with SIGSTOP, in the midst of the piece after
AFTER_PIECES; `-` stands for none. One line for each piece: `time bytes`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from gateway.core.clock import SystemClock
from gateway.policy.bandwidth import Bandwidth, BandwidthShare, Ceiling, numbering_of, rows_for
from gateway.shared.arena import SharedCells

SHARES = [BandwidthShare("read", "a", 3), BandwidthShare("read", "b", 1)]


def ceilings_of(rate: float) -> list[Ceiling]:
    """What the processes keep together."""
    return [Ceiling("read", None, rate)]


class Cells:
    """A view of cells that stops the process just before or behind reading or writing them."""

    def __init__(self, cells: memoryview[Any], stops: Stops, name: str) -> None:
        self._cells = cells
        self._stops = stops
        self._name = name

    def __iter__(self) -> Any:
        self._stops.at(f"before reading {self._name}")
        values = list(self._cells)
        self._stops.at(f"behind reading {self._name}")
        return iter(values)

    def __getitem__(self, place: int) -> Any:
        value = self._cells[place]
        self._stops.at(f"behind reading its own {self._name}")
        return value

    def __setitem__(self, place: int, value: Any) -> None:
        self._stops.at(f"before writing {self._name}")
        self._cells[place] = value
        self._stops.at(f"behind writing {self._name}")


class Stops:
    """Where the process stops itself, once."""

    def __init__(self, point: str) -> None:
        self._point = point
        self.armed = False

    def at(self, point: str) -> None:
        if self.armed and point == self._point:
            self.armed = False
            os.kill(os.getpid(), signal.SIGSTOP)


async def main(
    descriptor: int, own: int, processes: int, rate: float, piece: int, point: str, after: int, slot: str
) -> None:
    ceilings = ceilings_of(rate)
    rows = rows_for(numbering_of(ceilings, SHARES).most)
    cells, stops = SharedCells.attach(descriptor, rows, processes, own), Stops(point)
    clock = SystemClock()
    bandwidth = Bandwidth(ceilings, clock, cells, SHARES)
    bucket = bandwidth.link("read")
    if point != "-" and bucket is not None:
        bucket._taken = Cells(bucket._taken, stops, "taken")  # type: ignore[assignment]
        bucket._anchors = Cells(bucket._anchors, stops, "anchors")  # type: ignore[assignment]
    limiter = bandwidth.limiter("read", slot)
    assert limiter is not None
    pieces = 0
    while True:
        stops.armed = pieces == after
        if stops.armed and point.endswith("writing anchors"):
            await asyncio.sleep(0.3)  # a full bucket is what is noted down
        await limiter.take(piece, lambda: 0)
        pieces += 1
        sys.stdout.write(f"{clock.monotonic()} {piece}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    descriptor, own, processes, piece, after = (int(sys.argv[place]) for place in (1, 2, 3, 5, 7))
    asyncio.run(main(descriptor, own, processes, float(sys.argv[4]), piece, sys.argv[6], after, sys.argv[8]))

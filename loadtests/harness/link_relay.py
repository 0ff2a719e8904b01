"""A link: packets between two virtual network devices, each direction with a capacity, a queue and a distance.

    python -m loadtests.harness.link_relay NEAR_DESCRIPTOR FAR_DESCRIPTOR SECONDS_ONE_WAY

Started by `shaped_link.ShapedLink`, which says on standard input what it wants: `limit DIRECTION BYTES_PER_SECOND`, or
`take DIRECTION`, which is answered by a line of JSON: what has passed since the last time, and for how long each packet
had to wait for its turn. All packets of a direction share its queue, first in, first out; what finds it full is lost.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

QUEUE_BYTES = 16 * 2**20
"""More than a second of what the link bears when it bears least: losses do not keep the queue short."""

_PACKET_BYTES_MAX = 65536
_READ_AT_ONCE = 32
_FINEST_WAIT_SECONDS = 0.0005
_IDLE_WAIT_SECONDS = 0.1


@dataclass(slots=True)
class Wire:
    """One direction. `rate` is in bytes per second."""

    source: int
    sink: int
    distance_seconds: float
    rate: float = 1e9
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    queued_bytes: int = 0
    free_at: float = 0.0
    flying: deque[tuple[float, bytes]] = field(default_factory=deque)
    passed_bytes: int = 0
    lost_packets: int = 0
    delays: list[float] = field(default_factory=list)

    def let_in(self, now: float) -> None:
        """What has come."""
        with suppress(BlockingIOError):
            for _ in range(_READ_AT_ONCE):
                packet = os.read(self.source, _PACKET_BYTES_MAX)
                if self.queued_bytes + len(packet) > QUEUE_BYTES:
                    self.lost_packets += 1
                    continue
                self.queue.append((now, packet))
                self.queued_bytes += len(packet)

    def resume(self, now: float) -> float:
        """Let pass what may, and let out what has arrived; returns when there is more to do."""
        while self.queue:
            since, packet = self.queue[0]
            begins = max(self.free_at, since)
            if begins > now:
                break
            self.queue.popleft()
            self.queued_bytes -= len(packet)
            self.passed_bytes += len(packet)
            self.delays.append(begins - since)
            self.free_at = begins + len(packet) / self.rate
            self.flying.append((self.free_at + self.distance_seconds, packet))
        while self.flying and self.flying[0][0] <= now:
            with suppress(BlockingIOError, OSError):  # the receiver's queue is full: it is lost
                os.write(self.sink, self.flying.popleft()[1])
        return min(self.flying[0][0] if self.flying else now + 1, self.free_at if self.queue else now + 1)

    def take(self) -> str:
        told = {"bytes": self.passed_bytes, "lost_packets": self.lost_packets, "delays": self.delays}
        self.passed_bytes, self.lost_packets, self.delays = 0, 0, []
        return json.dumps(told)


def main(near: int, far: int, distance_seconds: float) -> None:
    """Until standard input ends."""
    with suppress(PermissionError):
        os.nice(-10)  # a link does not wait for processes
    wires = {"read": Wire(far, near, distance_seconds), "write": Wire(near, far, distance_seconds)}
    asked = b""
    for descriptor in (near, far, 0):
        os.set_blocking(descriptor, False)
    while True:
        now = time.monotonic()
        due = min(wire.resume(now) for wire in wires.values())
        wait = min(max(due - now, _FINEST_WAIT_SECONDS), _IDLE_WAIT_SECONDS)
        ready, _, _ = select.select([near, far, 0], [], [], wait)
        now = time.monotonic()
        for wire in wires.values():
            if wire.source in ready:
                wire.let_in(now)
        if 0 in ready:
            told = os.read(0, 4096)
            if not told:
                return
            *lines, asked = (asked + told).split(b"\n")
            for line in lines:
                what, direction, *value = line.decode().split()
                if what == "limit":
                    wires[direction].rate = float(value[0])
                else:
                    print(wires[direction].take(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

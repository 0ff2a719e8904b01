"""How holders ask the lease book: a pair of datagram sockets for each, made before any process is started.

Both ends outlive the processes that use them, so a restarted one finds its channel as it was: nothing to connect, no
path, nobody else who could. Neither side ever waits for the other: what cannot be sent now is not sent.

A message is a row of doubles in this machine's order: the time of asking (`Clock.monotonic`, which is one for all
processes), then a figure per ceiling. The answer bears the time of what it answers, so that a late one is known.
"""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from gateway.clock import Clock
from gateway.policy.bandwidth import Bandwidth
from gateway.policy.leases import ASK_SECONDS, LEASE_SECONDS, LeaseBook, Lessee

_DOUBLE_BYTES = 8


def channel() -> tuple[socket.socket, socket.socket]:
    """The holder's end and the book's."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end in ends:
        end.setblocking(False)
    return ends


def _send(end: socket.socket, asked_at: float, figures: Sequence[float]) -> None:
    """Or not, when the other side reads nothing. Then its lease runs out, or ours: nothing else is to be done."""
    with suppress(OSError):
        end.send(array("d", [asked_at, *figures]).tobytes())


def _receive(end: socket.socket, figures: int) -> tuple[float, list[float]] | None:
    """The next message; None when there is none."""
    try:
        message = end.recv((1 + figures) * _DOUBLE_BYTES)
    except (BlockingIOError, ConnectionError):  # nothing there, or the gateway ends
        return None
    asked_at, *rest = array("d", message)
    return asked_at, rest


class LeaseHolder:
    """Keeps this process's rates as `lessee` says, and tells the book what this process could use.

    `on_change` is told whether leases are in force, each time that changes.
    """

    def __init__(
        self,
        bandwidth: Bandwidth,
        lessee: Lessee,
        end: socket.socket,
        clock: Clock,
        on_change: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._bandwidth = bandwidth
        self._lessee = lessee
        self._ceilings = len(lessee.rates(clock.monotonic()))
        self._end = end
        self._clock = clock
        self._on_change = on_change
        self._leased = False

    async def run(self) -> None:
        """Ask, at once and then every ASK_SECONDS, until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._end, self._take_answers)
        try:
            while True:
                self._adopt()
                _send(self._end, self._clock.monotonic(), self._bandwidth.demands())
                await self._clock.sleep(ASK_SECONDS)
        finally:
            loop.remove_reader(self._end)

    def _take_answers(self) -> None:
        while (answer := _receive(self._end, self._ceilings)) is not None:
            asked_at, rates = answer
            self._lessee.granted(rates, asked_at)
        self._adopt()

    def _adopt(self) -> None:
        now = self._clock.monotonic()
        self._bandwidth.set_rates(self._lessee.rates(now))
        if self._lessee.leased(now) != self._leased:
            self._leased = not self._leased
            self._on_change(self._leased)


class LeaseServer:
    """Answers every holder out of one book. `ends` are the book's ends of the channels, by holder."""

    def __init__(self, ceilings: Sequence[float], ends: Mapping[str, socket.socket], clock: Clock) -> None:
        self._book = LeaseBook(ceilings, list(ends), clock.monotonic())
        self._ceilings = len(ceilings)
        self._ends = ends
        self._clock = clock

    def start(self) -> None:
        """From now on the event loop answers."""
        loop = asyncio.get_running_loop()
        for holder, end in self._ends.items():
            loop.add_reader(end, self._answer, holder, end)

    def stop(self) -> None:
        loop = asyncio.get_running_loop()
        for end in self._ends.values():
            loop.remove_reader(end)

    def _answer(self, holder: str, end: socket.socket) -> None:
        while (asked := _receive(end, self._ceilings)) is not None:
            asked_at, demands = asked
            now = self._clock.monotonic()
            if now - asked_at >= LEASE_SECONDS:
                continue  # asked while nobody answered: by now it has asked again
            rates = self._book.ask(holder, demands, now)
            if rates is not None:
                _send(end, asked_at, rates)

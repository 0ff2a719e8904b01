"""A node of a cluster that looks after the members, with peers that answer what a test wants."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.cluster.hello import Hello
from gateway.cluster.members import Member, read_view
from gateway.cluster.polling import TURN_SECONDS, Membership, Polling
from tests.support.manual_clock import ManualClock

FIRST, SECOND, THIRD = (f"10.0.0.{number}:9002" for number in (1, 2, 3))


class Peers:
    """Nodes that answer, by address. What is not there refuses."""

    def __init__(self, clock: ManualClock, *addresses: str) -> None:
        self._clock = clock
        self.hellos = {
            one: Hello(name=one, address=one, version="1", caches=True, age_seconds=5000, at=0.0) for one in addresses
        }
        self.asked: list[str] = []
        self.ahead_seconds = 0.0

    def change(self, address: str, **fields: object) -> None:
        self.hellos[address] = self.hellos[address].model_copy(update=fields)

    async def ask(self, address: str) -> bytes:
        self.asked.append(address)
        if address not in self.hellos:
            raise ConnectionRefusedError("refused")
        return self.hellos[address].model_copy(update={"at": self._clock.now() + self.ahead_seconds}).content()


class PolledNode:
    """A node at FIRST with its polling."""

    def __init__(self, directory: Path, entries: Sequence[str], *peers: str) -> None:
        self.clock = ManualClock()
        self.peers = Peers(self.clock, *peers)
        self.file = directory / "cluster-view"
        self.own = Member(FIRST, FIRST, "a", 7)
        self.listed: list[str] | None = None
        self.entries = list(entries)
        self.membership = Membership(directory / "cluster.json", "train", self.clock)
        self.polling = self.poll()

    def poll(self) -> Polling:
        return Polling(
            self.entries, lambda: self.own, self.membership, self.file, self.clock, self.peers.ask, resolve=self.resolve
        )

    async def resolve(self, entries: Sequence[str]) -> list[str]:
        if self.listed is None:
            return list(entries)
        if not self.listed:
            raise socket.gaierror("no such name")
        return self.listed

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.polling.run())
        try:
            await self.turn(0)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def turn(self, seconds: float = TURN_SECONDS) -> None:
        """Let time pass; what is then written is on the disk when this returns."""
        await self.clock.advance(seconds)
        for _ in range(5000):
            await asyncio.sleep(0.002)
            if len(self.clock._sleepers) == 2:  # both loops wait for the next turn
                return
        raise AssertionError("the polling has not come to rest")

    def seen(self) -> dict[str, Member]:
        return {one.address: one for one in read_view(self.file)[0]}

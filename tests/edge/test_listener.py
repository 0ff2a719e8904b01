"""Processes that accept from the same sockets share connections evenly: clients keep theirs for long."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from gateway.edge.s3_server import ASGIApp, ConnectionCounts, Listener, Receive, S3Server, Scope, Send
from gateway.shared.heartbeats import HUNG_SECONDS, Heartbeats
from tests.edge.apps import respond
from tests.support.manual_clock import ManualClock
from tests.support.serving import listening_socket, request

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Hand:
    """A clock of nanoseconds that a test moves."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def __call__(self) -> int:
        return self.now_ns


class Processes:
    """Servers that share a listening socket, as workers do; here all of them turn in one event loop, where the same
    one is always woken first."""

    def __init__(self, path: Path, count: int, clock: ManualClock, *, is_shared: bool = True) -> None:
        listening = listening_socket()
        self.port = listening.getsockname()[1]
        self.clock, self.hand = clock, Hand()
        self.heartbeats = Heartbeats(path / "heartbeats", self.hand)
        self.stops = [asyncio.Event() for _ in range(count)]
        self.counts: list[ConnectionCounts] = []
        self.servers: list[S3Server] = []
        for number in range(count):
            counts = None
            if is_shared:
                own = Heartbeats(path / "heartbeats", self.hand)
                own.beat(number)
                counts = ConnectionCounts(path / "connections", number, count, own)
                self.counts.append(counts)
            server = S3Server(_named(number), sockets=[listening.dup()], clock=clock, counts=counts)
            self.servers.append(server)
        listening.close()
        self._wires: list[Wire] = []
        self._running: list[asyncio.Task[None]] = []

    async def connected(self, connections: int) -> Counter[int]:
        """Open so many, one after the other, and say which processes have answered them."""
        found = Counter[int]()
        for _ in range(connections):
            wire = await asyncio.open_connection("127.0.0.1", self.port)
            self._wires.append(wire)
            found[await asked(wire)] += 1
        return found

    async def leave(self, after_seconds: float = 0.0) -> None:
        """All clients do."""
        await self.clock.advance(after_seconds)
        for _, writer in self._wires:
            writer.close()
            await writer.wait_closed()
        self._wires.clear()
        async with asyncio.timeout(30):
            while any(server.open_connections for server in self.servers):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def __aenter__(self) -> Processes:
        for server, stop in zip(self.servers, self.stops, strict=True):
            running = server.serve(stop, grace_seconds=5, on_ready=lambda: None)
            self._running.append(asyncio.create_task(running))
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()
        for stop in self.stops:
            stop.set()
        await asyncio.wait_for(asyncio.gather(*self._running), 30)
        for counts in self.counts:
            counts.close()
        self.heartbeats.close()

    async def stop(self, number: int) -> None:
        self.stops[number].set()
        await asyncio.wait_for(self._running[number], 30)


def _named(number: int) -> ASGIApp:
    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, b"%d" % number)

    return app


async def asked(wire: Wire) -> int:
    """Which process answers."""
    reader, writer = wire
    writer.write(request("GET"))
    async with asyncio.timeout(30):
        await reader.readuntil(b"\r\n\r\n")
        return int(await reader.readexactly(1))


def run(path: Path, scenario: Callable[[Processes], Coroutine[Any, Any, None]], count: int = 4) -> None:
    async def all_of_it() -> None:
        async with Processes(path, count, ManualClock()) as processes:
            await scenario(processes)

    asyncio.run(all_of_it())


async def test_one_process_would_take_them_all(tmp_path: Path) -> None:
    """What the other tests show is not so by itself."""
    async with Processes(tmp_path, 4, ManualClock(), is_shared=False) as processes:
        assert list((await processes.connected(8)).values()) == [8]


def test_each_gets_as_many_as_the_others(tmp_path: Path) -> None:
    """Whichever is woken first; and once more after all clients have left."""

    async def scenario(processes: Processes) -> None:
        assert await processes.connected(8) == dict.fromkeys(range(4), 2)
        await processes.leave(after_seconds=2.0)
        assert await processes.connected(4) == dict.fromkeys(range(4), 1)

    run(tmp_path, scenario)


def test_idle_connections_do_not_count(tmp_path: Path) -> None:
    """A process whose clients have nothing to ask has room for others that have."""

    async def scenario(processes: Processes) -> None:
        await processes.connected(2)
        wires, processes._wires = processes._wires, []
        [idle] = [wire for wire in wires if await asked(wire) == 0]
        [busy] = [wire for wire in wires if wire is not idle]
        for _ in range(4):
            await processes.clock.advance(1.0)
            assert await asked(busy) == 1
        assert await processes.connected(1) == {0: 1}
        processes._wires += wires

    run(tmp_path, scenario, count=2)


def test_a_process_that_hangs_or_has_left_is_not_waited_for(tmp_path: Path) -> None:
    """Though it has fewest; one that has stopped least of all."""

    async def scenario(processes: Processes) -> None:
        assert await processes.connected(3) == {0: 1, 1: 1, 2: 1}
        await processes.stop(2)
        assert not processes.counts[0].others_have_fewer(1)
        assert processes.counts[0].others_have_fewer(2)
        processes.hand.now_ns += int((HUNG_SECONDS + 1) * 1e9)
        assert not processes.counts[0].others_have_fewer(2)
        processes.heartbeats.beat(1)
        assert processes.counts[0].others_have_fewer(2)

    run(tmp_path, scenario, count=3)


def test_short_lived_connections_are_not_shared_out(tmp_path: Path) -> None:
    """Where a client opens one for each request, whoever wakes up first takes it: sharing would cost more than it
    brings. Connections that last are shared again."""

    async def scenario(processes: Processes) -> None:
        for _ in range(40):
            await processes.connected(1)
            await processes.leave()
        assert list((await processes.connected(6)).values()) == [6]
        await processes.leave(after_seconds=2.0)
        await processes.connected(6)
        await processes.leave(after_seconds=2.0)
        assert await processes.connected(4) == dict.fromkeys(range(2), 2)

    run(tmp_path, scenario, count=2)


async def test_a_connection_that_nobody_takes_is_taken_after_a_moment() -> None:
    """The others are busy, say."""
    listening = listening_socket()
    accepted, taken = list[socket.socket](), asyncio.Event()
    questions = 0

    def is_others_turn() -> bool:
        nonlocal questions
        questions += 1
        return True

    def take(connection: socket.socket) -> None:
        accepted.append(connection)
        taken.set()

    listener = Listener(listening, take, is_others_turn)
    listener.resume()
    clients = []
    for _ in range(2):
        taken.clear()
        clients.append(socket.create_connection(listening.getsockname()))
        await asyncio.wait_for(taken.wait(), 30)
    assert questions > 2
    listener.close()
    for one in (*clients, *accepted):
        one.close()

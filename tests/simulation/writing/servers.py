"""The servers behind the registry, as processes of nodes reach them: runs, failovers, splits, cut links."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from gateway.cluster.redis_link import RedisPlace
from gateway.cluster.scripts import ASK, Script, Word
from gateway.core.errors import RegistryAway
from tests.simulation.cluster.redis_model import RedisModel
from tests.simulation.processes import operation
from tests.simulation.virtual_time import VirtualClock

LAG_SECONDS_MAX = 5.0
"""So long a primary without its replica goes on (`min-replicas-max-lag`)."""

KEPT_SECONDS = 2.0
"""What was sent into a cut arrives late, or not at all."""


@dataclass(eq=False)
class Server:
    """One that was started, or has become the primary. `refuses_from`: it has lost its replica."""

    model: RedisModel
    thaws: asyncio.Event = field(default_factory=asyncio.Event)
    is_down: bool = False
    refuses_from: float | None = None

    def __post_init__(self) -> None:
        self.thaws.set()


class Servers:
    """The primary, and one that does not know yet that it is none any more."""

    def __init__(self, clock: VirtualClock, dice: Random) -> None:
        self.clock = clock
        self.dice = dice
        self._runs = 0
        self.primary = Server(RedisModel(self._run()))
        self.left: Server | None = None
        """After a split, the primary of before."""

        self.of_left: frozenset[str] = frozenset()
        """Nodes that reach the primary of before, and not the new one."""

        self.cut: set[str] = set()
        """Nodes that reach none."""

    def _run(self) -> str:
        self._runs += 1
        return f"{self._runs:06x}{self.dice.getrandbits(40):010x}"

    def all(self) -> list[Server]:
        found = [self.primary, self.left]
        return [one for one in found if one is not None and not one.is_down]

    def of(self, node: str) -> Server | None:
        """The server that a node reaches."""
        found = self.left if self.left is not None and node in self.of_left else self.primary
        return None if node in self.cut or found.is_down else found

    def connect(self, node: str) -> Connected:
        return Connected(self, node)

    # What happens

    def restart(self, how: str) -> None:
        """Another process takes its place, with all that it had, with what the replica has, or `empty`.

        Or somebody has it `emptied`: process and connections stay.
        """
        if how == "emptied":
            self.primary.model.restart_empty(self._run())
            return
        before, model = self.primary, RedisModel(self._run())
        before.is_down, model.skew_ms = True, before.model.skew_ms
        before.thaws.set()
        if how != "empty":
            model.content = before.model.content if how == "whole" else before.model.replica()
            model.replicate()
        self.primary = Server(model)

    def replicate(self) -> None:
        """The replica has all until now."""
        self.primary.model.replicate()

    def fail_over(self, of_left: frozenset[str]) -> None:
        """The replica takes over. Some nodes may keep to the primary of before, which lives on for a while."""
        before, model = self.primary, RedisModel(self._run())
        model.content, model.skew_ms = before.model.replica(), before.model.skew_ms
        model.replicate()
        self.left, self.of_left = (before, of_left) if of_left else (None, frozenset())
        if of_left:
            before.refuses_from = self.clock.monotonic() + LAG_SECONDS_MAX
            before.thaws.set()
        else:
            before.is_down = True
            before.thaws.set()
        self.primary = Server(model)

    def heal(self) -> None:
        if self.left is not None:
            self.left.is_down, self.left = True, None
        self.of_left = frozenset()
        self.cut.clear()
        self.primary.thaws.set()


class Connected:
    """In the place of `redis_link.Primary`: a connection, over which what was asked is carried out in order."""

    def __init__(self, servers: Servers, node: str) -> None:
        self._servers = servers
        self._node = node
        self._server: Server | None = None
        self._arrives_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        self.run = ""

    async def begin(self) -> None:
        await self.shake_hands()

    async def shake_hands(self) -> Mapping[str, str]:
        clock = self._servers.clock

        def tell(server: Server) -> Mapping[str, str]:
            return {"run": server.model.run, "server_time_usec": str(int(clock.now() * 1e6))}

        about: Mapping[str, str] = await self._asked(tell)
        self.run = about["run"]
        return about

    async def call(self, script: Script, words: Sequence[Word]) -> Any:
        def carry_out(server: Server) -> Any:
            if server.refuses_from is not None and self._servers.clock.monotonic() >= server.refuses_from:
                raise RegistryAway("NOREPLICAS Not enough good replicas to write.")
            if not self._knows(server):
                raise RegistryAway("EMPTIED somebody has emptied the server")
            server.model.now_ms = int(1000 * self._servers.clock.now()) + server.model.skew_ms
            return server.model.call(script, words)

        return await self._asked(carry_out)

    def ask(self, words: Sequence[Word], take: Callable[[Any], None]) -> None:
        async def answered() -> None:
            try:
                reply = await self.call(ASK, words)
            except RegistryAway as error:
                take(error)
            else:
                take(reply)

        self._asking = asyncio.get_running_loop().create_task(answered())

    def _knows(self, server: Server) -> bool:
        """Return whether nobody has emptied it since the handshake."""
        return server.model.run == self.run

    async def close(self) -> None:
        """What was sent may arrive all the same."""

    async def _asked(self, work: Callable[[Server], Any]) -> Any:
        operation()
        server = self._servers.of(self._node)
        if self._server is None:
            self._server = server
        if self._server is None or self._server is not server:
            await asyncio.sleep(self._servers.dice.choice((0.001, 0.001, 3.0)))
            raise RegistryAway("the connection is refused, or has broken")
        loop = asyncio.get_running_loop()
        answer, now = loop.create_future(), self._servers.clock.monotonic()
        self._arrives_at = max(self._arrives_at, now + 0.0002 + 0.02 * self._servers.dice.random() ** 6)
        loop.call_at(self._arrives_at, self._arrived, self._server, work, answer, context=contextvars.Context())
        value = await answer
        operation()
        return value

    def _arrived(self, server: Server, work: Callable[[Server], Any], answer: asyncio.Future[Any]) -> None:
        """It has come to the server, or to a cut."""
        if self._node in self._servers.cut or not server.thaws.is_set():
            answer.get_loop().create_task(self._held_up(server, work, answer))
        else:
            self._carry_out(server, work, answer)

    async def _held_up(self, server: Server, work: Callable[[Server], Any], answer: asyncio.Future[Any]) -> None:
        if self._node in self._servers.cut and self._servers.dice.random() < 0.5:
            await asyncio.sleep(KEPT_SECONDS * self._servers.dice.random())
        await server.thaws.wait()
        self._carry_out(server, work, answer)

    def _carry_out(self, server: Server, work: Callable[[Server], Any], answer: asyncio.Future[Any]) -> None:
        """Do the work, and tell whoever still waits for the answer."""
        if server.is_down or self._node in self._servers.cut:
            self._break(server, answer)
            return
        try:
            value = work(server)
        except RegistryAway as error:
            if not answer.done():
                answer.set_exception(error)
            return
        answer.get_loop().call_later(0.0002, self._came_back, server, value, answer)

    def _came_back(self, server: Server, value: object, answer: asyncio.Future[Any]) -> None:
        if server.is_down or self._node in self._servers.cut:
            self._break(server, answer)
        elif not answer.done():
            answer.set_result(value)

    def _break(self, server: Server, answer: asyncio.Future[Any]) -> None:
        """Who waits for what is gone hears of it, or of nothing: then its patience ends."""
        if server.is_down and not answer.done():
            answer.set_exception(RegistryAway("the connection has broken"))


async def connected(servers: Servers, place: RedisPlace) -> Connected:
    """As `redis_link.connected`; the place is called like the node that asks."""
    found = servers.connect(place.places[0][0])
    await found.begin()
    return found

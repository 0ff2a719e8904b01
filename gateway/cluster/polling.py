"""Finding out who is in the cluster: names are resolved, members are asked who they are, and the view file is written.

One process of a node does this, and all of them follow the file (members.py).
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import orjson
import structlog

from gateway.cluster.hello import Hello
from gateway.cluster.members import SETTLED_SECONDS, Gone, Member, alike, read_view, view_document
from gateway.core.clock import Clock
from gateway.core.errors import ForebayError
from gateway.core.model import immutable
from gateway.disk.atomic_write import write_durably
from gateway.origin.peer_protocol import VERSION
from gateway.telemetry import metrics

BY_NAME: Final = "dns://"
"""How an entry of `cluster.members` begins that stands for all addresses of a name."""

TURN_SECONDS: Final = 2.0
RESOLVE_SECONDS: Final = 5.0
KEEP_SECONDS: Final = 60.0
"""Seconds between two notes of this node's membership on its disk."""

HELLOS_PER_SECOND_MAX: Final = 20.0
HELLOS_AT_ONCE: Final = 64
HELLO_SECONDS_MAX = 2.0

Ask = Callable[[str], Awaitable[bytes]]
"""Returns the hello of the member at an address. Raises OSError or ForebayError if it does not answer as a member."""

_log = structlog.get_logger("forebay.cluster")


async def addresses_of(entries: Iterable[str]) -> list[str]:
    """Return the addresses that `cluster.members` names, each once. OSError if a name cannot be resolved."""
    found = list[str]()
    for entry in entries:
        if not entry.startswith(BY_NAME):
            found.append(entry)
            continue
        host, _, port = entry.removeprefix(BY_NAME).rpartition(":")
        try:
            answers = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except UnicodeError as error:  # a label of more than 63 characters
            raise OSError(f"{host!r} is no name of a host: {error}") from error
        addresses = sorted(str(one[4][0]) for one in answers)
        found += [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in addresses]
    return list(dict.fromkeys(found))


class Membership:
    """Since when this node has been a member without a gap, noted on its disk. `begin` and `note` block."""

    def __init__(self, file: Path | None, cluster: str, clock: Clock) -> None:
        """`file` None: there is no cache directory, and this node begins now."""
        self._file = file
        self._cluster = cluster
        self._clock = clock
        self._noted_at: float | None = None
        self._met_at = self.since = clock.monotonic()
        """On the monotonic clock."""

    def begin(self) -> None:
        """Go on as the member that this node was, unless it was away for longer than SETTLED_SECONDS."""
        now = self._clock.now()
        try:
            noted = orjson.loads(self._file.read_bytes()) if self._file is not None else {}
            if noted.get("cluster") == self._cluster and now - noted["seen"] <= SETTLED_SECONDS:
                self.since = self._clock.monotonic() - max(0.0, now - noted["since"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("this node begins as a new member of the cluster", file=str(self._file), error=str(error))

    def meet(self, oldest_since: float) -> None:
        """Note that other members answer; the oldest of them joined at `oldest_since`.

        This node begins anew where it was away from older ones for too long, though it ran.
        """
        now = self._clock.monotonic()
        if oldest_since < self._met_at < now - SETTLED_SECONDS:
            self.since = now
        self._met_at = now

    def note(self) -> None:
        """Write down that this node is a member, if the last time was long ago."""
        elapsed = self._clock.monotonic()
        if self._file is None or (self._noted_at is not None and elapsed < self._noted_at + KEEP_SECONDS):
            return
        first, self._noted_at = self._noted_at is None, elapsed
        now = self._clock.now()
        noted = {"cluster": self._cluster, "since": now - (elapsed - self.since), "seen": now}
        try:
            write_durably(self._file, orjson.dumps(noted))
        except OSError as error:
            if first:
                _log.warning("this node will be a new member of the cluster at its next start", error=str(error))


@immutable
class Heard:
    """This node's knowledge of one member. `hello` stays until the member sends a later one."""

    member: Member | None = None
    """As its last hello described it; None: it has never answered."""

    hello: Hello | None = None
    at: float = 0.0
    """When the hello came, in seconds since 1970."""

    clock_seconds: float = 0.0
    """Seconds by which its clock is ahead of the clock of this node."""

    problem: str | None = None
    """Why the last question got no answer."""

    asked_at: float = -math.inf
    """When it was asked last, on the monotonic clock."""


class Polling:
    """The background process's knowledge of the members. Event loop only."""

    def __init__(
        self,
        entries: Sequence[str],
        own: Callable[[], Member],
        membership: Membership,
        file: Path,
        clock: Clock,
        ask: Ask,
        *,
        resolve: Callable[[Sequence[str]], Awaitable[list[str]]] = addresses_of,
        resolve_seconds: float = RESOLVE_SECONDS,
        told: Callable[[str], Member | None] = lambda _address: None,
    ) -> None:
        """`own` returns this node as it is configured now; `file` is the view file.

        `told` returns what Redis says of the node at an address, which counts for its name and for what it writes.
        """
        self._entries = entries
        self._own = own
        self._membership = membership
        self._file = file
        self._clock = clock
        self._ask = ask
        self._resolve = resolve
        self._resolve_seconds = resolve_seconds
        self._told = told
        self._gone: dict[str, Gone] = {}
        self._written = b""
        self._failure = ""
        self.heard: dict[str, Heard] = {}
        """By address, in the order of the list: all members, this node among them."""

    @property
    def members(self) -> list[Member]:
        """The members in the order of the list."""
        own = replace(self._own(), since=self._membership.since)
        return [
            own if address == own.address else self._member(own, address, heard)
            for address, heard in self.heard.items()
        ]

    def _member(self, own: Member, address: str, heard: Heard) -> Member:
        told = self._told(address)
        member = replace(heard.member or told or alike(own, address), answers=heard.problem is None)
        return member if told is None else replace(member, name=told.name, prefixes=told.prefixes, store=told.store)

    def state_of(self, member: Member) -> str:
        """Return one of `metrics.MEMBER_STATES`."""
        heard, is_me = self.heard.get(member.address, Heard()), member.address == self._own().address
        if not is_me and heard.hello is None:
            return "unknown"
        if not is_me and heard.problem is not None:
            return "silent"
        return "up" if member.caches else "closed"

    async def run(self) -> None:
        """Look after the members for ever."""
        await asyncio.to_thread(self._membership.begin)
        with suppress(OSError, ValueError):  # no process before this one has found out anything
            members, gone = read_view(self._file)
            self.heard = {one.address: Heard(one if one.since is not None else None) for one in members}
            self._gone = {one.member.address: one for one in gone}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_listed(), name="members of the cluster")
            tasks.create_task(self._keep_asking(), name="hellos")

    async def _keep_listed(self) -> None:
        while True:
            try:
                self._list(await self._resolve(self._entries))
            except OSError as error:
                self._tell_failure(f"the names in cluster.members cannot be resolved: {error}")
            await self._clock.sleep(self._resolve_seconds)

    def _list(self, addresses: list[str]) -> None:
        if not addresses or addresses == list(self.heard):  # no name stands for no node
            return
        now = self._clock.monotonic()
        left = [heard.member for address, heard in self.heard.items() if address not in addresses]
        self._gone |= {one.address: Gone(one, now) for one in left if one is not None}
        if self.heard:
            _log.info("the members of the cluster have changed", before=len(self.heard), now=len(addresses))
        self.heard = {address: self.heard.get(address, Heard()) for address in addresses}

    async def _keep_asking(self) -> None:
        while True:
            while due := self._due()[:HELLOS_AT_ONCE]:
                await asyncio.gather(*map(self._say_hello, due))
                await self._publish()
            self._meet()
            await self._publish()
            await asyncio.to_thread(self._membership.note)
            await self._clock.sleep(TURN_SECONDS)

    def _meet(self) -> None:
        own, answering = self._own().address, [one for one in self.heard.values() if one.hello and not one.problem]
        ages = [one.member.since for one in answering if one.member is not None and one.member.since is not None]
        if own in self.heard and ages:
            self._membership.meet(min(ages))

    def _due(self) -> list[str]:
        """Return the members to be asked now, so that this node asks HELLOS_PER_SECOND_MAX at most."""
        own = self._own().address
        before = self._clock.monotonic() - max(TURN_SECONDS, len(self.heard) / HELLOS_PER_SECOND_MAX)
        return [address for address, heard in self.heard.items() if address != own and heard.asked_at <= before]

    async def _say_hello(self, address: str) -> None:
        last = self.heard.get(address, Heard())  # it may have left the list just now
        asked_at, asked_at_wall = self._clock.monotonic(), self._clock.now()
        try:
            async with asyncio.timeout(HELLO_SECONDS_MAX):
                hello = Hello.read(await self._ask(address))
        except (OSError, ForebayError, ValueError) as error:
            problem = str(error) or f"no answer within {HELLO_SECONDS_MAX:g} s"
            if last.problem is None:
                _log.warning("a member of the cluster does not answer", member=address, error=problem)
            heard = replace(last, problem=problem, asked_at=asked_at)
        else:
            if last.problem is not None:
                _log.info("a member of the cluster answers again", member=address)
            at, since = self._clock.now(), self._clock.monotonic() - hello.age_seconds
            known = last.member.since if last.member is not None else None
            if known is not None and abs(known - since) < TURN_SECONDS:
                since = known  # it is as old as it was: answers take unequal time
            caches = hello.caches and hello.protocol == VERSION
            member = Member(address, address, hello.zone, hello.weight, caches, since, store=hello.store)
            heard = Heard(member, hello, at, hello.at - (asked_at_wall + at) / 2, None, asked_at)
        if address in self.heard:
            self.heard[address] = heard
            if heard.problem is None:
                self._gone.pop(address, None)

    async def _publish(self) -> None:
        """Write the view file if it would change."""
        members, now = self.members, self._clock.monotonic()
        counts = Counter(map(self.state_of, members))
        for state in metrics.MEMBER_STATES:
            metrics.CLUSTER_MEMBERS.set(counts[state], state)
        self._gone = {one.member.address: one for one in self._gone.values() if now < one.at + SETTLED_SECONDS}
        content = view_document(members, list(self._gone.values()))
        if not members or content == self._written:
            return
        try:
            await asyncio.to_thread(write_durably, self._file, content)
        except OSError as error:
            self._tell_failure(f"the processes of this node cannot be told who is in the cluster: {error}")
        else:
            self._written, self._failure = content, ""

    def _tell_failure(self, text: str) -> None:
        if text != self._failure:
            _log.warning(text)
        self._failure = text

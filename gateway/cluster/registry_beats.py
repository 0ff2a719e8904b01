"""The background process's part in the registry: beats, members, and all that Redis must have before it is believed.

Redis is believed for LEASE_SECONDS from the beginning of the last good beat to one run, once every known node that
acknowledges writes has signed that run: has put into it all that its journal has pending. A Redis that was restarted
empty, or has failed over and lost its last second, is another run. When Redis may lack changes that this node has not
applied, the node forgets what it remembers before it believes it. Its horizon tells Redis which changes it has
outlived.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

import orjson
import structlog

from gateway.cluster.belief import Belief, SharedBelief
from gateway.cluster.members import Member, member_from
from gateway.cluster.redis_link import RedisLink
from gateway.cluster.scripts import (
    BEAT,
    BEAT_SECONDS,
    FORGET,
    LEASE_SECONDS,
    ROWS_MAX,
    SWEPT_MAX,
    Beat,
    Beaten,
    Word,
    key_bytes,
    own_question,
    question,
)
from gateway.core.clock import Clock
from gateway.core.errors import ForebayError, RegistryAway
from gateway.core.model import Claim, ObjectKey, PendingClaim, immutable
from gateway.disk.atomic_write import write_durably
from gateway.policy.registry import BOUND_SECONDS_MAX
from gateway.telemetry import metrics

SWEEP_PAUSE_SECONDS: Final = 0.05
RECONCILE_SECONDS: Final = 60.0
"""Seconds between two comparisons of journal and registry, and for which a claim that the journal lacks is left alone:
it precedes its commit."""

HORIZON_SECONDS: Final = BOUND_SECONDS_MAX + 60.0
PAGE: Final = 100
"""Claims that one look into the journal reads, on the event loop."""

UNSETTLED_MAX = 20_000

FOLLOWED_SECONDS: Final = 5.0
"""Seconds after which all processes of this node keep to members that Redis has told: the view file has them after 3,
and the processes look at it every second."""

_log = structlog.get_logger("forebay.cluster")


class Journal(Protocol):
    """This node's pending writes (gateway/writeback/pending_claims.py)."""

    def page(self, after: int, count_max: int) -> tuple[Sequence[PendingClaim], int]: ...
    def last(self, keys: Iterable[ObjectKey]) -> Mapping[ObjectKey, PendingClaim]: ...
    def highest_order(self) -> int: ...


@immutable
class Listed:
    """The members as Redis has told them in a run, on this node's disk by now."""

    run: str = ""
    version: int = 0
    members: Mapping[str, bytes] = field(default_factory=dict)


class RegistryBeats:
    """Event loop only. `run` it as a task, beside that of the link."""

    def __init__(
        self,
        link: RedisLink,
        belief: SharedBelief,
        own: Callable[[], Member],
        journal: Journal | None,
        forget: Callable[[], Awaitable[None]],
        file: Path,
        clock: Clock,
    ) -> None:
        """`own` is what this node says of itself: a store if it acknowledges writes, or still has some.

        `forget` voids all that this node remembers where it asks the registry. `file` keeps the members.
        """
        self._link = link
        self._belief = belief
        self._own = own
        self._journal = journal
        self._forget = forget
        self._file = file
        self._clock = clock
        self._run = ""
        self._is_signed = False
        self._horizon = 0
        self._is_outdated = True
        """This node must forget what it remembers before it believes the registry."""
        self._number = belief.read().number
        self._sequences: deque[tuple[float, int]] = deque()
        """Sequence numbers that Redis has told, and when."""
        self._seen = 0
        """The version of the members that all processes of this node keep to."""
        self._listed_at = -math.inf
        self._view_at = 0.0
        self._unsettled: dict[Claim, None] = {}
        self._has_unsettled = asyncio.Event()
        self._missing_at: dict[Claim, float] = {}
        """Claims in the registry that the journal lacks, and when this process first saw that."""
        self.listed = Listed()
        self.problem = "it was not asked yet"
        """Why Redis is not believed; empty: it is."""
        self.believed_since: float | None = None
        """In seconds since 1970."""
        self.clock_seconds: float | None = None
        """Seconds by which Redis' clock is ahead of this node's."""

    # For others

    @property
    def about(self) -> Mapping[str, str]:
        """Return what the server says of itself, as INFO has it."""
        return self._link.about

    def settle(self, claims: Sequence[Claim]) -> None:
        """Take claims out of the registry soon, whose writes are over.

        What cannot be sent for long is found by the comparison with the journal.
        """
        if len(self._unsettled) + len(claims) <= UNSETTLED_MAX:
            self._unsettled.update(dict.fromkeys(claims))
            self._has_unsettled.set()

    async def forget_node(self, node: str, *, only_ask: bool = False) -> int | None:
        """Give up a node that does not beat, or a store that no node has any more. Raise RegistryAway.

        Return how many keys it alone has pending, which are given up too; None: it beats.
        """
        stores = {name: member_of(name, info).store for name, info in self.listed.members.items()}
        store = stores.get(node, node)
        holders = [name for name, one in stores.items() if name != node and store and one == store]
        if holders and node in stores:
            store = ""  # the node goes on under another name, and so does all that it has
        elif holders and min([(await self._link.call(FORGET, [one, store, 1])).value for one in holders]) < 0:
            return None
        pending = left = (await self._link.call(FORGET, [node, store, 1])).value
        while left >= 0 and not only_ask:
            left = (await self._link.call(FORGET, [node, store, 0])).value
            if left == 0:
                break
        return None if left < 0 else int(pending)

    # The tasks

    async def run(self) -> None:
        """Keep it up for ever."""
        self.listed = await asyncio.to_thread(read_members, self._file)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_beating(), name="beats")
            tasks.create_task(self._keep_reconciling(), name="journal and registry")
            tasks.create_task(self._keep_settling(), name="settled claims")

    async def _keep_beating(self) -> None:
        while True:
            pause_seconds = BEAT_SECONDS
            try:
                if await self._beat() == SWEPT_MAX:
                    pause_seconds = SWEEP_PAUSE_SECONDS
            except ForebayError as error:  # Redis is away, or the journal cannot be read
                self._doubt(str(error))
            await self._clock.sleep(pause_seconds)

    async def _beat(self) -> int:
        """Beat once; return how many stamps that has removed."""
        began = self._clock.monotonic()
        run = await self._link.run_of_primary()
        if (told := self.about.get("server_time_usec", "")).isdecimal():
            self.clock_seconds = int(told) / 1e6 - self._clock.now()
        if run != self._run:
            self._begin_run(run)
        if (outlived := self._outlived(began)) > self._horizon:
            self._horizon = outlived  # the workers must know it before Redis removes a stamp for it
            self._belief.write(self._belief.read()._replace(horizon=outlived))
        if began >= self._listed_at + FOLLOWED_SECONDS:
            self._seen = self.listed.version
        own, has = self._own(), self.listed.version if began >= self._view_at else None
        flags = (bool(own.store), run, self._is_signed, self._seen, self._horizon, has)
        beat = Beat(own.name, orjson.dumps(own), *flags, self._others(own.name))
        answer = await self._link.call(BEAT, beat.words())
        if answer.run != run:
            raise RegistryAway("the primary is another one than a moment ago")
        beaten = Beaten(*answer.value)
        self._sequences.append((self._clock.monotonic(), beaten.sequence))
        if beaten.members is not None:
            await self._list(run, beaten)
        if beaten.is_signed:
            self._is_signed = True
        # Not sooner: until all have signed, another node may believe the run before, and stamp there what it changes.
        if beaten.is_complete and (self._is_outdated or beaten.floor > self._horizon):
            await self._begin_anew(beaten.sequence)
        self._believe(beaten, began + LEASE_SECONDS)
        return beaten.swept

    def _begin_run(self, run: str) -> None:
        """Publish another run before the journal is read: a worker whose commit comes later claims again."""
        self._doubt("this node has just found another run of Redis")
        self._run, self._is_signed, self._is_outdated, self._horizon = run, False, True, 0
        self._sequences.clear()
        self._view_at, self._seen = 0.0, 0
        self.listed = Listed(self.listed.run, 0, self.listed.members)
        self._belief.write(Belief(self._number, run))

    def _outlived(self, now: float) -> int:
        """Return the last number that Redis told so long ago that nothing older is believed."""
        outlived = 0
        while self._sequences and self._sequences[0][0] + HORIZON_SECONDS <= now:
            outlived = self._sequences.popleft()[1]
        return outlived

    async def _begin_anew(self, sequence: int) -> None:
        """Forget what this node remembers; then it has outlived all changes up to this number."""
        self._belief.write(Belief(self._number, self._run))
        await self._forget()
        self._number += 1
        self._is_outdated, self._horizon = False, sequence

    def _others(self, node: str) -> list[tuple[str, bytes]]:
        """Return the known members that acknowledge writes, for a run that may not know them."""
        if self.listed.run == self._run:
            return []
        known = self.listed.members.items()
        return [(name, info) for name, info in known if name != node and member_of(name, info).store]

    async def _list(self, run: str, beaten: Beaten) -> None:
        told = beaten.members or []
        members = {name.decode(): info for name, info in zip(told[::2], told[1::2], strict=True)}
        content = {"run": run, "members": {name: orjson.Fragment(info) for name, info in members.items()}}
        try:
            await asyncio.to_thread(write_durably, self._file, orjson.dumps(content))
        except OSError as error:
            raise RegistryAway(f"this node cannot write down who is in the cluster: {error}") from error
        self.listed = Listed(run, beaten.version, members)
        self._listed_at = self._clock.monotonic()
        self._view_at = self._listed_at + len(members) / 100

    def _believe(self, beaten: Beaten, until: float) -> None:
        if not self._is_signed:
            problem = "this node has not yet told it all that it has pending"
        elif not beaten.is_complete:
            problem = "it is new, and other nodes may still tell it what they have pending"
            if beaten.missing_count:
                names = b", ".join(sorted(beaten.missing)).decode()
                problem = f"nodes have not told it what they have pending: {names} ({beaten.missing_count} in all)"
        else:
            self._belief.write(Belief(self._number, self._run, self._horizon, until, bool(beaten.is_known)))
            if self.believed_since is None:
                _log.info("Redis is believed", run=self._run)
                self.believed_since = self._clock.now()
            self.problem = ""
            metrics.CLUSTER_REGISTRY_BELIEVED.set(1)
            return
        self._doubt(problem)

    def _doubt(self, problem: str) -> None:
        """Note why Redis is not believed. What was believed before ends by itself."""
        if self.believed_since is not None or problem != self.problem:
            _log.warning("Redis is not believed", reason=problem)
        self.problem, self.believed_since = problem, None
        metrics.CLUSTER_REGISTRY_BELIEVED.set(0)

    # What the journal has, and what the registry has

    async def _keep_reconciling(self) -> None:
        looked_at = 0.0
        while True:
            await self._clock.sleep(BEAT_SECONDS)
            now = self._clock.monotonic()
            if not self._run or (self._is_signed and now < looked_at + RECONCILE_SECONDS):
                continue
            run, looked_at = self._run, now
            try:
                await self._put_all(run)
                self._is_signed = self._is_signed or run == self._run
                await self._withdraw(run)
            except RegistryAway:  # the next beat says why, and asks for another one
                continue
            except ForebayError as error:
                _log.warning("the journal cannot be compared with the registry", error=str(error))

    async def _put_all(self, run: str) -> None:
        """Claim all pending writes of the journal that have no claim; later claims get higher numbers."""
        if self._journal is None:
            return
        answer = await self._link.ask(question("above", "", [self._journal.highest_order()]))
        if answer.run != run:
            raise RegistryAway("the primary is another one than a moment ago")
        claims, place = self._journal.page(0, PAGE)
        while claims:
            await self._send("put", claims, run)
            pending = self._pending(claims)
            self.settle([one.claim for one in claims if one.key not in pending])  # they were over before
            claims, place = self._journal.page(place, PAGE)

    async def _withdraw(self, run: str) -> None:
        """Take out this store's claims that the journal has lacked for long."""
        behind: tuple[bytes, bytes] | None = None
        missing: dict[Claim, float] = {}
        now = self._clock.monotonic()
        while self._link.store:
            answer = await self._link.ask(own_question(behind))
            if answer.run != run:
                return
            page = [
                Claim(ObjectKey(bucket.decode(), key.decode("utf-8", "surrogatepass")), token)
                for bucket, key, tokens in answer.value
                for token in tokens.decode().split(",")
            ]
            for begin in range(0, len(page), PAGE):
                some = page[begin : begin + PAGE]
                pending = self._pending(some)
                missing |= {one: self._missing_at.get(one, now) for one in some if one.key not in pending}
                await asyncio.sleep(0)
            if len(answer.value) < ROWS_MAX:
                break
            bucket, key, _ = answer.value[-1]
            behind = (bucket, key)
        old = [claim for claim, since in missing.items() if since + RECONCILE_SECONDS <= now]
        for begin in range(0, len(old), PAGE):
            await self._send("settle", old[begin : begin + PAGE], run)
        self._missing_at = {claim: since for claim, since in missing.items() if since + RECONCILE_SECONDS > now}

    async def _keep_settling(self) -> None:
        while True:
            await self._has_unsettled.wait()
            claims = list(islice(self._unsettled, PAGE))
            try:
                await self._settle(claims, self._run)
            except ForebayError:  # Redis is away, or the journal cannot be read
                await self._clock.sleep(BEAT_SECONDS)
                continue
            for claim in claims:
                self._unsettled.pop(claim, None)
            if not self._unsettled:
                self._has_unsettled.clear()

    async def _settle(self, claims: Sequence[Claim], run: str) -> None:
        await self._send("settle", claims, run)
        # The writes that are pending there have claims. A deletion that was acknowledged without Redis has none.
        await self._send("put", self._pending(claims).values(), run)

    def _pending(self, claims: Iterable[Claim | PendingClaim]) -> Mapping[ObjectKey, PendingClaim]:
        return self._journal.last([one.key for one in claims]) if self._journal is not None else {}

    async def _send(self, verb: str, claims: Iterable[Claim | PendingClaim], run: str) -> None:
        """Put pending claims, or settle claims. Raise RegistryAway if that went to another run."""
        by_bucket: dict[str, list[Word]] = {}
        for key, *token_and_order in claims:
            by_bucket.setdefault(key.bucket, []).extend((key_bytes(key.key), *token_and_order))
        asked = [self._link.ask(question(verb, bucket, words)) for bucket, words in by_bucket.items()]
        for answer in await asyncio.gather(*asked):
            if answer.run != run:
                raise RegistryAway("the primary is another one than a moment ago")


def read_members(file: Path) -> Listed:
    """Return the members that a node knew last; none if it knew none. Blocks."""
    try:
        document = orjson.loads(file.read_bytes())
        members = {name: orjson.dumps(info) for name, info in document["members"].items()}
        for name, info in members.items():
            member_of(name, info)
        return Listed(document["run"], 0, members)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("this node begins without the members that it knew", file=str(file), error=str(error))
    return Listed()


def member_of(name: str, info: bytes) -> Member:
    """Return what a node says of itself, under its name."""
    return member_from({**orjson.loads(info), "name": name})

"""Limits of callers, over all processes of the node: requests at a time and per second, bytes to and from the client.

A credential and a class of callers have an account each, where anything limits them; a request has to pass both. An
account has up to three gates: requests, bytes to the client ("read"), bytes from it ("write"). Who finds no room at a
gate waits there. The waiting pass by turns, a flow at a time: in the account of a class each credential is a flow.
A flow has start tags (start-time fair queueing): the one that has passed least since anybody waited is next, and
who comes back begins with the least of those that wait, so nobody saves up turns. Of one flow the request passes
that has waited longest, in whichever process.

All of it stands in cells that have one writer each (token_bucket.py):

    beat[p]           when process p last turned; one that has not for LOST_SECONDS holds no requests any more
    running[p]        the requests of the account that process p holds
    until[p]          until when process p says that it waits at the gate
    floor[p]          the start tag of the last one that process p has let pass in turn
    tag[flow][p]      the start tag that the flow's next one has, as far as process p has let it pass
    since[flow][p]    since when the flow's first one waits in process p; 0: none does

A request is counted first and looked at then: of two processes that want the last place none gets it, or one.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from gateway import cancellation
from gateway.clock import Clock
from gateway.policy.token_bucket import ROWS_OF_BUCKET, SharedCells, TokenBucket

BEAT_SECONDS = 0.2

LOST_SECONDS = 1.0
"""A process that has not turned for so long is stopped or dead: its requests are not counted until it turns again."""

HOLD_SECONDS = 0.1
"""So long others believe that a process waits. Then it looks again, or is not waited for."""

LOOK_SECONDS = 0.01
"""How often those who wait look what has become of the other processes."""

WAITING_MAX = 1024
"""Of one flow, at one gate of one process. Each holds a connection and its request's head."""

FLOWS_MAX = 64
"""In the account of a class. With more credentials some share their turns."""

PIECE_BYTES_MIN, PIECE_BYTES_MAX = 64 * 1024, 1024 * 1024
PIECE_SECONDS = 0.1
"""A body passes in pieces of so much of the rate."""

UNSIGNED = "anonymous"
"""Whose requests carry no signature: one credential, all together."""

OWN = "gateway"
"""Who signs with the gateway's own key pair, where there are no [[credentials]]."""

Scope = Literal["credential", "class"]
Direction = Literal["read", "write"]
LimitName = Literal["concurrency", "rate", "read", "write"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What an account allows; None: no limit."""

    concurrent_requests: int | None = None
    requests_per_second: float | None = None
    read_bytes_per_second: float | None = None
    write_bytes_per_second: float | None = None

    @property
    def any(self) -> bool:
        return self != _NO_LIMITS


_NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class CallerClass:
    """Callers by what their User-Agent says: `app/APP`, or a product's name. Neither: whom no other class has."""

    name: str
    limits: Limits
    app: str | None = None
    product: str | None = None


class Observer(Protocol):
    """Counts what becomes of requests. `name` is a credential's access key id, or a class's name."""

    def waited(self, scope: Scope, name: str, limit: LimitName, seconds: float) -> None: ...
    def refused(self, scope: Scope, name: str, limit: LimitName) -> None: ...
    def waiting(self, scope: Scope, name: str, change: int) -> None: ...
    def running(self, scope: Scope, name: str, change: int) -> None: ...


class Refused(Exception):
    """There was no room in time."""

    def __init__(self, scope: Scope, name: str, limit: LimitName, retry_after_seconds: int) -> None:
        super().__init__(f"the {scope} {name} is at its limit ({limit})")
        self.scope, self.name, self.limit = scope, name, limit
        self.retry_after_seconds = retry_after_seconds


class LimitsReplaced(Exception):
    """What a request waited for is in force no more; it has taken nothing."""


class _Tag(NamedTuple):
    """Whose turn it is: the least."""

    start: float
    since: float


@dataclass(eq=False, slots=True)
class _Waiter:
    cost: int
    since: float
    is_bounded: bool
    passed: asyncio.Future[bool]
    """False: the process ends. LimitsReplaced."""


class Gate:
    """One limit of an account, as one process sees that of all. Event loop only."""

    def __init__(
        self,
        cells: SharedCells,
        row: int,
        flows: int,
        clock: Clock,
        rate: float | None,
        most: int | None,
        on_waiting: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._cells, self._clock, self._most, self._on_waiting = cells, clock, most, on_waiting
        self._flows, self.rate = flows, rate
        self._own = cells.own
        self._bucket: TokenBucket | None = cells.bucket(row, rate) if rate is not None else None
        row += ROWS_OF_BUCKET
        self._beats = cells.numbers(0)
        self._running = cells.whole_numbers(row)
        self._until = cells.numbers(row + 1)
        self._floors = cells.numbers(row + 2)
        self._first_row = row + 3
        self._tags = [cells.numbers(row + 3 + flow) for flow in range(flows)]
        self._since = [cells.numbers(row + 3 + flows + flow) for flow in range(flows)]
        self._queues: dict[int, deque[_Waiter]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._dice = random.Random(cells.own)
        self.is_closed = False
        self.bound: LimitName = "rate"
        """What has kept the last one that found no room."""

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def is_used(self) -> bool:
        """A request of this process holds a place, or waits."""
        return bool(self._queues) or self._running[self._own] > 0

    def held(self, now: float) -> int:
        """The requests of all processes that turn."""
        lost = now - LOST_SECONDS
        return sum(
            count
            for process, (count, beat) in enumerate(zip(self._running, self._beats, strict=True))
            if count and (beat > lost or process == self._own)
        )

    def clear(self) -> None:
        """This process has just begun: whoever had its number before holds nothing and waits for nothing."""
        self._running[self._own] = 0
        self._until[self._own] = 0.0
        for row in self._since:
            row[self._own] = 0.0

    def passes(self, cost: int) -> bool:
        """Let one pass if nothing keeps it, and nobody waits; False, and nothing taken, otherwise."""
        now = self._clock.monotonic()
        return not self._queues and max(self._until) <= now and self._take(cost, now)

    async def enter(self, flow: int, cost: int, wait_seconds: float | None) -> bool:
        """Wait for the turn; False when it has not come in time. None: there is no such time. Raises LimitsReplaced."""
        if self.passes(cost):
            return True
        queue = self._queues.get(flow)
        if wait_seconds is not None and (wait_seconds <= 0 or self.is_closed):
            return False
        if queue is not None and len(queue) >= WAITING_MAX:
            return False
        now = self._clock.monotonic()
        waiter = _Waiter(cost, max(now, 1e-9), wait_seconds is not None, asyncio.get_running_loop().create_future())
        self._queues.setdefault(flow, deque()).append(waiter)
        self._on_waiting(1)
        self.look()
        try:
            await self._wait(waiter, wait_seconds)
        except BaseException:
            if waiter.passed.done() and waiter.passed.exception() is None and waiter.passed.result():
                self.leave(cost)
            raise
        finally:
            self._on_waiting(-1)
            self._forget(flow, waiter)
        return waiter.passed.done() and waiter.passed.result()

    async def _wait(self, waiter: _Waiter, wait_seconds: float | None) -> None:
        if wait_seconds is None:
            with cancellation.turn():
                await asyncio.wait((waiter.passed,))
            return
        pause = asyncio.ensure_future(self._clock.sleep(wait_seconds))
        try:
            with cancellation.turn():
                await asyncio.wait((waiter.passed, pause), return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()

    def leave(self, cost: int = 0) -> None:
        """A request is over; or, with its cost, has not been what it was taken for."""
        if self._most is not None:
            self._running[self._own] -= 1
        if cost and self._bucket is not None:
            self._bucket.give_back(cost)
        if self._queues:
            self.look()

    def charge(self, cost: int) -> None:
        """It has passed without having waited: those behind it wait for it."""
        if self._bucket is not None:
            self._bucket.take(cost)

    def close(self) -> None:
        """No request waits any more; bodies that have begun go on."""
        self.is_closed = True
        for flow, queue in list(self._queues.items()):
            for waiter in [one for one in queue if one.is_bounded]:
                self._forget(flow, waiter)
                waiter.passed.set_result(False)

    def let_go(self) -> None:
        """Others are in force: no request waits here any more. Bodies that have begun go on."""
        for flow, queue in list(self._queues.items()):
            for waiter in [one for one in queue if one.is_bounded]:
                self._forget(flow, waiter)
                waiter.passed.set_exception(LimitsReplaced())

    def look(self) -> None:
        """Let pass whose turn it is, and tell the others who waits."""
        now = self._clock.monotonic()
        while (flow := self._next(now)) is not None:
            waiter = self._queues[flow][0]
            start = self._start(flow)
            if not self._take(waiter.cost, now):
                break
            self._tags[flow][self._own] = start + max(1, waiter.cost)
            self._floors[self._own] = max(self._floors[self._own], start)
            self._forget(flow, waiter)
            waiter.passed.set_result(True)
        self._tell(now)
        if self._queues and self._looking is None:
            self._looking = asyncio.create_task(self._look_on(), name="limits of callers")

    async def _look_on(self) -> None:
        while self._queues:
            now = self._clock.monotonic()
            delay_seconds = self._bucket.delay_seconds(now) if self._bucket is not None else 0.0
            # Processes that wait for the same moment have the same chance to be the first then.
            await self._clock.sleep(
                min(max(delay_seconds, 0.001), LOOK_SECONDS) + self._dice.uniform(0, LOOK_SECONDS / 10)
            )
            self.look()
        self._looking = None

    def _take(self, cost: int, now: float) -> bool:
        bucket = self._bucket
        if bucket is not None and bucket.delay_seconds(now) > 0:
            self.bound = "rate"
            return False
        if self._most is not None:
            self._running[self._own] += 1
            if self.held(now) > self._most:
                self._running[self._own] -= 1
                self.bound = "concurrency"
                return False
        if bucket is not None:
            bucket.take(cost)
        return True

    def _next(self, now: float) -> int | None:
        """The flow of this process whose turn it is; None where it is another process's, or nobody waits."""
        best: tuple[_Tag, int] | None = None
        for flow, queue in self._queues.items():
            tag = _Tag(self._start(flow), queue[0].since)
            if best is None or tag < best[0]:
                best = tag, flow
        if best is None:
            return None
        for process, until in enumerate(self._until):
            if until <= now or process == self._own:
                continue
            waiting = self._cells.column_of_numbers(self._first_row + self._flows, self._flows, process)
            for flow in range(self._flows):
                since = waiting[flow]
                if since and _Tag(self._start(flow), since) < best[0]:
                    return None
        return best[1]

    def _start(self, flow: int) -> float:
        return max(max(self._tags[flow]), max(self._floors))

    def _forget(self, flow: int, waiter: _Waiter) -> None:
        queue = self._queues.get(flow)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._queues[flow]
                self._since[flow][self._own] = 0.0
                if not self._queues:
                    self._until[self._own] = 0.0

    def _tell(self, now: float) -> None:
        if self._queues:
            for flow, queue in self._queues.items():
                self._since[flow][self._own] = queue[0].since
            self._until[self._own] = now + HOLD_SECONDS


def _rows_of_gate(flows: int) -> int:
    return ROWS_OF_BUCKET + 3 + 2 * flows


@dataclass(frozen=True, slots=True)
class Account:
    """What one credential or one class has in all. A gate is None where nothing limits what passes there."""

    scope: Scope
    name: str
    requests: Gate | None
    read: Gate | None
    write: Gate | None

    def gate(self, direction: Direction) -> Gate | None:
        """Of bytes."""
        return self.read if direction == "read" else self.write


@dataclass(frozen=True, slots=True)
class AccountPlan:
    """An account that is limited, the same in all processes by its place."""

    scope: Scope
    name: str
    limits: Limits
    flows: int


@dataclass(frozen=True, slots=True)
class CallersPlan:
    """Who is limited, and how long a request waits for room."""

    credentials: Sequence[tuple[str, Limits]]
    classes: Sequence[CallerClass]
    wait_seconds: float

    @property
    def accounts(self) -> list[AccountPlan]:
        flows = min(FLOWS_MAX, len(self.credentials) + 1)
        of_classes = [AccountPlan("class", one.name, one.limits, flows) for one in self.classes if one.limits.any]
        return [
            AccountPlan("credential", key, limits, 1) for key, limits in self.credentials if limits.any
        ] + of_classes

    @property
    def rows(self) -> int:
        """Of cells, for all of it; 0 where nothing is limited."""
        rows = sum(3 * _rows_of_gate(account.flows) for account in self.accounts)
        return rows + 1 if rows else 0


@dataclass(eq=False, slots=True)
class CallerLimits:
    """The accounts of callers with one credential and of one class: first the credential's own, then the class's."""

    accounts: Sequence[tuple[Account, int]]
    """With the number of the flow that the credential is in each."""

    wait_seconds: float
    clock: Clock
    observer: Observer

    def piece_bytes(self, direction: Direction) -> int | None:
        """How much of a body passes at once; None: it is not paced."""
        gates = [account.gate(direction) for account, _ in self.accounts]
        rates = [gate.rate for gate in gates if gate is not None and gate.rate is not None]
        return int(min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, min(rates) * PIECE_SECONDS))) if rates else None

    def enter_now(self, direction: Direction) -> bool:
        """Hold a place for a request, where there is room in all accounts now. To `leave` when it is over."""
        entered: list[Account] = []
        for account, _ in self.accounts:
            gate, bytes_gate = account.requests, account.gate(direction)
            if (bytes_gate is not None and not bytes_gate.passes(0)) or (gate is not None and not gate.passes(1)):
                for one in entered:
                    _leave(one, 1)
                return False
            entered.append(account)
        self._tell_running(1)
        return True

    async def enter(self, direction: Direction, wait_seconds: float | None = None) -> None:
        """The same, and wait for room: Refused when there is none in time, or too many wait already. LimitsReplaced."""
        until = self.clock.monotonic() + (self.wait_seconds if wait_seconds is None else wait_seconds)
        entered: list[Account] = []
        try:
            for account, flow in self.accounts:
                bytes_gate = account.gate(direction)
                await self._through(account, bytes_gate, flow, 0, until, direction)
                await self._through(account, account.requests, flow, 1, until, None)
                entered.append(account)
        except BaseException:
            for account in entered:
                _leave(account, 1)
            raise
        self._tell_running(1)

    def leave(self) -> None:
        """The request is over."""
        self._tell_running(-1)
        for account, _ in self.accounts:
            _leave(account, 0)

    async def pass_bytes(self, direction: Direction, count: int) -> bool:
        """Wait until a piece of a body may pass; whether it had to."""
        has_waited = False
        for account, flow in self.accounts:
            gate = account.gate(direction)
            if gate is None or gate.passes(count):
                continue
            has_waited, began = True, self.clock.monotonic()
            try:
                while not await gate.enter(flow, count, None):
                    await self.clock.sleep(LOOK_SECONDS)  # there are too many pieces in the row
            finally:
                self.observer.waited(account.scope, account.name, direction, self.clock.monotonic() - began)
        return has_waited

    def charge(self, direction: Direction, count: int) -> None:
        """Bytes have passed that did not wait: the debt holds back what comes next."""
        for account, _ in self.accounts:
            gate = account.gate(direction)
            if gate is not None and count:
                gate.charge(count)

    async def _through(
        self, account: Account, gate: Gate | None, flow: int, cost: int, until: float, direction: LimitName | None
    ) -> None:
        if gate is None or gate.passes(cost):
            return
        limit: LimitName = direction or gate.bound
        began = self.clock.monotonic()
        try:
            has_passed = await gate.enter(flow, cost, until - began)
        finally:
            self.observer.waited(account.scope, account.name, limit, self.clock.monotonic() - began)
        if not has_passed:
            self.observer.refused(account.scope, account.name, limit)
            raise Refused(account.scope, account.name, limit, 1)

    def _tell_running(self, change: int) -> None:
        for account, _ in self.accounts:
            self.observer.running(account.scope, account.name, change)


def _leave(account: Account, cost: int) -> None:
    if account.requests is not None:
        account.requests.leave(cost)


class Callers:
    """Every caller's limits, as one process keeps them with the others that use `cells`; without, it is alone."""

    def __init__(self, plan: CallersPlan, clock: Clock, observer: Observer, cells: SharedCells | None = None) -> None:
        self._clock = clock
        self._observer = observer
        self._wait_seconds = plan.wait_seconds
        self._classes = plan.classes
        self._cells = cells or SharedCells.of_one_process(plan.rows or 1, clock.monotonic())
        self._flows = {key: number for number, (key, _) in enumerate(plan.credentials, 1)}
        self._accounts: dict[tuple[Scope, str], Account] = {}
        self._found: dict[tuple[str, str | None], CallerLimits | None] = {}
        self._gates: list[Gate] = []
        row = 1
        for account in plan.accounts:
            gates = []
            for rate, most in _gates_of(account.limits):
                gate = None
                if rate is not None or most is not None:
                    gate = self._gate(account, row, rate, most)
                gates.append(gate)
                row += _rows_of_gate(account.flows)
            self._accounts[account.scope, account.name] = Account(account.scope, account.name, *gates)
        self._class_of = lru_cache(maxsize=1024)(self._looked_up)

    def _gate(self, account: AccountPlan, row: int, rate: float | None, most: int | None) -> Gate:
        def on_waiting(change: int) -> None:
            self._observer.waiting(account.scope, account.name, change)

        gate = Gate(self._cells, row, account.flows, self._clock, rate, most, on_waiting)
        gate.clear()
        self._gates.append(gate)
        return gate

    @property
    def any(self) -> bool:
        """Whether anybody is limited."""
        return bool(self._accounts)

    def find(self, credential: str, user_agent: str) -> CallerLimits | None:
        """What limits a caller; None: nothing does."""
        if not self._accounts:
            return None
        of_class = self._class_of(user_agent) if self._classes else None
        key = credential, of_class
        if key not in self._found:
            accounts = []
            if (own := self._accounts.get(("credential", credential))) is not None:
                accounts.append((own, 0))
            if of_class is not None and (found := self._accounts.get(("class", of_class))) is not None:
                accounts.append((found, self._flows.get(credential, 0) % FLOWS_MAX))
            made = CallerLimits(accounts, self._wait_seconds, self._clock, self._observer) if accounts else None
            if credential not in self._flows and credential not in (UNSIGNED, OWN):
                return made
            self._found[key] = made
        return self._found[key]

    def _looked_up(self, user_agent: str) -> str | None:
        words = user_agent.split()
        apps = {word[4:] for word in words if word.startswith("app/")}
        products = {word.partition("/")[0] for word in words}
        for one in self._classes:
            if (one.app is not None and one.app in apps) or (one.product is not None and one.product in products):
                return one.name
        return next((one.name for one in self._classes if one.app is None and one.product is None), None)

    @property
    def is_idle(self) -> bool:
        """Nobody is under these limits, or waits to be, in this process."""
        return not any(gate.is_used for gate in self._gates)

    async def beat(self) -> None:
        """Tell the others that this process turns, for ever."""
        beats = self._cells.numbers(0)
        while True:
            beats[self._cells.own] = self._clock.monotonic()
            await self._clock.sleep(BEAT_SECONDS)

    def let_go(self) -> None:
        """Others are in force: requests that wait have not begun, and look where to enter now."""
        for gate in self._gates:
            gate.let_go()

    def close(self) -> None:
        """The process is to end: nobody waits for room any more."""
        for gate in self._gates:
            gate.close()


def _gates_of(limits: Limits) -> Iterable[tuple[float | None, int | None]]:
    yield limits.requests_per_second, limits.concurrent_requests
    yield limits.read_bytes_per_second, None
    yield limits.write_bytes_per_second, None

"""Limits of callers, over all processes of the node: requests at a time and per second, bytes to and from the client.

Each credential and each class of callers has an account, if anything limits it; a request must pass both. An account
has a gate for requests, and two for each limited direction, to the client ("read") and from it ("write"): `turns`
decides whose turn it is, and `wire` lets no byte pass before its time. A request enters by `turns`, and pays there for
its first piece in advance: as much as the last ones of its flow took, if nothing tells. The difference is settled when
the piece is known. Bytes paid in advance may come late, and with others; so every piece passes `wire` at the moment at
which it is handed on.

A request without room at a gate waits there. Waiting requests pass by turns, a flow at a time: in the account of a
class each credential is a flow. Flows have start tags (start-time fair queueing): the flow that has passed least while
others waited is next, and one that comes back starts with the least tag among those waiting, so that none saves up
turns. Of one flow the request passes that has waited longest, in whichever process.

All of it is in cells that have one writer each (shared/arena.py):

    beat[p]           when process p last ran; without a beat for LOST_SECONDS it holds no requests
    running[p]        the requests of the account that process p holds
    until[p]          until when process p says that it waits at the gate
    floor[p]          the start tag of the last request that process p has let pass in turn
    tag[flow][p]      the start tag of the flow's next request, as far as process p has let it pass
    since[flow][p]    since when the flow's first request waits in process p; 0: none waits

A request is counted before it is checked: of two processes that want the last place none gets it, or one.

A change of limits changes what gates let pass. What holds a place, or waits, stays where it is; a request has the
accounts that limited its caller when it came.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from gateway.core import cancellation
from gateway.core.clock import Clock
from gateway.policy.token_bucket import ROWS_OF_BUCKET, TokenBucket
from gateway.shared.arena import Numbering, SharedCells
from gateway.telemetry import metrics

BEAT_SECONDS = 0.2

LOST_SECONDS = 1.0
"""A process without a beat for this long is stopped or dead: its requests do not count until it runs again."""

HOLD_SECONDS = 0.1
"""Seconds for which other processes count a process as waiting. Then it looks again, or they go on without it."""

LOOK_SECONDS = 0.01
"""Seconds between two looks of waiting requests at the other processes."""

WAITING_MAX = 1024
"""Waiting requests of one flow, at one gate of one process. Each holds a connection and its request's head."""

FLOWS_MAX = 64
"""Flows in the account of a class. With more credentials some share their turns."""

PIECE_BYTES_MIN, PIECE_BYTES_MAX = 64 * 1024, 1024 * 1024
PIECE_SECONDS = 0.1
"""A body passes in pieces of this part of a second's rate, within these sizes."""

_LEARNING = 1 / 8
"""The weight of the latest answer in the expected size of the next."""

_AGENTS_KEPT, _AGENT_CHARACTERS_MAX = 1024, 512
"""The most User-Agents whose class is remembered; longer ones are looked up each time."""

UNSIGNED = "anonymous"
"""The credential that stands for all requests without a signature."""

OWN = "gateway"
"""The credential of the gateway's own key pair, without [[credentials]]."""

Scope = Literal["credential", "class"]
Direction = Literal["read", "write"]
LimitName = Literal["concurrency", "rate", "read", "write"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an account; None: no limit."""

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
    """Callers by their User-Agent: `app/APP`, or a product's name. With neither, all callers of no other class."""

    name: str
    limits: Limits
    app: str | None = None
    product: str | None = None


class CallerRefused(Exception):
    """There was no room in time."""

    def __init__(self, scope: Scope, name: str, limit: LimitName, retry_after_seconds: int) -> None:
        super().__init__(f"the {scope} {name} is at its limit ({limit})")
        self.scope, self.name, self.limit = scope, name, limit
        self.retry_after_seconds = retry_after_seconds


class _Tag(NamedTuple):
    """A place in the order of turns: the least is next."""

    start: float
    since: float


@dataclass(eq=False, slots=True)
class _CallerWaiter:
    cost: int
    since: float
    is_bounded: bool
    passed: asyncio.Future[bool]
    """False: the process ends."""


class Gate:
    """One limit of an account, as one process sees that of all. Event loop only."""

    def __init__(self, cells: SharedCells, row: int, flows: int, direction: Direction | None, clock: Clock) -> None:
        """Limit nothing before `apply_settings`; then bytes in a `direction`, or (None) requests."""
        self._cells, self._clock, self._row, self._flows, self._direction = cells, clock, row, flows, direction
        self._scope: Scope = "credential"
        self._name = ""
        self._most: int | None = None
        self._bucket: TokenBucket | None = None
        self._told_at = clock.monotonic()
        self._own = cells.own
        row += ROWS_OF_BUCKET
        self._beats = cells.numbers(0)
        self._running = cells.whole_numbers(row)
        self._until = cells.numbers(row + 1)
        self._floors = cells.numbers(row + 2)
        self._first_row = row + 3
        self._tags = [cells.numbers(row + 3 + flow) for flow in range(flows)]
        self._since = [cells.numbers(row + 3 + flows + flow) for flow in range(flows)]
        self._queues: dict[int, deque[_CallerWaiter]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._rng = random.Random(cells.own)
        self.is_closed = False
        self._running[self._own] = 0  # the process that had this number before holds nothing any more
        self._until[self._own] = 0.0
        for cell in self._since:
            cell[self._own] = 0.0

    def apply_settings(
        self, scope: Scope, name: str, rate: float | None, most: int | None, *, is_latest: bool = True
    ) -> None:
        """Limit an account from now on, and what waits here. The rate of the latest settings holds in all processes."""
        self._tell_waits(self._clock.monotonic())  # under the name and the limit until now
        self._scope, self._name, self._most = scope, name, most
        self._bucket = TokenBucket(self._cells, self._row, rate) if rate is not None else None
        if self._bucket is not None and is_latest:
            self._bucket.set_rate(rate or 0.0, self._clock.monotonic())
        self.look()

    @property
    def limit(self) -> LimitName:
        if self._direction is not None:
            return self._direction
        if self._bucket is None:
            return "concurrency"
        if self._most is None:
            return "rate"
        now = self._clock.monotonic()
        return "concurrency" if self.held(now) >= self._most and self._bucket.delay_seconds(now) <= 0 else "rate"

    @property
    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def held(self, now: float) -> int:
        """Return the requests held by all running processes."""
        lost = now - LOST_SECONDS
        return sum(
            count
            for process, (count, beat) in enumerate(zip(self._running, self._beats, strict=True))
            if count and (beat > lost or process == self._own)
        )

    def passes(self, cost: int) -> bool:
        """Let a request pass if nothing holds it up, and none waits; otherwise take nothing, and return False."""
        now = self._clock.monotonic()
        return not self._queues and max(self._until) <= now and self._take(cost, now)

    def has_room(self) -> bool:
        now = self._clock.monotonic()
        is_free = self._bucket is None or self._bucket.delay_seconds(now) <= 0
        return is_free and not self._queues and max(self._until) <= now

    def passes_ahead(self, cost: int) -> bool:
        """Let a request pass that has waited for its turn elsewhere, even before those waiting here."""
        return self._take(cost, self._clock.monotonic())

    async def enter(self, flow: int, cost: int, wait_seconds: float | None) -> bool:
        """Wait for the turn; False when it has not come in time. None: no time limit."""
        if self.passes(cost):
            return True
        queue = self._queues.get(flow)
        if wait_seconds is not None and (wait_seconds <= 0 or self.is_closed):
            return False
        if queue is not None and len(queue) >= WAITING_MAX:
            return False
        now = self._clock.monotonic()
        waiter = _CallerWaiter(
            cost, max(now, 1e-9), wait_seconds is not None, asyncio.get_running_loop().create_future()
        )
        labels = self._scope, self._name, self.limit
        self._tell_waits(now)
        self._queues.setdefault(flow, deque()).append(waiter)
        metrics.CALLER_WAITS.add(1, *labels)
        metrics.CALLER_WAITING.add(1, *labels)
        self.look()
        try:
            await self._wait(waiter, wait_seconds)
        except BaseException:
            if waiter.passed.done() and waiter.passed.result():
                self.leave(cost)
            raise
        finally:
            metrics.CALLER_WAITING.add(-1, *labels)
            self._forget(flow, waiter)
        return waiter.passed.done() and waiter.passed.result()

    async def _wait(self, waiter: _CallerWaiter, wait_seconds: float | None) -> None:
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
        """End a request; or, with its cost, take its entry back."""
        if self._direction is None:
            self._running[self._own] -= 1
        if cost and self._bucket is not None:
            self._bucket.release(cost)
        if self._queues:
            self.look()

    def charge(self, cost: int) -> None:
        """Charge for bytes that pass without waiting: later ones wait for them. A negative cost gives some back."""
        if self._bucket is not None and cost:
            self._bucket.take(cost)
            if cost < 0 and self._queues:
                self.look()

    def close(self) -> None:
        """End the waits of requests; bodies that have begun go on."""
        self.is_closed = True
        for flow, queue in list(self._queues.items()):
            for waiter in [one for one in queue if one.is_bounded]:
                self._forget(flow, waiter)
                waiter.passed.set_result(False)

    def look(self) -> None:
        now = self._clock.monotonic()
        self._tell_waits(now)
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
                min(max(delay_seconds, 0.001), LOOK_SECONDS) + self._rng.uniform(0, LOOK_SECONDS / 10)
            )
            self.look()
        self._looking = None

    def _take(self, cost: int, now: float) -> bool:
        bucket = self._bucket
        if bucket is not None and bucket.delay_seconds(now) > 0:
            return False
        if self._direction is None:
            self._running[self._own] += 1
            if self._most is not None and self.held(now) > self._most:
                self._running[self._own] -= 1
                return False
        if bucket is not None:
            bucket.take(cost)
        return True

    def _next(self, now: float) -> int | None:
        """Return the flow of this process whose turn it is; None if it is another process's, or none waits."""
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

    def _forget(self, flow: int, waiter: _CallerWaiter) -> None:
        queue = self._queues.get(flow)
        if queue is not None and waiter in queue:
            self._tell_waits(self._clock.monotonic())
            queue.remove(waiter)
            if not queue:
                del self._queues[flow]
                self._since[flow][self._own] = 0.0
                if not self._queues:
                    self._until[self._own] = 0.0

    def _tell_waits(self, now: float) -> None:
        if self._queues and now > self._told_at:
            waited_seconds = (now - self._told_at) * self.waiting
            metrics.CALLER_WAIT_SECONDS.add(waited_seconds, self._scope, self._name, self.limit)
        self._told_at = now

    def _tell(self, now: float) -> None:
        if self._queues:
            for flow, queue in self._queues.items():
                self._since[flow][self._own] = queue[0].since
            self._until[self._own] = now + HOLD_SECONDS


_FIRST_ROWS = 1
"""The beats."""

_GATES_OF_ACCOUNT = 5
"""One for requests; turns and wire, for read and write."""


def _rows_of_gate(flows: int) -> int:
    return ROWS_OF_BUCKET + 3 + 2 * flows


class BytesGates:
    """The two gates of one direction of an account, which share a rate; see the module."""

    def __init__(self, turns: Gate, wire: Gate, rate: float) -> None:
        self.turns, self.wire = turns, wire
        self.piece_bytes = int(min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, rate * PIECE_SECONDS)))
        self._expected: dict[int, float] = {}

    def expected_bytes(self, flow: int) -> int:
        return round(self._expected.get(flow, self.piece_bytes))

    def learn(self, flow: int, count: int) -> None:
        before = self._expected.get(flow, float(count))
        self._expected[flow] = before + (count - before) * _LEARNING


@dataclass(frozen=True, slots=True)
class Account:
    """All gates of one credential or one class. A gate is None if nothing limits it."""

    scope: Scope
    name: str
    requests: Gate | None
    read: BytesGates | None
    write: BytesGates | None

    def bytes_gates(self, direction: Direction) -> BytesGates | None:
        return self.read if direction == "read" else self.write


@dataclass(frozen=True, slots=True)
class CallersPlan:
    """The callers, limited or not, and how long a request waits for room."""

    credentials: Sequence[tuple[str, Limits]]
    classes: Sequence[CallerClass]
    wait_seconds: float


@dataclass(eq=False, slots=True)
class CallerLimits:
    """The accounts of callers with one credential and of one class: first the credential's own, then the class's."""

    accounts: Sequence[tuple[Account, int]]
    """Each with the number of the credential's flow in it."""

    wait_seconds: float
    clock: Clock

    def piece_bytes(self, direction: Direction) -> int | None:
        """Return the bytes of a body that pass at once; None: it is not limited."""
        gates = [account.bytes_gates(direction) for account, _ in self.accounts]
        return min((one.piece_bytes for one in gates if one is not None), default=None)

    def enter_now(self, direction: Direction, expected_bytes: int | None = None) -> Admission | None:
        """Hold a place for a request if all accounts have room now; otherwise return None.

        `expected_bytes` is the length of its body in this direction, if known.
        """
        admission = Admission(self, direction)
        for account, flow in self.accounts:
            gates, cost = account.bytes_gates(direction), 0
            if gates is not None:
                cost = _first_piece(gates, flow, expected_bytes)
                if not gates.turns.passes(cost):
                    admission.undo()
                    return None
            admission.paid.append(cost)
            if account.requests is not None and not account.requests.passes(1):
                admission.undo()
                return None
            admission.entered += 1
        self._tell_running(1)
        return admission

    async def enter(
        self, direction: Direction, expected_bytes: int | None = None, wait_seconds: float | None = None
    ) -> Admission:
        """Wait for a place. Refused when none comes in time, or too many requests wait already."""
        until = self.clock.monotonic() + (self.wait_seconds if wait_seconds is None else wait_seconds)
        admission = Admission(self, direction)
        try:
            for account, flow in self.accounts:
                gates, cost = account.bytes_gates(direction), 0
                if gates is not None:
                    cost = _first_piece(gates, flow, expected_bytes)
                    await self._through(account, gates.turns, flow, cost, until, direction)
                admission.paid.append(cost)
                await self._through(account, account.requests, flow, 1, until, None)
                admission.entered += 1
        except BaseException:
            admission.undo()
            raise
        self._tell_running(1)
        return admission

    async def wait_for_bytes(self, account: Account, gate: Gate, flow: int, direction: Direction, count: int) -> None:
        """Wait until it is the turn of a piece of a body, however long that takes."""
        while not await gate.enter(flow, count, None):
            await self.clock.sleep(LOOK_SECONDS)  # too many pieces are waiting

    async def _through(
        self, account: Account, gate: Gate | None, flow: int, cost: int, until: float, direction: LimitName | None
    ) -> None:
        if gate is None or gate.passes(cost):
            return
        if not await gate.enter(flow, cost, until - self.clock.monotonic()):
            limit = gate.limit
            metrics.CALLER_REFUSED.add(1, account.scope, account.name, limit)
            raise CallerRefused(account.scope, account.name, limit, 1)

    def _tell_running(self, change: int) -> None:
        for account, _ in self.accounts:
            metrics.CALLER_RUNNING.add(change, account.scope, account.name)


def _first_piece(gates: BytesGates, flow: int, expected_bytes: int | None) -> int:
    return gates.expected_bytes(flow) if expected_bytes is None else min(expected_bytes, gates.piece_bytes)


class Admission:
    """The place that a request holds under limits, until it leaves."""

    __slots__ = ("_begun_bytes", "_direction", "_is_settled", "_limits", "entered", "paid")

    def __init__(self, limits: CallerLimits, direction: Direction) -> None:
        self._limits = limits
        self._direction = direction
        self._begun_bytes: dict[Direction, int] = {}
        """Bytes of the first piece of the body in a direction: it may come in several calls."""

        self._is_settled = False
        self.entered = 0
        """The number of accounts that count it."""

        self.paid: list[int] = []
        """The payment to the turns of each account on entry, as far as it is not used yet."""

    def piece_bytes(self, direction: Direction) -> int | None:
        """Return the bytes of a body that pass at once; None: it is not limited."""
        return self._limits.piece_bytes(direction)

    def passes(self, direction: Direction, count: int) -> bool:
        """Let a whole short body pass if nothing holds it up; otherwise take nothing, and return False."""
        if not self._passes_wires(direction, count, None):
            return False
        self._begins_with(direction, count)
        return True

    async def pass_bytes(self, direction: Direction, count: int) -> bool:
        """Wait until a piece of a body, of at least a byte, may pass; return whether it had to wait."""
        has_waited = not self._begins_with(direction, count) and await self._take_turns(direction, count)
        held: Gate | None = None
        while not self._passes_wires(direction, count, held):
            if held is not None:
                held.charge(-count)
            held, has_waited = await self._wait_for_a_wire(direction, count), True
        return has_waited

    def release(self, direction: Direction, count: int) -> None:
        """Give back bytes that have just passed, but were not handed on."""
        for account, _ in self._limits.accounts:
            gates = account.bytes_gates(direction)
            if gates is not None and count:
                gates.turns.charge(-count)
                gates.wire.charge(-count)

    def leave(self) -> None:
        self._limits._tell_running(-1)
        for account, _ in self._limits.accounts:
            if account.requests is not None:
                account.requests.leave(0)
        self._settle()

    def undo(self) -> None:
        """Take back the entries, as some account had no room."""
        for number, (account, _) in enumerate(self._limits.accounts):
            if number < self.entered and account.requests is not None:
                account.requests.leave(1)
            gates = account.bytes_gates(self._direction)
            if number < len(self.paid) and gates is not None:
                gates.turns.charge(-self.paid[number])

    def _begins_with(self, direction: Direction, count: int) -> bool:
        """Tell whether these bytes belong to the first piece, whose turn it is, and charge its cost beyond the entry's.

        Later bytes wait for that.
        """
        begun, piece_bytes = self._begun_bytes.get(direction, 0), self._limits.piece_bytes(direction)
        if piece_bytes is None:
            return True
        if begun and begun + count > piece_bytes:
            if direction == self._direction:
                self._settle()
            return False
        self._begun_bytes[direction] = begun + count
        for number, (account, _) in enumerate(self._limits.accounts):
            gates = account.bytes_gates(direction)
            if gates is None:
                continue
            paid = min(count, self.paid[number]) if direction == self._direction else 0
            if paid:
                self.paid[number] -= paid
            if count > paid:
                gates.turns.charge(count - paid)
        return True

    def _settle(self) -> None:
        if self._is_settled:
            return
        self._is_settled = True
        for number, (account, flow) in enumerate(self._limits.accounts):
            gates = account.bytes_gates(self._direction)
            if gates is not None:
                gates.learn(flow, min(gates.piece_bytes, self._begun_bytes.get(self._direction, 0)))
                gates.turns.charge(-self.paid[number])
                self.paid[number] = 0

    async def _take_turns(self, direction: Direction, count: int) -> bool:
        has_waited = False
        for account, flow in self._limits.accounts:
            gates = account.bytes_gates(direction)
            if gates is not None and not gates.turns.passes(count):
                has_waited = True
                await self._limits.wait_for_bytes(account, gates.turns, flow, direction, count)
        return has_waited

    def _passes_wires(self, direction: Direction, count: int, held: Gate | None) -> bool:
        """Pass the wires of all accounts at the same moment, or none; `held` was just passed.

        Bytes held at one wire while another is waited for would add up, and pass together in a burst.
        """
        passed: list[Gate] = []
        for _, _, wire in self._wires(direction):
            if wire is held:
                continue
            if not (wire.passes(count) if held is None else wire.passes_ahead(count)):
                for one in passed:
                    one.charge(-count)
                return False
            passed.append(wire)
        return True

    async def _wait_for_a_wire(self, direction: Direction, count: int) -> Gate:
        """Wait in turn at the first wire without room."""
        wires = self._wires(direction)
        account, flow, wire = next((one for one in wires if not one[2].has_room()), wires[-1])
        await self._limits.wait_for_bytes(account, wire, flow, direction, count)
        return wire

    def _wires(self, direction: Direction) -> list[tuple[Account, int, Gate]]:
        found = [(account, flow, account.bytes_gates(direction)) for account, flow in self._limits.accounts]
        return [(account, flow, gates.wire) for account, flow, gates in found if gates is not None]


class Callers:
    """Every caller's limits, as one process keeps them with the others that use `cells`; without cells, alone."""

    def __init__(
        self,
        plan: CallersPlan,
        clock: Clock,
        cells: SharedCells | None = None,
        credentials: Numbering | None = None,
        classes: Numbering | None = None,
        generation: int = 0,
    ) -> None:
        """`credentials` and `classes` are their numbers, for the most that there may be: the same in all processes."""
        credentials, classes = credentials or _numbering(plan.credentials), classes or _numbering(plan.classes)
        self._clock = clock
        self._credentials_most = credentials.most
        rows = rows_for(credentials.most, classes.most)
        self._cells = cells or SharedCells.of_one_process(rows, clock.monotonic())
        self._gates: dict[int, Gate] = {}
        """By their first row. They stay when their account is limited no more: requests may have passed them."""

        self._plan: CallersPlan | None = None
        self.apply_settings(plan, credentials, classes, generation)

    def apply_settings(self, plan: CallersPlan, credentials: Numbering, classes: Numbering, generation: int) -> None:
        """Keep to other limits from now on."""
        if plan == self._plan:
            return
        self._plan = plan
        self._wait_seconds = plan.wait_seconds
        self._classes = plan.classes
        self._class_of = _class_of(plan.classes)
        self._flows = {key: credentials.of[key] for key, _ in plan.credentials}
        self._found: dict[tuple[str, str | None], CallerLimits | None] = {}
        self._left = set(self._gates)
        """The first rows of gates that limit nothing any more."""

        self._is_latest = self._cells.is_latest(generation)
        accounts = [
            self._account("credential", key, credentials.of[key], limits)
            for key, limits in plan.credentials
            if limits.any
        ]
        accounts += [
            self._account("class", one.name, classes.of[one.name], one.limits) for one in plan.classes if one.limits.any
        ]
        self._accounts = {(one.scope, one.name): one for one in accounts}
        for row in self._left:
            self._gates[row].apply_settings("credential", "", None, None)

    def _account(self, scope: Scope, name: str, number: int, limits: Limits) -> Account:
        def gate(place: int, rate: float | None, most: int | None, direction: Direction | None) -> Gate:
            flows = FLOWS_MAX if scope == "class" else 1
            row = self._first_row(scope, number) + place * _rows_of_gate(flows)
            self._left.discard(row)
            if row not in self._gates:
                self._gates[row] = Gate(self._cells, row, flows, direction, self._clock)
            self._gates[row].apply_settings(scope, name, rate, most, is_latest=self._is_latest)
            return self._gates[row]

        def of_bytes(place: int, rate: float | None, direction: Direction) -> BytesGates | None:
            if rate is None:
                return None
            return BytesGates(gate(place, rate, None, direction), gate(place + 1, rate, None, direction), rate)

        rate, most = limits.requests_per_second, limits.concurrent_requests
        requests = gate(0, rate, most, None) if rate is not None or most is not None else None
        read = of_bytes(1, limits.read_bytes_per_second, "read")
        write = of_bytes(3, limits.write_bytes_per_second, "write")
        return Account(scope, name, requests, read, write)

    def _first_row(self, scope: Scope, number: int) -> int:
        of_credential = _GATES_OF_ACCOUNT * _rows_of_gate(1)
        if scope == "credential":
            return _FIRST_ROWS + (number - 1) * of_credential
        first = _FIRST_ROWS + self._credentials_most * of_credential
        return first + (number - 1) * _GATES_OF_ACCOUNT * _rows_of_gate(FLOWS_MAX)

    def find(self, credential: str, user_agent: str) -> CallerLimits | None:
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
            made = CallerLimits(accounts, self._wait_seconds, self._clock) if accounts else None
            if credential not in self._flows and credential not in (UNSIGNED, OWN):
                return made
            self._found[key] = made
        return self._found[key]

    async def beat(self) -> None:
        """Tell the other processes that this one runs, until cancelled."""
        beats = self._cells.numbers(0)
        while True:
            beats[self._cells.own] = self._clock.monotonic()
            await self._clock.sleep(BEAT_SECONDS)

    def close(self) -> None:
        for gate in self._gates.values():
            gate.close()


def rows_for(credentials: int, classes: int) -> int:
    """Return the rows of cells for as many."""
    of_credentials, of_classes = credentials * _rows_of_gate(1), classes * _rows_of_gate(FLOWS_MAX)
    return _FIRST_ROWS + _GATES_OF_ACCOUNT * (of_credentials + of_classes)


def _numbering(of: Sequence[tuple[str, Limits]] | Sequence[CallerClass]) -> Numbering:
    names = [one.name if isinstance(one, CallerClass) else one[0] for one in of]
    return Numbering(len(names)).changed(names)


def _class_of(classes: Sequence[CallerClass]) -> Callable[[str], str | None]:
    """Return a function from a User-Agent to the name of its class. It remembers only short ones."""

    def looked_up(user_agent: str) -> str | None:
        words = user_agent.split()
        apps = {word[4:] for word in words if word.startswith("app/")}
        products = {word.partition("/")[0] for word in words}
        for one in classes:
            if (one.app is not None and one.app in apps) or (one.product is not None and one.product in products):
                return one.name
        return next((one.name for one in classes if one.app is None and one.product is None), None)

    remembered = lru_cache(maxsize=_AGENTS_KEPT)(looked_up)

    def found(user_agent: str) -> str | None:
        return (remembered if len(user_agent) <= _AGENT_CHARACTERS_MAX else looked_up)(user_agent)

    return found

"""Each rule has failed for its own reason: what it is about is broken on purpose, and it says so.

What is broken is what stays: the disk, the origin, the clock, what a node answers, `WritebackBuffer`. A rogue does in
the name of the background process what a node must not do.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import pytest

from gateway.core.errors import OriginUnreachable
from gateway.origin.client import OriginRequest, StreamedBody
from gateway.writeback.admin import checkpoint_retention
from gateway.writeback.buffer import WritebackBuffer
from gateway.writeback.flushing.state import Progress
from tests.simulation.clients import LARGE_PART_BYTES, OF_OTHERS, Clients
from tests.simulation.disk import SimulatedDisk
from tests.simulation.invariants import RULES
from tests.simulation.markers import is_marker
from tests.simulation.node import BACKGROUND, Node
from tests.simulation.origins import SENDER, ProcessOrigin, SimulatedOrigin
from tests.simulation.virtual_time import VirtualClock
from tests.simulation.world import Setting, World, play
from tests.support.asgi import Answer
from tests.support.memory_origin.content import BytesContent
from tests.support.memory_origin.response import MemoryResponse
from tests.support.memory_origin.store import StoredObject

Patch = pytest.MonkeyPatch
Send = Callable[[ProcessOrigin, OriginRequest], Coroutine[Any, Any, MemoryResponse]]

WRITES = {"put": 10.0, "pass_time": 2.0}
AWAY = {**WRITES, "trouble": 2.0, "heal": 3.0}
CROWDS = {"crowd": 1.0, "pass_time": 2.0}


# What is broken


def _sends(patch: Patch, send: Callable[[Send, ProcessOrigin, OriginRequest], Coroutine[Any, Any, Any]]) -> None:
    """Have what the background process sends go through this; it is given how it goes in truth."""
    real: Send = ProcessOrigin.send

    async def sent(origin: ProcessOrigin, request: OriginRequest) -> MemoryResponse:
        if origin._process.name != "background":
            return await real(origin, request)
        answer: MemoryResponse = await send(real, origin, request)
        return answer

    patch.setattr(ProcessOrigin, "send", sent)


def _acknowledges(patch: Patch, acknowledge: Callable[[Any, WritebackBuffer, Any], Coroutine[Any, Any, Any]]) -> None:
    real = WritebackBuffer.acknowledge
    patch.setattr(WritebackBuffer, "acknowledge", lambda buffer, pending: acknowledge(real, buffer, pending))


def commits_are_lost(patch: Patch) -> None:
    numbers = count(1)

    async def acknowledge(real: Any, buffer: WritebackBuffer, pending: Any) -> Any:
        return pending if next(numbers) % 5 == 0 else await real(buffer, pending)

    _acknowledges(patch, acknowledge)


def tombstones_are_forgotten(patch: Patch) -> None:
    async def write_tombstone(*_: Any) -> None:
        """As where the origin has nothing of it."""

    patch.setattr(WritebackBuffer, "write_tombstone", write_tombstone)


def syncs_are_left_out(patch: Patch) -> None:
    patch.setattr(SimulatedDisk, "fsync", lambda *_: None)


def all_is_left_out(patch: Patch) -> None:
    patch.setattr(checkpoint_retention, "superseded", lambda saves, _: {one.id for one in saves})


def reads_pass_the_buffer(patch: Patch) -> None:
    patch.setattr(WritebackBuffer, "pending", lambda *_: None)


def nobody_else_is_thought_of(patch: Patch) -> None:
    async def send(real: Send, origin: ProcessOrigin, request: OriginRequest) -> MemoryResponse:
        if request.method == "HEAD" and request.key is not None:
            return MemoryResponse(404, {"content-length": "0"}, with_body=False)
        headers = {name: value for name, value in request.headers.items() if not name.startswith("if-")}
        return await real(origin, replace(request, headers=headers))

    _sends(patch, send)


def all_that_is_there_is_older(patch: Patch) -> None:
    """Than a write that was acknowledged before anybody had asked for what it would overwrite."""
    real = Progress._is_expected
    patch.setattr(Progress, "_is_expected", lambda flush, found: not flush.write.expected.known or real(flush, found))


def others_are_seen_where_nobody_is(patch: Patch) -> None:
    async def send(real: Send, origin: ProcessOrigin, request: OriginRequest) -> MemoryResponse:
        if request.method == "PUT" and any(name.startswith("if-") for name in request.headers):
            body = b"<Error><Code>PreconditionFailed</Code></Error>"
            return MemoryResponse(412, {"content-length": str(len(body))}, BytesContent(body))
        response = await real(origin, request)
        if request.method == "HEAD" and request.key is not None:
            told = {"etag": '"0123"', "last-modified": "Thu, 01 Jan 2032 00:00:00 GMT", "content-length": "4"}
            response = MemoryResponse(200, told, with_body=False)
        return response

    _sends(patch, send)


def markers_go_at_once(patch: Patch) -> None:
    real = Clients.put

    async def put(clients: Clients, bucket: str, key: str, value: bytes, **headers: str) -> bool:
        done = await real(clients, bucket, key, value, **headers)
        if done and is_marker(key):
            token = SENDER.set("background")
            stored = StoredObject(key, BytesContent(value), '"marker"', clients._clock.now())
            clients._origin.inner.buckets[bucket].put(stored)
            SENDER.reset(token)
        return done

    patch.setattr(Clients, "put", put)


def a_key_is_stuck(patch: Patch) -> None:
    async def send(real: Send, origin: ProcessOrigin, request: OriginRequest) -> MemoryResponse:
        if request.key == "k0":
            await asyncio.Event().wait()
        return await real(origin, request)

    _sends(patch, send)


def files_of_others_are_said_to_be_there(patch: Patch) -> None:
    async def send(real: Send, origin: ProcessOrigin, request: OriginRequest) -> MemoryResponse:
        if request.method == "HEAD" and (request.key or "").endswith(OF_OTHERS):
            told = {"content-length": "0", "etag": '"0123"'}  # a node does not believe a 200 without one
            return MemoryResponse(200, told, with_body=False)
        return await real(origin, request)

    _sends(patch, send)


def one_request_at_a_time(patch: Patch) -> None:
    locks: dict[object, asyncio.Lock] = {}

    async def send(real: Send, origin: ProcessOrigin, request: OriginRequest) -> MemoryResponse:
        async with locks.setdefault(origin._process, asyncio.Lock()):
            await asyncio.sleep(1.0)  # so slow that the first crowd shows it
            return await real(origin, request)

    _sends(patch, send)


def small_ones_come_later(patch: Patch) -> None:
    async def send(real: Send, origin: ProcessOrigin, request: OriginRequest) -> MemoryResponse:
        if request.method == "PUT":
            await asyncio.sleep(12.0)
        return await real(origin, request)

    _sends(patch, send)


def acknowledgements_wait(patch: Patch) -> None:
    async def acknowledge(real: Any, buffer: WritebackBuffer, pending: Any) -> Any:
        await asyncio.sleep(2.0)
        return await real(buffer, pending)

    _acknowledges(patch, acknowledge)


def acknowledgements_never_come(patch: Patch) -> None:
    async def acknowledge(*_: Any) -> Any:
        await asyncio.Event().wait()

    _acknowledges(patch, acknowledge)


def acknowledgements_break(patch: Patch) -> None:
    async def acknowledge(*_: Any) -> Any:
        raise ValueError("broken")

    _acknowledges(patch, acknowledge)


def _answers(patch: Patch, answer: Callable[[Node, str, str], Answer | None]) -> None:
    """Have a node answer so, where it does not answer as it does."""
    real = Node.ask

    async def ask(
        node: Node, number: int, method: str, target: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer | None:
        return answer(node, method, target) or await real(node, number, method, target, body, headers)

    patch.setattr(Node, "ask", ask)


def uploads_need_the_bucket(patch: Patch) -> None:
    def answer(node: Node, method: str, target: str) -> Answer | None:
        return Answer(503, {}, b"", complete=True) if node._origin.trouble and target.endswith("?uploads") else None

    _answers(patch, answer)


def deletions_look_at_nothing(patch: Patch) -> None:
    def answer(node: Node, method: str, target: str) -> Answer | None:
        return Answer(204, {}, b"", complete=True) if method == "DELETE" else None

    _answers(patch, answer)


def nodes_break(patch: Patch) -> None:
    def answer(_: Node, method: str, __: str) -> Answer | None:
        if method == "GET":
            raise RuntimeError("broken")
        return None

    _answers(patch, answer)


def etags_are_not_looked_at(patch: Patch) -> None:
    """They are no MD5s, and the node is told what it expects."""
    plain: dict[str, str] = {}
    made, carry = SimulatedOrigin._made, SimulatedOrigin.carry

    def noted(origin: SimulatedOrigin, stored: StoredObject) -> StoredObject:
        plain[stored.key] = stored.etag
        origin.is_opaque = True
        return made(origin, stored)

    async def carried(origin: SimulatedOrigin, request: OriginRequest, sent: Any) -> MemoryResponse:
        response = await carry(origin, request, sent)
        if request.method == "HEAD" and response.status == 200 and request.key in plain:
            response.headers = {**response.headers, "etag": plain[request.key]}
        return response

    patch.setattr(SimulatedOrigin, "_made", noted)
    patch.setattr(SimulatedOrigin, "_told", lambda _, __, response: response)
    patch.setattr(SimulatedOrigin, "carry", carried)


def what_is_heard_is_forgotten(patch: Patch) -> None:
    forgotten: set[tuple[str | None, str | None]] = set()

    async def send(real: Send, origin: ProcessOrigin, request: OriginRequest) -> MemoryResponse:
        response = await real(origin, request)
        place = (request.key, request.headers.get("content-md5"))
        if place[1] is not None and place not in forgotten:
            forgotten.add(place)
            await asyncio.sleep(1.5)
            raise OriginUnreachable("forgotten")
        return response

    _sends(patch, send)


def _has_a_rogue(patch: Patch, work: Callable[[ProcessOrigin], Coroutine[Any, Any, Any]]) -> None:
    """Have every background process do this, too."""
    real = Node.start_background

    async def start(node: Node) -> None:
        await real(node)
        process = node._processes[BACKGROUND]
        await node._as(process, _begun(work(node._origin.of(process))))

    patch.setattr(Node, "start_background", start)


async def _begun(work: Coroutine[Any, Any, Any]) -> None:
    _ROGUES.add(asyncio.create_task(work))


_ROGUES: set[asyncio.Task[Any]] = set()


def _put(bucket: str, key: str, body: bytes) -> OriginRequest:
    async def chunks() -> Any:
        yield body

    md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
    return OriginRequest("PUT", bucket, key, (), {"content-md5": md5}, StreamedBody(chunks(), len(body)))


def everything_is_sent_at_once(patch: Patch) -> None:
    async def work(origin: ProcessOrigin) -> None:
        bodies = [b"%d" % number + bytes(LARGE_PART_BYTES) for number in range(40)]
        await asyncio.gather(*(origin.send(_put("other", f"rogue/{one[:2]!r}", one)) for one in bodies))

    _has_a_rogue(patch, work)


def what_is_gone_comes_late(patch: Patch) -> None:
    real = Clients.delete

    async def delete(clients: Clients, bucket: str, key: str) -> bool:
        done = await real(clients, bucket, key)
        process = clients._node._processes[BACKGROUND]
        if done and process.alive:
            await asyncio.sleep(5.0)
            await clients._origin.of(process).send(_put(bucket, key, b"late"))
        return done

    patch.setattr(Clients, "delete", delete)


def it_never_waits_longer(patch: Patch) -> None:
    """The node's clock runs ten times as fast, and with it all of its pauses are a tenth."""

    class Fast(VirtualClock):
        def now(self) -> float:
            return super().now() + 9 * super().monotonic()

        def monotonic(self) -> float:
            return 10 * super().monotonic()

        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds / 10)

    real = Node.__init__

    def made(node: Node, disk: Any, origin: Any, slots: Any, clock: VirtualClock, dice: Any) -> None:
        real(node, disk, origin, slots, Fast(clock._loop, clock.skew_seconds), dice)

    patch.setattr(Node, "__init__", made)


def nothing_is_told(patch: Patch) -> None:
    real = Node.shown

    async def shown(node: Node) -> Mapping[tuple[str, str], int]:
        return dict.fromkeys(await real(node), 0)

    patch.setattr(Node, "shown", shown)


def files_stay(patch: Patch) -> None:
    patch.setattr(SimulatedDisk, "unlink", lambda *_, **__: None)


def no_day_passes(patch: Patch) -> None:
    real = World.__init__

    def made(world: World, *given: Any) -> None:
        real(world, *given)
        world._jump = lambda seconds: None

    patch.setattr(World, "__init__", made)


# And that it is seen

CONFLICTS: Mapping[str, float] = {"away": 3.0, "delete_conflict": 3.0}

HISTORIES_UNTIL_SEEN = 30
"""A rule that has not failed by then sees nothing: which seed shows it changes with whatever asks the dice for more."""


@dataclass(frozen=True)
class Case:
    """A rule, what is broken, and the kind of history in which that shows."""

    rule: str
    broken: Callable[[Patch], None]
    often: Mapping[str, float] = field(default_factory=lambda: WRITES)
    steps: int = 30
    flush: str = "all"
    consistency: Literal["strict", "ttl"] | None = None
    first: int = 0
    """The seed with which to begin: it showed soon when this was written, and others are tried where it does not."""


CASES = (
    Case("nothing is lost", commits_are_lost),
    Case("nothing is lost", syncs_are_left_out, {**AWAY, "cut_power": 3.0}),
    Case("nothing is lost", tombstones_are_forgotten, {**AWAY, "delete": 5.0}, first=1),
    Case("what is left out is superseded", all_is_left_out, {**AWAY, "save_run": 6.0}, flush="latest", first=12),
    Case("reads see the last write", reads_pass_the_buffer, {**AWAY, "read": 5.0}, first=5),
    Case("others are kept", nobody_else_is_thought_of, {**AWAY, "others_write": 3.0}, first=7),
    Case(
        "others are kept",
        all_that_is_there_is_older,
        {**WRITES, "others_write_pending": 4.0},
        consistency="ttl",
        first=1,
    ),
    Case("conflicts are with others", others_are_seen_where_nobody_is),
    Case("conflicts are decided by people", deletions_look_at_nothing, CONFLICTS, first=10),
    Case("markers come last", markers_go_at_once, {"save_run": 5.0, "save_table": 5.0}),
    Case("manifests are whole", files_of_others_are_said_to_be_there, {"save_shared": 5.0, "pass_time": 2.0}),
    Case("all is flushed", a_key_is_stuck),
    Case("small ones do not wait", small_ones_come_later),
    Case("small ones do not wait", one_request_at_a_time, CROWDS),
    Case("acknowledged soon", acknowledgements_wait),
    Case("writes are taken while the bucket is away", uploads_need_the_bucket, {**AWAY, "upload": 5.0}),
    Case("ETags are the origin's", etags_are_not_looked_at),
    Case("nothing is sent twice", what_is_heard_is_forgotten, CROWDS, steps=5),
    Case("what is gone is not sent", what_is_gone_comes_late, {**WRITES, "delete": 5.0}),
    Case("a kill costs little", everything_is_sent_at_once, {**WRITES, "kill_background": 3.0}),
    Case("tries grow rare", it_never_waits_longer, {"denied": 1.0, "pass_time": 1.0}, steps=10),
    Case("parts are counted while they go", nothing_is_told, CROWDS, steps=10),
    Case("nothing is left", files_stay),
    Case("uploads expire", no_day_passes, {"abandon": 1.0}, steps=5),
    Case("requests end", acknowledgements_never_come),
    Case("requests do not fail inside", acknowledgements_break),
    Case("clients", nodes_break, {**WRITES, "read": 5.0}),
)


def test_every_rule_has_a_case() -> None:
    assert {one.rule for one in CASES} == set(RULES)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=[f"{one.rule}: {one.broken.__name__}" for one in CASES])
def test_what_is_broken_is_seen(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where nothing is broken, nothing is."""
    like = Setting(case.first, "aws", case.steps, [case.rule], 0.0, often=case.often, flush=case.flush)
    like = replace(like, consistency=case.consistency)
    assert not play(like).judge.violations
    case.broken(monkeypatch)
    tried = [replace(like, seed=seed) for seed in range(case.first, case.first + HISTORIES_UNTIL_SEEN)]
    assert any(case.rule in (one.rule for one in play(setting).judge.violations) for setting in tried)

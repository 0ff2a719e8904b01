"""Clause 14 of docs/semantics.md: bytes from a replica that lags, lies or dies, truth from the source."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.model import ObjectKey
from gateway.origin.client import OriginRequest
from gateway.origin.replicas import LACKING_SECONDS, PAUSE_SECONDS, Replica, ReplicaOrigin
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support.asgi import Answer, call
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin
from tests.support.memory_origin.faults import AlterHeaders, CutBody, Effect, Fault, Unreachable, on
from tests.support.memory_origin.faults import Answer as Refusal
from tests.support.slots import Slot

TTL_SECONDS, NEGATIVE_SECONDS = 20.0, 5.0
PREFIX = Prefix.parse("s3://bucket/")
TTL = Slot("t", PREFIX, "read-write", "ttl", TTL_SECONDS, NEGATIVE_SECONDS)
STRICT = Slot("s", PREFIX)
IMMUTABLE = Slot("i", PREFIX, "read-only", "immutable")
KEY = ObjectKey("bucket", "k")
SIZE_BYTES = 3 * BLOCK_SIZE_BYTES - 1000


def content(number: int) -> bytes:
    """The bytes of the number-th version: no part of them is any other's."""
    return bytes([number]) * (SIZE_BYTES + number)


@dataclass
class Region:
    gateway: GatewayApp
    source: MemoryOrigin
    replica: MemoryOrigin
    clock: ManualClock

    def source_bytes(self) -> int:
        """Requests for bytes that the source has got."""
        return self.source.count(Operation.GET_OBJECT)

    def replicate(self, data: bytes | None = None) -> None:
        body = self.source.data("bucket", "k") if data is None else data
        self.replica.put("copy", "k", body)

    async def get(self, headers: dict[str, str] | None = None, method: str = "GET", key: str = "k") -> Answer:
        asking = asyncio.create_task(call(self.gateway.app, method, f"/bucket/{key}", headers, sign=False))
        while not (await asyncio.wait([asking], timeout=0.02))[0]:
            if any(fault.times != 0 for fault in self.replica.faults):
                await self.clock.advance(0.1)  # the pause before the rest of a body is asked for
        answer = asking.result()
        await self.gateway.catalog.settle()
        await self.gateway.blocks.settle()
        return answer

    async def forget_bytes(self) -> None:
        await self.gateway.blocks.invalidate(KEY)


@asynccontextmanager
async def region(directory: Path, slot: Slot) -> AsyncIterator[Region]:
    clock = ManualClock()
    source, copy = MemoryOrigin(clock), MemoryOrigin(clock)
    source.create_bucket("bucket")
    copy.create_bucket("copy")
    origin = ReplicaOrigin(source, [Replica(copy, "copy", clock)], lambda name: slot.prefer == "source")
    async with gateway_app(
        directory,
        origin=source,
        through=origin,
        slots=[slot],
        clock=clock,
        allow_unsigned=True,
        reads_near=lambda key, name: origin.reads_near(key.key, name),
    ) as gateway:
        yield Region(gateway, source, copy, clock)


@pytest.mark.parametrize("slot", [TTL, STRICT, IMMUTABLE], ids=lambda slot: slot.name)
@pytest.mark.parametrize("headers", [{}, {"x-amz-checksum-mode": "ENABLED"}])
async def test_14_1_bytes_come_from_the_replica_and_facts_from_the_source(
    tmp_path: Path, slot: Slot, headers: dict[str, str]
) -> None:
    """14.1 The source is asked for no byte; what it says of the object is what the client reads."""
    async with region(tmp_path, slot) as here:
        here.source.put("bucket", "k", content(1), {"x-amz-meta-of": "source", "content-type": "a/source"})
        here.replica.put("copy", "k", content(1), {"x-amz-meta-of": "replica", "content-type": "a/replica"})
        for _ in range(2):
            answer = await here.get(headers)
            assert (answer.status, answer.body, answer.complete) == (200, content(1), True)
            assert (answer.headers["x-amz-meta-of"], answer.headers["content-type"]) == ("source", "a/source")
        assert here.source_bytes() == 0
        assert here.replica.count(Operation.GET_OBJECT) == 3
        assert {one.bucket for one in here.replica.calls} == {"copy"}


async def test_14_1_only_reads_of_a_named_version_ask_the_replica(tmp_path: Path) -> None:
    """14.1 LIST, HEAD, writes, deletions and what passes the cache are the source's alone."""
    async with region(tmp_path, STRICT) as here:
        here.source.put("bucket", "k", content(1))
        here.replicate()
        await here.get(method="HEAD")
        await here.get({"Range": "bytes=0-1,4-5"})
        await call(here.gateway.app, "GET", "/bucket?list-type=2", sign=False)
        await call(here.gateway.app, "GET", "/bucket/k?tagging", sign=False)
        await call(here.gateway.app, "PUT", "/bucket/other", body=b"x", sign=False)
        await call(here.gateway.app, "DELETE", "/bucket/k", sign=False)
        assert (await here.get()).status == 404
        assert here.replica.calls == []


async def test_14_1_a_slot_may_prefer_the_source(tmp_path: Path) -> None:
    async with region(tmp_path, Slot("s", PREFIX, prefer="source")) as here:
        here.source.put("bucket", "k", content(1))
        here.replicate()
        assert (await here.get()).body == content(1)
        assert here.replica.calls == []


FAULTS: dict[str, Effect] = {
    "forbidden": Refusal(403, "AccessDenied"),
    "busy": Refusal(503, "SlowDown"),
    "broken": Refusal(500),
    "away": Unreachable(),
    "other ETag": AlterHeaders({"etag": '"0123456789abcdef-3"'}),
    "other range": AlterHeaders({"content-range": "bytes 1-2/3"}),
    "cut": CutBody(BLOCK_SIZE_BYTES // 3),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_14_2_no_fault_of_a_replica_fails_a_read(tmp_path: Path, name: str) -> None:
    """14.2 The source gives what the replica did not; a body that breaks off goes on where it stopped."""
    async with region(tmp_path, TTL) as here:
        here.source.put("bucket", "k", content(1))
        here.replicate()
        here.replica.inject(on(Operation.GET_OBJECT), FAULTS[name], times=None)
        answer = await here.get()
        assert (answer.status, answer.body, answer.complete) == (200, content(1), True)
        assert 0 < here.replica.count(Operation.GET_OBJECT) <= 3
        asked = [one.headers["range"] for one in here.source.calls if one.operation is Operation.GET_OBJECT]
        if name == "cut":
            assert f"bytes={BLOCK_SIZE_BYTES // 3}-{BLOCK_SIZE_BYTES - 1}" in asked
        assert len(asked) == 3


@pytest.mark.slow
async def test_14_2_what_a_replica_lacks_it_is_asked_for_ever_more_rarely(tmp_path: Path) -> None:
    """14.2 It is asked again after 10, 20, 40 seconds; at once for another version; and the source meanwhile."""
    async with region(tmp_path, TTL) as here:
        here.source.put("bucket", "k", content(1))
        asked = []
        for second in range(100):
            await here.forget_bytes()
            before = here.replica.count()
            assert (await here.get({"Range": "bytes=5-9"})).body == content(1)[5:10]
            asked += [second] if here.replica.count() > before else []
            await here.clock.advance(1.0)
        assert asked == [0, LACKING_SECONDS, 3 * LACKING_SECONDS, 7 * LACKING_SECONDS]
        here.source.put("bucket", "k", content(2))
        here.replicate()
        await here.clock.advance(TTL_SECONDS)
        await here.forget_bytes()
        before = here.replica.count()
        for _ in range(2):  # the first read finds that there is a new version
            assert (await here.get()).body == content(2)
            await here.forget_bytes()
        assert here.replica.count() > before


@pytest.mark.slow
async def test_14_2_a_dead_replica_is_left_alone(tmp_path: Path) -> None:
    async with region(tmp_path, TTL) as here:
        for number in range(40):
            here.source.put("bucket", f"{number}", b"x" * 100)
            here.replica.put("copy", f"{number}", b"x" * 100)
        dead = here.replica.inject(on(Operation.GET_OBJECT), Unreachable(), times=None)
        for number in range(20):
            assert (await here.get(key=f"{number}")).body == b"x" * 100
        assert here.replica.count() == 1
        assert here.source.count(Operation.HEAD_OBJECT) == 1  # the others are asked for version and bytes at once
        dead.times = 0
        await here.clock.advance(PAUSE_SECONDS)
        before = here.source_bytes()
        for number in range(20, 40):
            assert (await here.get(key=f"{number}")).body == b"x" * 100
        assert (here.replica.count(), here.source_bytes()) == (21, before)


async def test_14_2_half_behind_the_missing_bytes_alone_come_from_the_source(tmp_path: Path) -> None:
    async with region(tmp_path, IMMUTABLE) as here:
        for number in range(20):
            here.source.put("bucket", f"{number}", content(number))
            if number % 2:
                here.replica.put("copy", f"{number}", content(number))
        for number in range(20):
            assert (await here.get(key=f"{number}")).body == content(number)
        asked = {one.key for one in here.source.calls if one.operation is Operation.GET_OBJECT}
        assert asked == {f"{number}" for number in range(0, 20, 2)}


async def test_14_1_a_replica_is_asked_alone_if_a_check_names_it(tmp_path: Path) -> None:
    async with region(tmp_path, TTL) as here:
        here.replica.put("copy", "there", b"x")
        origin = here.gateway.app.services.origin
        async with await origin.send(OriginRequest("HEAD", "bucket", "there", replica=0)) as response:
            assert response.status == 200
        assert here.source.calls == []


STEPS = st.lists(
    st.one_of(
        st.sampled_from(["put", "delete", "own put", "own delete", "evict", "heal", *["get"] * 4, "head"]),
        st.sampled_from(["replicate", "replicate", "replicate an old one", "replicate a deletion"]),
        st.sampled_from(sorted(FAULTS)),
        st.floats(0.1, 30.0),
    ),
    min_size=10,
    max_size=50,
)


@dataclass
class Model:
    """Every version that the source had since the last own write, and since when; None: no object."""

    states: list[tuple[float, int | None]] = field(default_factory=lambda: [(0.0, None)])
    versions: list[int] = field(default_factory=list)

    def change(self, now: float, *, own: bool, absent: bool) -> int:
        number = len(self.versions) + 1
        self.versions.append(number)
        if own:
            self.states = []
        self.states.append((now, None if absent else number))
        return number

    def allowed(self, now: float, slot: Slot) -> set[int | None]:
        found = {self.states[-1][1]}
        if slot.consistency == "ttl":
            for (_, state), (ended, _) in zip(self.states, self.states[1:], strict=False):
                if now - ended < (NEGATIVE_SECONDS if state is None else TTL_SECONDS):
                    found.add(state)
        return found


async def play(here: Region, slot: Slot, steps: list[str | float]) -> None:
    model, faults = Model(), list[Fault]()
    for step in steps:
        if isinstance(step, float):
            await here.clock.advance(step)
        elif step in ("get", "head"):
            answer = await here.get(method=step.upper())
            assert answer.status in (200, 404)
            seen = int(answer.headers["content-length"]) - SIZE_BYTES if answer.status == 200 else None
            assert seen in model.allowed(here.clock.now(), slot)
            if step == "get" and seen is not None:
                assert answer.complete
                assert answer.body == content(seen)
        elif step == "evict":
            await here.forget_bytes()
        elif step == "heal":
            for fault in faults:
                fault.times = 0
        elif step in FAULTS:
            faults.append(here.replica.inject(on(Operation.GET_OBJECT), FAULTS[step], times=None))
        elif step.startswith("replicate"):
            replicate(here, model, step)
        else:
            await change(here, model, step)


def replicate(here: Region, model: Model, step: str) -> None:
    """In any order: the newest version, the one before it after that, or that there is none."""
    if step == "replicate a deletion":
        here.replica.buckets["copy"].objects.pop("k", None)
    elif model.versions:
        here.replicate(content(model.versions[-1 if step == "replicate" else -2 if len(model.versions) > 1 else -1]))


async def change(here: Region, model: Model, step: str) -> None:
    own, absent = step.startswith("own"), step.endswith("delete")
    number = model.change(here.clock.now(), own=own, absent=absent)
    body, method = b"" if absent else content(number), "DELETE" if absent else "PUT"
    if own:
        assert (await call(here.gateway.app, method, "/bucket/k", body=body, sign=False)).status in (200, 204)
    else:
        async with await here.source.send(OriginRequest(method, "bucket", "k", body=body)) as answer:
            assert answer.status in (200, 204)


@pytest.mark.slow
@pytest.mark.parametrize("slot", [STRICT, TTL])
@settings(max_examples=12, deadline=None)
@given(STEPS)
def test_14_1_no_lag_of_a_replica_changes_an_answer(slot: Slot, steps: list[str | float]) -> None:
    """14.1, 14.2 Whatever the lag, overwrites, deletions, order of replication and faults: each answer is whole, and
    one version that the source had within the slot's bound."""

    async def run(directory: Path) -> None:
        async with region(directory, slot) as here:
            await play(here, slot, steps)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))

"""Clauses 2 and 3 of docs/semantics.md against a model: every kind of read in every kind of slot, random histories.

Whatever is read must have been the truth at an instant that the slot's bound allows. FOREBAY_STALENESS_EXAMPLES
lengthens a run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.edge.asgi import S3App
from gateway.metadata.catalog import Catalog
from gateway.operations.visibility import OriginEvents
from gateway.origin.client import OriginRequest, OriginResponse
from gateway.policy.slots import Prefix
from gateway.s3.events import ObjectEvent
from tests.origin.origins import xml
from tests.support.asgi import Answer, call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.memory_origin import MemoryOrigin
from tests.support.slots import Slot

EXAMPLES = int(os.environ.get("FOREBAY_STALENESS_EXAMPLES", "15"))

TTL_SECONDS, SHORT_SECONDS, NEGATIVE_SECONDS = 20.0, 7.0, 5.0
SLOTS = [
    Slot("ttl", Prefix.parse("s3://bucket/"), "read-write", "ttl", TTL_SECONDS, NEGATIVE_SECONDS),
    Slot("short", Prefix.parse("s3://bucket/q/"), "read-write", "ttl", SHORT_SECONDS),
    Slot("immutable", Prefix.parse("s3://bucket/i/"), "read-write", "immutable", 60.0, NEGATIVE_SECONDS),
    Slot("strict", Prefix.parse("s3://strict/")),
]
KEYS = ["bucket/a", "bucket/d/b", "bucket/i/a", "bucket/i/d/b", "bucket/q/a", "strict/a"]
QUERIES = [
    "bucket?list-type=2",
    "bucket?list-type=2&max-keys=1",
    "bucket?list-type=2&prefix=i/",
    "bucket?list-type=2&prefix=i/&delimiter=/&fetch-owner=true",
    "bucket?list-type=2&prefix=q/&encoding-type=url",
    "bucket?prefix=d&max-keys=2",
    "bucket?delimiter=/",
    "bucket?list-type=2&start-after=d/b&max-keys=2",
    "strict?list-type=2",
]

KEY = st.sampled_from(KEYS)
READ = st.tuples(st.sampled_from(["GET", "HEAD", "range"]), KEY)
LIST = st.tuples(st.just("list"), st.sampled_from(QUERIES))
LATE = st.one_of(st.tuples(st.just("late HEAD"), KEY), st.tuples(st.just("late list"), st.sampled_from(QUERIES)))
OUTSIDE = st.tuples(st.sampled_from(["put", "put", "copy", "delete"]), KEY)
TOLD = st.tuples(st.sampled_from(["told put", "told copy", "told delete"]), KEY)
"""An outside write and its event."""
OWN = st.tuples(st.sampled_from(["own put", "own delete", "event"]), KEY)
PAUSE = st.sampled_from([0.4, 4.0, 6.5, 8.0, 19.5, 21.0, 61.0, 100.0])
CHANGE = st.sampled_from(["put", "copy", "delete", "own put", "told copy", "HEAD"])
LISTED = st.tuples(st.just("listed"), KEY, CHANGE, st.sampled_from([0.2, 61.0]))
"""A change behind a HEAD that came so long after a write; the TTL over, a listing, and what is remembered after it."""

STEPS = st.lists(
    st.one_of(READ, READ, LIST, LISTED, OUTSIDE, PAUSE, LATE, TOLD, OWN, st.just("arrive")), min_size=8, max_size=40
)

State = tuple[int, int] | None
"""An object's label, which is new with each write, and its size; None is absence."""


@dataclass
class Past:
    """Every state a key had since the last own write or event, and since when."""

    states: list[tuple[float, State]] = field(default_factory=lambda: [(0.0, None)])

    @property
    def present(self) -> State:
        return self.states[-1][1]

    def change(self, now: float, state: State) -> None:
        self.states.append((now, state))

    def forget(self) -> None:
        """From now on only the present may be told."""
        del self.states[:-1]

    def allowed(self, now: float, present_seconds: float, absent_seconds: float) -> set[State]:
        """What may be told, where presence is believed for so long, and absence."""
        found = {self.present}
        for (_, state), (ended, _) in zip(self.states, self.states[1:], strict=False):
            if now - ended < (absent_seconds if state is None else present_seconds):
                found.add(state)
        return found


def object_bounds(key: str) -> tuple[float, float]:
    """How long presence and absence of a key are believed by GET and HEAD."""
    if key.startswith("strict/"):
        return 0.0, 0.0
    if key.startswith("bucket/q/"):
        return SHORT_SECONDS, 0.0
    return (math.inf if key.startswith("bucket/i/") else TTL_SECONDS), NEGATIVE_SECONDS


def listing_bound(query: str) -> float:
    """How long a listing is believed: as long as all slots under its prefix allow."""
    if query.startswith("strict"):
        return 0.0
    if "prefix=i/" in query:
        return math.inf
    return TTL_SECONDS if "prefix=d" in query else SHORT_SECONDS


class Held:
    """The origin as the second worker has it: its answers wait on their way, while it is asked to hold them."""

    def __init__(self, origin: MemoryOrigin) -> None:
        self._origin = origin
        self.gate: asyncio.Event | None = None

    async def send(self, request: OriginRequest) -> OriginResponse:
        response = await self._origin.send(request)
        if self.gate is not None:
            await self.gate.wait()
        return response

    async def aclose(self) -> None:
        return


class History:
    """Two workers over one directory, and what was true of each key."""

    def __init__(self, gateway: GatewayApp, clock: ManualClock) -> None:
        self.gateway, self.clock = gateway, clock
        self.past = {key: Past() for key in KEYS}
        self.labels = 0
        self.held = Held(gateway.origin)
        self.second = Catalog(self.held, gateway.catalog._opened, clock)
        services = dataclasses.replace(gateway.app.services, catalog=self.second, origin=self.held)
        self.late_app: S3App = dataclasses.replace(gateway.app, services=services)
        self.late: list[asyncio.Task[Answer]] = []
        self.events = OriginEvents(gateway.catalog, gateway.blocks, services.slots)

    async def play(self, steps: list[Any]) -> None:
        for step in steps:
            if isinstance(step, float):
                await self.clock.advance(step)
            elif step == "arrive":
                await self.arrive()
            else:
                await self.step(*step)
        await self.arrive()
        for key in KEYS:
            await self.read("GET", key)
        for query in QUERIES:
            await self.list(query)

    async def step(self, what: str, on: str, *more: Any) -> None:
        if what == "listed":
            await self.change_and_list(on, *more)
        elif what == "list":
            await self.list(on)
        elif what.startswith("late"):
            await self.read_late("HEAD" if what == "late HEAD" else "GET", f"/{on}")
        elif what in ("GET", "HEAD", "range"):
            await self.read(what, on)
        elif what.startswith("own"):
            await self.write_own(what == "own put", on)
        else:
            if what != "event":
                await self.write_outside(what.removeprefix("told "), on)
            if what == "event" or what.startswith("told"):
                await self.tell(on)

    async def change_and_list(self, key: str, change: str, pause: float) -> None:
        await self.write_outside("put", key)
        await self.clock.advance(pause)
        await self.read("HEAD", key)
        await self.step(change, key)
        await self.clock.advance(61.0)
        for query in QUERIES:
            await self.list(query)
        await self.read("HEAD", key)
        await self.read("GET", key)

    # --- reading ----------------------------------------------------------------------------------------------------

    async def read(self, how: str, key: str) -> None:
        headers = {"range": "bytes=0-0"} if how == "range" else {}
        answer = await call(self.gateway.app, "HEAD" if how == "HEAD" else "GET", f"/{key}", headers, sign=False)
        await self.settle()
        state = seen(answer)
        allowed = self.past[key].allowed(self.clock.now(), *object_bounds(key))
        assert state in allowed, f"{how} of {key} gives {state}, and may give {allowed}"
        if state is not None and how != "HEAD":
            assert answer.body == content(state[1])[: 1 if how == "range" else None]

    async def list(self, query: str) -> None:
        """All pages."""
        found: dict[str, int] = {}
        place = ""
        while True:
            answer = await call(self.gateway.app, "GET", f"/{query}{place}", sign=False)
            assert answer.status == 200, answer.body
            root = xml(answer.body)
            page = dict(entries(query, root))
            found |= page
            token, marker = root.findtext("NextContinuationToken"), root.findtext("NextMarker")
            if root.findtext("IsTruncated") != "true":
                break
            place = f"&continuation-token={token}" if token else f"&marker={marker or list(page)[-1].split('/', 1)[1]}"
        await self.settle()
        self.check_listed(query, found)

    def check_listed(self, query: str, found: dict[str, int]) -> None:
        bound = listing_bound(query)
        for key in KEYS:
            if not is_asked(query, key):
                continue
            allowed = self.past[key].allowed(self.clock.now(), bound, bound)
            sizes = {None if state is None else state[1] for state in allowed}
            assert found.get(key) in sizes, f"{query} has {key} as {found.get(key)}, and may as {sizes}"

    async def read_late(self, method: str, target: str) -> None:
        """Asked for now, answered later: what it says is old by then, and must not be taken for new."""
        if self.held.gate is None:
            self.held.gate = asyncio.Event()
        self.late.append(asyncio.create_task(call(self.late_app, method, target, sign=False)))
        for _ in range(5):
            await asyncio.sleep(0)

    async def arrive(self) -> None:
        if self.held.gate is not None:
            self.held.gate.set()
            self.held.gate = None
        for answer in await asyncio.gather(*self.late):
            assert answer.status in (200, 404)
        self.late.clear()
        await self.settle()

    # --- writing ----------------------------------------------------------------------------------------------------

    async def write_own(self, is_put: bool, key: str) -> None:
        state = self.next_state() if is_put else None
        headers = {"x-amz-meta-label": str(state[0])} if state is not None else {}
        body = content(state[1]) if state is not None else b""
        answer = await call(self.gateway.app, "PUT" if is_put else "DELETE", f"/{key}", headers, body, sign=False)
        assert answer.status in (200, 204)
        self.past[key].change(self.clock.now(), state)
        self.past[key].forget()

    async def write_outside(self, how: str, key: str) -> None:
        """`copy` is in place: the bytes stay, and with them ETag and size, but not the metadata."""
        past = self.past[key]
        state = None if how == "delete" else self.next_state()
        if how == "copy" and state is not None and past.present is not None:
            state = state[0], past.present[1]
        bucket, _, name = key.partition("/")
        if state is None:
            async with await self.gateway.origin.send(OriginRequest("DELETE", bucket, name)) as response:
                assert response.status == 204
        else:
            self.gateway.origin.put(bucket, name, content(state[1]), {"x-amz-meta-label": str(state[0])})
        past.change(self.clock.now(), state)

    async def tell(self, key: str) -> None:
        bucket, _, name = key.partition("/")
        assert await self.events.apply([ObjectEvent("here", "ObjectCreated:Put", bucket, name, None)]) == [None]
        self.past[key].forget()

    def next_state(self) -> tuple[int, int]:
        self.labels += 1
        return self.labels, self.labels

    async def settle(self) -> None:
        await self.gateway.catalog.settle()
        await self.second.settle()
        await self.gateway.blocks.settle()

    async def close(self) -> None:
        await self.arrive()
        await self.second.listing.close()


def content(size: int) -> bytes:
    return bytes([size % 251]) * size


def seen(answer: Answer) -> State:
    assert answer.status in (200, 206, 404), answer.body
    if answer.status == 404:
        return None
    total = answer.headers.get("content-range", "").rpartition("/")[2] or answer.headers["content-length"]
    return int(answer.headers["x-amz-meta-label"]), int(total)


def entries(query: str, root: Any) -> Iterator[tuple[str, int]]:
    bucket = query.partition("?")[0]
    for node in root.iter("Contents"):
        yield f"{bucket}/{node.findtext('Key')}", int(node.findtext("Size"))


def is_asked(query: str, key: str) -> bool:
    """Whether a listing has `key` itself, if there is one."""
    bucket, _, name = key.partition("/")
    fields = dict(part.split("=") for part in query.partition("?")[2].split("&") if part)
    prefix = fields.get("prefix", "")
    if bucket != query.partition("?")[0] or not name.startswith(prefix) or name <= fields.get("start-after", ""):
        return False
    return "delimiter" not in fields or fields["delimiter"] not in name[len(prefix) :]


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(STEPS)
@example([("listed", "bucket/a", "copy", 0.2)])
@example([("listed", "bucket/a", "copy", 61.0)])
@example([("listed", "bucket/a", "HEAD", 61.0)])
@example([("listed", "bucket/i/a", "told copy", 61.0)])
def test_3_no_read_is_older_than_its_slot_allows(steps: list[Any]) -> None:
    """2.1, 2.3, 3.1 to 3.4, 3.9, 3.11, 3.12 Own writes and events at once, others' writes within the bound, always."""

    async def run(directory: Path) -> None:
        clock = ManualClock()
        origin = MemoryOrigin(clock)
        for bucket in ("bucket", "strict"):
            origin.create_bucket(bucket)
        async with gateway_app(directory, origin=origin, slots=SLOTS, clock=clock, allow_unsigned=True) as gateway:
            history = History(gateway, clock)
            try:
                await history.play(steps)
            finally:
                await history.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))

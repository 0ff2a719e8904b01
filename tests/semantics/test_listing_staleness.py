"""Clauses 2.1 to 2.3 and 3.9 of docs/semantics.md against a model, over random histories of two workers."""

from __future__ import annotations

import asyncio
import dataclasses
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
from gateway.origin.client import OriginRequest, OriginResponse
from gateway.policy.slots import Prefix
from tests.origin.origins import xml
from tests.support.asgi import call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.slots import Slot

EXAMPLES = int(os.environ.get("FOREBAY_LISTING_EXAMPLES", "20"))
TTL_SECONDS = 20.0
SLOT = Slot("t", Prefix.parse("s3://bucket/"), "read-write", "ttl", TTL_SECONDS)
KEYS = ["a", "d/1", "d/2", "d/e/1", "z"]
PREFIXES = ["", "d/", "d/e", "z"]

WRITE = st.tuples(st.sampled_from(["own", "own", "outside"]), st.sampled_from(["PUT", "DELETE"]), st.sampled_from(KEYS))
LIST = st.tuples(
    st.sampled_from(["list", "list", "list late"]), st.integers(0, 1), st.sampled_from(PREFIXES), st.integers(1, 4)
)
PAUSE = st.sampled_from([1.0, 10.0, 19.0, 21.0, 29.0])
OUTLIVED = st.tuples(st.just("outlived"), st.sampled_from(["PUT", "DELETE"]), st.sampled_from(KEYS), PAUSE)
"""An outside write right behind a listing, and a listing when its TTL is nearly over, or just."""

STEPS = st.lists(st.one_of(WRITE, LIST, PAUSE, OUTLIVED, st.just("arrive")), min_size=5, max_size=30)


@dataclass
class Key:
    """Every state it had since the last own write, and since when. The state is a size; None is absence."""

    states: list[tuple[float, int | None]] = field(default_factory=lambda: [(0.0, None)])

    def change(self, now: float, state: int | None, *, own: bool) -> None:
        if own:
            self.states = []
        self.states.append((now, state))

    def allowed(self, now: float) -> set[int | None]:
        """What a listing may say: the present, and whatever was so within the bound."""
        found = {self.states[-1][1]}
        for (_, state), (ended, _) in zip(self.states, self.states[1:], strict=False):
            if now - ended < TTL_SECONDS:
                found.add(state)
        return found


class Held:
    """An origin whose answers to LIST wait on their way, while it is asked to hold them."""

    def __init__(self, gateway: GatewayApp) -> None:
        self._gateway = gateway
        self.gate: asyncio.Event | None = None

    async def send(self, request: OriginRequest) -> OriginResponse:
        response = await self._gateway.origin.send(request)
        if self.gate is not None:
            await self.gate.wait()
        return response

    async def aclose(self) -> None:
        return


class History:
    """Two workers, one bucket, and what is known of it."""

    def __init__(self, gateway: GatewayApp, clock: ManualClock) -> None:
        self.clock = clock
        self.gateway = gateway
        self.keys = {key: Key() for key in KEYS}
        self.sizes = 0
        self.origin = Held(gateway)
        self.catalog = Catalog(gateway.origin, gateway.catalog._opened, clock)
        late = dataclasses.replace(gateway.app.services, catalog=self.catalog, origin=self.origin)
        self.workers = [gateway.app, dataclasses.replace(gateway.app, services=late)]
        self.late: list[asyncio.Task[Any]] = []

    async def play(self, steps: list[Any]) -> None:
        for step in steps:
            if isinstance(step, float):
                await self.clock.advance(step)
            elif step == "arrive":
                await self.arrive()
            elif step[0] == "outlived":
                await self.list(self.workers[0], "", 2)
                await self.write("outside", step[1], step[2])
                await self.clock.advance(step[3])
                await self.list(self.workers[0], step[2], 2)
            elif step[0] == "list":
                await self.list(self.workers[step[1]], step[2], step[3])
            elif step[0] == "list late":
                await self.list_late(step[2], step[3])
            else:
                await self.write(*step)
        await self.arrive()
        await self.list(self.workers[0], "", 1000)

    async def write(self, by: str, method: str, key: str) -> None:
        self.sizes += 1
        body = b"" if method == "DELETE" else bytes(self.sizes)
        state = None if method == "DELETE" else self.sizes
        self.keys[key].change(self.clock.now(), state, own=by == "own")
        if by == "own":
            assert (await call(self.gateway.app, method, f"/bucket/{key}", body=body, sign=False)).status in (200, 204)
        else:
            async with await self.gateway.origin.send(OriginRequest(method, "bucket", key, body=body)) as answer:
                assert answer.status in (200, 204)

    async def list(self, app: S3App, prefix: str, limit: int) -> None:
        """All pages; nothing in them may be older than allowed."""
        if app is self.workers[1]:
            await self.arrive()
        seen = dict[str, int]()
        async for size_by_key in pages(app, prefix, limit):
            seen |= size_by_key
        for key in KEYS:
            if key.startswith(prefix):
                allowed = self.keys[key].allowed(self.clock.now())
                assert seen.get(key) in allowed, f"{key} is listed as {seen.get(key)}, and may be {allowed}"
        await self.settle()

    async def list_late(self, prefix: str, limit: int) -> None:
        """A page that is asked for now and comes later: what it says is old by then."""
        if self.origin.gate is None:
            self.origin.gate = asyncio.Event()
        listing = call(self.workers[1], "GET", f"/bucket?list-type=2&prefix={prefix}&max-keys={limit}", sign=False)
        self.late.append(asyncio.create_task(listing))
        for _ in range(5):
            await asyncio.sleep(0)

    async def arrive(self) -> None:
        if self.origin.gate is not None:
            self.origin.gate.set()
            self.origin.gate = None
        for listing in self.late:
            assert (await listing).status == 200
        self.late.clear()
        await self.settle()

    async def settle(self) -> None:
        await self.gateway.catalog.settle()
        await self.catalog.settle()

    async def close(self) -> None:
        await self.catalog.settle()
        await self.catalog.listing.close()


async def pages(app: S3App, prefix: str, limit: int) -> Any:
    token = ""
    while True:
        target = f"/bucket?list-type=2&prefix={prefix}&max-keys={limit}"
        answer = await call(app, "GET", f"{target}&continuation-token={token}" if token else target, sign=False)
        assert answer.status == 200, answer.body
        root = xml(answer.body)
        yield dict(listed(root))
        token = root.findtext("NextContinuationToken") or ""
        if not token:
            return


def listed(root: Any) -> Iterator[tuple[str, int]]:
    for node in root.iter("Contents"):
        yield node.findtext("Key"), int(node.findtext("Size"))


LATE_TRUTH = [
    ("outlived", "PUT", "a", 1.0),
    ("own", "PUT", "d/e/1"),
    ("list late", 0, "", 1),
    ("outlived", "PUT", "d/e/1", 21.0),
    ("list", 0, "", 1),
]
"""What a worker asked about a key that was written comes when the key has been listed anew."""


@pytest.mark.slow
@settings(max_examples=EXAMPLES, deadline=None)
@given(STEPS)
@example(LATE_TRUTH)
def test_3_9_no_listing_is_older_than_the_slot_allows(steps: list[Any]) -> None:
    """2.1, 2.3, 3.9 Own writes at once, others' within metadata_ttl, by whichever worker, however late pages come."""

    async def run(directory: Path) -> None:
        clock = ManualClock()
        async with gateway_app(directory, slots=[SLOT], clock=clock, allow_unsigned=True) as gateway:
            history = History(gateway, clock)
            try:
                await history.play(steps)
            finally:
                await history.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))

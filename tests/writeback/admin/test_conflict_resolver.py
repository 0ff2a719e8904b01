"""Clause 6.5 of docs/semantics.md: nothing of others is overwritten that nobody has agreed to overwrite, whatever
they write, and whenever."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import NothingPending, NotToBeDecided
from gateway.s3.requests import Operation
from gateway.writeback.journal.records import ExpectedVersion
from tests.support.memory_origin.faults import Answer, Call
from tests.support.writeback import key
from tests.support.writeback_admin import AdminHarness

KEYS = ("a", "b")

STEP = st.tuples(
    st.sampled_from(["clash", "keep-ours", "theirs", "put", "gone", "keep-theirs", "time", "settle"]),
    st.sampled_from(KEYS),
    st.integers(0, 6),  # so many turns the others have before the next step
)


class World:
    """A node and others who write to one bucket. `agreed` are ETags that may be overwritten (None: no object)."""

    def __init__(self, harness: AdminHarness) -> None:
        self.harness = harness
        self.agreed: set[tuple[str, str | None]] = {(name, None) for name in KEYS}
        self.ours: dict[str, bytes] = {}
        self.of_ours: set[str | None] = set()
        self.overwrites: list[tuple[Call, str | None]] = []
        self._number = 0
        harness.buffer.origin.inject(self._watched, Answer(500), times=None)

    def _watched(self, call: Call) -> bool:
        """Writes down what lies under the key that the node is about to write; no fault."""
        if call.operation is Operation.PUT_OBJECT and call.key is not None:
            self.overwrites.append((call, self.etag(call.key)))
        return False

    def etag(self, name: str) -> str | None:
        found = self.harness.buffer.bucket.objects.get(name)
        return None if found is None else found.etag

    async def step(self, what: str, name: str) -> None:
        self._number += 1
        content = b"%d" % self._number
        if what == "put":
            expected = self.etag(name)  # the absorb's own look
            self.agreed.add((name, expected))
            self.ours[name] = content
            stored = await self.harness.buffer.put(key(name), content, expected=ExpectedVersion.exactly(expected))
            self.of_ours.add(stored.etag)
        elif what == "clash":
            for one in ("put", "theirs", "settle"):
                await self.step(one, name)
        elif what == "theirs":
            self.harness.buffer.origin.put("bucket", name, b"theirs" + content)
        elif what == "gone":
            self.harness.buffer.bucket.objects.pop(name, None)
        elif what == "time":
            await self.harness.buffer.clock.advance(1.0)
        elif what == "settle":
            await self.settled()
        else:
            await self.decide(what, name)

    async def settled(self) -> None:
        """Let time pass until nothing is left but conflicts and what waits behind them."""
        for _ in range(10_000):
            left = await self.harness.progress()
            if left.objects == left.stuck:
                return
            await self.harness.buffer.clock.advance(0.3)
            await asyncio.sleep(0.001)
        raise AssertionError("it never came to it")

    async def decide(self, decision: str, name: str) -> None:
        try:
            decided = await self.harness.admin.resolve(key(name), decision, None)
        except (NothingPending, NotToBeDecided):
            return
        if decision == "keep-ours":
            self.agreed.add((name, decided.etag_at_origin))

    def check(self) -> None:
        """Every write of the node that the origin has taken was of something that might be overwritten, or our own."""
        for call, before in self.overwrites:
            assert call.status != 200 or call.key is None or before in self.of_ours or (call.key, before) in self.agreed


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(STEP, max_size=25))
def test_nothing_of_others_is_overwritten_unasked(steps: list[tuple[str, str, int]]) -> None:
    """Puts, decisions and outside writes in any order, while flushes are under way; in the end everything is decided,
    and the node's last word has arrived where it was given."""

    async def run(directory: Path) -> None:
        harness = AdminHarness(directory)
        try:
            world = World(harness)
            harness.start()
            for what, name, turns in steps:
                await world.step(what, name)
                for _ in range(turns):
                    await asyncio.sleep(0)
                world.check()
            await finish(world)
        finally:
            await harness.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))


async def finish(world: World) -> None:
    """Decide for ours until nothing is left."""
    while world.harness.buffer.left():
        await world.settled()
        conflicts = {one.key.key for one in world.harness.buffer.left()}
        for name in conflicts:
            await world.decide("keep-ours", name)
        await world.settled()
        for name in conflicts - {one.key.key for one in world.harness.buffer.left()}:
            assert world.harness.buffer.origin.data("bucket", name) == world.ours[name]
    world.check()

"""Clauses 2.1, 3.2 and 3.4 of docs/semantics.md against a model, over random histories."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.origin.client import OriginRequest
from gateway.policy.slots import Prefix
from tests.support.asgi import call
from tests.support.gateway_app import GatewayApp, gateway_app
from tests.support.manual_clock import ManualClock
from tests.support.slots import Slot

TTL_SECONDS = 20.0
NEGATIVE_SECONDS = 5.0
SLOT = Slot("t", Prefix.parse("s3://bucket/"), "read-write", "ttl", TTL_SECONDS, NEGATIVE_SECONDS)

STEPS = st.lists(
    st.one_of(
        st.sampled_from(["own put", "own delete", "outside put", "outside delete", "get", "head", "get", "head"]),
        st.floats(0.1, 30.0),
    ),
    min_size=5,
    max_size=40,
)


@dataclass
class Model:
    """Every state the key had since the last own write, and since when. The state is a size; None is absence."""

    states: list[tuple[float, int | None]] = field(default_factory=lambda: [(0.0, None)])
    sizes: int = 0

    def change(self, now: float, *, own: bool, absent: bool) -> int:
        self.sizes += 1
        if own:
            self.states = []
        self.states.append((now, None if absent else self.sizes))
        return self.sizes

    def allowed(self, now: float) -> set[int | None]:
        """What an answer may say: the present, and whatever was so within the bound of its kind."""
        found = {self.states[-1][1]}
        for (_, state), (ended, _) in zip(self.states, self.states[1:], strict=False):
            if now - ended < (NEGATIVE_SECONDS if state is None else TTL_SECONDS):
                found.add(state)
        return found


async def play(gateway: GatewayApp, clock: ManualClock, steps: list[str | float]) -> None:
    model = Model()
    for step in steps:
        if isinstance(step, float):
            await clock.advance(step)
        elif step in ("get", "head"):
            answer = await call(gateway.app, step.upper(), "/bucket/k", sign=False)
            seen = int(answer.headers["content-length"]) if answer.status == 200 else None
            assert seen in model.allowed(clock.now())
            if step == "get" and seen is not None:
                assert answer.body == bytes([seen]) * seen
            await gateway.catalog.settle()
        else:
            await change(gateway, model, clock.now(), step)


async def change(gateway: GatewayApp, model: Model, now: float, step: str) -> None:
    own, absent = step.startswith("own"), step.endswith("delete")
    size = model.change(now, own=own, absent=absent)
    body = b"" if absent else bytes([size]) * size
    method = "DELETE" if absent else "PUT"
    if own:
        assert (await call(gateway.app, method, "/bucket/k", body=body, sign=False)).status in (200, 204)
    else:
        async with await gateway.origin.send(OriginRequest(method, "bucket", "k", body=body)) as answer:
            assert answer.status in (200, 204)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(STEPS)
def test_3_2_no_answer_is_older_than_the_slot_allows(steps: list[str | float]) -> None:
    """2.1, 3.2, 3.4 Own writes at once, others' within metadata_ttl or negative_ttl, whatever the order."""

    async def run(directory: Path) -> None:
        clock = ManualClock()
        async with gateway_app(directory, slots=[SLOT], clock=clock, allow_unsigned=True) as gateway:
            await play(gateway, clock, steps)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(Path(directory)))

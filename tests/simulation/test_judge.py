"""What the judge lets pass: whatever a client may have been shown at some moment of its request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.core.model import MARKERS
from gateway.writeback import order
from tests.simulation.clients import OF_OTHERS
from tests.simulation.invariants import FLUSHED_WITHIN_SECONDS
from tests.simulation.markers import is_marker
from tests.simulation.node import Kept
from tests.simulation.virtual_time import VirtualTimeLoop
from tests.simulation.world import Setting, World
from tests.support.asgi import Answer


@pytest.fixture
def loop() -> Iterator[VirtualTimeLoop]:
    with closing(VirtualTimeLoop()) as loop:
        yield loop


@pytest.fixture
def world(tmp_path: Path, loop: VirtualTimeLoop) -> World:
    return World(Setting(1, "corrupting"), tmp_path, loop)


def _answers(world: World, patch: pytest.MonkeyPatch, answer: Answer) -> None:
    """Have every request be answered so, after others and then a client have written `bucket/k2`."""

    async def ask(*_: object, **__: str) -> Answer:
        history = world.judge.of("bucket", "k2")
        await asyncio.sleep(1.0)
        world.origin.write_as_others("bucket", "k2", b"theirs")
        await asyncio.sleep(1.0)
        attempt = history.begin(b"ours", world.clock.monotonic())
        await asyncio.sleep(1.0)
        attempt.ended, attempt.acknowledged = world.clock.monotonic(), True
        return answer

    patch.setattr(world.clients, "ask", ask)


def test_a_copy_may_have_what_others_wrote_to_its_source_meanwhile(
    world: World, loop: VirtualTimeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that was overwritten before the copy was answered."""
    _answers(world, monkeypatch, Answer(200, {}, b"<ETag>e</ETag>", complete=True))
    loop.run_until_complete(world.clients.copy("bucket", "k2", "k5"))
    for value in (b"theirs", b"ours"):
        world.judge.read("bucket", "k5", value, set())
    assert not world.judge.violations
    world.judge.read("bucket", "k5", b"never written", set())
    assert [one.rule for one in world.judge.violations] == ["reads see the last write"]


@pytest.mark.parametrize(("value", "is_right"), [(b"theirs", True), (b"ours", True), (b"never written", False)])
def test_a_read_may_see_what_others_wrote_meanwhile(
    world: World, loop: VirtualTimeLoop, monkeypatch: pytest.MonkeyPatch, value: bytes, *, is_right: bool
) -> None:
    """And that was overwritten before the read was answered."""
    _answers(world, monkeypatch, Answer(200, {}, value, complete=True))
    loop.run_until_complete(world.clients.read("bucket", "k2"))
    assert (not world.judge.violations) == is_right


@pytest.mark.parametrize(
    "key",
    [
        *("known", "k0", "burst/1", "crowd-1/small", "step-1/__0_0.distcp", f"shared-1/__2{OF_OTHERS}"),
        *("step-1/.metadata", "step-1/.metadata.tmp", "step-1/model.safetensors.index.json"),
        *("step-1/model.safetensors.index.json.tmp", "run-1/latest", "table-1/_SUCCESS", "table-1/_delta_log/1.json"),
        *("table-1/day=1/part-0000", "run-1/step-1/rank1/model-1.safetensors", "large/passing-1"),
    ],
)
def test_the_judge_takes_for_a_marker_what_the_node_does(key: str) -> None:
    assert is_marker(key) == order.is_marker(key, MARKERS)


@pytest.mark.parametrize(("value", "is_late"), [(b"a manifest", False), (None, True)])
@pytest.mark.parametrize("name", [".metadata", ".metadata.tmp"])
def test_a_marker_may_wait_for_a_person_who_decides_a_conflict(
    world: World, name: str, value: bytes | None, *, is_late: bool
) -> None:
    """Under its passing name, too. Its deletion waits for nobody."""
    conflict, marker = ("bucket", "step-1/__0_0.distcp"), ("bucket", f"step-1/{name}")
    world.judge.kept = lambda: Kept(frozenset({conflict, marker}), frozenset({conflict}))
    world.origin.write_as_others(*marker, b"an older one")
    world.judge.health("bucket", good=True, now=1.0)
    attempt = world.judge.of(*marker).begin(value, 1.0)
    attempt.ended, attempt.acknowledged = 1.0, True
    world.judge.check_liveness(2 * FLUSHED_WITHIN_SECONDS)
    assert [one.rule for one in world.judge.violations] == ["all is flushed"] * is_late

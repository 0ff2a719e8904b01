"""What the judge lets pass: whatever a client may have been shown at some moment of its request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

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

"""First looks: one at a time over all processes, and whoever waits for one is told of its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from gateway.blocks.fetch_locks import FileWatcher, lock_of_place
from gateway.blocks.layout import object_id
from gateway.blocks.origin_gets import UnpinnedGet, UnpinnedGets
from gateway.core.model import ObjectKey
from tests.blocks.filling.test_fetch_locks import processes

KEY = ObjectKey("bucket", "k")
OTHERS = [
    (ObjectKey("bucket", "l"), 0, {}),
    (KEY, 65536, {}),
    (KEY, 0, {"x-amz-request-payer": "requester"}),
]


@contextmanager
def two_workers(directory: Path) -> Iterator[tuple[UnpinnedGets, UnpinnedGets]]:
    watcher = FileWatcher()
    with processes(directory) as opened:
        one, other = opened.locks
        yield UnpinnedGets(one, watcher, asyncio.Semaphore(8)), UnpinnedGets(other, watcher, asyncio.Semaphore(8))
    watcher.close()


@contextmanager
def looking(looks: UnpinnedGets, key: ObjectKey, offset: int, headers: dict[str, str]) -> Iterator[UnpinnedGet | None]:
    """A first look, where one is to be had, while this lasts."""
    look = looks.begin(object_id(key), offset, headers)
    with look or nullcontext():
        yield look


@pytest.mark.parametrize("elsewhere", [False, True])
def test_one_looks_at_a_time(tmp_path: Path, elsewhere: bool) -> None:
    """While somebody looks, nobody else does, in the same process or in another; other bytes are nobody's concern."""

    async def scenario() -> None:
        with two_workers(tmp_path / "c") as (one, two):
            asking = two if elsewhere else one
            with looking(one, KEY, 0, {}) as look:
                assert look is not None
                assert asking.pending(KEY, 0, {})
                with looking(asking, KEY, 0, {}) as second:
                    assert second is None
                for key, offset, headers in OTHERS:
                    assert not asking.pending(key, offset, headers)
                    with looking(asking, key, offset, headers) as free:
                        assert free is not None
            assert not asking.pending(KEY, 0, {})
            with looking(asking, KEY, 0, {}) as next_look:
                assert next_look is not None

    asyncio.run(scenario())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_look_that_is_over_keeps_others_out_while_its_fill_runs(tmp_path: Path, elsewhere: bool) -> None:
    """Who waited goes on when the version is known; the next first look is to be had when the fill has ended."""

    async def scenario() -> None:
        with two_workers(tmp_path / "c") as (one, two):
            asking = two if elsewhere else one
            with looking(one, KEY, 0, {}) as look:
                assert look is not None
                look.hold()
                waiting = asyncio.create_task(asking.settled(KEY, 0, {}))
                await asyncio.sleep(0)
                assert not waiting.done()
            assert await waiting
            assert not asking.pending(KEY, 0, {})
            assert not await asking.settled(KEY, 0, {})
            with looking(asking, KEY, 0, {}) as second:
                assert second is None
            look.let_go()
            with looking(asking, KEY, 0, {}) as third:
                assert third is not None

    asyncio.run(scenario())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_who_waits_for_a_whole_answer_goes_on_when_its_bytes_are_to_be_had(tmp_path: Path, elsewhere: bool) -> None:
    """Another process waits until the fetch has ended; this one can share it; nobody asks the origin again before."""

    async def scenario() -> None:
        with two_workers(tmp_path / "c") as (one, two):
            asking = two if elsewhere else one
            with looking(one, KEY, 0, {}) as look:
                assert look is not None
                look.hold()
                look.whole = True
                waiting = asyncio.create_task(two.settled(KEY, 0, {}))
            await asyncio.sleep(0)
            assert not waiting.done()
            assert asking.pending(KEY, 0, {}) is elsewhere
            with looking(asking, KEY, 0, {}) as second:
                assert second is None
            look.let_go()
            assert await waiting
            with looking(asking, KEY, 0, {}) as third:
                assert third is not None

    asyncio.run(scenario())


def test_a_fill_that_ends_before_its_look_leaves_nothing(tmp_path: Path) -> None:
    """Small fills end before their first reader has begun to be served."""

    async def scenario() -> None:
        with two_workers(tmp_path / "c") as (one, two):
            with looking(one, KEY, 0, {}) as look:
                assert look is not None
                look.hold()
                look.let_go()
                assert two.pending(KEY, 0, {})
            with looking(two, KEY, 0, {}) as second:
                assert second is not None

    asyncio.run(scenario())


def test_nobody_waits_for_the_dead(tmp_path: Path) -> None:
    """A dead process's look is over, though its claim still stands."""

    async def scenario() -> None:
        watcher = FileWatcher()
        with processes(tmp_path) as opened:
            dead, living = opened.locks
            looks = UnpinnedGets(living, watcher, asyncio.Semaphore(8))
            assert dead.take(lock_of_place(object_id(KEY), 0, {})) == 0
            waiting = asyncio.create_task(looks.settled(KEY, 0, {}))
            await asyncio.sleep(0)
            assert not waiting.done()
            dead.close()
            assert await waiting is False
            assert looks.pending(KEY, 0, {})
        watcher.close()

    asyncio.run(scenario())

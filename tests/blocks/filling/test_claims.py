"""Who fetches a small block: at most one living process has a claim, and whoever waits for it is told."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.blocks.files import watching
from gateway.blocks.files.watching import FileWatcher
from gateway.blocks.filling.claims import Claims, Place, place_of_fill, place_of_look
from gateway.blocks.layout import block_at, object_id
from gateway.objects import ObjectKey, ObjectVersion

WORKERS = 3
PLACES = [Place(5, 1), Place(5, 2), Place(6, 1)]
"""Two keys that want the same cell, and one beside it."""


def directory_in(path: Path) -> Path:
    (path / "slots").mkdir(parents=True)
    return path


class ClaimsOfThree(RuleBasedStateMachine):
    """What three workers claim, give back and leave behind, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = directory_in(Path(tempfile.mkdtemp()) / "c")
        self.claims = [Claims(self.directory, worker) for worker in range(WORKERS)]
        self.dead: set[int] = set()
        self.held: dict[int, tuple[Place, int]] = {}

    @rule(worker=st.integers(0, WORKERS - 1), place=st.sampled_from(PLACES))
    def claim(self, worker: int, place: Place) -> None:
        if worker in self.dead:
            return
        owner = self.held.get(place.cell)
        answer = self.claims[worker].claim(place)
        if owner is None or owner == (place, worker):
            assert answer == worker
            self.held[place.cell] = (place, worker)
        else:
            assert answer == (owner[1] if owner[0] == place else None)

    @rule(worker=st.integers(0, WORKERS - 1), place=st.sampled_from(PLACES))
    def succeed(self, worker: int, place: Place) -> None:
        """Take over from a holder that is seen dead, and from no other."""
        owner = self.held.get(place.cell)
        if worker in self.dead or owner is None or owner[1] == worker:
            return
        assert self.claims[worker].lives(owner[1]) is (owner[1] not in self.dead)
        if owner[1] in self.dead:
            assert self.claims[worker].claim(place, owner[1]) == worker
            self.held[place.cell] = (place, worker)

    @rule(worker=st.integers(0, WORKERS - 1), place=st.sampled_from(PLACES))
    def release(self, worker: int, place: Place) -> None:
        """Giving back what another has changes nothing."""
        if worker in self.dead:
            return
        self.claims[worker].release(place)
        if self.held.get(place.cell) == (place, worker):
            del self.held[place.cell]

    @rule(worker=st.integers(0, WORKERS - 1))
    def exchange(self, worker: int) -> None:
        """One claim for another of the same cell, without a moment between; nothing for who has not got it."""
        if worker in self.dead:
            return
        self.claims[worker].exchange(PLACES[0], PLACES[1])
        if self.held.get(PLACES[0].cell) == (PLACES[0], worker):
            self.held[PLACES[0].cell] = (PLACES[1], worker)

    @rule(worker=st.integers(0, WORKERS - 1), place=st.sampled_from(PLACES))
    def look(self, worker: int, place: Place) -> None:
        """Who holds a claim can be seen without claiming it."""
        if worker not in self.dead:
            owner = self.held.get(place.cell)
            assert self.claims[worker].holder(place) == (owner[1] if owner is not None and owner[0] == place else None)

    @rule(worker=st.integers(0, WORKERS - 1), place=st.sampled_from(PLACES), holder=st.integers(0, WORKERS - 1))
    def wait(self, worker: int, place: Place, holder: int) -> None:
        if worker not in self.dead:
            assert self.claims[worker].await_release(place, holder) is (self.held.get(place.cell) == (place, holder))

    @rule(worker=st.integers(0, WORKERS - 1))
    def kill(self, worker: int) -> None:
        if worker not in self.dead:
            self.claims[worker].close()
            self.dead.add(worker)

    @rule(worker=st.integers(0, WORKERS - 1))
    def restart(self, worker: int) -> None:
        """What a process of before has left is nobody's."""
        if worker in self.dead:
            self.claims[worker] = Claims(self.directory, worker)
            self.claims[worker].forget(worker)
            self.dead.discard(worker)
            self.held = {cell: held for cell, held in self.held.items() if held[1] != worker}

    @invariant()
    def whether_others_fetch_is_known(self) -> None:
        if self.dead:
            return  # those of dead workers count until their slots are opened again
        for worker in range(WORKERS):
            assert self.claims[worker].others_claim() is any(held[1] != worker for held in self.held.values())

    def teardown(self) -> None:
        for worker in set(range(WORKERS)) - self.dead:
            self.claims[worker].close()
        shutil.rmtree(self.directory.parent)


TestClaims = ClaimsOfThree.TestCase
TestClaims.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("end", ["release", "kill", "restart"])
def test_who_waits_is_woken_at_once(tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bell, or by the kernel when the holder dies: nobody asks again and again, nobody sleeps a second."""
    monkeypatch.setattr(watching, "LOOK_SECONDS", 3600.0)  # who is not woken sleeps beyond the test's time limit

    async def scenario() -> None:
        directory, place, watcher = directory_in(tmp_path / "c"), PLACES[0], FileWatcher()
        holder, waiter = Claims(directory, 0), Claims(directory, 1)
        assert holder.claim(place) == 0
        with watcher.watch(waiter.bell(0)) as watch:
            watch.clear()
            assert waiter.await_release(place, 0)
            if end == "release":
                holder.release(place)
            else:
                holder.close()
            if end == "restart":
                holder = Claims(directory, 0)
                holder.forget(0)
            await watch.changed()
        assert waiter.lives(0) is (end != "kill")
        assert waiter.claim(place, 0 if end == "kill" else None) == 1
        if end != "kill":
            holder.close()
        waiter.close()
        watcher.close()

    asyncio.run(scenario())


def test_places_spread_and_tell_audiences_apart() -> None:
    """Blocks that differ in object, version, place or audience hardly ever share cell and tag."""
    versions = [ObjectVersion(ObjectKey("bucket", f"k{key}"), etag, 2**30) for key in range(16) for etag in ("a", "b")]
    blocks = [block_at(version, number, 2**20) for version in versions for number in range(8)]
    places = {place_of_fill(block, headers) for block in blocks for headers in ({}, {"x-amz-request-payer": "a"})}
    assert len(places) == 2 * len(blocks)
    assert len({place.cell for place in places}) > len(places) * 0.4


@pytest.mark.parametrize("headers", [{}, {"x-amz-request-payer": "requester"}])
@pytest.mark.parametrize("number", [0, 1, 77])
def test_a_look_lies_where_the_fill_that_it_leads_to_will(headers: dict[str, str], number: int) -> None:
    """Whichever version it finds: one claim takes the other's place, and one of another fill keeps the look out."""
    key = ObjectKey("bucket", "k")
    blocks = [block_at(ObjectVersion(key, etag, 2**30), number, 2**20) for etag in ("a", "b")]
    look = place_of_look(object_id(key), blocks[0].offset, headers)
    fills = {place_of_fill(block, headers) for block in blocks}
    assert {fill.cell for fill in fills} == {look.cell}
    assert len({look.tag} | {fill.tag for fill in fills}) == 3

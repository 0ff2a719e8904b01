"""The memory that all processes share: laid out once, and found by all; names keep their numbers in it."""

from __future__ import annotations

import os
import random

import pytest

from gateway.core.errors import StartupError
from gateway.shared.arena import Numbering, SharedCells, make_shared_memory, names_max, path_of


def test_memory_of_another_layout_is_refused() -> None:
    """A child that was upgraded under a running gateway misreads nothing."""
    descriptor = make_shared_memory(2, 3, 0.0)
    try:
        for rows, processes, own in ((1, 3, 0), (2, 2, 0), (2, 3, 3)):
            with pytest.raises(ValueError, match="another version or configuration"):
                SharedCells.attach(descriptor, rows, processes, own)
    finally:
        os.close(descriptor)


def test_the_memory_cannot_be_made_smaller() -> None:
    """Touching what is gone would kill the process that does."""
    descriptor = make_shared_memory(1, 1, 0.0)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 8)
    finally:
        os.close(descriptor)


def test_memory_is_found_from_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc is of another one, the supervisor has another id there than it knows."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    descriptor = make_shared_memory(1, 1, 0.0)
    try:
        assert os.path.samestat(os.stat(path_of(descriptor)), os.fstat(descriptor))
    finally:
        os.close(descriptor)


def test_memory_that_no_process_could_open_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has mounted /proc: the start says so, and not each process for itself."""

    def no_such_file(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", no_such_file)
    with pytest.raises(StartupError, match="/proc is not mounted here"):
        path_of(3)


def test_a_part_is_a_view_of_its_rows() -> None:
    cells = SharedCells.of_one_process(5, 0.0)
    part = cells.part(2, 2)
    part.whole_numbers(1)[0] = 7
    assert [cells.whole_numbers(row)[0] for row in range(5)] == [0, 0, 0, 7, 0]
    part.follow(3)
    assert not cells.is_latest(2)
    assert cells.is_latest(3)


@pytest.mark.parametrize("seed", range(20))
def test_names_keep_their_numbers_while_they_stay(seed: int) -> None:
    """Whatever comes and goes beside them; two never have the same."""
    dice = random.Random(seed)
    names = {f"slot{number}" for number in range(dice.randrange(4))}
    numbering = Numbering.begin(sorted(names), more=3)
    assert numbering.most == names_max(len(names), 3)
    for _ in range(200):
        before, kept = numbering, {name for name in names if dice.random() < 0.8}
        new = {f"slot{dice.randrange(50)}" for _ in range(dice.randrange(4))}
        names = set(sorted(kept | new)[: numbering.most])
        numbering = numbering.changed(sorted(names))
        for name in names & before.of.keys():
            assert numbering.of[name] == before.of[name]
        assert len(set(numbering.of.values())) == len(numbering.of)
        assert set(numbering.of.values()) <= set(range(1, numbering.most + 1))


def test_who_is_gone_longest_gives_its_number_up_first() -> None:
    numbering = Numbering(3).changed(["a", "b", "c"]).changed(["b", "c"]).changed(["c"])
    assert numbering.changed(["c", "b"]).of["b"] == 2
    assert numbering.changed(["c", "new"]).of == {"b": 2, "c": 3, "new": 1}
    with pytest.raises(ValueError, match="more than 3"):
        numbering.changed(["a", "b", "c", "d"])

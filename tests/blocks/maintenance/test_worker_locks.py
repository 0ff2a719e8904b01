"""Who opens and closes the directory, one at a time; and nobody waits for one that hangs."""

from __future__ import annotations

import threading
from itertools import count
from pathlib import Path

import pytest

from gateway.blocks import opening
from gateway.blocks.opening import WorkerLocks


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPENING_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(opening, "OPENING_LOOKS_MAX", 5)


def hangs(worker: int) -> int:
    return 7 * worker


def test_one_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """It may be stopped, and nobody able to end it: those who wait say so, and serve without the directory."""
    with WorkerLocks(tmp_path, 3).opening(hangs), pytest.raises(BlockingIOError, match="worker 3 hangs while it opens"):
        WorkerLocks(tmp_path, 1).opening(hangs).__enter__()
    with WorkerLocks(tmp_path, 1).opening(hangs):
        pass


def test_one_that_turns_is_waited_for(tmp_path: Path) -> None:
    """However long it takes: a directory of many files is looked through, and killed half-way begun again."""
    beats, waited = count(), threading.Event()
    asked: list[int] = []

    def turns(worker: int) -> int:
        asked.append(worker)
        if len(asked) > 3 * opening.OPENING_LOOKS_MAX:
            waited.set()
        return next(beats)

    def wait() -> None:
        with WorkerLocks(tmp_path, 1).opening(turns):
            opened.set()

    opened = threading.Event()
    with WorkerLocks(tmp_path, 3).opening(turns):
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert waited.wait(30)
        assert not opened.is_set()
    waiting.join(30)
    assert opened.is_set()
    assert set(asked) == {3}

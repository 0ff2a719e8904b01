"""Power cuts on a disk that keeps nothing but what was synced, and each sync is needed (docs/semantics.md, clause 5).

What a worker has done to its files is written down, and made again as any power cut may leave it (strict_disk.py): at
any acknowledgement, with none, some or all of what was not synced. FOREBAY_KILL_SEED and FOREBAY_STRICT_CUTS repeat or
lengthen a run. Compiling the library that writes it down takes `cc`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from gateway.core import clock
from gateway.core.errors import ForebayError
from gateway.writeback.opening import recover
from gateway.writeback.pending_reader import FileGone
from tests.support.buffer_history import Expected, Hearing, check, start_writers
from tests.support.strict_disk import Moment, built, moments, synced_names, traced

CUTS = int(os.environ.get("FOREBAY_STRICT_CUTS", "20"))
SEED = int(os.environ.get("FOREBAY_KILL_SEED", random.SystemRandom().randrange(2**32)))
LINES = 900
"""So many that the journal's log is taken over into the journal, and begun anew."""

CHANCES = (0.0, 0.5, 1.0)
"""Of what was not synced, to survive."""

SYNCS = {
    "the directory that the buffer lies in": "",
    "the buffer's directory": "buffer",
    "FORMAT": "buffer/FORMAT.new",
    "the directory of the staged files of all": "buffer/staged",
    "the directory of a worker's staged files": "buffer/staged/w0",
    "a staged file": "buffer/staged/w0/*",
    "the journal's log": "buffer/journal-wal",
    "the journal": "buffer/journal",
}
"""Each is left out in turn. By the names below the directory that is traced, `*` for any."""


OF_SQLITE = "buffer/journal-journal"
"""By which the journal's first page is made, before anything is acknowledged."""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("library"))


class Worker:
    """What a worker has done, and what of it may be left."""

    def __init__(self, path: Path, library: Path, dice: random.Random, without: str | None = None) -> None:
        self._images = (path / f"image{number}" for number in count())
        self._dice = dice
        self.trace = path / "trace"
        disk = path / "disk"
        disk.mkdir(parents=True)
        environment = traced(library, self.trace, disk, without)
        (writer,) = start_writers(disk / "buffer", dice, 1, environment=environment)
        hearing = Hearing(writer, Expected())
        hearing.lines(LINES)
        writer.send_signal(signal.SIGKILL)
        hearing.rest(lambda *_: None)

    def moments(self) -> Iterator[Moment]:
        return moments(self.trace)

    def cut(self, moment: Moment, chance: float) -> None:
        """Look whether everything is there that was acknowledged, after a power cut at this moment."""
        image = next(self._images)
        moment.after_a_cut(image, self._dice, chance)
        expected = Expected()
        for line in moment.said.splitlines():
            expected.hear(*json.loads(line))
        recover(image / "buffer", now=clock.Moment(2.0))
        asyncio.run(check(image / "buffer", [expected]))
        shutil.rmtree(image)


def test_power_cuts_lose_nothing_that_was_acknowledged(tmp_path: Path, library: Path) -> None:
    """5.1 Whatever survives of what was not synced."""
    print(f"FOREBAY_KILL_SEED={SEED} FOREBAY_STRICT_CUTS={CUTS}")
    dice, cuts = random.Random(SEED), 0
    for number in count():
        worker = Worker(tmp_path / f"{number}", library, dice)
        for moment in worker.moments():
            if dice.random() < 0.2:
                worker.cut(moment, dice.choice(CHANCES))
                cuts += 1
            if cuts == CUTS:
                return


def test_no_sync_is_forgotten_here(tmp_path: Path, library: Path) -> None:
    """What is synced at all is what is left out below."""
    worker = Worker(tmp_path / "worker", library, random.Random(SEED))
    names = {re.sub(r"w0/[0-9a-f]{32}$", "w0/*", name) for name in synced_names(worker.trace)}
    assert names - {OF_SQLITE} == set(SYNCS.values())


@pytest.mark.parametrize("sync", SYNCS)
def test_every_sync_is_needed(tmp_path: Path, library: Path, sync: str) -> None:
    """Left out, something that was acknowledged is lost, and found missing."""
    print(f"FOREBAY_KILL_SEED={SEED}")
    worker = Worker(tmp_path / "worker", library, random.Random(SEED), SYNCS[sync])
    with pytest.raises((AssertionError, ForebayError, FileGone, OSError, sqlite3.Error)) as found:
        cut_again_and_again(worker)
    print(repr(found.value)[:200])


def cut_again_and_again(worker: Worker) -> None:
    """Nothing that was not synced survives."""
    for number, moment in enumerate(worker.moments()):
        if number % 10 == 3:
            worker.cut(moment, 0.0)

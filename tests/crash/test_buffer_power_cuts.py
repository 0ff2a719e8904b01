"""The power goes while the write-back buffer is written to (docs/semantics.md, clause 5). Mounting takes root.

An ext4 of its own is shut down without flushing its journal: whatever was not synced is lost. What was acknowledged is
there after the next mount, byte for byte. An fsync that meets the shut-down may report success for what is lost, which
no power cut can do (jbd2 calls a transaction that it gave up complete): only what was acknowledged before counts.
FOREBAY_KILL_SEED and FOREBAY_POWER_CUTS repeat or lengthen a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
from pathlib import Path

import pytest

from gateway.core.clock import Moment
from gateway.core.errors import ForebayError
from gateway.writeback.opening import recover
from tests.support.buffer_history import Expected, Hearing, check, start_writers
from tests.support.disks import kill_disk, mortal_disk, mounted

CUTS = int(os.environ.get("FOREBAY_POWER_CUTS", "25"))
SEED = int(os.environ.get("FOREBAY_KILL_SEED", random.SystemRandom().randrange(2**32)))
LINES_MAX = 40
MUTANT_CUTS_MAX = 30

pytestmark = [pytest.mark.slow, pytest.mark.root]


def cut(image: Path, mount_point: Path, dice: random.Random, expected: list[Expected], *options: str) -> None:
    """A writer, a power cut somewhere in its work, and a look at what is there."""
    with mounted(mount_point, image):
        (writer,) = start_writers(mount_point / "buffer", dice, 1, *options)
        hearing = Hearing(writer, expected[0])
        hearing.lines(dice.randrange(1, LINES_MAX))
        hearing.so_far()
        kill_disk(mount_point)
        writer.send_signal(signal.SIGKILL)
        hearing.rest(expected[0].hear_after_the_cut)
    with mounted(mount_point, image):
        recover(mount_point / "buffer", now=Moment(2.0))
        asyncio.run(check(mount_point / "buffer", expected))
        subprocess.run(["sync", "-f", str(mount_point)], check=True)


def test_power_cuts_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Again and again on one buffer."""
    print(f"FOREBAY_KILL_SEED={SEED}")
    dice, expected, image = random.Random(SEED), [Expected()], tmp_path / "image"
    with mortal_disk(tmp_path / "disk", image):
        pass
    for _ in range(CUTS):
        cut(image, tmp_path / "disk", dice, expected)


def cut_often(image: Path, mount_point: Path, dice: random.Random, expected: list[Expected], option: str) -> None:
    for _ in range(MUTANT_CUTS_MAX):
        cut(image, mount_point, dice, expected, option)


@pytest.mark.parametrize("sync", ["file", "journal"])
def test_every_sync_is_needed(tmp_path: Path, sync: str) -> None:
    """Left out, it is found out: so the cuts do cut. (ext4 syncs a new file's name with the file.)"""
    print(f"FOREBAY_KILL_SEED={SEED}")
    dice, expected, image = random.Random(SEED), [Expected()], tmp_path / "image"
    with mortal_disk(tmp_path / "disk", image):
        pass
    with pytest.raises((AssertionError, ForebayError, OSError, sqlite3.Error)) as found:
        cut_often(image, tmp_path / "disk", dice, expected, f"--without-sync-of={sync}")
    print(repr(found.value)[:200])

"""The power goes under a running gateway that writes back (docs/semantics.md, clause 5). Mounting takes root.

Its cache directory lies on an ext4 of its own, which is shut down without flushing its journal while several clients
write. What they had been answered by then is there after the next start, with its ETag, and in the end at the origin;
of the rest all is as before or as it was to be. FOREBAY_KILL_SEED and FOREBAY_GATEWAY_POWER_CUTS repeat or lengthen a
run; tests/crash/test_buffer_power_cuts.py cuts the power of the buffer alone, more often.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.points.client import Client, Interrupted
from tests.crash.points.field import Field
from tests.crash.points.finding import find_lost_uploads
from tests.crash.points.scenarios import several_at_once
from tests.support.disks import RemountedDisk, kill_disk

CUTS = int(os.environ.get("FOREBAY_GATEWAY_POWER_CUTS", "6"))
SEED = int(os.environ.get("FOREBAY_KILL_SEED", random.SystemRandom().randrange(2**32)))
SECONDS_MAX = 120 + 15 * CUTS

DISK_BYTES = 512 * 1024**2
ANSWERS_MAX = 60
CUTS_BETWEEN_LOOKS = 5


@dataclass(slots=True)
class Power:
    """Goes when so many answers have come.

    The processes outlive the disk by a moment that no real machine has, and an fsync that meets the cut may report
    success for what is lost. So what they say then nobody hears, neither their clients nor the origin.
    """

    disk: Path
    field: Field
    answers: int
    is_off: bool = False

    def answered(self) -> None:
        """Interrupted when it is off."""
        self.answers -= 1
        if self.answers == 0:
            self.is_off = True
            self.go()
        if self.is_off:
            raise Interrupted("the power is off")

    def go(self) -> None:
        """Return when no process acts any more, whether it is gone yet or not."""
        self.field.origin.is_out_of_reach = True
        kill_disk(self.disk)
        self.field.kill_all()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
def test_power_cuts_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """5.1 Again and again on one directory."""
    print(f"FOREBAY_KILL_SEED={SEED} FOREBAY_GATEWAY_POWER_CUTS={CUTS}")
    dice, disk = random.Random(SEED), RemountedDisk(tmp_path / "disk", tmp_path / "image", DISK_BYTES)
    with disk.mounted(), Field.opened(tmp_path, disk.mount_point / "cache", SEED) as field:
        for number in range(1, CUTS + 1):
            cut(field, disk, number, dice.randrange(1, ANSWERS_MAX))
            if number % CUTS_BETWEEN_LOOKS == 0:
                field.check_all()
        field.check_all()
        assert field.gateway.terminate() == 0
        find_lost_uploads(field)


def cut(field: Field, disk: RemountedDisk, number: int, answers: int) -> None:
    """Clients at work, a power cut somewhere, and a look at what is there."""
    run = field.new_run(f"cut-{number}")
    power = Power(disk.mount_point, field, answers)
    field.client.on_answer = power.answered
    try:
        several_at_once(run)
    except Interrupted:
        pass
    else:
        power.go()
    field.fall()
    field.client.on_answer = Client.ignore
    field.origin.is_out_of_reach = False
    disk.mount_anew()
    field.rise()
    field.verify(run)

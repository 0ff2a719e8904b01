"""When a cache directory that gives errors is left alone, and when it is tried again."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import lmdb
import pytest

from gateway.blocks.disk_health import (
    FAILURES_MAX,
    FAILURES_SECONDS,
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    STEADY_SECONDS,
    CircuitBreaker,
    Trouble,
    trouble_of,
)
from gateway.core.errors import BlockDamaged, StoreUnavailable, is_mistake
from gateway.telemetry import metrics
from tests.support.blocks import TestClock, disk_state
from tests.support.counting import by_label


def caused(error: Exception, number: int) -> Exception:
    error.__cause__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (errno.ENOSPC, Trouble.FULL),
        (errno.EDQUOT, Trouble.FULL),
        (errno.EROFS, Trouble.READ_ONLY),
        (errno.EIO, Trouble.FAILING),
        (errno.ENODEV, Trouble.FAILING),
        (errno.ENOENT, Trouble.FAILING),
        (errno.EMFILE, None),
        (errno.ENOMEM, None),
    ],
)
def test_errors_say_what_is_wrong_with_the_disk(number: int, trouble: Trouble | None) -> None:
    """No space and no device are told apart; a lack of descriptors or memory is no fault of the disk."""
    assert trouble_of(caused(StoreUnavailable("x"), number)) is trouble


def test_what_is_wrong_with_a_block_is_not_wrong_with_the_disk() -> None:
    """A wrong checksum, a file that somebody removed, a slot without room: the directory is as good as before."""
    assert trouble_of(BlockDamaged("the checksum of chunk 3 differs")) is None
    assert trouble_of(caused(BlockDamaged("the block's file is gone"), errno.ENOENT)) is None
    assert trouble_of(StoreUnavailable("no room for 8 MiB of slot a")) is None
    assert trouble_of(caused(BlockDamaged("cannot be read"), errno.EIO)) is Trouble.FAILING
    full = StoreUnavailable("the index cannot be written")
    full.__cause__ = lmdb.MapFullError("mdb_put: MDB_MAP_FULL")
    assert trouble_of(full) is Trouble.FULL


def test_mistakes_are_told_from_bad_luck() -> None:
    """No disk comes to wrong rights by itself."""
    assert is_mistake(PermissionError(errno.EACCES, "x"))
    assert is_mistake(caused(StoreUnavailable("x"), errno.ENOTDIR))
    assert not is_mistake(OSError(errno.EROFS, "x"))
    assert not is_mistake(OSError(errno.ENOSPC, "x"))
    assert not is_mistake(StoreUnavailable("x"))


class Patient:
    """What a probe will find, and how often it was asked."""

    def __init__(self) -> None:
        self.clock = TestClock()
        self.finds: Trouble | None = None
        self.probes = 0
        self.isolation = CircuitBreaker(Path("/c"), self.probe, self.clock)

    async def probe(self, trouble: Trouble) -> Trouble | None:
        self.probes += 1
        return self.finds

    def fails(self, number: int) -> None:
        self.isolation.note(caused(StoreUnavailable("x"), number))

    async def wait(self, seconds: float) -> None:
        """Let time pass, and whoever has waited for it go on."""
        await settled()
        self.clock.advance(seconds)
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_one_bad_sector_isolates_nothing_and_three_failures_do() -> None:
    """Failures that lie far apart never add up."""

    async def scenario() -> None:
        patient = Patient()
        for _ in range(3 * FAILURES_MAX):
            patient.fails(errno.EIO)
            patient.clock.time += FAILURES_SECONDS
        assert patient.isolation.readable
        for _ in range(FAILURES_MAX):
            patient.fails(errno.EIO)
        assert (patient.isolation.readable, patient.isolation.writable) == (False, False)
        assert disk_state() == "failing"
        await patient.isolation.close()

    asyncio.run(scenario())


def test_a_full_disk_is_known_at_once_and_goes_on_giving() -> None:
    """No space leaves no doubt. What has become worse since is seen, what is less bad changes nothing."""

    async def scenario() -> None:
        patient = Patient()
        patient.fails(errno.ENOSPC)
        assert (patient.isolation.readable, patient.isolation.writable) == (True, False)
        patient.fails(errno.EROFS)
        patient.fails(errno.ENOSPC)
        assert disk_state() == "read-only"
        for _ in range(FAILURES_MAX):
            patient.fails(errno.EIO)
        assert patient.isolation.state == "failing"
        await patient.isolation.close()

    asyncio.run(scenario())


def test_probes_come_at_growing_distances_and_end_the_isolation() -> None:
    """1, 2, 4 … 60 seconds; what the probe has found counts, and a disk that is soon ill again is left alone longer."""

    async def scenario() -> None:
        patient = Patient()
        patient.finds = Trouble.FULL
        patient.fails(errno.ENOSPC)
        expected = PAUSE_SECONDS
        for probes in range(1, 10):
            await patient.wait(expected * 0.99)
            assert patient.probes == probes - 1
            await patient.wait(expected * 0.01 + 1e-6)
            assert patient.probes == probes
            expected = min(2 * expected, PAUSE_SECONDS_MAX)
        patient.finds = None
        await patient.wait(PAUSE_SECONDS_MAX)
        assert patient.isolation.writable
        patient.fails(errno.ENOSPC)
        await patient.wait(PAUSE_SECONDS_MAX - 1)
        assert not patient.isolation.writable
        await patient.wait(2)
        assert patient.isolation.writable
        patient.clock.time += STEADY_SECONDS
        patient.fails(errno.ENOSPC)
        await patient.wait(PAUSE_SECONDS)
        assert patient.isolation.writable
        await patient.isolation.close()

    asyncio.run(scenario())


def test_the_log_has_a_line_for_each_change_and_not_for_each_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A thousand refused writes are one line; coming back is another."""

    async def scenario() -> None:
        patient = Patient()
        for _ in range(1000):
            patient.fails(errno.ENOSPC)
        await patient.wait(PAUSE_SECONDS)
        assert patient.isolation.writable
        assert by_label(metrics.CACHE_DISK_ERRORS, "trouble") == {"full": 1000}
        await patient.isolation.close()

    asyncio.run(scenario())
    assert len(capsys.readouterr().out.splitlines()) == 2

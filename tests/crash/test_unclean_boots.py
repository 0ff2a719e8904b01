"""After a crash of the machine: files never synced come back old, torn or not at all (docs/semantics.md, clause 5.1).

Another boot id stands for the crash. What it leaves of the index and of the catalog must not be believed, however whole
it looks.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.crash.test_kills import block_bytes_on_disk, total, unfinished_files
from tests.scenarios.races import reading, writing
from tests.scenarios.races.caller import Caller
from tests.scenarios.races.history import Bounds
from tests.scenarios.races.world import World
from tests.support.gateway_process import GatewayProcess
from tests.support.processes import kill_if_there
from tests.support.strict_origin import StrictOrigin

BUCKET = "bucket"
KEYS = dict.fromkeys((f"kept/{number}" for number in range(12)), Bounds(remembered=True))
DATABASES = ("blocks/index", "catalog/index")
SURVEY_SECONDS_MAX = 30.0
PAGE_BYTES = 4096
SEED = 20261121

Crash = Callable[[Path, Path], None]
"""Leaves of a database directory what a crash may; the second is a copy of it from earlier on."""


def older(database: Path, earlier: Path) -> None:
    shutil.rmtree(database)
    shutil.copytree(earlier, database)


def torn(database: Path, earlier: Path) -> None:
    """Some pages are of now, some of then."""
    rng = random.Random(SEED)
    then = (earlier / "data.mdb").read_bytes()
    with (database / "data.mdb").open("r+b") as file:
        for start in range(0, len(then), PAGE_BYTES):
            if rng.random() < 0.5:
                file.seek(start)
                file.write(then[start : start + PAGE_BYTES])


def zeros(database: Path, earlier: Path) -> None:
    """The length is right, every other page never reached the disk."""
    size_bytes = (database / "data.mdb").stat().st_size
    with (database / "data.mdb").open("r+b") as file:
        for start in range(2 * PAGE_BYTES, size_bytes, 2 * PAGE_BYTES):
            file.seek(start)
            file.write(bytes(PAGE_BYTES))


def truncated(database: Path, earlier: Path) -> None:
    with (database / "data.mdb").open("r+b") as file:
        file.truncate(5 * PAGE_BYTES)


def gone(database: Path, earlier: Path) -> None:
    (database / "data.mdb").unlink()


def whole(database: Path, earlier: Path) -> None:
    """Everything has reached the disk, but nobody can know that."""


@pytest.fixture
def running() -> Iterator[GatewayProcess]:
    """A slot that never asks again: a catalog that were believed would answer with what was overwritten since."""
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        config: dict[str, Any] = {
            "server": {"workers": 2, "allow_unsigned": True},
            "origin": origin.settings,
            "cache": {"capacity": "8MiB", "block_size": "64KiB"},
            "slots": [{"name": "kept", "prefix": f"s3://{BUCKET}/kept/", "consistency": "immutable"}],
        }
        with GatewayProcess(config) as gateway:
            yield gateway


async def write_and_read(gateway: GatewayProcess, world: World, *, write: bool) -> None:
    """Every key: overwritten perhaps, then read twice, so that it is cached and remembered."""
    rng = random.Random(SEED)
    with closing(Caller(gateway.s3_url)) as caller:
        for key in world.keys:
            if write:
                await writing.put(world, caller, rng, key)
            for step in (reading.get, reading.get, reading.head):
                await step(world, caller, rng, key)


def crash(gateway: GatewayProcess, leave: Crash, earlier: Path) -> None:
    """Every process is gone at once, and the machine comes up again."""
    pids = [pid for pid in gateway.worker_pids() if pid is not None]
    gateway.signal(signal.SIGKILL)
    for pid in pids:
        kill_if_there(pid)
    gateway.wait()
    for database in DATABASES:
        leave(gateway.directory / database, earlier / database)
    for name in ("blocks", "catalog"):
        assert not (gateway.directory / name / "CLEAN").exists()
        (gateway.directory / name / "BOOT").write_text("00000000-0000-4000-8000-000000000000\n")


def wait_for_exact_accounts(gateway: GatewayProcess) -> None:
    """The survey ends, and then the index says what the disk says."""
    deadline = time.monotonic() + SURVEY_SECONDS_MAX
    while total(gateway, "forebay_cache_unaccounted_bytes") or unfinished_files(gateway) or not exact(gateway):
        assert time.monotonic() < deadline, "the accounts did not become exact"
        time.sleep(0.1)


def exact(gateway: GatewayProcess) -> bool:
    used_bytes, on_disk = total(gateway, "forebay_cache_usage_bytes"), block_bytes_on_disk(gateway)
    return used_bytes == on_disk > 0


@pytest.mark.slow
@pytest.mark.parametrize("leave", [older, torn, zeros, truncated, gone, whole])
def test_5_1_what_was_not_synced_is_not_believed(running: GatewayProcess, tmp_path: Path, leave: Crash) -> None:
    """1.4, 2.1, 5.1 Every read is right, no stale version is remembered, and the accounts become exact."""
    world = World(BUCKET, KEYS, list(KEYS))
    asyncio.run(write_and_read(running, world, write=True))
    for database in DATABASES:
        shutil.copytree(running.directory / database, tmp_path / database)
    asyncio.run(write_and_read(running, world, write=True))
    crash(running, leave, tmp_path)
    running.start()
    with running.explaining():
        asyncio.run(write_and_read(running, world, write=False))
        wait_for_exact_accounts(running)
        asyncio.run(write_and_read(running, world, write=True))
    assert world.counts["broken reads"] == 0
    assert running.terminate() == 0
    running.start()
    wait_for_exact_accounts(running)

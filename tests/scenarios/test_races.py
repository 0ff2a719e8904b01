"""Overwrites, copies, renames and deletes that race with reads, fills and forwards on four workers, against a model.

What clients do comes from a seed; how it interleaves does not, so a seed that failed is likely to fail again, not
certain to. FOREBAY_SEED and FOREBAY_STEPS repeat or lengthen a run; a failure shows the history of the key.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.races.history import STRICT, Bounds
from tests.scenarios.races.playing import READS, WRITES, Play, outside_writes, race, vary_latency
from tests.scenarios.races.world import World
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

STEPS = int(os.environ.get("FOREBAY_STEPS", "1500"))
SEED = int(os.environ.get("FOREBAY_SEED", random.SystemRandom().randrange(2**32)))
SECONDS_MAX = 100 + STEPS / 25

WORKERS = 4
CLIENTS = 24
KEYS_PER_SLOT = 3
BUCKET = "race"
TTL = Bounds(presence_seconds=0.3, absence_seconds=0.15, remembered=True)
SLOTS: list[dict[str, Any]] = [
    {"name": "strict", "prefix": f"s3://{BUCKET}/strict/", "consistency": "strict"},
    {
        "name": "ttl",
        "prefix": f"s3://{BUCKET}/ttl/",
        "consistency": "ttl",
        "metadata_ttl": f"{TTL.presence_seconds}s",
        "negative_ttl": f"{TTL.absence_seconds}s",
    },
    {"name": "immutable", "prefix": f"s3://{BUCKET}/immutable/", "consistency": "immutable"},
]
"""What others do to objects of an immutable slot is never looked for, so nobody else touches them here."""

BOUNDS = {"strict": STRICT, "ttl": TTL, "immutable": Bounds(remembered=True)}
KEYS = {f"{slot}/{number}": bounds for slot, bounds in BOUNDS.items() for number in range(KEYS_PER_SLOT)}
KEYS |= {f"ttl/theirs/{number}": TTL for number in range(KEYS_PER_SLOT)}
OWN = [key for key in KEYS if "theirs" not in key]
OTHERS = [key for key in KEYS if not key.startswith("immutable/")]
"""Own writes void what is remembered, so that some keys of the ttl slot are for the writes of others alone."""


@pytest.fixture
def running() -> Iterator[tuple[GatewayProcess, StrictOrigin]]:
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        config: dict[str, Any] = {
            "server": {"workers": WORKERS, "allow_unsigned": True},
            "origin": origin.settings,
            "cache": {"capacity": "8MiB", "block_size": "64KiB", "small_object_max": "32KiB", "readahead": "128KiB"},
            "slots": SLOTS,
        }
        with GatewayProcess(config) as gateway:
            yield gateway, origin


def connections_of(gateway: GatewayProcess) -> list[int]:
    """How many sockets each worker has open."""
    return [_sockets(pid) for pid in gateway.worker_pids() if pid is not None]


def _sockets(pid: int) -> int:
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += os.readlink(entry).startswith("socket:")
    return found


@pytest.mark.slow
@pytest.mark.timeout(SECONDS_MAX)
async def test_2_1_racing_requests_see_what_their_slot_promises(running: tuple[GatewayProcess, StrictOrigin]) -> None:
    """1.1, 1.2, 2.1 to 2.3, 3.1 to 3.4, 3.9, 4.2 Every answer to every client is one that the model allows."""
    gateway, origin = running
    print(f"replay with FOREBAY_SEED={SEED} FOREBAY_STEPS={STEPS}")
    world = World(BUCKET, KEYS, OWN)
    play = Play(world, [(READS, list(KEYS)), (WRITES, OWN), (outside_writes(origin), OTHERS)])
    idle, busy = connections_of(gateway), [0] * WORKERS

    async def goes_on(taken: int) -> bool:
        if taken % 500 == 499:
            now = connections_of(gateway)
            busy[:] = [seen + (there > before) for seen, there, before in zip(busy, now, idle, strict=True)]
        return taken < STEPS

    with gateway.explaining():
        changing = asyncio.create_task(vary_latency(origin, SEED))
        try:
            await race(play, gateway.s3_url, seed=SEED, clients=CLIENTS, goes_on=goes_on)
        finally:
            changing.cancel()
    print(f"{STEPS} steps: {dict(sorted(world.counts.items()))}")
    assert all(busy), f"not every worker had clients: {busy}"
    assert world.counts["judged"] > STEPS // 2
    assert world.counts["broken reads"] < STEPS // 20
    for outcome in ("cache hit", "cache partial", "cache miss", "head hit", "head miss"):
        assert world.counts[outcome] > STEPS // 1000, f"hardly any {outcome}: this run shows little"

"""Racers: clients that take random steps on the same keys, all at once, for a number of steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from itertools import count

from tests.scenarios.races import reading, writing
from tests.scenarios.races.caller import Caller
from tests.scenarios.races.world import World
from tests.support.strict_origin import StrictOrigin

Step = Callable[[World, Caller, random.Random, str], Awaitable[None]]

NEW_CONNECTION = 0.03
"""How often a client connects anew, so that it gets to another worker."""

LATENCIES_SECONDS = (0.0, 0.0, 0.002, 0.01)
LATENCY_LASTS_SECONDS = 0.05

Steps = Mapping[Step, float]
"""Step → how often, in relation to the others."""

READS: Steps = {
    reading.get: 22,
    reading.get_range: 18,
    reading.get_if_changed: 3,
    reading.head: 14,
    reading.leave_early: 3,
    reading.list_keys: 2,
    reading.list_directory: 5,
}
WRITES: Steps = {
    writing.put: 9,
    writing.put_if_absent: 2,
    writing.put_half: 2,
    writing.put_in_parts: 3,
    writing.copy: 5,
    writing.rename: 0.2,  # seldom: it voids what is remembered of the whole bucket
    writing.delete: 4,
    writing.delete_several: 2,
    writing.tag: 2,
}


def outside_writes(origin: StrictOrigin) -> Steps:
    outside = writing.Outside(origin)
    return {outside.put: 5, outside.delete: 2}


class Play:
    """Which steps there are, and which keys each kind of them is for."""

    def __init__(self, world: World, kinds: Sequence[tuple[Steps, Sequence[str]]]) -> None:
        self.world = world
        self._steps = [(step, keys) for steps, keys in kinds for step in steps]
        self._weights = [weight for steps, _ in kinds for weight in steps.values()]

    def step(self, rng: random.Random) -> tuple[Step, str]:
        """What to do next, and to which key."""
        step, keys = rng.choices(self._steps, self._weights)[0]
        return step, rng.choice(keys)


async def race(play: Play, url: str, *, seed: int, clients: int, goes_on: Callable[[int], Awaitable[bool]]) -> None:
    """Have `clients` take steps all at once until one is told to stop; the first wrong answer ends it.

    `goes_on` is asked before every step, with how many were taken; it may keep a client waiting. Each client's steps
    come from the seed.
    """
    numbers = count()

    async def client(number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        with closing(Caller(url)) as caller:
            while await goes_on(next(numbers)):
                step, key = play.step(rng)
                play.world.counts[step.__name__] += 1
                await step(play.world, caller, rng, key)
                if rng.random() < NEW_CONNECTION:
                    caller.hang_up()

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))


async def vary_latency(origin: StrictOrigin, seed: int) -> None:
    """Until cancelled: an origin that is now fast, now slow, so that races come out differently."""
    rng = random.Random(seed)
    while True:
        origin.latency_seconds = rng.choice(LATENCIES_SECONDS)
        await asyncio.sleep(LATENCY_LASTS_SECONDS)

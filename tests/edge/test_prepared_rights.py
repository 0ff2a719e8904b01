"""Prepared requests in slots of whose callers the origin is the judge: none is answered without its yes."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.edge.access import ConfiguredKeyring, Key
from gateway.policy.slots import EVERYTHING
from gateway.telemetry.metrics import PREPARED_REQUESTS
from tests.edge.both_ways import SLOTS, Asked, ChangingKeyring, Pair, both_ports
from tests.support.gateway_app import gateway_app
from tests.support.policies import Policy
from tests.support.set_clock import SetClock
from tests.support.slots import Slot, slot_with
from tests.support.snapshots import freeze

TTL_SECONDS = 60.0
KEYS = ("d/a", "t/a", "s/a", "x/a")
READS: Sequence[Asked] = [
    Asked(method, key, fields, style=style)
    for key in KEYS
    for method in ("GET", "HEAD")
    for style in ("botocore", "presigned")
    if key != "d/a" or style == "botocore"  # presigned for a minute, by the system's clock
    for fields in ({}, {"range": "bytes=0-3"}, {"if-none-match": '"other"'})
]


def judged(slots: Sequence[Slot]) -> list[Slot]:
    return [
        slot_with(one, write="through", authorization="origin", authorization_ttl_seconds=TTL_SECONDS) for one in slots
    ]


@asynccontextmanager
async def a_pair(directory: Path, keyring: ChangingKeyring | None = None) -> AsyncIterator[tuple[Pair, Policy]]:
    """Both ways; what SOME may read, too, says a policy."""
    clock, policy = SetClock(), Policy(read=[""], write=[""], list=[""])
    keyring = keyring or ChangingKeyring()
    keyring.change(("",), rotate=False)
    async with gateway_app(directory, slots=judged(SLOTS), clock=clock, keyring=keyring) as gateway:
        for key in KEYS:
            gateway.origin.put("bucket", key, random.Random(key).randbytes(1000))
        await freeze(gateway, "v1", "s3://bucket/s/")
        gateway.origin.policies = {"ALL": Policy(read=[""], write=[""], list=[""]), "SOME": policy}
        async with both_ports(gateway, clock, keyring) as both:
            yield both, policy


async def status(both: Pair, asked: Asked, way: str = "fast") -> bytes:
    answer = await both.settled(both.ask(asked, way))
    assert answer is not None
    return answer[0][9:12]


@pytest.mark.parametrize("key", KEYS)
async def test_what_is_prepared_needs_the_origins_yes(tmp_path: Path, key: str) -> None:
    """Each caller its own; for as long as it counts, and not when settings were changed."""
    async with a_pair(tmp_path) as (both, policy):
        mine, others = Asked("GET", key, {}, who="ALL"), Asked("GET", key, {}, who="SOME")
        before = PREPARED_REQUESTS.value("GetObject", slot_of(both, key))
        for _ in range(6):
            assert await status(both, mine) == b"200"
            assert await status(both, others) == b"200"
        await both.leave("fast")
        policy.deny.add(key)
        assert await status(both, others) == b"200"
        both.clock.ahead_seconds += TTL_SECONDS + 1
        for _ in range(6):
            assert await status(both, others) == b"403"
            assert await status(both, mine) == b"200"
        policy.deny.clear()
        for _ in range(6):
            assert await status(both, others) == b"200"
        policy.deny.add(key)
        both.gateway.app.services.rights.forget()
        for _ in range(3):
            assert await status(both, others) == b"403"
    assert PREPARED_REQUESTS.value("GetObject", slot_of(both, key)) - before > 6


def slot_of(both: Pair, key: str) -> str:
    return both.gateway.app.services.slots.find("bucket", key).name


@pytest.mark.slow
async def test_both_ways_answer_alike_whatever_the_origin_says(tmp_path: Path) -> None:
    """Rights that come and go, and time that passes: never an answer that the whole way would not give."""
    rng = random.Random(1)
    async with a_pair(tmp_path) as (both, policy):
        seen: set[bytes] = set()
        for _ in range(400):
            if rng.random() < 0.05:
                both.clock.ahead_seconds += rng.choice([1.0, TTL_SECONDS])
            if rng.random() < 0.1:
                key = rng.choice(KEYS)
                (policy.deny.discard if key in policy.deny else policy.deny.add)(key)
                both.gateway.app.services.rights.forget()
            asked = replace(rng.choice(READS), who=rng.choice(["ALL", "SOME"]))
            first, other = rng.sample(["fast", "slow"], 2)
            one, two = await status(both, asked, first), await status(both, asked, other)
            assert one == two, asked
            assert (one == b"403") == (asked.who == "SOME" and asked.key in policy.deny), asked
            seen.add(one)
        assert seen == {b"200", b"206", b"403"}


async def test_a_presigned_request_is_not_answered_by_anothers_right(tmp_path: Path) -> None:
    """One path, two key pairs with the very same grant: each needs its own yes."""

    class Keyring(ChangingKeyring):
        def change(self, prefixes: tuple[str, ...], *, rotate: bool) -> None:
            self._keys = ConfiguredKeyring(
                [Key(name, secret, None, EVERYTHING) for name, secret in self.secrets.items()]
            )

    async with a_pair(tmp_path, Keyring()) as (both, policy):
        policy.deny.add("t/a")
        mine, others = (Asked("GET", "t/a", {}, who=who, style="presigned") for who in ("ALL", "SOME"))
        for _ in range(8):
            assert await status(both, mine) == b"200"
            assert await status(both, others) == b"403"

"""Clause 3.18 of docs/semantics.md: a restore of what was written back, by many ranks at once."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from gateway.operations.writeback import cache_promotion
from gateway.policy.slots import Prefix
from gateway.s3.requests import Operation
from tests.support.memory_origin.faults import Hold, on
from tests.support.slots import Slot, slot_with
from tests.support.write_back_gateway import PART_BYTES, Client, a_client

RANKS = 16
ASKING = 512
PREFIX = Prefix.parse("s3://bucket/back/")
STRICT = Slot("strict", PREFIX, write="back")
TTL = Slot("ttl", PREFIX, "read-write", "ttl", 60.0, write="back")
IMMUTABLE = Slot("immutable", PREFIX, "read-write", "immutable", write="back")
FILES = 4


async def save(client: Client) -> dict[str, bytes]:
    """A checkpoint that the origin has, and nobody has read."""
    await client.learn()
    bodies = {f"back/step-1/__{rank}_0.distcp": os.urandom(PART_BYTES) for rank in range(FILES)}
    bodies["back/step-1/.metadata"] = b"names them"
    for name, body in bodies.items():
        answer = await client.ask("PUT", name, body)
        assert answer.headers["x-forebay-cache"] == "absorbed"
    await client.flush()
    await client.gateway.catalog.settle()
    return bodies


async def restore(client: Client, bodies: dict[str, bytes], rank: int) -> None:
    """Every file, each rank from another one on."""
    names = list(bodies)
    for number in range(len(names)):
        name = names[(rank + number) % len(names)]
        answer = await client.ask("GET", name)
        assert answer.body == bodies[name]
        assert answer.headers["x-forebay-cache"] == "hit"


@pytest.mark.slow
@pytest.mark.parametrize("slot", [TTL, IMMUTABLE])
async def test_3_18_a_restore_asks_the_origin_nothing(tmp_path: Path, slot: Slot) -> None:
    """3.18 Sixteen ranks read the same files at once after the flush: from this node, and with no question."""
    async with a_client(tmp_path, [slot]) as client:
        bodies = await save(client)
        asked = len(client.origin.calls)
        await asyncio.gather(*(restore(client, bodies, rank) for rank in range(RANKS)))
        assert client.origin.calls[asked:] == []


@pytest.mark.slow
async def test_3_18_a_strict_slot_asks_which_version_is_current_and_for_no_byte(tmp_path: Path) -> None:
    """3.1, 3.18 One HEAD for each GET, which ranks that ask at once share."""
    async with a_client(tmp_path, [STRICT]) as client:
        bodies = await save(client)
        asked = len(client.origin.calls)
        await asyncio.gather(*(restore(client, bodies, rank) for rank in range(RANKS)))
        operations = [call.operation for call in client.origin.calls[asked:]]
        assert set(operations) == {Operation.HEAD_OBJECT}
        assert len(operations) <= RANKS * len(bodies)


async def test_3_18_what_others_write_is_seen_as_in_any_such_slot(tmp_path: Path) -> None:
    """3.2, 3.18 Within metadata_ttl of the flush: nothing is believed for longer because it was written here."""
    async with a_client(tmp_path, [slot_with(TTL, metadata_ttl_seconds=0.3)]) as client:
        await client.learn()
        await client.ask("PUT", "back/_SUCCESS", b"100")
        await client.flush()
        client.origin.put("bucket", "back/_SUCCESS", b"other")
        for _ in range(100):
            if (await client.ask("GET", "back/_SUCCESS")).body == b"other":
                return
            await asyncio.sleep(0.1)
        raise AssertionError("it is still the one that was written here")


@pytest.mark.slow
@pytest.mark.parametrize("slot", [STRICT, TTL, IMMUTABLE])
async def test_3_18_discovery_by_512_ranks_costs_a_constant(tmp_path: Path, slot: Slot) -> None:
    """3.1, 3.18 LIST of the checkpoint's directory and HEAD of its manifest, by all ranks at once."""
    async with a_client(tmp_path, [slot]) as client:
        await save(client)
        asked = len(client.origin.calls)
        listing = "?list-type=2&prefix=back%2Fstep-1%2F"
        questions = [("GET", listing), ("HEAD", "back/step-1/.metadata")] * ASKING
        answers = await asyncio.gather(*(client.ask(method, target) for method, target in questions))
        assert all(b".metadata" in answer.body for answer in answers[::2])
        assert len(client.origin.calls) - asked <= 4


async def test_3_18_a_question_that_the_origin_does_not_answer_holds_no_flush_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3.18 What the origin has is durable, and called so, whether or not it tells the object's head as well."""
    monkeypatch.setattr(cache_promotion, "LEARN_SECONDS", 0.05)
    async with a_client(tmp_path, [TTL]) as client:
        await client.learn()
        await client.ask("PUT", "back/_SUCCESS", b"")
        answered = asyncio.Event()
        client.origin.inject(on(Operation.HEAD_OBJECT, key="back/_SUCCESS"), Hold(answered), times=None)
        await client.flush()
        answered.set()
        assert (await client.ask("HEAD", "back/_SUCCESS")).headers["x-forebay-durable"] == "true"

"""Uploads that the bucket has ended by its own rules give their room back: clause 4.8 of docs/semantics.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.core.clock import SystemClock
from gateway.s3.requests import Operation
from gateway.writeback.journal.records import IDLE_SECONDS_MIN, UPLOAD_LOOK_SECONDS
from tests.support.slots import slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import PART_BYTES, SLOTS, Client, a_client


class Later(SystemClock):
    """Some time later than it is."""

    seconds = 0.0

    def now(self) -> float:
        return super().now() + self.seconds

    def monotonic(self) -> float:
        return super().monotonic() + self.seconds


async def left_alone(client: Client, names: list[str]) -> None:
    """Uploads whose parts the bucket has, and nobody goes on with."""
    for name in names:
        await client.part(name, await client.create(name), 1, bytes(PART_BYTES))
    async with client.flushing():
        await until(lambda: all(one.parts for one in client.origin.buckets["bucket"].uploads.values()))
        await until(lambda: client.origin.count(Operation.UPLOAD_PART) == len(names))


def opens(client: Client) -> int:
    return client.buffer.look(lambda tx: tx.counts()[1])


@pytest.mark.parametrize("is_upload", [False, True])
async def test_4_8_what_the_bucket_has_ended_makes_room_for_what_finds_none(tmp_path: Path, *, is_upload: bool) -> None:
    """4.8 5.9 The first that finds none goes through, or waits for it; those behind it are absorbed."""
    clock, slots = Later(), [slot_with(SLOTS[0], buffer_bytes=3 * PART_BYTES)]
    async with a_client(tmp_path, slots, clock=clock) as client:
        await client.learn()
        await left_alone(client, [f"back/abandoned-{number}" for number in range(3)])
        client.origin.buckets["bucket"].uploads.clear()
        clock.seconds = IDLE_SECONDS_MIN + 1
        async with client.flushing(expiries=True):
            if is_upload:
                assert "x-forebay-not-absorbed" in (await client.ask("POST", "back/next?uploads")).headers
            else:
                await client.ask("PUT", "back/next", bytes(PART_BYTES))
            await until(lambda: opens(client) == 0)
            answer = await client.ask("PUT", "back/absorbed", bytes(PART_BYTES))
            assert answer.headers["x-forebay-cache"] == "absorbed"


@pytest.mark.slow
async def test_4_8_what_the_bucket_still_has_or_a_client_goes_on_with_stays(tmp_path: Path) -> None:
    """4.8 Each is asked about once in ten seconds at most, however many writes find no room."""
    clock, slots = Later(), [slot_with(SLOTS[0], buffer_bytes=3 * PART_BYTES)]
    async with a_client(tmp_path, slots, clock=clock) as client:
        await client.learn()
        await left_alone(client, ["back/open-1", "back/open-2", "back/ended"])
        uploads = client.origin.buckets["bucket"].uploads
        ended = next(name for name, one in uploads.items() if one.key == "back/ended")
        del uploads[ended]
        looks = client.origin.count(Operation.LIST_PARTS)
        async with client.flushing():
            for number in range(3):  # nothing has been left alone for so long
                await client.ask("PUT", f"back/through-{number}", bytes(PART_BYTES))
        assert (opens(client), client.origin.count(Operation.LIST_PARTS)) == (3, looks)
        clock.seconds = IDLE_SECONDS_MIN + 1
        async with client.flushing(expiries=True):
            await client.ask("PUT", "back/through-4", bytes(PART_BYTES))
            await until(lambda: opens(client) == 2)
            for number in range(3):
                await client.ask("PUT", f"back/more-{number}", bytes(2 * PART_BYTES))
        assert client.origin.count(Operation.LIST_PARTS) == looks + 3


async def test_4_8_every_few_minutes_they_are_looked_for_in_any_case(tmp_path: Path) -> None:
    """4.8 Nobody needs the room."""
    clock = Later()

    assert UPLOAD_LOOK_SECONDS <= 300
    async with a_client(tmp_path, clock=clock) as client:
        await client.learn()
        await left_alone(client, ["back/ended"])
        client.origin.buckets["bucket"].uploads.clear()
        clock.seconds = UPLOAD_LOOK_SECONDS + 1
        async with client.flushing(expiries=True):
            await until(lambda: opens(client) == 0)

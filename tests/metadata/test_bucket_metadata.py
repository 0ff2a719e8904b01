"""Small answers on disk: what comes back, when, and to whom."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.metadata.bucket_metadata import (
    ANSWER_BYTES_MAX,
    BucketAnswer,
    BucketQuery,
    pack,
    unpack,
)
from gateway.metadata.entries import ObservedAt, answer_freshness
from gateway.metadata.opening import ANSWERS
from gateway.policy.slots import Prefix
from tests.support.slots import Slot
from tests.support.small_answers import ANSWER, QUESTION, keep, known, playing

NAMES = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=8)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20)
ANSWER_OF_ANY_KIND = st.builds(
    BucketAnswer, st.integers(200, 599), st.lists(st.tuples(NAMES, VALUES), max_size=4), st.binary(max_size=50)
)
MOMENTS = st.builds(ObservedAt, st.integers(0, 2**63), st.floats(0, 1e9), st.integers(0, 2**32 - 1))


@given(MOMENTS, ANSWER_OF_ANY_KIND)
def test_status_headers_and_body_come_back(learned: ObservedAt, answer: BucketAnswer) -> None:
    """A record gives back what was packed, in order, to the byte."""
    assert unpack(b"place", pack(b"place", learned, answer)) == (learned, answer)


@given(st.data())
def test_a_damaged_record_is_none(data: st.DataObject) -> None:
    """A flipped bit, a cut, an addition, another question's record: a miss, never another answer."""
    record = pack(b"place", ObservedAt(7, 1.5, 9), ANSWER)
    bit = data.draw(st.integers(0, len(record) * 8 - 1))
    flipped = bytearray(record)
    flipped[bit // 8] ^= 1 << bit % 8
    assert unpack(b"place", bytes(flipped)) is None
    assert unpack(b"place", record[: data.draw(st.integers(0, len(record) - 1))]) is None
    assert unpack(b"place", record + b"x") is None
    assert unpack(b"elsewhere", record) is None


@pytest.mark.parametrize(
    ("consistency", "age", "boot", "epoch", "expected"),
    [
        ("strict", 0.0, 1, 7, "fresh"),
        ("strict", 60.0, 1, 7, "useless"),
        ("ttl", 59.9, 1, 7, "fresh"),
        ("ttl", 60.0, 1, 7, "stale"),
        ("ttl", 90.0, 1, 7, "useless"),
        ("immutable", 1e9, 1, 7, "stale"),
        ("immutable", 0.0, 2, 7, "useless"),
        ("ttl", 0.0, 2, 7, "useless"),
        ("ttl", 0.0, 1, 8, "useless"),
        ("ttl", -1.0, 1, 7, "useless"),
    ],
)
def test_what_is_believed(consistency: str, age: float, boot: int, epoch: int, expected: str) -> None:
    """By an age of this boot's own clock, in the epoch of the question; stale as long as the slot goes on."""
    slot = Slot("x", Prefix(""), "read-write", consistency, 60.0, 0.0, 30.0)
    learned, now = ObservedAt(7, 1000.0, 1), ObservedAt(epoch, 1000.0 + age, boot)
    assert answer_freshness(learned, now, slot, ttl_seconds=60.0).value == expected


async def test_what_was_kept_is_recalled_by_others_and_later(tmp_path: Path) -> None:
    """By a second user of the directory, and by one that opens it after the first is gone."""
    async with playing(tmp_path) as (world, answers):
        second = world.answers()
        assert await known(second) is None
        await keep(answers)
        assert await known(second) == await known(answers) == ANSWER
        assert await known(answers, BucketQuery("GetBucketLocation", "other")) is None
        assert await known(answers, BucketQuery("HeadBucket", "bucket")) is None
        await second.close()
    assert world.troubles == {}
    async with playing(tmp_path) as (_, answers):
        assert await known(answers) == ANSWER


async def test_what_was_asked_before_a_write_is_never_believed_after_it(tmp_path: Path) -> None:
    """Not what lies there, not what lands later, not what was asked for while the disk was read."""
    async with playing(tmp_path) as (world, answers):
        await keep(answers)
        asked = answers.now("bucket")
        world.moment = replace(world.moment, epoch=8)
        assert await known(answers) is None
        answers.keep(QUESTION, asked, ANSWER)
        await answers.settle()
        assert await known(answers) is None
        await keep(answers)
        recalling = asyncio.ensure_future(known(answers))
        await asyncio.sleep(0)
        world.moment = replace(world.moment, epoch=9)
        assert await recalling is None


async def test_the_file_is_for_its_user_alone_and_keeps_to_its_size(tmp_path: Path) -> None:
    """Whatever the umask; whoever has many buckets makes it forget others, and answers over 64 KiB are not kept."""
    before = os.umask(0)
    try:
        async with playing(tmp_path, size_bytes_max=2**20) as (world, answers):
            for number in range(300):
                question = BucketQuery("GetBucketTagging", f"b{number}")
                await keep(answers, question, BucketAnswer(200, [], os.urandom(8000)))
            assert await known(answers, BucketQuery("GetBucketTagging", "b0")) is None
            assert await known(answers, BucketQuery("GetBucketTagging", "b299")) is not None
            await keep(answers, answer=BucketAnswer(200, [], b"x" * ANSWER_BYTES_MAX))
            assert await known(answers) is None
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / ANSWERS).rglob("*")}
    assert set(modes) >= {"cache.db"}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / ANSWERS).stat().st_mode) == 0o700
    assert world.database.stat().st_size < 2 * 2**20
    assert world.troubles == {}

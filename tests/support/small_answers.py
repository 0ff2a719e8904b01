"""What the tests of small answers share: answers in a directory, at a moment that the test chooses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway.metadata.bucket_metadata import BucketAnswer, BucketMetadataCache, BucketQuery
from gateway.metadata.entries import Freshness, ObservedAt
from gateway.metadata.opening import ANSWERS
from gateway.policy.slots import Prefix
from gateway.telemetry import metrics
from tests.support.counting import by_label
from tests.support.slots import Slot

QUESTION = BucketQuery("GetBucketLocation", "bucket")
ANSWER = BucketAnswer(
    200, [("content-type", "application/xml"), ("x-amz-bucket-region", "eu")], b"<LocationConstraint/>"
)
SLOT = Slot("t", Prefix.parse("s3://bucket/"), "read-write", "ttl", 60.0)


@dataclass
class World:
    """Answers in a directory, and the moment that a test is in."""

    directory: Path
    moment: ObservedAt = field(default_factory=lambda: ObservedAt(7, 1000.0, 1))

    def answers(self, **more: int) -> BucketMetadataCache:
        return BucketMetadataCache(self.directory / ANSWERS, lambda bucket: self.moment, ttl_seconds=60.0, **more)

    def pass_seconds(self, seconds: float) -> None:
        self.moment = replace(self.moment, seconds=self.moment.seconds + seconds)

    @property
    def troubles(self) -> dict[str, float]:
        """The number of each that was counted."""
        return by_label(metrics.SMALL_ANSWER_TROUBLES, "trouble")

    @property
    def database(self) -> Path:
        return self.directory / ANSWERS / "cache.db"


@asynccontextmanager
async def playing(directory: Path, **more: int) -> AsyncIterator[tuple[World, BucketMetadataCache]]:
    """One process's answers, until the context ends."""
    world = World(directory)
    answers = world.answers(**more)
    try:
        yield world, answers
    finally:
        await answers.close()


async def keep(answers: BucketMetadataCache, question: BucketQuery = QUESTION, answer: BucketAnswer = ANSWER) -> None:
    answers.keep(question, answers.now(question.bucket), answer)
    await answers.settle()


async def known(answers: BucketMetadataCache, question: BucketQuery = QUESTION) -> BucketAnswer | None:
    found = await answers.recall(question, SLOT)
    return found.answer if found is not None and found.freshness is Freshness.FRESH else None

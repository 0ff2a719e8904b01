"""What the origin has said of buckets, remembered on disk for all workers: small, asked for often, seldom another.

An answer is believed for a TTL, and only while its bucket's invalidation epoch (epochs.py) is the one in which the
origin was asked: an own change of the bucket voids it at once, on every worker, though it land later.

The disk is asked on a thread of its own. It is never waited for long: a locked, slow, full or harmed file is a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from gateway.metadata import answer_records
from gateway.metadata.answer_file import SIZE_BYTES_MAX, AnswerFile, Trouble
from gateway.metadata.answer_records import Answer, Question
from gateway.metadata.freshness import Freshness, answer_freshness
from gateway.metadata.observer import AnswersObserver
from gateway.metadata.records import Learned
from gateway.policy.slots import Slot

__all__ = ["ANSWER_BYTES_MAX", "Answer", "Question", "Recalled", "SmallAnswers"]

ANSWER_BYTES_MAX = 64 * 1024
"""Longer answers, headers included, are not kept."""

PENDING_MAX = 64
"""Questions and answers that wait for the disk at once; further ones do without it."""

RECALL_SECONDS_MAX = 0.25
"""How long the disk is waited for."""

PAUSE_SECONDS = 1.0
"""How long the disk is left alone after it did not give or take something."""

_CLOSE_SECONDS_MAX = 5.0

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Recalled:
    """An answer that is fresh, or stale: good only when the origin gives none."""

    answer: Answer
    is_fresh: bool


class SmallAnswers:
    """One worker process's view of the answers that all workers share in `directory`; made when first used.

    `now` gives a bucket's invalidation epoch and the time (`Catalog.now_of_bucket`). `ttl_seconds` 0 remembers nothing.
    """

    def __init__(
        self,
        directory: Path,
        now: Callable[[str], Learned],
        *,
        ttl_seconds: float,
        observer: AnswersObserver,
        size_bytes_max: int = SIZE_BYTES_MAX,
    ) -> None:
        self.now = now
        self.is_on = ttl_seconds > 0
        self._ttl_seconds = ttl_seconds
        self._observer = observer
        self._file = AnswerFile(directory, size_bytes_max=size_bytes_max)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="small-answers")
        self._pending: set[asyncio.Future[Any]] = set()
        self._paused_until_seconds = 0.0

    async def recall(self, question: Question, slot: Slot) -> Recalled | None:
        """What is remembered and may be used in `slot`, the one that all of the bucket is in."""
        now = self.now(question.bucket)
        work = self._submit(now, self._file.get, question.place)
        if work is None:
            return None
        done, _ = await asyncio.wait({work}, timeout=RECALL_SECONDS_MAX)
        if not done:
            self._trouble(Trouble.UNAVAILABLE, now)
            return None
        record = work.result()
        return self._judged(question, record, slot) if isinstance(record, bytes) else None

    def keep(self, question: Question, asked: Learned, answer: Answer) -> None:
        """Remember what the origin answered; `asked` is what `now` gave before it was asked."""
        now = self.now(question.bucket)
        record = answer_records.pack(question.place, asked, answer)
        if len(record) <= ANSWER_BYTES_MAX and asked.generation == now.generation:
            self._submit(now, self._file.put, question.place, record)

    def answered(self, question: Question, outcome: str) -> None:
        """Count a question that has its answer: hit, miss or stale."""
        self._observer.answered(question.operation, outcome)

    async def settle(self) -> None:
        """Wait until what was to be kept so far is kept, or given up."""
        if self._pending:
            await asyncio.wait(self._pending)

    async def close(self) -> None:
        """Write what is left; a disk that does not come back is left behind."""
        closing = asyncio.wrap_future(self._thread.submit(self._file.close))
        await asyncio.wait({closing}, timeout=_CLOSE_SECONDS_MAX)
        self._thread.shutdown(wait=closing.done(), cancel_futures=True)

    def _judged(self, question: Question, record: bytes, slot: Slot) -> Recalled | None:
        found = answer_records.unpack(question.place, record)
        if found is None:
            self._observer.trouble(Trouble.DAMAGED)
            return None
        learned, answer = found
        now = self.now(question.bucket)
        state = answer_freshness(learned, now, slot, ttl_seconds=self._ttl_seconds)
        return None if state is Freshness.USELESS else Recalled(answer, state is Freshness.FRESH)

    def _submit(
        self, now: Learned, function: Callable[P, R], *arguments: P.args, **keywords: P.kwargs
    ) -> asyncio.Future[R] | None:
        """Have the thread do something that never raises; None when it shall be left alone, or has enough to do."""
        if now.seconds < self._paused_until_seconds or len(self._pending) >= PENDING_MAX:
            self._observer.trouble(Trouble.UNAVAILABLE)
            return None
        work = asyncio.wrap_future(self._thread.submit(function, *arguments, **keywords))
        self._pending.add(work)
        work.add_done_callback(lambda done: self._done(done, now))
        return work

    def _done(self, work: asyncio.Future[R], now: Learned) -> None:
        self._pending.discard(work)
        if work.cancelled():
            return
        result = work.result()
        if isinstance(result, Trouble):
            self._trouble(result, now)

    def _trouble(self, trouble: Trouble, now: Learned) -> None:
        self._observer.trouble(trouble)
        self._paused_until_seconds = now.seconds + PAUSE_SECONDS

"""Tells the rest of a flush, and checkpoints, in any process of the node: in the one that flushes, and in workers.

Other nodes ask the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from gateway.api import documents as to
from gateway.core.clock import Clock
from gateway.core.model import ObjectKey
from gateway.origin.client import Origin
from gateway.policy.slots import Prefix
from gateway.writeback.admin.checkpoint_parts import PartsPage, Reads
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries
from gateway.writeback.admin.checkpoints import CheckpointsReport
from gateway.writeback.admin.queries import Name, may_be_name, name_of
from gateway.writeback.flushing.reconciler import Attempts
from gateway.writeback.flushing.requests import first_key
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.rows import keys_under, text
from gateway.writeback.journal.transaction import JournalTransaction

PROBLEMS_SHOWN = 20
"""The most problems that a flush shows; a listing has them all."""


class Flusher(Protocol):
    """The flushing process's knowledge beside the journal (`Reconciler`)."""

    def prioritise(self, prefix: Prefix) -> None: ...
    def scratch_slots(self) -> frozenset[str]: ...
    def attempts(self, prefix: Prefix) -> Attempts: ...
    def awaiting_files(self, covers: Callable[[ObjectKey], bool]) -> Mapping[int, int]: ...


class FlusherElsewhere:
    """Stands for the flushing process in a worker. That process hears of requests by the journal."""

    def __init__(self, scratch_slots: Callable[[], frozenset[str]]) -> None:
        self.scratch_slots = scratch_slots

    def prioritise(self, prefix: Prefix) -> None:
        """Do nothing."""

    def attempts(self, prefix: Prefix) -> Attempts:
        return Attempts()

    def awaiting_files(self, covers: Callable[[ObjectKey], bool]) -> Mapping[int, int]:
        return {}


class FlushReport:
    """BufferUnavailable if the journal is unreadable."""

    def __init__(
        self, queries: CheckpointQueries, journal: Journal, origin: Origin, clock: Clock, flusher: Flusher
    ) -> None:
        self._queries = queries
        self._journal = journal
        self._origin = origin
        self._clock = clock
        self._reconciler = flusher
        self.report = CheckpointsReport(queries, clock)

    async def checkpoints(
        self, prefix: Prefix, after: str, count: int, states: Collection[str]
    ) -> to.CheckpointsDocument:
        """Return a page of the checkpoints under a prefix, in any of `states` (empty: all)."""
        return await self.report.page(prefix, after, count, states)

    async def parts(self, prefix: Prefix, after: str, count: int) -> PartsPage:
        """Return this node's parts of checkpoints, a page as `checkpoints` has it."""
        return await self.report.parts(prefix, after, count)

    async def reads_of(self, bucket: str, prefixes: Sequence[str]) -> Reads:
        """Return how far files of checkpoints were read here."""
        return await self.report.reads_of(bucket, prefixes)

    async def flush(self, prefix: Prefix) -> to.FlushProgress:
        """Try writes under a prefix (a name covers only itself) at once, before others; return how much is pending."""
        through = self._journal.read(lambda tx: tx.writes.newest())
        scope = await self._meant(prefix)
        begun = await self.progress(prefix, through, is_name=isinstance(scope, Name))
        if scope.key_prefix:
            await self._raise_priority(scope)
        await self._try_now(scope)
        return begun

    async def progress(self, prefix: Prefix, through: int, *, is_name: bool = False) -> to.FlushProgress:
        """Return what is pending of writes up to sequence `through`. `is_name`: only this object or directory."""
        scope = name_of(prefix) if is_name and may_be_name(prefix) else prefix
        stats = await self._queries.flush(scope, through)
        problems = await self._queries.worst(scope, through, PROBLEMS_SHOWN)
        attempts, awaiting = self._reconciler.attempts(scope), self._awaiting(scope)
        return flush_progress(scope, through, stats, problems, attempts, awaiting, self._journal.problem)

    async def _meant(self, prefix: Prefix) -> Prefix:
        if not may_be_name(prefix):
            return prefix
        if self._journal.read(lambda tx: tx.writes.has_any(prefix.bucket, prefix.key_prefix)):
            return name_of(prefix)
        under = keys_under(prefix.key_prefix)
        if not self._journal.read(lambda tx: tx.writes.listing(prefix.bucket, *under, 1)):
            return prefix
        is_object = await self._first_key(prefix.bucket, prefix.key_prefix) == prefix.key_prefix
        if is_object or await self._first_key(prefix.bucket, f"{prefix.key_prefix}/") is not None:
            return name_of(prefix)
        return prefix

    async def _first_key(self, bucket: str, prefix: str) -> str | None:
        """Return the first key with a prefix; None also if the origin does not say."""
        found = await first_key(self._origin, bucket, prefix)
        return found if isinstance(found, str) else None

    async def _raise_priority(self, scope: Prefix) -> None:
        now, ranges = self._clock.now(), [keys_under(scope.key_prefix)]
        if isinstance(scope, Name):
            start = text(scope.key_prefix)
            ranges = [(start, start + b"\0"), (start + b"/", start + b"0")]

        def of_scope(tx: JournalTransaction) -> None:
            for first, stop in ranges:
                tx.local.send_all_after_all(scope.bucket, first, stop, now, self._reconciler.scratch_slots())
                tx.turns.raise_priority(scope.bucket, first, stop, now)

        await self._journal.change(of_scope)

    def _awaiting(self, scope: Prefix) -> Mapping[int, int]:
        return self._reconciler.awaiting_files(lambda key: scope.covers(*key))

    async def _try_now(self, prefix: Prefix) -> None:
        now, awaiting = self._clock.now(), self._awaiting(prefix)
        await self._journal.change(lambda tx: tx.turns.try_now(prefix.bucket, prefix.key_prefix, now, awaiting))
        self._reconciler.prioritise(prefix)


def flush_progress(
    scope: Prefix,
    through: int,
    sums: to.FlushSums,
    problems: list[to.PendingObject],
    attempts: Attempts,
    awaiting: Mapping[int, int],
    journal_problem: str | None,
) -> to.FlushProgress:
    """`awaiting` maps ids of waiting manifests to their numbers of missing files."""
    return to.FlushProgress(
        prefix=str(scope),
        is_name=isinstance(scope, Name),
        awaiting_files=len(awaiting),
        files_missing=sum(awaiting.values()),
        through=through,
        **dict(sums),
        longest_attempt_seconds=attempts.longest_seconds,
        origin_away=attempts.is_away,
        journal_problem=journal_problem,
        problems=problems,
    )

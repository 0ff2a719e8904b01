"""Applies the slots' rules for checkpoints: which need no flush, which stay cached, how long local objects last.

Runs in the process that flushes. Each look decides from the journal anew, so nothing is lost with the process.

A run's checkpoints are in the order in which their last saves began, by a count: clocks go back. Once one of them is at
the origin, whole and with as many files, those before it are not sent any more where the slot's rule says so; before
that all are. A job that died while it saved has left fewer files, and names alone may not tell that some are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import structlog

from gateway.core.clock import Clock, Moment
from gateway.core.model import LOCAL_EXPIRY_SECONDS, ObjectKey
from gateway.policy.slots import Slot
from gateway.writeback.admin.checkpoint_queries import CheckpointQueries, CheckpointRow, RunRow
from gateway.writeback.admin.queries import look_repeatedly
from gateway.writeback.checkpoints.state import CheckpointState, is_whole
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.transaction import JournalTransaction

LOOK_SECONDS = 2.0

EXPIRY_LOOK_SECONDS = 30.0

_log = structlog.get_logger("forebay.writeback")


FlushRule: TypeAlias = int | Literal["all", "latest"]
"""The checkpoints that are flushed whatever follows them: all, none (`latest`), or every n-th."""


def flush_rule_of(text: str) -> FlushRule:
    """Parse `all`, `latest` or `every-5th`; ValueError for anything else."""
    if text == "all" or text == "latest":
        return text  # type: ignore[return-value]
    number = text.removeprefix("every-").rstrip("stndrh")
    if not text.startswith("every-") or not number.isdecimal() or int(number) < 2:
        raise ValueError(f"{text!r} is no rule for flushes")
    return int(number)


def superseded(run: Sequence[CheckpointRow], rule: FlushRule) -> set[int]:
    """Return the ids of a run's checkpoints (the newest first) that need no flush any more."""
    left_out, most = set[int](), 0
    if rule == "all":
        return left_out
    for row in run:
        if row.document.state == CheckpointState.DURABLE:
            most = max(most, row.document.files)
        elif 0 < row.document.files <= most and (rule == "latest" or row.ordinal % rule != 0):
            left_out.add(row.id)
    return left_out


def whole_since(run: Sequence[CheckpointRow], old: CheckpointRow) -> float:
    """Return when the newest checkpoint that supersedes this one was whole here; 0 if none does."""
    for row in run:
        is_newer = row.save_order > old.save_order and row.document.files >= old.document.files
        if is_newer and row.document.state == CheckpointState.DURABLE:
            return row.document.last_at or 0.0
    return 0.0


def kept(run: Sequence[CheckpointRow], keep_last: int) -> set[int]:
    """Return the ids of a run's `keep_last` newest complete checkpoints, and of those that are being saved."""
    complete = [row for row in run if is_whole(row.document)][:keep_last]
    being_saved = [row for row in run if row.document.state == CheckpointState.WRITING]
    return {row.id for row in (*being_saved, *complete)}


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint to keep in the cache: its prefix as a key, and its durable objects' bytes (0: unknown).

    `mark` changes when the cache may hold more of it than before.
    """

    name: ObjectKey
    objects: Sequence[tuple[ObjectKey, int]]
    mark: tuple[object, ...]


class CheckpointCache(Protocol):
    """The cache in which flushed checkpoints stay."""

    async def keep(self, checkpoints: Sequence[KeptCheckpoint]) -> Mapping[ObjectKey, str]:
        """Keep these checkpoints, and no others. Return the names of those that do not fit, with the reason."""


class CheckpointRetention:
    """Retention for one buffer. `slots` may change."""

    def __init__(
        self,
        queries: CheckpointQueries,
        journal: Journal,
        slots: Iterable[Slot],
        cache: CheckpointCache,
        clock: Clock,
    ) -> None:
        self._queries = queries
        self._journal = journal
        self._slots = slots
        self._cache = cache
        self._clock = clock
        self._expired_at = float("-inf")
        self._has_kept = True  # the previous process may have kept some
        self.kept: Mapping[ObjectKey, str | None] = {}
        """The checkpoints to keep in the cache, by name, each with the reason if the cache cannot keep it."""

    async def run(self) -> None:
        await look_repeatedly(self.look, self._clock, LOOK_SECONDS)

    async def look(self) -> None:
        """Apply all rules once. Raise BufferUnavailable when the journal cannot be read or written."""
        await self._supersede()
        await self._send_after_all()
        await self._keep()
        if self._clock.monotonic() - self._expired_at >= EXPIRY_LOOK_SECONDS:
            self._expired_at = self._clock.monotonic()
            await self._expire()

    def _flush_rules(self) -> Mapping[str, FlushRule]:
        """Return the rules of the slots that flush what they acknowledge."""
        return {one.name: flush_rule_of(one.flush) for one in self._slots if one.write == "back"}

    async def _supersede(self) -> None:
        rules = {name: rule for name, rule in self._flush_rules().items() if rule != "all"}
        if not rules:
            return
        for run in await self._queries.unsent_runs(rules.keys(), self._clock.now()):
            doomed = superseded(run.rows, rules[run.slot]) & run.unsent
            for row in run.rows:
                if row.id in doomed:
                    await self._keep_here(row, whole_since(run.rows, row))

    async def _send_after_all(self) -> None:
        """Flush local objects that no rule leaves out any more: a newer checkpoint was deleted, or the rule changed."""
        with_local = set(self._journal.read(_with_local))
        rules = {name: rule for name, rule in self._flush_rules().items() if name in with_local}
        if not rules:
            return
        now = self._clock.now()
        for slot, checkpoint_id, run in await self._queries.local(rules.keys()):
            if checkpoint_id is not None:
                found = await self._queries.run_of(run, now)
                if checkpoint_id in superseded(found.rows, rules.get(found.slot, "all")):
                    continue
            objects = await self._journal.change(
                lambda tx: tx.local.send_checkpoint_after_all(slot, checkpoint_id, now)  # noqa: B023
            )
            if objects:
                _log.info("objects that were not to be sent are sent after all", slot=slot, objects=objects)

    async def _keep_here(self, row: CheckpointRow, newer_since: float) -> None:
        now = self._clock.now()
        objects = await self._journal.change(lambda tx: tx.local.keep_here(row.id, now, newer_since))
        if objects:
            _log.info(
                "a checkpoint is not sent any more: a newer one is at the origin",
                checkpoint=str(row.key),
                slot=row.document.slot,
                objects=objects,
            )

    async def _keep(self) -> None:
        rules = {one.name: one for one in self._slots if one.write == "back" and one.keep_last is not None}
        if not rules and not self._has_kept:
            return
        runs: Sequence[RunRow] = await self._queries.runs(rules.keys(), self._clock.now()) if rules else ()
        chosen = list[KeptCheckpoint]()
        for run in runs:
            ids, prefix = kept(run.rows, rules[run.slot].keep_last or 1), rules[run.slot].prefix
            for row in run.rows:
                if row.id in ids and prefix.covers(*row.key):
                    objects, shown = await self._queries.durable_objects(row.id), row.document
                    mark = (shown.state, shown.files, shown.began_at, len(objects) == shown.files)
                    chosen.append(KeptCheckpoint(row.key, objects, mark))
        refused = await self._cache.keep(chosen)
        for name, reason in refused.items():
            if self.kept.get(name) != reason:
                _log.warning(
                    "keep_last: the cache cannot keep all of a checkpoint", checkpoint=str(name), reason=reason
                )
        self.kept = {one.name: refused.get(one.name) for one in chosen}
        self._has_kept = bool(chosen)

    async def _expire(self) -> None:
        lasting = {one.name: one.scratch_expiry_seconds for one in self._slots}
        for slot in self._journal.read(_with_local):
            expiry_seconds = lasting.get(slot, LOCAL_EXPIRY_SECONDS)
            now = Moment.of(self._clock)
            oldest = self._journal.read(lambda tx: tx.local.oldest(slot))  # noqa: B023
            if oldest is None or now.passed_since(oldest) < expiry_seconds:
                continue
            objects, size_bytes = await self._journal.change(
                lambda tx: tx.local.remove(slot, now, None, expiry_seconds)  # noqa: B023
            )
            if objects:
                _log.info("objects that were not to be sent have expired", slot=slot, objects=objects, bytes=size_bytes)


def _with_local(tx: JournalTransaction) -> list[str]:
    return [slot for slot, usage in tx.files.usages().items() if usage.local_objects]

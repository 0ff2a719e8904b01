"""Counts the outcomes of flushes, and logs them without flooding the log."""

from __future__ import annotations

import structlog

from gateway.core.clock import Clock, Moment
from gateway.telemetry import metrics
from gateway.telemetry.metrics import FailureKind
from gateway.writeback.journal.records import Write

_log = structlog.get_logger("forebay.writeback")

LINES_PER_MINUTE = 30
"""For failing flushes, for those that recover, and for manifests: with the origin away, every flush fails."""

FLUSHED_LINES_PER_SECOND = 100
"""Flushed objects that have a line each; those beyond share one."""


class FlushLogger:
    """Counts and logs the events of pending writes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failing, self._going_on, self._manifests = (_Lines(clock) for _ in range(3))
        self._lines = 0
        self._objects = 0
        self._deletions = 0
        self._bytes = 0

    async def run(self) -> None:
        """Log the sum of what had no line of its own, once a second."""
        try:
            while True:
                await self._clock.sleep(1.0)
                self._log_sum()
        finally:
            self._log_sum()

    def _log_sum(self) -> None:
        self._lines = 0
        if self._objects:
            _log.info("objects were flushed", objects=self._objects, deletions=self._deletions, bytes=self._bytes)
            self._objects = self._deletions = self._bytes = 0

    def settled(self, write: Write, etag: str | None, attempt_seconds: float) -> None:
        """Count a write that is not pending any more: the origin has this version, or None: the key is deleted."""
        age_seconds = max(0.0, Moment.of(self._clock).since(write.acknowledged_then)[0])
        metrics.WRITEBACK_FLUSHED_OBJECTS.add(1, write.spec.slot)
        metrics.WRITEBACK_FLUSHED_BYTES.add(write.size_bytes, write.spec.slot)
        metrics.WRITEBACK_FLUSH_SECONDS.observe(age_seconds, write.spec.slot)
        if self._lines == FLUSHED_LINES_PER_SECOND:
            self._objects += 1
            self._deletions += write.deleted
            self._bytes += write.size_bytes
            return
        self._lines += 1
        _log.info(
            "a deletion was flushed" if write.deleted else "an object was flushed",
            object=str(write.key),
            slot=write.spec.slot,
            sequence=write.sequence,
            bytes=write.size_bytes,
            etag=etag,
            age_seconds=round(age_seconds, 3),
            attempt_seconds=round(attempt_seconds, 3),
        )

    def failing(self, write: Write, failures: int, reason: str, kind: FailureKind) -> None:
        """Count and log a failed attempt that another one follows."""
        metrics.WRITEBACK_FLUSH_FAILURES.add(1, write.spec.slot, kind)
        if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, …
            message, slot = "a write cannot be flushed yet, and stays here", write.spec.slot
            self._failing.log("warning", message, str(write.key), slot, failures=failures, reason=reason)

    def not_looked_after(self, name: str, slot: str, reason: str) -> None:
        """Something has failed on this node, and is tried again."""
        self._failing.log("error", "a write cannot be processed, and stays here", name, slot, reason=reason)

    def goes_on(self, write: Write) -> None:
        """Log that the origin has taken a part of a write that had failed."""
        message = "a write that could not be flushed makes progress again"
        self._going_on.log("info", message, str(write.key), write.spec.slot)

    def conflict(self, write: Write, reason: str) -> None:
        metrics.WRITEBACK_CONFLICTS.add(1, write.spec.slot)
        _log.error(
            "CONFLICT: others have changed the key; this node keeps its write until a person decides: "
            "forebay writeback resolve",
            object=str(write.key),
            slot=write.spec.slot,
            reason=reason,
        )

    def damaged(self, write_id: int, name: str, slot: str, reason: str) -> None:
        metrics.WRITEBACK_DAMAGED.add(1, slot)
        _log.error(
            "DAMAGED: the bytes of an acknowledged write on this disk have changed; they are kept and not sent",
            object=name,
            slot=slot,
            reason=reason,
        )

    def not_understood(self, write: Write, reason: str) -> None:
        """Log a manifest that cannot be read, and is flushed in the order of arrival."""
        message = "a manifest's file names cannot be read: it goes to the origin in the order of arrival"
        self._manifests.log("warning", message, str(write.key), write.spec.slot, reason=reason)

    def awaits_files(self, write: Write, reason: str, *, of_others: bool = False) -> None:
        message = "a manifest waits here until the origin has the files that it names"
        if of_others:
            message = "a marker waits here until the origin has what other nodes have acknowledged before it"
        self._manifests.log("info", message, str(write.key), write.spec.slot, reason=reason)

    def expired(self, write: Write, reason: str) -> None:
        """Log an open upload that has ended without being completed."""
        _log.warning(
            "an upload that its client has not completed has expired",
            object=str(write.key),
            slot=write.spec.slot,
            upload_id=write.upload_id,
            reason=reason,
        )


class _Lines:
    """Log lines about writes, LINES_PER_MINUTE at most; the next line tells how many were left out."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._minute = 0
        self._lines = 0
        self._left_out = 0

    def log(self, level: str, message: str, name: str, slot: str, **fields: object) -> None:
        minute = int(self._clock.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._lines = minute, 0
        if self._lines == LINES_PER_MINUTE:
            self._left_out += 1
            return
        self._lines += 1
        if self._left_out:
            fields["lines_left_out"] = self._left_out
            self._left_out = 0
        getattr(_log, level)(message, object=name, slot=slot, **fields)

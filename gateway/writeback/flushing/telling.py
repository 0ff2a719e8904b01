"""What becomes of flushes, told to people: counted, and written to the log without flooding it."""

from __future__ import annotations

from typing import Protocol

import structlog

from gateway.writeback.journal.records import PendingObject

_log = structlog.get_logger("forebay.writeback")


class FlushCounters(Protocol):
    """For metrics."""

    def flushed(self, slot: str, size_bytes: int) -> None: ...

    def flush_failed(self, slot: str) -> None: ...

    def flush_conflict(self, slot: str) -> None: ...

    def flush_damaged(self, slot: str) -> None: ...


class Teller:
    """The methods of `flush.FlushObserver`."""

    def __init__(self, counters: FlushCounters) -> None:
        self._counters = counters

    def settled(self, pending: PendingObject) -> None:
        self._counters.flushed(pending.fixed.slot, pending.size_bytes)

    def failing(self, pending: PendingObject, failures: int, reason: str) -> None:
        self._counters.flush_failed(pending.fixed.slot)
        if failures & (failures - 1) == 0:  # the 1st, 2nd, 4th, 8th, …
            _log.warning(
                "a write cannot be flushed yet, and stays here",
                object=str(pending.key),
                slot=pending.fixed.slot,
                failures=failures,
                reason=reason,
            )

    def goes_on(self, pending: PendingObject) -> None:
        _log.info("a write that could not be flushed goes on", object=str(pending.key), slot=pending.fixed.slot)

    def conflict(self, pending: PendingObject) -> None:
        self._counters.flush_conflict(pending.fixed.slot)
        _log.error(
            "A CONFLICT: somebody else has changed the object at the origin; the write of this node is kept here until "
            "somebody decides: forebay writeback resolve",
            object=str(pending.key),
            slot=pending.fixed.slot,
        )

    def damaged(self, pending: PendingObject, reason: str) -> None:
        self._counters.flush_damaged(pending.fixed.slot)
        _log.error(
            "DAMAGED: what lies here of an acknowledged write is not what was acknowledged; it is not sent",
            object=str(pending.key),
            slot=pending.fixed.slot,
            reason=reason,
        )

"""The end of a run: what the origin has of uploads that nobody knows is found, as after a minute, and aborted, as after
half a day."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from gateway.core.clock import Moment, SystemClock
from gateway.origin.client import Origin
from gateway.writeback.flushing.flush_task import FlushDependencies
from gateway.writeback.flushing.reconciler import Reconciler
from gateway.writeback.flushing.requests import Requests
from gateway.writeback.flushing.state import UNUSED_SECONDS
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Write
from gateway.writeback.journal.uploads import CARRIED_OUT_SECONDS
from gateway.writeback.staged_file import BufferThreads, Staging
from tests.crash.points.client import BUCKET
from tests.crash.points.field import Field
from tests.crash.points.ledger import Difference
from tests.support.flushing import Observer

SECONDS_MAX = 60.0


class _LaterClock(SystemClock):
    def __init__(self, ahead_seconds: float) -> None:
        self._ahead_seconds = ahead_seconds

    def now(self) -> float:
        return super().now() + self._ahead_seconds

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead_seconds


def find_lost_uploads(field: Field) -> None:
    """Of a gateway that has ended. Difference when an upload is left at the origin, or anything in the journal."""
    field.origin.stop()
    asyncio.run(_find(field))
    left = field.origin.model.buckets[BUCKET].uploads
    if left:
        raise Difference(f"uploads are left at the origin: {[one.key for one in left.values()]}")


async def _find(field: Field) -> None:
    journal = Journal(field.gateway.directory / "writeback", lambda _: None)
    try:
        journal.recover(Moment(SystemClock().now()))
        await _reconcile(field, journal, CARRIED_OUT_SECONDS, lambda one: one.origin_upload_id is None)
        await _reconcile(field, journal, CARRIED_OUT_SECONDS + UNUSED_SECONDS, lambda _: True)
    finally:
        journal.close()


async def _reconcile(field: Field, journal: Journal, ahead_seconds: float, is_left: Callable[[Write], bool]) -> None:
    """So much later, until nothing is left that is to be aborted at the origin. Difference when it stays."""
    threads, clock = BufferThreads(1), _LaterClock(ahead_seconds)
    observer = Observer(clock)
    requests = Requests(
        cast(Origin, field.origin.model), Staging(field.gateway.directory / "writeback", 0), threads, clock
    )
    reconciling = asyncio.create_task(Reconciler(FlushDependencies(journal, requests, observer, observer, clock)).run())
    try:
        async with asyncio.timeout(SECONDS_MAX):
            while any(map(is_left, journal.read(lambda tx: tx.uploads.aborting()))):  # noqa: ASYNC110 - another process has no event
                await asyncio.sleep(0.05)
    except TimeoutError:
        left = list(filter(is_left, journal.read(lambda tx: tx.uploads.aborting())))
        raise Difference(f"what was asked for at the origin is still to be found out: {left}") from None
    finally:
        reconciling.cancel()
        await asyncio.gather(reconciling, return_exceptions=True)
        threads.shut_down()

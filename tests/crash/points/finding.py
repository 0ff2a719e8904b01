"""The end of a run: what the origin has of uploads that nobody knows is found and aborted, as after a minute."""

from __future__ import annotations

import asyncio
from typing import cast

from gateway.clock import SystemClock
from gateway.origin.client import Origin
from gateway.writeback.files.staged_file import Staging
from gateway.writeback.flushing.reconciler import Reconciler, Tools
from gateway.writeback.flushing.requests import Requests
from gateway.writeback.journal.book import CARRIED_OUT_SECONDS
from gateway.writeback.journal.journal import Journal
from gateway.writeback.threads import BufferThreads
from tests.crash.points.client import BUCKET
from tests.crash.points.field import Field
from tests.crash.points.ledger import Difference
from tests.support.flushing import Observer

SECONDS_MAX = 60.0


class _LaterClock(SystemClock):
    """When everything that was on its way has arrived."""

    def now(self) -> float:
        return super().now() + CARRIED_OUT_SECONDS

    def monotonic(self) -> float:
        return super().monotonic() + CARRIED_OUT_SECONDS


def find_lost_uploads(field: Field) -> None:
    """Of a gateway that has ended. Difference when an upload is left at the origin, or anything in the journal."""
    field.origin.stop()
    asyncio.run(_find(field))
    left = field.origin.model.buckets[BUCKET].uploads
    if left:
        raise Difference(f"uploads are left at the origin: {[one.key for one in left.values()]}")


async def _find(field: Field) -> None:
    directory = field.gateway.directory / "writeback"
    journal, threads = Journal(directory, lambda _: None), BufferThreads(1)
    observer, clock = Observer(), _LaterClock()
    try:
        journal.recover(SystemClock().now())
        requests = Requests(cast(Origin, field.origin.model), Staging(directory, 0), threads, clock)
        reconciling = asyncio.create_task(Reconciler(Tools(journal, requests, observer, observer, clock)).run())
        try:
            async with asyncio.timeout(SECONDS_MAX):
                while journal.read(lambda book: book.are_any_aborting()):  # noqa: ASYNC110 - another process has no event
                    await asyncio.sleep(0.05)
        except TimeoutError:
            left = journal.read(lambda book: book.aborting())
            raise Difference(f"what was asked for at the origin is still to be found out: {left}") from None
        finally:
            reconciling.cancel()
            await asyncio.gather(reconciling, return_exceptions=True)
    finally:
        threads.shut_down()
        journal.close()

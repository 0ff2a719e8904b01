"""The end of a run: what the origin has of uploads that nobody knows is found and aborted, as after a minute."""

from __future__ import annotations

import asyncio
from typing import cast

from gateway.clock import SystemClock
from gateway.origin.client import Origin
from gateway.writeback.files.staged_file import Staging
from gateway.writeback.flushing.flush_requests import FlushRequests
from gateway.writeback.flushing.lost_uploads import CARRIED_OUT_SECONDS, LostUploads
from gateway.writeback.journal.journal import Journal
from gateway.writeback.threads import BufferThreads
from tests.crash.points.client import BUCKET
from tests.crash.points.field import Field
from tests.crash.points.ledger import Difference


class _LaterClock(SystemClock):
    """When everything that was on its way has arrived."""

    def now(self) -> float:
        return super().now() + CARRIED_OUT_SECONDS


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
    try:
        journal.recover(SystemClock().now())
        requests = FlushRequests(cast(Origin, field.origin.model), Staging(directory, 0), threads)
        await LostUploads(journal, requests, _LaterClock()).look()
        for origin_upload_id in journal.read(lambda book: book.orphan_ids(1000)):
            orphan = journal.read(lambda book: book.orphan_of(origin_upload_id))  # noqa: B023
            assert orphan is not None
            assert await requests.abort(orphan.key, orphan.origin_upload_id)
        if journal.read(lambda book: book.suspected("", 1)):
            raise Difference("what was asked for at the origin is still to be found out")
    finally:
        threads.shut_down()
        journal.close()

"""`write = "back"`, uploads that the origin completes: clauses 4.8 and 5.7 of docs/semantics.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.s3.requests import Operation
from tests.support.memory_origin.faults import Unreachable, on
from tests.support.write_back_gateway import a_client


@pytest.mark.parametrize("done", [True, False])
async def test_5_7_an_upload_that_the_origin_has_completed_is_over(tmp_path: Path, *, done: bool) -> None:
    """5.7 Nothing of it stays, though nobody heard that the origin has done it; else it stays as it is, and its client
    may go on. 4.8 Either way a repeated Complete is answered 200."""
    async with a_client(tmp_path) as client:
        upload_id = await client.create("back/m")
        etags = {1: await client.part("back/m", upload_id, 1, b"part")}
        client.origin.inject(on(Operation.COMPLETE_MULTIPART_UPLOAD), Unreachable(late=done))
        client.origin.inject(on(Operation.HEAD_OBJECT), Unreachable())
        await client.complete("back/m", upload_id, etags, 503, headers={"If-None-Match": "*"})
        await client.find_lost_completions()
        left = (len(list(client.buffer.staging.names())), client.buffer.look(lambda tx: tx.counts()))
        assert left == ((0, (0, 0)) if done else (1, (0, 1)))
        await client.complete("back/m", upload_id, etags, headers={"If-None-Match": "*"})
        assert client.origin.data("bucket", "back/m") == b"part"

"""Replies on other servers than our own, and on encrypted connections."""

from __future__ import annotations

import asyncio
import os
from collections.abc import MutableMapping
from typing import Any

from gateway.core.model import BodyStream, BorrowedBuffer
from gateway.edge.asgi import RequestRecord, send_reply
from gateway.edge.response import COPIED_BYTES
from gateway.edge.sending import PlainSend
from gateway.operations.context import Response

CONTENT = os.urandom(3 * COPIED_BYTES + 5)


async def lending() -> BodyStream:
    position = 0
    while position < len(CONTENT):
        lent = BorrowedBuffer(memoryview(CONTENT)[position:])
        yield lent
        position += lent.taken


def test_lent_bytes_are_copied_a_little_at_a_time() -> None:
    """A server that holds what it has not sent yet holds that for every slow client: it gets no more than a little."""
    messages = list[MutableMapping[str, Any]]()

    async def send(message: MutableMapping[str, Any]) -> None:
        messages.append(message)

    reply = Response(200, [("content-length", str(len(CONTENT)))], lending())
    record = RequestRecord(b"/b/k")
    asyncio.run(send_reply(reply, {"method": "GET"}, PlainSend(send, "GET"), record))
    bodies = [message["body"] for message in messages[1:]]
    assert (record.sent_bytes, b"".join(bodies)) == (len(CONTENT), CONTENT)
    assert max(len(body) for body in bodies) == COPIED_BYTES
    assert [message.get("more_body", False) for message in messages[1:]] == [True] * 4 + [False]

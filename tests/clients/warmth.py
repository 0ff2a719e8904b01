"""Whether what a client read came out of the cache: asked of the origin, not of the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.clients.origins import Origin, Seen


@contextmanager
def reads_at(origin: Origin, bucket: str) -> Iterator[list[Seen]]:
    """The GETs of object bytes that reach the origin inside the block; the list is complete once it is left."""
    before = len(origin.object_reads(bucket))
    reads: list[Seen] = []
    yield reads
    reads += origin.object_reads(bucket)[before:]


def put_all(client: Any, bucket: str, content: dict[str, bytes]) -> dict[str, bytes]:
    """Put every object of `content`, and give it back."""
    for key, data in content.items():
        client.put_object(Bucket=bucket, Key=key, Body=data)
    return content

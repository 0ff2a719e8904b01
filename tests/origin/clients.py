"""An `S3Origin` against a strict origin, with a clock that never waits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.origin.client import OriginSettings
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials
from gateway.origin.traffic_meter import Attempt
from tests.origin.clocks import JumpingClock
from tests.origin.origins import STRICT_PAIR
from tests.support.strict_origin import StrictOrigin

MEBIBYTE = 1024 * 1024


class Client:
    """An `S3Origin` with a clock that never waits."""

    def __init__(self, strict: StrictOrigin, **settings: object) -> None:
        self.clock = JumpingClock()
        self.attempts: list[Attempt] = []
        given: dict[str, object] = {"endpoint_url": strict.endpoint_url, **settings}
        self.origin = S3Origin(
            OriginSettings(**given),  # type: ignore[arg-type]
            StaticCredentials(STRICT_PAIR),
            self.clock,
            instance_id="gateway-1",
            on_attempt=self.attempts.append,
            hedges=False,  # a busy machine would add to the requests that tests count
        )


@asynccontextmanager
async def playing(strict: StrictOrigin, **settings: object) -> AsyncIterator[Client]:
    """A client of its own; when this is over, the origin is done with all its requests."""
    client = Client(strict, **settings)
    try:
        yield client
    finally:
        await client.origin.aclose()
    strict.settle()


async def pieces(*chunks: bytes, failure: Exception | None = None) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if failure is not None:
        raise failure

"""The origins that tests share."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.origin.origins import OriginUnderTest, Scenario, running
from tests.support.strict_origin import StrictOrigin


@pytest.fixture(scope="module")
def server() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        yield origin


@pytest.fixture
def strict(server: StrictOrigin) -> Iterator[StrictOrigin]:
    """The strict origin with one object, nothing recorded, no faults."""
    server.model.buckets.clear()
    server.model.put("bucket", "key", b"0123456789")
    server.model.calls.clear()
    server.model.faults.clear()
    server.request_lines.clear()
    server.request_headers.clear()
    server.clients.clear()
    yield server
    server.region = "us-east-1"
    server.accepts_unknown_length = False


@pytest.fixture(
    params=["memory", "strict", "moto", "directory", "azure", pytest.param("azurite", marks=pytest.mark.azure)],
    scope="module",
)
def under_test(request: pytest.FixtureRequest) -> Iterator[OriginUnderTest]:
    with running(request.param) as origin:
        yield origin


@pytest.fixture
def run(under_test: OriginUnderTest) -> Callable[[Scenario], None]:
    """Runs a scenario with a client and a fresh bucket."""

    def runner(scenario: Scenario) -> None:
        async def main() -> None:
            origin = under_test.connect()
            bucket = f"b-{uuid.uuid4().hex[:12]}"
            try:
                await under_test.make_bucket(origin, bucket)
                await scenario(origin, bucket)
            finally:
                await origin.aclose()

        asyncio.run(main())

    return runner

"""First reads of small objects: answered without a task, as the whole way answers them, whatever the origin says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.core.model import ObjectKey
from gateway.operations.cold_reads import ColdRead
from tests.edge.test_prepared import SLOTS, Asked, ChangingKeyring, Pair, both_ports, head_of
from tests.origin.origins import s3_origin
from tests.support.gateway_app import gateway_app
from tests.support.set_clock import SetClock
from tests.support.strict_origin import StrictOrigin


@asynccontextmanager
async def cold_pair(directory: Path) -> AsyncIterator[tuple[Pair, StrictOrigin]]:
    """Both ways of a gateway before an origin over HTTP; the kinds of heads are known, and a connection is open."""
    clock, keyring = SetClock(), ChangingKeyring()
    with StrictOrigin() as strict:
        strict.model.create_bucket("bucket")
        origin = s3_origin(strict.endpoint_url, max_attempts=1)
        try:
            async with (
                gateway_app(
                    directory,
                    origin=strict.model,
                    through=origin,
                    slots=SLOTS,
                    clock=clock,
                    keyring=keyring,
                    writeback=True,
                ) as gateway,
                both_ports(gateway, clock, keyring) as both,
            ):
                strict.model.put("bucket", "d/first", b"first")
                for asked in KINDS:
                    await both.settled(both.ask(Asked("GET", "d/first", asked), "fast"))
                await gateway.blocks.invalidate(ObjectKey("bucket", "d/first"))
                yield both, strict
        finally:
            await origin.aclose()


KINDS: tuple[dict[str, str], ...] = ({}, {"range": "bytes=2-5"}, {"x-amz-checksum-mode": "ENABLED"})


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each cold read that ended, whether it was answered without a task."""
    found: list[bool] = []
    answer = ColdRead.answer

    def noted(read: ColdRead) -> Any:
        result = answer(read)
        found.append(result is not None)
        return result

    monkeypatch.setattr(ColdRead, "answer", noted)
    return found


async def read(both: Pair, way: str, key: str, fields: dict[str, str]) -> tuple[bytes, bytes]:
    answer = await both.said(way, head_of(Asked("GET", key, fields), "first-secret", both.clock.now()))
    assert answer is not None
    return answer


async def test_a_first_read(tmp_path: Path, answered: list[bool]) -> None:
    async with cold_pair(tmp_path) as (both, strict):
        strict.model.put("bucket", "d/a", b"content", {"content-type": "image/jpeg"})
        head, body = await read(both, "fast", "d/a", {})
        assert body == b"content"
        assert answered == [True]
        print(head)

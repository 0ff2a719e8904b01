"""Nothing is kept for strangers: whatever they send, and however often, memory stays what it was."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.support.asgi import ACCESS_KEY_ID, call
from tests.support.gateway_app import GatewayApp, gateway_app

REQUESTS = 300
LONG_BYTES = 16 * 1024
GROWTH_BYTES_MAX = 2 * 1024 * 1024
"""Less than half of what they send."""

Sent = tuple[str, Mapping[str, str]]

_DATED = {"x-amz-date": "20260101T000000Z", "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}


def authorization(key_id: str, *, region: str = "us-east-1", signed: str = "host") -> Mapping[str, str]:
    credential = f"{key_id}/20260101/{region}/s3/aws4_request"
    value = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={signed}, Signature={'0' * 64}"
    return {**_DATED, "authorization": value}


FLOODS: dict[str, Callable[[str], Sent]] = {
    "key id": lambda text: ("/bucket/k", authorization(text)),
    "known key id": lambda text: ("/bucket/k", authorization(ACCESS_KEY_ID, signed=f"host;{text}")),
    "region": lambda text: ("/bucket/k", authorization(ACCESS_KEY_ID, region=text)),
    "scheme": lambda text: ("/bucket/k", {"authorization": text}),
    "x-amz-date": lambda text: ("/bucket/k", {**authorization(ACCESS_KEY_ID), "x-amz-date": text}),
    "date": lambda text: ("/bucket/k", {"authorization": authorization("a")["authorization"], "date": text}),
    "host": lambda text: ("/bucket/k", {"Host": f"{text}.s3.local"}),
    "bucket": lambda text: (f"/{text}/k", {}),
    "key": lambda text: (f"/bucket/{text}", {}),
    "field name": lambda text: ("/bucket/k", {text: "value"}),
    "field": lambda text: ("/bucket/k", {"if-modified-since": text, "if-none-match": text, "range": text}),
    "query": lambda text: (f"/bucket/k?{text}", {}),
    "presigned": lambda text: (
        f"/bucket/k?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={text}%2F20260101%2Fus-east-1%2Fs3%2Faws4_request"
        "&X-Amz-Date=20260101T000000Z&X-Amz-Expires=60&X-Amz-SignedHeaders=host&X-Amz-Signature=0",
        {},
    ),
    "presigned, version 2": lambda text: (f"/bucket/k?AWSAccessKeyId={text}&Expires=1&Signature=0", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("flood", FLOODS)
def test_refused_requests_leave_nothing_behind(tmp_path: Path, flood: str) -> None:
    """Long ones, each another: what is remembered of those that were refused is bounded in bytes."""

    async def send(gateway: GatewayApp, numbers: range) -> None:
        for number in numbers:
            target, headers = FLOODS[flood](f"{number:08}" + "x" * LONG_BYTES)
            answer = await call(gateway.app, "GET", target, headers, sign=False)
            assert answer.status >= 400

    async def scenario() -> int:
        async with gateway_app(tmp_path) as gateway:
            await send(gateway, range(20))
            gc.collect()
            tracemalloc.start()
            try:
                before, _ = tracemalloc.get_traced_memory()
                await send(gateway, range(20, REQUESTS))
                gc.collect()
                return tracemalloc.get_traced_memory()[0] - before
            finally:
                tracemalloc.stop()

    assert asyncio.run(scenario()) < GROWTH_BYTES_MAX

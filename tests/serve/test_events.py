"""Events of the origin, sent to the admin port of a running gateway: every worker goes by them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

_TRIES = 12
"""Each over a connection of its own: it is as good as certain that both workers are met."""


def get(url: str, path: str) -> bytes:
    answer = httpx.get(f"{url}{path}", trust_env=False, timeout=20)
    assert answer.status_code == 200
    return answer.content


def seen(gateway: GatewayProcess) -> set[bytes]:
    return {get(gateway.s3_url, "/bucket/key") for _ in range(_TRIES)}


def listed(gateway: GatewayProcess) -> set[bool]:
    """Whether the object is listed as five bytes long."""
    return {b"<Size>5</Size>" in get(gateway.s3_url, "/bucket?list-type=2") for _ in range(_TRIES)}


@pytest.mark.slow
def test_an_event_is_seen_by_every_worker_when_it_is_answered() -> None:
    """3.12 The background process takes it, the workers share what it voids; metrics count it."""
    record = {
        "eventSource": "aws:s3",
        "eventName": "ObjectCreated:Put",
        "s3": {"bucket": {"name": "bucket"}, "object": {"key": "key", "eTag": "0"}},
    }
    with StrictOrigin() as origin:
        origin.model.put("bucket", "key", b"old")
        config: dict[str, Any] = {
            "server": {"workers": 2, "allow_unsigned": True},
            "origin": origin.settings,
            "slots": [{"name": "slot", "prefix": "s3://bucket/", "consistency": "immutable"}],
        }
        with GatewayProcess(config) as gateway:
            assert (seen(gateway), listed(gateway)) == ({b"old"}, {False})
            origin.model.put("bucket", "key", b"newer")
            assert (seen(gateway), listed(gateway)) == ({b"old"}, {False})
            events = f"{gateway.admin_url}/api/v1/events"
            answer = httpx.post(events, json={"Records": [record]}, trust_env=False, timeout=20)
            assert answer.json()["applied"] == 1
            assert (seen(gateway), listed(gateway)) == ({b"newer"}, {True})
            metrics = get(gateway.admin_url, "/metrics").decode()
            assert 'forebay_origin_events_total{outcome="applied"} 1.0' in metrics

"""Crawls that are killed go on where they were, and take back no own write (docs/semantics.md, clause 3.17)."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.s3.requests import Operation
from tests.clients.boto import boto3_client
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.faults import Delay, on
from tests.support.strict_origin import StrictOrigin

KEYS = 20_000
KILLS = 3
_PATIENCE_SECONDS = 60.0


def background(gateway: GatewayProcess) -> tuple[int | None, dict[str, Any] | None]:
    """The process, and how the index stands; None while it is down, or has not opened the directory yet."""
    status = gateway.status()
    pid = next(one["process_id"] for one in status["gateway"]["processes"] if one["name"] == "background")
    return pid, next(iter(status["indexes"]), None)


@pytest.mark.slow
def test_a_crawl_goes_on_when_its_process_is_killed(tmp_path: Path) -> None:
    """Again and again in the middle of it, while the gateway's own clients write: at the end LIST is what is there."""
    with StrictOrigin() as origin:
        for number in range(KEYS):
            origin.model.put("bucket", f"data/{number:06d}", b"x")
        origin.model.inject(on(Operation.LIST_OBJECTS_V2), Delay(0.1), times=None)
        slot = {"name": "data", "prefix": "s3://bucket/data/", "mode": "read-write", "consistency": "immutable"}
        config: dict[str, Any] = {
            "origin": origin.settings,
            "slots": [slot | {"index": True, "index_concurrency": 2}],
        }
        with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
            s3 = boto3_client(gateway.s3_url)
            for kill in range(KILLS):
                _kill_in_mid_crawl(gateway)
                s3.put_object(Bucket="bucket", Key=f"data/{kill:06d}-own", Body=b"own")
                s3.delete_object(Bucket="bucket", Key=f"data/{kill:06d}")
            _wait_until_complete(gateway)
            pages = s3.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix="data/")
            listed = [one["Key"] for page in pages for one in page.get("Contents", [])]
        assert listed == [key.decode() for key in origin.model.buckets["bucket"].sorted_keys]
        crawled = sum("max-keys" not in dict(one.query) for one in origin.model.calls if one.key is None)
        assert crawled < 3 * KEYS / 1000, "what was listed before a kill is not listed again"


def _kill_in_mid_crawl(gateway: GatewayProcess) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        pid, index = background(gateway)
        if pid is not None and index is not None and index["state"] == "crawling" and index["pages"] >= 2:
            os.kill(pid, signal.SIGKILL)
            _wait_for_another(gateway, pid)
            return
        time.sleep(0.02)
    raise AssertionError(f"no crawl has begun\n{gateway.log}")


def _wait_for_another(gateway: GatewayProcess, pid: int) -> None:
    """The admin port is the killed process's: nobody answers until there is another."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            if background(gateway)[0] not in (None, pid):
                return
        time.sleep(0.02)
    raise AssertionError(f"the background process did not come back\n{gateway.log}")


def _wait_until_complete(gateway: GatewayProcess) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        _, index = background(gateway)
        if index is not None and index["complete"]:
            return
        time.sleep(0.05)
    raise AssertionError(f"the index is not complete\n{gateway.log}")

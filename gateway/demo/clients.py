"""boto3 as a training job uses it, and a tally of where its answers came from."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gateway.demo.stack import REGION, AccessKey

_AWS_PREFIX = "AWS_"


class CacheTally:
    """Counts the `x-forebay-cache` header of every GetObject answer of one client."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def watch(self, client: Any) -> None:
        client.meta.events.register("after-call.s3.GetObject", self._count)

    def take(self) -> Counter[str]:
        """Return the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def _count(self, http_response: Any, **_: object) -> None:
        header = http_response.headers.get("x-forebay-cache", "none").partition(";")[0]
        with self._lock:
            self._counts[header] += 1


def hit_ratio(counts: Mapping[str, int]) -> float:
    """Return the share of GETs answered from this node's disk alone; 0 when there were none."""
    total = sum(counts.values())
    return counts.get("hit", 0) / total if total else 0.0


def s3_client(url: str, keys: AccessKey, connections: int) -> Any:
    """Return a boto3 client with nothing set but the endpoint: path style, SigV4, boto3's own checksums."""
    import boto3
    from botocore.config import Config

    config = Config(
        max_pool_connections=connections,
        retries={"mode": "standard", "total_max_attempts": 2},
        connect_timeout=5,
        read_timeout=30,
        proxies={},
    )
    session = boto3.session.Session(
        aws_access_key_id=keys.access_key_id, aws_secret_access_key=keys.secret_access_key, region_name=REGION
    )
    return session.client("s3", endpoint_url=url, config=config)


@contextmanager
def without_aws_settings() -> Iterator[None]:
    """Hide the user's own AWS profile, endpoint and CA bundle while the demo runs."""
    taken = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_AWS_PREFIX)}
    os.environ.update(AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(_AWS_PREFIX)]:
            del os.environ[name]
        os.environ.update(taken)

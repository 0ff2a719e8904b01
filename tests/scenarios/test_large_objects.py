"""Objects far larger than memory: what a worker holds does not depend on what passes through it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from tests.support.gateway_process import GatewayProcess
from tests.support.living_files import living_files
from tests.support.memory_origin.content import GeneratedContent
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

GIB = 1024**3
LARGE_GIB = int(os.environ.get("FOREBAY_LARGE_GIB", "0"))
"""Reads and writes all of an object so large; else twice the cache of one, where 32 bits end."""

READ_SIZE_BYTES = (LARGE_GIB or 5) * GIB
READ_FROM = 0 if LARGE_GIB else 4 * GIB - GIB // 2
READ_UNTIL = READ_SIZE_BYTES if LARGE_GIB else READ_FROM + GIB
WRITTEN_SIZE_BYTES = (LARGE_GIB or 1) * GIB
PART_SIZE_BYTES = 64 * 1024**2
WORKER_BYTES_MAX = 300 * 1024**2


@pytest.fixture
def gateway() -> Iterator[tuple[GatewayProcess, StrictOrigin]]:
    with StrictOrigin(keep_bodies=False) as origin:
        origin.model.create_bucket("large")
        config: dict[str, dict[str, Any]] = {
            "origin": origin.settings,
            "cache": {"capacity": "512MiB"},
        }
        with GatewayProcess(config) as process:
            yield process, origin


def client_of(gateway: GatewayProcess) -> Any:
    config = Config(
        s3={"payload_signing_enabled": False},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        retries={"max_attempts": 1},
    )
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=config,
    )


def own_bytes(gateway: GatewayProcess) -> int:
    """The most that any worker has in memory for itself now: pages of cached files are the page cache's (RssAnon)."""
    sizes = []
    for pid in gateway.worker_pids():
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        sizes.append(int(status.partition("RssAnon:")[2].split()[0]) * 1024)
    return max(sizes)


class GeneratedFile:
    """A readable file of computed bytes, which looks at a gateway's memory each time it is read."""

    def __init__(self, content: GeneratedContent, gateway: GatewayProcess) -> None:
        self.own_bytes: list[int] = []
        self._content = content
        self._gateway = gateway
        self._position = 0

    def read(self, count: int = -1) -> bytes:
        self.own_bytes.append(own_bytes(self._gateway))
        data = self._content.read(self._position, count if count >= 0 else self._content.size_bytes)
        self._position += len(data)
        return data


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_large_object_is_read_in_bounded_memory(gateway: tuple[GatewayProcess, StrictOrigin]) -> None:
    """Through a cache of 512 MiB: every byte right, the worker's memory below its bound, the disk too."""
    process, origin = gateway
    origin.model.put_generated("large", "object", READ_SIZE_BYTES, seed=7)
    content = GeneratedContent(READ_SIZE_BYTES, seed=7)
    wanted = f"bytes={READ_FROM}-{READ_UNTIL - 1}"
    body = client_of(process).get_object(Bucket="large", Key="object", Range=wanted)["Body"]
    position = READ_FROM
    while data := body.read(8 * 1024**2):
        assert data == content.read(position, len(data)), f"wrong bytes from {position} on"
        position += len(data)
        assert own_bytes(process) < WORKER_BYTES_MAX
    assert position == READ_UNTIL
    on_disk = sum(status.st_size for _, status in living_files(process.directory))
    assert on_disk < 600 * 1024**2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_large_object_is_written_in_bounded_memory(gateway: tuple[GatewayProcess, StrictOrigin]) -> None:
    """Parts of 64 MiB arrive at the origin as they were sent; the worker's memory stays below its bound."""
    process, origin = gateway
    content = GeneratedContent(WRITTEN_SIZE_BYTES, seed=8)
    transfer = TransferConfig(multipart_chunksize=PART_SIZE_BYTES, max_concurrency=2)
    content_file = GeneratedFile(content, process)
    client_of(process).upload_fileobj(content_file, "large", "object", Config=transfer)
    stored = origin.model.buckets["large"].objects["object"]
    assert stored.content.size_bytes == WRITTEN_SIZE_BYTES
    digests = [
        hashlib.md5(content.read(offset, PART_SIZE_BYTES), usedforsecurity=False).digest()
        for offset in range(0, WRITTEN_SIZE_BYTES, PART_SIZE_BYTES)
    ]
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    assert stored.etag == f'"{whole}-{len(digests)}"'
    assert max(content_file.own_bytes) < WORKER_BYTES_MAX

"""The disk takes nothing of one process for a while: write-back goes on by itself (docs/semantics.md, 5.6, 8.2)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cache_label import cache_label
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

BUCKET = "bucket"
LIMIT_BYTES = 128 * 1024
"""What a process may write of a file: its own log stays below, the journal's log is beyond."""


pytestmark = pytest.mark.slow


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    config: dict[str, Any] = {
        "server": {"workers": 1, "allow_unsigned": True},
        "origin": {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY},
        "cache": {"persistent": True},
        "slots": [{"name": "back", "prefix": f"s3://{BUCKET}/", "write": "back"}],
    }
    with StrictOrigin() as origin:
        origin.model.create_bucket(BUCKET)
        config["origin"]["endpoint_url"] = origin.endpoint_url
        with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
            put(gateway, "first")
            eventually(lambda: put(gateway, "again") == "absorbed" and log_bytes(gateway) > LIMIT_BYTES + 65536)
            eventually(lambda: waiting(gateway) == 0)
            yield gateway


def put(gateway: GatewayProcess, key: str) -> str:
    """What became of it: absorbed, forwarded, or 503."""
    with httpx.Client(base_url=gateway.s3_url, trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
        answer = client.put(f"/{BUCKET}/{key}", content=key.encode())
    assert answer.status_code in (200, 503), answer.text
    return cache_label(answer) if answer.status_code == 200 else "503"


def waiting(gateway: GatewayProcess) -> int:
    """Objects that the origin does not have."""
    answer = httpx.get(
        f"{gateway.admin_url}/api/v1/writeback/objects?prefix=s3://", trust_env=False, timeout=ANSWER_SECONDS_MAX
    )
    return len(answer.json()["objects"])


def log_bytes(gateway: GatewayProcess) -> int:
    return (gateway.directory / "writeback" / "journal-wal").stat().st_size


def failing_processes(gateway: GatewayProcess) -> int:
    number: int = gateway.status()["cache"]["disk"]["journal_failing_processes"]
    return number


def process_id(gateway: GatewayProcess, name: str) -> int:
    (found,) = (one["process_id"] for one in gateway.status()["gateway"]["processes"] if one["name"] == name)
    assert isinstance(found, int)
    return found


@contextmanager
def nothing_taken_of(process: int) -> Iterator[None]:
    """Its writes to large files fail (EFBIG), as with a quota or a disk that answers EIO."""
    before = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, before)


def test_the_flush_goes_on_when_the_disk_takes_writes_again(gateway: GatewayProcess) -> None:
    """Without a restart; until then the status says what is wrong, and the log once."""
    background = process_id(gateway, "background")
    with nothing_taken_of(background):
        assert [put(gateway, f"k{number}") for number in range(20)] == ["absorbed"] * 20
        eventually(lambda: failing_processes(gateway) == 1)
        assert waiting(gateway) > 0
    eventually(lambda: waiting(gateway) == 0)
    eventually(lambda: failing_processes(gateway) == 0)
    assert process_id(gateway, "background") == background
    told = [line for line in gateway.log.splitlines() if "the write-back journal takes no writes until" in line]
    assert len(told) == 1
    assert len([line for line in gateway.log.splitlines() if '"level":"info"' not in line]) < 60


def test_a_worker_acknowledges_again_when_the_disk_takes_writes_again(gateway: GatewayProcess) -> None:
    """Without a restart; one write meets the failure, and those after it go through, until nothing is wrong."""
    worker = process_id(gateway, "worker0")
    with nothing_taken_of(worker):
        outcomes = [put(gateway, f"k{number}") for number in range(20)]
        assert outcomes[0] == "503"
        assert set(outcomes[1:]) == {"forwarded"}
        assert failing_processes(gateway) == 1
    eventually(lambda: failing_processes(gateway) == 0)
    eventually(lambda: put(gateway, "then") == "absorbed")  # it is left alone for some seconds more
    assert [put(gateway, f"l{number}") for number in range(10)] == ["absorbed"] * 10
    assert process_id(gateway, "worker0") == worker
    eventually(lambda: waiting(gateway) == 0)

"""Checkpoints as the command and metrics show them, with a real gateway and boto3, through a kill and a restart."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.serve.test_writeback_admin import Running, running
from tests.support.gateway_process import ANSWER_SECONDS_MAX
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

STEP = "run/step-100"


@pytest.fixture
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as one:
        one.model.create_bucket("bucket")
        yield one


def checkpoints(one: Running, *arguments: str) -> list[dict[str, Any]]:
    result = one.run("checkpoints", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return [orjson.loads(line) for line in result.stdout.splitlines()]


def state(one: Running) -> str | None:
    found = checkpoints(one, f"s3://bucket/back/{STEP}/")
    return found[0]["state"] if found else None


def metrics(one: Running) -> str:
    with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
        return client.get(f"{one.gateway.admin_url}/metrics").text


@pytest.mark.slow
def test_a_checkpoint_is_followed_from_its_save_to_the_bucket(origin: StrictOrigin, tmp_path: Path) -> None:
    """A kill of the whole gateway in between changes nothing; deleted, it is gone."""
    with running(origin, tmp_path / "cache") as one:
        origin.stop()
        for rank in range(2):
            one.put(f"{STEP}/__{rank}_0.distcp", b"x" * 1000)
        assert state(one) in ("writing", "failed")
        one.put(f"{STEP}/.metadata.tmp", b"manifest")
        source = {"Bucket": "bucket", "Key": f"back/{STEP}/.metadata.tmp"}
        one.s3.copy_object(Bucket="bucket", Key=f"back/{STEP}/.metadata", CopySource=source)
        one.gateway.signal(signal.SIGKILL)
        one.gateway.wait()
        one.gateway.start()
        again = Running(one.gateway)
        [found] = checkpoints(again)
        assert (found["prefix"], found["ranks_seen"], found["bytes_flushed"]) == (f"back/{STEP}/", [0, 1], 0)
        assert found["files"] == 4
        origin.start()
        again.s3.delete_object(Bucket="bucket", Key=f"back/{STEP}/.metadata.tmp")
        assert again.run("flush", "s3://bucket/back/", "--wait").exit_code == 0
        assert state(again) == "durable"
        shown = again.run("checkpoints")
        assert shown.stdout.splitlines()[1] == f"s3://bucket/back/{STEP}/"
        assert shown.stdout.splitlines()[2].split()[:2] == ["durable", "3"]
        eventually(lambda: 'forebay_checkpoints{slot="back",state="durable"} 1' in metrics(again))
        for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
            again.s3.delete_object(Bucket="bucket", Key=f"back/{STEP}/{name}")
        assert state(again) is None


@pytest.mark.slow
def test_how_far_a_checkpoint_is_read_is_shown(origin: StrictOrigin, tmp_path: Path) -> None:
    """Of each file, whether the buffer answers or the cache; each byte once, and no HEAD."""
    size = 1_000_000

    def restore() -> dict[str, Any]:
        [found] = checkpoints(one, f"s3://bucket/back/{STEP}/")
        shown: dict[str, Any] = found["restore"]
        return shown

    def read(rank: int, first: int, last: int) -> None:
        key = f"back/{STEP}/__{rank}_0.distcp"
        assert len(one.s3.get_object(Bucket="bucket", Key=key, Range=f"bytes={first}-{last}")["Body"].read()) > 0

    with running(origin, tmp_path / "cache") as one:
        for rank in range(2):
            one.put(f"{STEP}/__{rank}_0.distcp", b"x" * size)
        one.put(f"{STEP}/.metadata", b"manifest")
        assert restore() is None
        read(0, 0, 99_999)
        assert one.run("flush", f"s3://bucket/back/{STEP}", "--wait").exit_code == 0
        for at in range(100_000, size, 100_000):
            read(0, at, at + 99_999)
        for at in range(5):
            read(1, at * 100_000, at * 100_000 + 99_999)
        one.s3.head_object(Bucket="bucket", Key=f"back/{STEP}/__1_0.distcp")
        eventually(lambda: restore()["bytes_read"] == 1_500_000)
        found = restore()
        assert (found["state"], found["files"], found["files_begun"], found["bytes"]) == ("reading", 2, 2, 2 * size)
        [behind] = found["behind"]["objects"]
        assert (behind["bytes_read"], found["behind"]["ranks"]) == (500_000, [1])
        assert "restore under way: 75% of 2 files" in one.run("checkpoints").stdout

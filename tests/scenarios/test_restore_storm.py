"""Sixteen ranks, each a process, restore a checkpoint at once from a running gateway, as training jobs do."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import time
from multiprocessing.synchronize import Barrier
from typing import Any

import boto3
import pytest
from botocore.config import Config

from gateway.s3.requests import Operation
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.memory_origin.faults import Call
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

RANKS = 16
FILES = 16
FILE_BYTES = 2 * 1024**2
FINISH_RATIO_MAX = 8.0
"""The last rank's time to the first's, where clients and gateway share a busy machine: nobody starves. What it is
without that measures `loadtests.restore_storm`."""


def config(origin: StrictOrigin, consistency: str) -> dict[str, Any]:
    slot = {"name": "ckpt", "prefix": "s3://bucket/ckpt/", "write": "back", "consistency": consistency}
    return {
        "server": {"workers": 2},
        "origin": origin.settings,
        "cache": {"capacity": "512MiB", "block_size": "2MiB", "persistent": True},
        "slots": [slot if consistency == "strict" else slot | {"metadata_ttl": "10m"}],
    }


def client(url: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )


def key(number: int) -> str:
    return f"ckpt/step-100/__{number}_0.distcp"


def restored(s3: Any, rank: int, *, own: bool, at_the_door: Barrier) -> tuple[float, dict[int, str]]:
    """How long a rank takes, and the digests of what it read: its own file FILES times, or each file once."""
    digests = {}
    s3.list_objects_v2(Bucket="bucket", Prefix="ckpt/step-100/")
    at_the_door.wait()
    began = time.monotonic()
    for number in range(FILES):
        file = rank if own else (rank + number) % FILES
        body = s3.get_object(Bucket="bucket", Key=key(file))["Body"].read()
        digests[file] = hashlib.sha256(body).hexdigest()
    return time.monotonic() - began, digests


def _rank(url: str, rank: int, at_the_door: Barrier, found: Any) -> None:
    s3 = client(url)
    for own in (False, True):
        found.put((own, *restored(s3, rank, own=own, at_the_door=at_the_door)))


def storms(url: str) -> list[tuple[bool, float, dict[int, str]]]:
    """All ranks read the same files, then each its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["boto3"])  # sixteen that import it themselves cost more than what they read
    at_the_door, found = context.Barrier(RANKS), context.Queue()
    ranks = [context.Process(target=_rank, args=(url, rank, at_the_door, found)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    try:
        return [found.get(timeout=3 * ANSWER_SECONDS_MAX) for _ in range(2 * RANKS)]
    finally:
        for rank in ranks:
            rank.join(timeout=30)
            rank.kill()


def asked_of(origin: StrictOrigin, since: int) -> list[Call]:
    return [call for call in origin.model.calls[since:] if (call.key or "").startswith("ckpt/")]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("consistency", ["ttl", "strict"])
def test_all_ranks_restore_from_the_disk(consistency: str) -> None:
    """3.18 The same files, then each its own: every byte from this node, no question to the origin in a `ttl` slot and
    HEADs alone in a `strict` one; no rank starves."""
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        with GatewayProcess(config(origin, consistency)) as gateway:
            s3 = client(gateway.s3_url)
            s3.put_object(Bucket="bucket", Key="ckpt/first", Body=b"goes through")
            digests = {}
            for number in range(FILES):
                body = os.urandom(FILE_BYTES)
                digests[number] = hashlib.sha256(body).hexdigest()
                s3.put_object(Bucket="bucket", Key=key(number), Body=body)
            gateway.command("flush", "s3://bucket/ckpt/", "--wait").check_returncode()
            asked = len(origin.model.calls)
            ranks = storms(gateway.s3_url)
            for which in (False, True):
                seconds = [seconds for own, seconds, _ in ranks if own == which]
                print(f"{consistency}, own files {which}: ranks took {min(seconds):.2f} to {max(seconds):.2f} s")
                assert max(seconds) / min(seconds) < FINISH_RATIO_MAX
            for _, _, found in ranks:
                assert found.items() <= digests.items()
            operations = {call.operation for call in asked_of(origin, asked)}
            assert operations <= ({Operation.HEAD_OBJECT} if consistency == "strict" else set())


@pytest.mark.slow
def test_9_7_every_worker_serves_what_a_head_has_warmed() -> None:
    """9.7 All ranks ask any of two workers for the same objects; the origin sends each byte once, then nothing."""
    with StrictOrigin() as origin:
        contents = {key(number): os.urandom(FILE_BYTES) for number in range(4)}
        for name, content in contents.items():
            origin.model.put("bucket", name, content)
        origin.bytes_per_second = 40e6
        with GatewayProcess(config(origin, "ttl")) as gateway:
            clients = [client(gateway.s3_url) for _ in range(8)]

            def labels() -> set[str]:
                answers = [
                    s3.head_object(Bucket="bucket", Key=name, Range="bytes=0-0") for s3 in clients for name in contents
                ]
                assert {answer["ResponseMetadata"]["HTTPStatusCode"] for answer in answers} == {206}
                return {answer["ResponseMetadata"]["HTTPHeaders"]["x-forebay-cache"] for answer in answers}

            eventually(lambda: labels() == {"hit"}, "it does not become warm")
            assert origin.model.count(Operation.GET_OBJECT) == len(contents)
            for s3 in clients:
                for name, content in contents.items():
                    assert s3.get_object(Bucket="bucket", Key=name)["Body"].read() == content
            assert origin.model.count(Operation.GET_OBJECT) == len(contents)

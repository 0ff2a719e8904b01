"""A bucket with replicas, through a running gateway: with keys of their own, dead, and with other ETags."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.test_origin_state import metrics_of
from tests.serve.test_several_origins import FAR, MAIN, lines, origin_with
from tests.support.changing_slots import client_of
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

BODY = bytes(range(251)) * 1500
"""Six blocks of 64 KiB."""


@pytest.fixture
def source() -> Iterator[StrictOrigin]:
    with origin_with("train", MAIN) as origin:
        yield origin


@pytest.fixture
def near() -> Iterator[StrictOrigin]:
    with origin_with("train-eu", FAR) as origin:
        yield origin


def config_of(source: StrictOrigin, replica_url: str, **slot: Any) -> dict[str, Any]:
    return {
        "origin": {"endpoint_url": source.endpoint_url, "access_key_id": MAIN[0], "secret_access_key": MAIN[1]},
        "server": {"workers": 2},
        "cache": {"capacity": "64MiB", "block_size": "64KiB"},
        "origin_credentials": [{"name": "eu", "access_key_id": FAR[0], "secret_access_key": FAR[1]}],
        "buckets": [
            {
                "name": "train",
                "replicas": [{"name": "train-eu", "endpoint_url": replica_url, "origin_credentials": "eu"}],
            }
        ],
        "slots": [{"name": "data", "prefix": "s3://train/", "consistency": "ttl", "index": True, **slot}],
    }


def filled(source: StrictOrigin, *replicas: StrictOrigin) -> list[str]:
    keys = [f"data/{number}" for number in range(8)]
    for key in keys:
        source.model.put("train", key, BODY)
        for replica in replicas:
            replica.model.put("train-eu", key, BODY)
    return keys


def replica_reads(gateway: GatewayProcess) -> dict[str, float]:
    found, name = metrics_of(gateway), "forebay_origin_replica_total{outcome="
    return {one.split('"')[1]: value for one, value in found.items() if one.startswith(name) and value}


@pytest.mark.slow
def test_14_1_an_epoch_takes_no_byte_from_the_source(source: StrictOrigin, near: StrictOrigin) -> None:
    """14.1 Over the wire, signed for the replica with its own key, which the source never sees."""
    keys = filled(source, near)
    with GatewayProcess(config_of(source, near.endpoint_url)) as gateway:
        client = client_of(gateway.s3_url, MAIN)
        assert [one["Key"] for one in client.list_objects_v2(Bucket="train")["Contents"]] == keys
        for key in keys:
            assert client.get_object(Bucket="train", Key=key)["Body"].read() == BODY
        client.put_object(Bucket="train", Key="data/own", Body=b"own")
        assert client.get_object(Bucket="train", Key="data/own")["Body"].read() == b"own"
        assert {line.split()[0] for line, _ in lines(source, "/train/data/") if "own" not in line} == {"HEAD"}
        assert {signer for _, signer in lines(source, "/train")} == {MAIN[0]}
        assert {signer for _, signer in lines(near, "/train-eu")} == {FAR[0]}
        assert replica_reads(gateway).pop("hit") >= len(keys)
        assert metrics_of(gateway)["forebay_origin_replica_bytes_total"] == len(keys) * len(BODY)
        (bucket, replica) = gateway.status()["origin"]["differing"]
        assert (bucket["replica"], replica["replica"], replica["state"]) == (None, 0, "well")


@pytest.mark.slow
def test_14_2_other_etags_make_reads_slower_and_never_wrong(source: StrictOrigin, near: StrictOrigin) -> None:
    """14.2 As after a copy with other part sizes. The metric tells."""
    keys = filled(source)
    client = client_of(near.endpoint_url, FAR)
    for key in keys:
        upload = client.create_multipart_upload(Bucket="train-eu", Key=key)["UploadId"]
        part = client.upload_part(Bucket="train-eu", Key=key, PartNumber=1, UploadId=upload, Body=BODY)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        client.complete_multipart_upload(Bucket="train-eu", Key=key, UploadId=upload, MultipartUpload=parts)
    with GatewayProcess(config_of(source, near.endpoint_url)) as gateway:
        reader = client_of(gateway.s3_url, MAIN)
        for key in keys:
            assert reader.get_object(Bucket="train", Key=key)["Body"].read() == BODY
        assert replica_reads(gateway).keys() == {"other-version"}


@pytest.mark.slow
def test_doctor_and_status_compare_a_replica_with_its_source(source: StrictOrigin, near: StrictOrigin) -> None:
    filled(source, near)
    with GatewayProcess(config_of(source, near.endpoint_url)) as gateway:
        assert f"replica of s3://train/ at {near.endpoint_url}, signed by eu" in gateway.command("status").stdout
        for body, told in (
            (BODY, "s3://train/ (replica 1): has data/0 with the source's ETag"),
            (b"older", "data/0 has another ETag there"),
            (None, "data/0 is 404 there"),
        ):
            near.model.buckets["train-eu"].objects.pop("data/0", None)
            if body is not None:
                near.model.put("train-eu", "data/0", body)
            assert told in gateway.command("doctor", "--config", str(gateway.config_file)).stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["refuses connections", "says nothing"])
def test_14_2_a_dead_replica_fails_no_read(source: StrictOrigin, kind: str) -> None:
    """14.2 Nor does it delay more than the first reads; /readyz stays 200, and names it."""
    keys = filled(source)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if kind == "says nothing":
            silent.listen(64)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with GatewayProcess(config_of(source, url)) as gateway:
            client = client_of(gateway.s3_url, MAIN)
            for key in keys:
                assert client.get_object(Bucket="train", Key=key)["Body"].read() == BODY
            assert replica_reads(gateway).keys() == {"failed"}
            assert replica_reads(gateway)["failed"] <= 2 * len(keys)
            ready = httpx.get(f"{gateway.admin_url}/readyz", timeout=60)
            assert ready.status_code == 200
            assert "s3://train/ (replica): " in ready.json()["origin_problem"]


@pytest.mark.slow
def test_14_2_a_replica_that_dies_in_the_middle_of_bodies_fails_no_read(
    source: StrictOrigin, near: StrictOrigin, tmp_path: Path
) -> None:
    """14.2 Each body goes on from the source."""
    keys = filled(source, near)
    with GatewayProcess(config_of(source, near.endpoint_url)) as gateway:
        client = client_of(gateway.s3_url, MAIN)
        for key in keys[:2]:
            assert client.get_object(Bucket="train", Key=key)["Body"].read() == BODY
        body = client.get_object(Bucket="train", Key=keys[2])["Body"]
        read = body.read(1000)
        near.stop()
        assert read + body.read() == BODY
        for key in keys[3:]:
            assert client.get_object(Bucket="train", Key=key)["Body"].read() == BODY


def test_a_replica_cannot_be_the_bucket_itself(source: StrictOrigin, tmp_path: Path) -> None:
    config = config_of(source, source.endpoint_url)
    config["buckets"][0]["replicas"][0] |= {"name": "train"}
    with pytest.raises(AssertionError, match="another place than the bucket's own"), GatewayProcess(config):
        pass

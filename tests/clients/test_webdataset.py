"""WebDataset over shards in a bucket: through `pipe:aws s3 cp`, and on URLs that were presigned."""

from __future__ import annotations

import io
import os
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.boto import boto3_client
from tests.clients.commands import client_environment
from tests.clients.conftest import Endpoint
from tests.clients.content import random_bytes
from tests.clients.origins import Origin
from tests.clients.warmth import put_all, reads_at

# WebDataset leaves the ends of the pipes it opened to the garbage collector.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

SHARDS, SAMPLES = 2, 20


def _sample(number: int) -> dict[str, bytes]:
    return {"jpg": random_bytes(90_000, seed=number), "cls": str(number % 10).encode()}


def _shard(number: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as shard:
        for sample in range(number * SAMPLES, (number + 1) * SAMPLES):
            for extension, data in _sample(sample).items():
                member = tarfile.TarInfo(f"{sample:06d}.{extension}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def shards(direct: Any, bucket: str) -> list[str]:
    """Shards at the origin; their keys."""
    return list(put_all(direct, bucket, {f"train+é/{number:05d}.tar": _shard(number) for number in range(SHARDS)}))


@pytest.fixture(autouse=True)
def _environment(endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a job's shell has; curl takes the certificate to trust from it too."""
    for name, value in client_environment(endpoint.url, endpoint.ca_file, tmp_path).items():
        monkeypatch.setenv(name, value)
    if endpoint.ca_file is not None:
        monkeypatch.setenv("CURL_CA_BUNDLE", os.fspath(endpoint.ca_file))


def _samples(urls: list[str]) -> Iterator[tuple[int, dict[str, bytes]]]:
    """An epoch: number and content of each sample."""
    import webdataset

    for sample in webdataset.WebDataset(urls, shardshuffle=False):
        yield int(sample["__key__"]), {name: data for name, data in sample.items() if not name.startswith("__")}


def _read_twice(urls: list[str], origin: Origin, bucket: str, endpoint: Endpoint) -> None:
    """Both epochs are the samples that were packed, in order; the second one reads no byte at the origin.

    On a busy machine the gateway sends a read again that is late, and the origin may hear of it in the second epoch.
    """
    before = endpoint.sent_twice()
    for _ in range(2):
        with reads_at(origin, bucket) as reads:
            found = list(_samples(urls))
        assert found == [(number, _sample(number)) for number in range(SHARDS * SAMPLES)]
    assert not reads or len(reads) <= endpoint.sent_twice() - before, reads


def test_pipe_aws_s3_cp(endpoint: Endpoint, shards: list[str], origin: Origin, bucket: str) -> None:
    """The way that README names."""
    urls = [f"pipe:aws s3 cp {shlex.quote(f's3://{bucket}/{key}')} -" for key in shards]
    _read_twice(urls, origin, bucket, endpoint)


def test_pipe_s5cmd_cat(endpoint: Endpoint, shards: list[str], origin: Origin, bucket: str) -> None:
    """The same with s5cmd, which is told the endpoint in the command."""
    urls = [f"pipe:s5cmd --endpoint-url {endpoint.url} cat {shlex.quote(f's3://{bucket}/{key}')}" for key in shards]
    _read_twice(urls, origin, bucket, endpoint)


@pytest.mark.parametrize(("pipe", "signature"), [("pipe:curl -fsS ", "s3"), ("", "s3v4")], ids=["pipe:curl", "http"])
def test_presigned_urls(
    pipe: str, signature: str, endpoint: Endpoint, shards: list[str], origin: Origin, bucket: str
) -> None:
    """URLs that boto3 signs for the gateway, through a pipe of curl and through WebDataset's own http handler."""
    client = boto3_client(endpoint.url, endpoint.ca_file, signature_version=signature)
    signed = [client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key}) for key in shards]
    client.close()
    _read_twice([pipe + (shlex.quote(url) if pipe else url) for url in signed], origin, bucket, endpoint)


def test_writing_shards(direct: Any, bucket: str) -> None:
    """TarWriter into `pipe:aws s3 cp -` puts the shard that is then read."""
    import webdataset

    with webdataset.TarWriter(f"pipe:aws s3 cp - s3://{bucket}/out.tar") as writer:
        for number in range(SAMPLES):
            writer.write({"__key__": f"{number:06d}", **_sample(number)})
    found = list(_samples([f"pipe:aws s3 cp s3://{bucket}/out.tar -"]))
    assert found == [(number, _sample(number)) for number in range(SAMPLES)]
    assert direct.head_object(Bucket=bucket, Key="out.tar")["ContentLength"] > SAMPLES * 90_000


def test_a_missing_shard_is_an_error(bucket: str) -> None:
    """Training stops instead of going on without the shard: at the command's exit code or at the empty tar."""
    with pytest.raises((OSError, tarfile.ReadError), match=r"exit 1|empty file"):
        list(_samples([f"pipe:aws s3 cp s3://{bucket}/missing.tar - 2>/dev/null"]))

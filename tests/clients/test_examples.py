"""Every example of examples/ that the extras `clients`, `more-clients` and `torch` suffice for, as a user runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.commands import client_environment
from tests.clients.conftest import Endpoint

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS = 180
"""The bound of each of three runs. They import PyTorch, which takes long on a busy machine."""

LIGHT = ["boto3_objects.py", "aws_cli.sh", "arrow_parquet.py", "webdataset_shards.py", "safetensors_s3fs.py"]
TORCH = ["pytorch_datasets.py", "pytorch_dcp.py"]

at_strict = pytest.mark.parametrize("origin", ["strict"], indirect=True, scope="session")
"""Their clients meet both origins in tests of their own."""


def _run(example: str, endpoint: Endpoint, bucket: str, home: Path, direct: Any) -> None:
    environment = client_environment(endpoint.url, None, home)
    environment["AWS_ENDPOINT_URL"] = environment.pop("AWS_ENDPOINT_URL_S3")
    program = "sh" if example.endswith(".sh") else sys.executable
    foreign = {"part-0.parquet", "a.txt", "folder", "folder/part-0.parquet", "folder/sample.bin", "folder-of-others/x"}
    for key in foreign:
        direct.put_object(Bucket=bucket, Key=key, Body=b"of somebody else")
    known = set(foreign)
    for target, prefix in ((f"{bucket}/folder", "folder/"), (f"{bucket}/folder/", "folder/"), (bucket, "")):
        command = [program, f"examples/{example}", f"s3://{target}"]
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
        )
        assert ended.returncode == 0, ended.stderr + ended.stdout
        assert ended.stdout.splitlines()[-1].startswith("ok: ")
        found = {one["Key"] for one in direct.list_objects_v2(Bucket=bucket)["Contents"]}
        new, known = found - known, known | found
        assert new, "it wrote nothing into the bucket"
        assert all(re.fullmatch(rf"{prefix}[\w.-]+-[\w.]+/.+", key) for key in new), new
    for key in foreign:
        assert direct.get_object(Bucket=bucket, Key=key)["Body"].read() == b"of somebody else"


@pytest.mark.clients
@pytest.mark.timeout(3 * _LIMIT_SECONDS + 60)
@at_strict
@pytest.mark.parametrize("example", LIGHT)
def test_an_example_runs(example: str, http_endpoint: Endpoint, bucket: str, tmp_path: Path, direct: Any) -> None:
    """What it writes through the gateway is in the bucket, below the prefix that it was given, with a slash or without,
    whatever lies there; and what it reads twice is what it wrote."""
    _run(example, http_endpoint, bucket, tmp_path, direct)


@pytest.mark.torch
@pytest.mark.timeout(3 * _LIMIT_SECONDS + 60)
@at_strict
@pytest.mark.parametrize("example", TORCH)
def test_an_example_with_torch_runs(
    example: str, http_endpoint: Endpoint, bucket: str, tmp_path: Path, direct: Any
) -> None:
    """What it writes through the gateway is in the bucket, and what it reads twice is what it wrote."""
    _run(example, http_endpoint, bucket, tmp_path, direct)

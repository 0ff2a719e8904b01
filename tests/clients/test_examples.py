"""Every example of examples/ that the extras `clients`, `more-clients` and `torch` suffice for, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.commands import client_environment
from tests.clients.conftest import Endpoint

ROOT = Path(__file__).resolve().parents[2]

LIGHT = ["boto3_objects.py", "aws_cli.sh", "arrow_parquet.py", "webdataset_shards.py", "safetensors_s3fs.py"]
TORCH = ["pytorch_datasets.py", "pytorch_dcp.py"]


def _run(example: str, endpoint: Endpoint, bucket: str, home: Path, direct: Any) -> None:
    environment = client_environment(endpoint.url, None, home)
    environment["AWS_ENDPOINT_URL"] = environment.pop("AWS_ENDPOINT_URL_S3")
    program = "sh" if example.endswith(".sh") else sys.executable
    command = [program, f"examples/{example}", f"s3://{bucket}/folder"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("ok: ")
    assert direct.list_objects_v2(Bucket=bucket)["KeyCount"] > 0, "it wrote nothing into the bucket"


@pytest.mark.clients
@pytest.mark.parametrize("example", LIGHT)
def test_an_example_runs(example: str, http_endpoint: Endpoint, bucket: str, tmp_path: Path, direct: Any) -> None:
    """What it writes through the gateway is in the bucket, and what it reads twice is what it wrote."""
    _run(example, http_endpoint, bucket, tmp_path, direct)


@pytest.mark.torch
@pytest.mark.parametrize("example", TORCH)
def test_an_example_with_torch_runs(
    example: str, http_endpoint: Endpoint, bucket: str, tmp_path: Path, direct: Any
) -> None:
    """What it writes through the gateway is in the bucket, and what it reads twice is what it wrote."""
    _run(example, http_endpoint, bucket, tmp_path, direct)

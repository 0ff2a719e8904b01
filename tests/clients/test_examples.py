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

LIGHT = [
    "boto3_objects.py",
    "aws_cli.sh",
    "arrow_parquet.py",
    "webdataset_shards.py",
    "safetensors_s3fs.py",
    "local_reads.py",
]
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


ODPS_LIKE = """
import datetime
from enum import Enum
import pyarrow
class ODPS:
    def __init__(self, *given, **named): self.project = named["project"]
    def get_table(self, name): return Table()
class Table:
    last_data_modified_time = datetime.datetime(2026, 1, 2, 3, 4, 5)
    def reload(self): pass
class SessionStatus(Enum):
    INIT, NORMAL = "INIT", "NORMAL"
class TableBatchScanRequest: pass
class SessionRequest:
    def __init__(self, session_id): assert session_id == "s"
class ReadRowsRequest:
    def __init__(self, session_id, split_index): self.split_index = split_index
class Session:
    session_id, split_count = "s", 3
    def __init__(self, status): self.session_status = status
class Reader:
    def __init__(self, split): self.left = 0 if split == 1 else 2
    def read(self):
        self.left -= 1
        return pyarrow.record_batch({"id": list(range(1000))}) if self.left >= 0 else None
class StorageApiArrowClient:
    def __init__(self, odps, table): assert isinstance(odps, ODPS) and isinstance(table, Table)
    def create_read_session(self, request): return Session(SessionStatus.INIT)
    def get_read_session(self, request): return Session(SessionStatus.NORMAL)
    def read_rows_arrow(self, request): return Reader(request.split_index)
"""
"""The parts of pyodps 0.13 that the example uses: there is no MaxCompute to try it with."""


@pytest.mark.clients
@at_strict
def test_the_export_of_a_table_runs(http_endpoint: Endpoint, bucket: str, tmp_path: Path, direct: Any) -> None:
    """A split without rows is no object; the marker comes last."""
    package = tmp_path / "odps" / "apis" / "storage_api"
    package.mkdir(parents=True)
    for directory in (package.parent.parent, package.parent):
        (directory / "__init__.py").write_text(
            "from odps.apis.storage_api import ODPS\n" if directory.name == "odps" else ""
        )
    (package / "__init__.py").write_text(ODPS_LIKE)
    environment = client_environment(http_endpoint.url, None, tmp_path) | {"PYTHONPATH": str(tmp_path)}
    environment["AWS_ENDPOINT_URL"] = environment.pop("AWS_ENDPOINT_URL_S3")
    environment |= {f"ODPS_{name}": "x" for name in ("ACCESS_ID", "ACCESS_KEY", "PROJECT", "ENDPOINT")}
    command = [sys.executable, "examples/odps_table.py", f"s3://{bucket}/tables", "rows"]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert ended.stdout.splitlines()[-1] == f"ok: 4000 rows in s3://{bucket}/tables/rows-20260102T030405/"
    found = [one["Key"].rpartition("/")[2] for one in direct.list_objects_v2(Bucket=bucket)["Contents"]]
    assert found == ["_SUCCESS", "part-00000.parquet", "part-00002.parquet"]


@pytest.mark.torch
@pytest.mark.timeout(3 * _LIMIT_SECONDS + 60)
@at_strict
@pytest.mark.parametrize("example", TORCH)
def test_an_example_with_torch_runs(
    example: str, http_endpoint: Endpoint, bucket: str, tmp_path: Path, direct: Any
) -> None:
    """What it writes through the gateway is in the bucket, and what it reads twice is what it wrote."""
    _run(example, http_endpoint, bucket, tmp_path, direct)

"""A version of Forebay that does not know what lies in a cache directory leaves it alone."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from gateway.writeback.journal.schema import VERSION
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

REPOSITORY = Path(__file__).resolve().parents[2]
CHECKPOINT = {f"back/step-1/__{rank}_0.distcp": os.urandom(100_000 + rank) for rank in range(4)}

NEWER = {
    "writeback": ("the write-back journal has version", "run the version that wrote it until everything is flushed"),
    "blocks": ("has the block format", "run the version that wrote it"),
    "catalog": ("has the catalog format", "run the version that wrote it"),
}
"""What lies in a cache directory with a version of its own → what is said where it is newer."""


def client(url: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 1}),
    )


def read(s3: Any) -> dict[str, bytes]:
    return {key: s3.get_object(Bucket="bucket", Key=key)["Body"].read() for key in CHECKPOINT}


def on_the_journal(directory: Path, *statements: str) -> None:
    with closing(sqlite3.connect(directory / "writeback" / "journal", isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def make_newer(directory: Path, part: str) -> None:
    """As a later version of Forebay might leave it."""
    if part == "writeback":
        on_the_journal(directory, f"PRAGMA user_version = {VERSION + 1}")
    else:
        (directory / part / "FORMAT").write_text(f"forebay {part} 99\n", encoding="utf-8")


def contents(directory: Path) -> Mapping[Path, str]:
    """A digest of every file but SQLite's own bookkeeping and what says that a process is there."""
    transient = {"lock", "journal-shm", "journal-wal", "opening.lock"}
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in transient and path.parent.name != "users"
    }


def started(gateway: GatewayProcess) -> subprocess.CompletedProcess[str]:
    """A start that is to fail."""
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(gateway.config_file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY, check=False)


@pytest.mark.slow
def test_a_newer_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A version that does not know what lies there refuses, says what to do, and leaves every byte of it. The version
    that wrote it reads and flushes it all afterwards."""
    directory = tmp_path / "cache"
    with StrictOrigin() as origin:
        own = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        config: dict[str, Any] = {
            "origin": {"endpoint_url": origin.endpoint_url, "region": "us-east-1", **own},
            "cache": {"capacity": "1GiB", "persistent": True},
            "slots": [{"name": "back", "prefix": "s3://bucket/back/", "write": "back", "buffer": "100MiB"}],
        }
        with GatewayProcess(config, directory=directory) as gateway:
            s3 = client(gateway.s3_url)
            s3.create_bucket(Bucket="bucket")
            s3.put_object(Bucket="bucket", Key="back/first", Body=b"by which it learns of the bucket's ETags")
            origin.is_out_of_reach = True
            for key, body in CHECKPOINT.items():
                answer = s3.put_object(Bucket="bucket", Key=key, Body=body)
                assert answer["ResponseMetadata"]["HTTPHeaders"]["x-forebay-cache"] == "absorbed"
            gateway.terminate()

            for part, said in NEWER.items():
                kept = {path: path.read_bytes() for path in (directory / part / "FORMAT",) if path.exists()}
                make_newer(directory, part)
                before = contents(directory / part)
                refused = started(gateway)
                assert (refused.returncode, refused.stdout) == (1, ""), part
                assert all(words in refused.stderr for words in said), refused.stderr
                assert contents(directory / part) == before, part
                if part == "writeback":
                    on_the_journal(directory, f"PRAGMA user_version = {VERSION}")
                for path, content in kept.items():
                    path.write_bytes(content)

            origin.is_out_of_reach = False
            gateway.start()
            assert read(client(gateway.s3_url)) == CHECKPOINT
            flushed = gateway.command("flush", "s3://", "--wait", "--timeout", "60s")
            assert flushed.returncode == 0, flushed.stdout + flushed.stderr
            assert read(client(origin.endpoint_url)) == CHECKPOINT

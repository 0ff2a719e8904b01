"""CPU time of an S3 worker per warm GET, presigned requests from `wrk` (Debian), strict consistency.

    python -m loadtests.warm_reads [--seconds 5] [--connections 8]

The origin is the tests' strict one on the same machine: each GET costs it a HEAD, which bounds the requests per second.
CPU per request of the worker is the figure to compare.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

SIZES = {"100 KiB": 100 * 1024, "8 MiB": 8 * 1024**2}
ROUNDS = 3


@dataclass(frozen=True)
class Figure:
    """One round of one object."""

    requests_per_second: float
    cpu_microseconds_per_request: float


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(pid: int, url: str, seconds: int, connections: int) -> Figure:
    before = cpu_seconds(pid)
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", url]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in output:
        raise SystemExit(output)
    match = re.search(r"(\d+) requests in", output)
    if match is None:
        raise SystemExit(output)
    count = int(match[1])
    return Figure(count / seconds, (cpu_seconds(pid) - before) / count * 1e6)


def client_of(gateway: GatewayProcess) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        aws_access_key_id=ACCESS_KEY_ID,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        region_name="us-east-1",
        config=Config(signature_version="s3v4"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=8)
    arguments = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing: apt-get install wrk")
    with StrictOrigin() as origin:
        for name, size_bytes in SIZES.items():
            origin.model.put("bucket", name, os.urandom(size_bytes))
        config: dict[str, dict[str, Any]] = {
            "origin": {
                "endpoint_url": origin.endpoint_url,
                "access_key_id": ACCESS_KEY_ID,
                "secret_access_key": SECRET_ACCESS_KEY,
            },
            "cache": {"capacity": "1GiB", "block_size": "8MiB"},
        }
        with GatewayProcess(config) as gateway:
            client = client_of(gateway)
            pid = gateway.worker_pids()[0]
            assert pid is not None
            for name in SIZES:
                client.get_object(Bucket="bucket", Key=name)["Body"].read()
                url = client.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": name})
                for _ in range(ROUNDS):
                    figure = measure(pid, url, arguments.seconds, arguments.connections)
                    print(
                        f"{name:8} {figure.requests_per_second:8.0f} requests/s "
                        f"{figure.cpu_microseconds_per_request:8.0f} µs of CPU per request"
                    )


if __name__ == "__main__":
    main()

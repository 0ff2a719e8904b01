"""The origin of the client tests: a real server process whose requests can be looked at."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gateway.demo.processes import ChildProcess

ACCESS_KEY_ID = "clients-key"
SECRET_ACCESS_KEY = "clients-secret-0123456789"
REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that reached the origin. `key` is decoded; empty for a request on a bucket."""

    method: str
    bucket: str
    key: str
    query: str
    range: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the origin listens, and what it was asked so far."""

    url: str
    log: Path

    def requests(self) -> list[Seen]:
        return [_seen(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def object_reads(self, bucket: str) -> list[Seen]:
        """GETs that carried object bytes out of the origin."""
        return [one for one in self.requests() if one.method == "GET" and one.bucket == bucket and one.key]


@contextmanager
def running_origin(directory: Path) -> Iterator[Origin]:
    log = directory / "requests.log"
    log.touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = ChildProcess(
        "origin",
        ["tests.clients.recording_moto", str(log)],
        re.compile(r"listening on (\d+)"),
        environment | {"TMPDIR": str(directory)},
        directory / "origin.log",
    )
    try:
        yield Origin(f"http://127.0.0.1:{process.wait_until_ready()[1]}", log)
    finally:
        process.stop()


def _seen(line: str) -> Seen:
    method, target, byte_range = line.split("\t")
    parts = urlsplit(target if target.startswith("http") else f"http://origin/{target[1:]}")
    bucket, _, key = parts.path.removeprefix("/").partition("/")
    return Seen(method, bucket, unquote(key), parts.query, byte_range)

"""The origins of the client tests: servers over real HTTP whose requests can be looked at.

moto knows most of S3 and believes what it is told; the strict origin knows less and verifies every signature, hash and
checksum.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gateway.demo.stack import DemoProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

__all__ = ["ACCESS_KEY_ID", "REGION", "SECRET_ACCESS_KEY", "Origin", "Seen", "running_moto", "running_strict_origin"]

REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that reached the origin. `key` is decoded; empty for a request on a bucket."""

    method: str
    bucket: str
    key: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the origin listens, and what it was asked so far."""

    url: str
    requests: Callable[[], list[Seen]]

    def object_reads(self, bucket: str) -> list[Seen]:
        """GETs that carried object bytes out of the origin."""
        return [one for one in self.requests() if one.method == "GET" and one.bucket == bucket and one.key]


@contextmanager
def running_strict_origin() -> Iterator[Origin]:
    with StrictOrigin(region=REGION) as server:

        def requests() -> list[Seen]:
            return [Seen(call.method, call.bucket or "", call.key or "") for call in server.model.calls]

        yield Origin(server.endpoint_url, requests)


@contextmanager
def running_moto(directory: Path) -> Iterator[Origin]:
    log = directory / "requests.log"
    log.touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = DemoProcess(
        "origin",
        ["tests.clients.recording_moto", str(log)],
        re.compile(r"listening on (\d+)"),
        environment | {"TMPDIR": str(directory)},
        directory / "origin.log",
    )
    try:
        url = f"http://127.0.0.1:{process.wait_until_ready()[1]}"
        yield Origin(url, lambda: [_seen(line) for line in log.read_text(encoding="utf-8").splitlines()])
    finally:
        process.stop()


def _seen(line: str) -> Seen:
    method, target = line.split("\t")
    parts = urlsplit(target if target.startswith("http") else f"http://origin/{target[1:]}")
    bucket, _, key = parts.path.removeprefix("/").partition("/")
    return Seen(method, bucket, unquote(key))

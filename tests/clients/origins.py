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
from typing import Any
from urllib.parse import unquote, urlsplit

from gateway.demo.stack import DemoProcess
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

__all__ = [
    "ACCESS_KEY_ID",
    "IS_DIRECTORY",
    "NODES",
    "REGION",
    "SECRET_ACCESS_KEY",
    "Origin",
    "Seen",
    "running_directory",
    "running_moto",
    "running_strict_origin",
]

REGION = "us-east-1"
NODES = int(os.environ.get("FOREBAY_CLIENTS_NODES", "1"))
"""More than one: a cluster behind one address."""


IS_DIRECTORY = os.environ.get("FOREBAY_CLIENTS_ORIGIN") == "file"
"""Where a test expects something else of a directory, it says so by this, with the clause of docs/semantics.md."""


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
    root: Path | None = None
    """The directory that it is; `url` is then that of another gateway in front of it."""

    def make_bucket(self, client: Any, name: str) -> None:
        if self.root is not None:
            (self.root / name).mkdir()  # 13.9: buckets are made in the directory
        else:
            client.create_bucket(Bucket=name)

    def configuration(self) -> dict[str, Any]:
        """Of a gateway in front of it, but for slots."""
        if self.root is not None:
            return home_of(self.root)
        keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
        return {"origin": {"endpoint_url": self.url, "region": REGION, **keys}}

    def object_reads(self, bucket: str) -> list[Seen]:
        """GETs that carried object bytes out of the origin. Of several nodes, nothing is told: each asks for itself."""
        if NODES > 1 or self.root is not None:
            return []
        return [one for one in self.requests() if one.method == "GET" and one.bucket == bucket and one.key]


@contextmanager
def running_strict_origin() -> Iterator[Origin]:
    with StrictOrigin(region=REGION) as server:

        def requests() -> list[Seen]:
            return [Seen(call.method, call.bucket or "", call.key or "") for call in server.model.calls]

        yield Origin(server.endpoint_url, requests)


@contextmanager
def running_directory(root: Path) -> Iterator[Origin]:
    """A directory, and in front of it a gateway that keeps nothing."""
    with GatewayProcess({**home_of(root), "slots": [{"name": "all", "prefix": "s3://"}]}) as gateway:
        yield Origin(gateway.s3_url, list, root)


def home_of(root: Path) -> dict[str, Any]:
    """The configuration of a gateway whose buckets are the directories in `root`."""
    keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    unset = {"access_key_id": None, "secret_access_key": None}
    origin = {"endpoint_url": f"file://{root}", "region": REGION, **unset}
    return {"origin": origin, "credentials": [{**keys, "allow": ["s3://"]}]}


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

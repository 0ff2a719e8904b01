"""Real clients on one side, a real origin on the other, a running gateway in between.

`make test-clients-back` has every client write into the write-back buffer, and expects the same of it, except where
WRITTEN_BACK says so. `make test-clients-cluster` does that with three nodes, which take turns to get a request.
`make test-clients-directory` has a directory as the origin.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.clients.boto import boto3_client
from tests.clients.origins import (
    IS_DIRECTORY,
    NODES,
    Origin,
    running_directory,
    running_moto,
    running_strict_origin,
)
from tests.support.gateway_process import GatewayProcess
from tests.support.one_address import one_address
from tests.support.waiting import eventually

FLUSHED_SECONDS = 30.0

_LEFT = "SELECT count(*) FROM writes WHERE pending = 1 OR state = 4"
"""What the origin is still to be told."""

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where gateways listen; `ca_file` is what an https client must trust."""

    url: str
    ca_file: Path | None
    directories: Sequence[Path]
    admin_urls: Sequence[str] = ()

    def sent_twice(self) -> int:
        """Return how many reads the gateways have sent once more, because an answer was late."""
        lines = [line for url in self.admin_urls for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines()]
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith("forebay_origin_hedges_total{"))

    def wait_until_flushed(self) -> None:
        """Return when the origin has everything that was acknowledged, and no upload that was aborted here."""
        for journal in (directory / "writeback" / "journal" for directory in self.directories):
            if journal.exists():
                with closing(sqlite3.connect(journal, timeout=FLUSHED_SECONDS)) as connection:
                    _wait_until_nothing_is_left(connection)


def _wait_until_nothing_is_left(journal: sqlite3.Connection) -> None:
    eventually(lambda: journal.execute(_LEFT).fetchone() == (0,), "the origin never got everything")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop moto over https where tests meet both origins: the strict one judges what clients do over https.

    Of a directory, those that make buckets: 13.9.
    """
    items[:] = [item for item in items if not (_is_second_opinion(item) or (IS_DIRECTORY and _makes_buckets(item)))]


def _makes_buckets(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == "test_buckets"


def _is_second_opinion(item: pytest.Item) -> bool:
    parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    meets_one = any("origin" in str(marker.args[0]) for marker in item.iter_markers("parametrize"))
    return (parameters.get("origin"), parameters.get("endpoint")) == ("moto", "https") and not meets_one


@pytest.fixture(scope="session", params=["directory"] if IS_DIRECTORY else ["moto", "strict"])
def origin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    """Every client meets both."""
    with ExitStack() as stack:
        match request.param:
            case "directory":
                yield stack.enter_context(running_directory(tmp_path_factory.mktemp("origin")))
            case "moto":
                yield stack.enter_context(running_moto(tmp_path_factory.mktemp("origin")))
            case _:
                yield stack.enter_context(running_strict_origin())


WRITE = os.environ.get("FOREBAY_CLIENTS_WRITE", "through")
"""`back` has all clients write into the buffer; whoever looks at the origin waits until everything is there."""

WRITTEN_BACK = WRITE == "back"
"""Where a test expects something else then, it says so by this, with the clause of docs/semantics.md."""


@contextmanager
def _endpoint(origin: Origin, directory: Path, ca_file: Path | None = None, **server: str) -> Iterator[Endpoint]:
    config: dict[str, Any] = {
        "slots": [{"name": "all", "prefix": "s3://", "write": WRITE}],
        "server": server,
        "cache": {"capacity": "2GiB", "persistent": True},
        **origin.configuration(),
    }
    with ExitStack() as stack:
        if NODES == 1:
            gateway = stack.enter_context(GatewayProcess(config))
            yield Endpoint(gateway.s3_url, ca_file, [gateway.directory], [gateway.admin_url])
            return
        cluster = stack.enter_context(one_address(directory, config, NODES, ca_file=ca_file))
        if WRITTEN_BACK:
            _wait_until_all_absorb(origin, [one.s3_url for one in cluster.gateways], ca_file)
        directories = [one.directory for one in cluster.gateways]
        yield Endpoint(cluster.s3_url, ca_file, directories, [one.admin_url for one in cluster.gateways])


def _wait_until_all_absorb(origin: Origin, urls: Sequence[str], ca_file: Path | None) -> None:
    """Until each node acknowledges writes itself: all others must have heard of it, and the first goes through."""
    direct, bucket = boto3_client(origin.url), f"bucket-{next(_numbers)}"
    direct.create_bucket(Bucket=bucket)
    deadline = time.monotonic() + FLUSHED_SECONDS
    for url in urls:
        client, outcome = boto3_client(url, ca_file), ""
        while outcome != "absorbed":
            assert time.monotonic() < deadline, outcome
            answer = client.put_object(Bucket=bucket, Key="ready", Body=b"x")["ResponseMetadata"]["HTTPHeaders"]
            outcome = answer["x-forebay-cache"]
        client.close()
    direct.close()


@pytest.fixture(scope="session")
def http_endpoint(origin: Origin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    with _endpoint(origin, tmp_path_factory.mktemp("http")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def https_endpoint(origin: Origin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    directory = tmp_path_factory.mktemp("https")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    certificate.private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))
    server = str(directory / "server.pem")
    with _endpoint(origin, directory, directory / "ca.pem", certificate_file=server, key_file=server) as endpoint:
        yield endpoint


@pytest.fixture(params=["http", "https"])
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    """The gateway over http, then over https: clients frame their bodies differently."""
    found: Endpoint = request.getfixturevalue(f"{request.param}_endpoint")
    return found


@pytest.fixture
def through(endpoint: Endpoint) -> Iterator[Any]:
    """boto3 through the gateway."""
    client = boto3_client(endpoint.url, endpoint.ca_file)
    yield client
    client.close()


@pytest.fixture
def direct(origin: Origin, request: pytest.FixtureRequest) -> Iterator[Any]:
    """boto3 straight to the origin: what the others are compared with."""
    client = boto3_client(origin.url)
    if WRITTEN_BACK:
        names = {"endpoint", "http_endpoint", "https_endpoint"} & set(request.fixturenames)
        endpoints = [request.getfixturevalue(name) for name in names]

        def wait(**_: Any) -> None:
            for endpoint in endpoints:
                endpoint.wait_until_flushed()

        client.meta.events.register("before-call.s3", wait)
    yield client
    client.close()


@pytest.fixture
def bucket(origin: Origin, direct: Any) -> str:
    """A bucket that no other test uses."""
    name = f"bucket-{next(_numbers)}"
    origin.make_bucket(direct, name)
    return name

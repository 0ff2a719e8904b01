"""Real clients on one side, a real origin on the other, a running gateway in between.

`make test-clients-back` has every client write into the write-back buffer instead, and expects the
same of it, but for what WRITTEN_BACK names.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.clients.boto import boto3_client
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Origin, running_moto, running_strict_origin
from tests.support.gateway_process import GatewayProcess

FLUSHED_SECONDS = 30.0

_LEFT = "SELECT count(*) FROM writes WHERE pending = 1 OR state = 4"
"""What the origin is still to be told."""

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a gateway listens; `ca_file` is what an https client must trust."""

    url: str
    ca_file: Path | None
    directory: Path

    def wait_until_flushed(self) -> None:
        """Return when the origin has everything that was acknowledged, and no upload that was aborted here."""
        journal = self.directory / "writeback" / "journal"
        if not journal.exists():
            return
        deadline = time.monotonic() + FLUSHED_SECONDS
        with closing(sqlite3.connect(journal, timeout=FLUSHED_SECONDS)) as connection:
            while connection.execute(_LEFT).fetchone() != (0,):
                assert time.monotonic() < deadline, "the origin never got everything"
                time.sleep(0.005)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drop moto over https where tests meet both origins: the strict one judges what clients do over https."""
    items[:] = [item for item in items if not _is_second_opinion(item)]


def _is_second_opinion(item: pytest.Item) -> bool:
    parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    meets_one = any("origin" in str(marker.args[0]) for marker in item.iter_markers("parametrize"))
    return (parameters.get("origin"), parameters.get("endpoint")) == ("moto", "https") and not meets_one


@pytest.fixture(scope="session", params=["moto", "strict"])
def origin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    """Every client meets both."""
    moto = request.param == "moto"
    with running_moto(tmp_path_factory.mktemp("origin")) if moto else running_strict_origin() as running:
        yield running


WRITE = os.environ.get("FOREBAY_CLIENTS_WRITE", "through")
"""`back` has all clients write into the buffer; whoever looks at the origin waits until everything is there."""

WRITTEN_BACK = WRITE == "back"
"""Where a test expects something else then, it says so by this, with the clause of docs/semantics.md."""


def _gateway(origin: Origin, **server: str) -> GatewayProcess:
    return GatewayProcess(
        {
            "slots": [{"name": "all", "prefix": "s3://", "write": WRITE}],
            "server": server,
            "origin": {
                "endpoint_url": origin.url,
                "region": REGION,
                "access_key_id": ACCESS_KEY_ID,
                "secret_access_key": SECRET_ACCESS_KEY,
            },
            "cache": {"capacity": "2GiB", "persistent": True},
        }
    )


@pytest.fixture(scope="session")
def http_endpoint(origin: Origin) -> Iterator[Endpoint]:
    with _gateway(origin) as gateway:
        yield Endpoint(gateway.s3_url, None, gateway.directory)


@pytest.fixture(scope="session")
def https_endpoint(origin: Origin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    directory = tmp_path_factory.mktemp("https")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    certificate.private_key_and_cert_chain_pem.write_to_path(str(directory / "server.pem"))
    server = str(directory / "server.pem")
    with _gateway(origin, certificate_file=server, key_file=server) as gateway:
        yield Endpoint(gateway.s3_url, directory / "ca.pem", gateway.directory)


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
def bucket(direct: Any) -> str:
    """A bucket that no other test uses."""
    name = f"bucket-{next(_numbers)}"
    direct.create_bucket(Bucket=name)
    return name

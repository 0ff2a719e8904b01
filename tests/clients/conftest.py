"""Real clients on one side, a real origin on the other, a running gateway in between."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.support.gateway_process import GatewayProcess

from tests.clients.boto import boto3_client
from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, Origin, running_origin

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a gateway listens; `ca_file` is what an https client must trust."""

    url: str
    ca_file: Path | None


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    with running_origin(tmp_path_factory.mktemp("origin")) as running:
        yield running


def _running_gateway(directory: Path, origin: Origin, server: str = "") -> Iterator[GatewayProcess]:
    config = f"""
[server]
port = 0
{server}
[admin]
port = 0
[origin]
endpoint_url = "{origin.url}"
region = "{REGION}"
access_key_id = "{ACCESS_KEY_ID}"
secret_access_key = "{SECRET_ACCESS_KEY}"
[cache]
directory = "{directory / "cache"}"
capacity = "2GiB"
"""
    with GatewayProcess(config, directory) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def http_endpoint(origin: Origin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    for gateway in _running_gateway(tmp_path_factory.mktemp("http"), origin):
        yield Endpoint(gateway.s3_url, None)


@pytest.fixture(scope="session")
def https_endpoint(origin: Origin, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    directory = tmp_path_factory.mktemp("https")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(directory / "ca.pem")
    certificate.private_key_pem.write_to_path(directory / "key.pem")
    for index, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(directory / "chain.pem", append=index > 0)
    server = f'certificate_file = "{directory / "chain.pem"}"\nkey_file = "{directory / "key.pem"}"'
    for gateway in _running_gateway(directory, origin, server):
        yield Endpoint(gateway.s3_url, directory / "ca.pem")


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
def direct(origin: Origin) -> Iterator[Any]:
    """boto3 straight to the origin: what the others are compared with."""
    client = boto3_client(origin.url)
    yield client
    client.close()


@pytest.fixture
def bucket(direct: Any) -> str:
    """A bucket that no other test uses."""
    name = f"bucket-{next(_numbers)}"
    direct.create_bucket(Bucket=name)
    return name

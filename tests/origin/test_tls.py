"""https towards the origin."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from gateway.core.errors import ConfigError, OriginUnreachable
from gateway.origin.client import StreamedBody
from tests.origin.clients import pieces
from tests.origin.origins import ask, s3_origin
from tests.support.strict_origin import StrictOrigin


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StrictOrigin]:
    certificate = authority.issue_cert("127.0.0.1")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    certificate.private_key_and_cert_chain_pem.write_to_path(str(path))
    with StrictOrigin(certificate_file=str(path)) as origin:
        origin.model.put("bucket", "key", b"data")
        yield origin


async def fetch(server: StrictOrigin, ca_bundle: str | None) -> bytes:
    origin = s3_origin(server.endpoint_url, ca_bundle=ca_bundle, max_attempts=2)
    try:
        return (await ask(origin, "GET", "bucket", "key")).body
    finally:
        await origin.aclose()


def test_the_ca_bundle_is_trusted(server: StrictOrigin, authority: trustme.CA, tmp_path: Path) -> None:
    """A private authority is trusted when the configuration names it."""
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    assert asyncio.run(fetch(server, str(bundle))) == b"data"


def test_unknown_authorities_are_not(server: StrictOrigin) -> None:
    """Without it there is no connection, and no data goes out."""
    with pytest.raises(OriginUnreachable, match="ertificate"):
        asyncio.run(fetch(server, None))


@pytest.mark.parametrize("content", [None, "not a certificate"])
def test_an_unusable_bundle_is_a_configuration_error(server: StrictOrigin, tmp_path: Path, content: str | None) -> None:
    """It names the key; nothing is tried without verification."""
    bundle = tmp_path / "ca.pem"
    if content is not None:
        bundle.write_text(content)
    with pytest.raises(ConfigError, match=r"origin\.ca_bundle"):
        asyncio.run(fetch(server, str(bundle)))


async def test_uploads_pass_over_tls(server: StrictOrigin, authority: trustme.CA, tmp_path: Path) -> None:
    """Of any size, in memory or streamed: no piece waits for ever to have left."""
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    origin = s3_origin(server.endpoint_url, ca_bundle=str(bundle))
    try:
        async with asyncio.timeout(20):
            for size in (1, 200_000, 3_000_000):
                data = bytes(size)
                assert (await ask(origin, "PUT", "bucket", "new", body=data)).status == 200
                body = StreamedBody(pieces(data[: size // 2], data[size // 2 :]), size)
                assert (await ask(origin, "PUT", "bucket", "streamed", body=body)).status == 200
                assert server.model.data("bucket", "new") == server.model.data("bucket", "streamed") == data
    finally:
        await origin.aclose()

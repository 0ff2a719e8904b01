"""https through a proxy: CONNECT, and TLS to the origin itself behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trustme

from gateway.core.errors import OriginUnreachable
from tests.origin.origins import ask, s3_origin
from tests.support.connections import answering
from tests.support.strict_origin import StrictOrigin


@asynccontextmanager
async def tunnelling(heads: list[bytes], answer: bytes) -> AsyncIterator[str]:
    """Digs tunnels where `answer` says 200."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError):
                while data := await reader.read(64 * 1024):
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        heads.append(head)
        writer.write(answer)
        if b" 200 " not in answer:
            return
        host, _, port = head.split(b" ")[1].decode().partition(":")
        upstream, downstream = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.gather(copy(reader, downstream), copy(upstream, writer))
        finally:
            downstream.transport.abort()

    async with answering(serve) as port:
        yield f"http://user:p%40ss@127.0.0.1:{port}"


def test_https_goes_through_a_tunnel(tmp_path: Path) -> None:
    """The certificate is the origin's; uploads and answers pass; the password is the proxy's only."""
    authority = trustme.CA()
    certificate = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    bundle = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(bundle))
    heads: list[bytes] = []

    async def scenario(strict: StrictOrigin) -> None:
        async with tunnelling(heads, b"HTTP/1.1 200 Connection established\r\n\r\n") as proxy:
            origin = s3_origin(strict.endpoint_url, ca_bundle=str(bundle), proxy=proxy)
            try:
                assert (await ask(origin, "PUT", "bucket", "new", body=bytes(1_000_000))).status == 200
                assert (await ask(origin, "GET", "bucket", "new")).body == bytes(1_000_000)
            finally:
                await origin.aclose()

    with StrictOrigin(certificate_file=str(certificate)) as strict:
        strict.model.create_bucket("bucket")
        asyncio.run(scenario(strict))
        assert len(heads) == 1
        assert heads[0].startswith(f"CONNECT {strict.endpoint_url.removeprefix('https://')} HTTP/1.1\r\n".encode())
        assert b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n" in heads[0]
        assert not any(name.lower() == b"proxy-authorization" for head in strict.request_headers for name, _ in head)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", b"", b"SSH-2.0\r\n\r\n"])
async def test_a_proxy_that_refuses_is_an_origin_out_of_reach(answer: bytes) -> None:
    """And it is certain that nothing was sent."""
    async with tunnelling([], answer) as proxy:
        origin = s3_origin("https://127.0.0.1:1", proxy=proxy, max_attempts=1)
        try:
            with pytest.raises(OriginUnreachable, match="proxy") as caught:
                await ask(origin, "GET", "bucket", "key")
            assert not caught.value.may_be_done
            assert "p@ss" not in str(caught.value)
        finally:
            await origin.aclose()

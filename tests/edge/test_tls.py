"""https on the S3 port."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
import trustme

from gateway.core.errors import StartupError
from gateway.disk.pem import PemFile
from gateway.edge.s3_server import Receive, Scope, Send, TlsFiles
from gateway.edge.server_state import ServerLimits
from tests.edge.apps import echo, file_app
from tests.support.certificates import tls_files
from tests.support.serving import request, serving, talking


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> TlsFiles:
    certificate = authority.issue_cert("localhost")
    return tls_files(certificate, tmp_path)


@pytest.fixture
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def test_requests_and_large_bodies_pass_through_tls(tls: TlsFiles, trusting: ssl.SSLContext) -> None:
    """Keep-alive, back-pressure in both directions, and a clean end."""
    body = os.urandom(3 * 1024 * 1024)
    async with serving(echo, tls=tls) as port:
        wire = await port.connect(ssl=trusting, server_hostname="localhost")
        for expected in (body, b"small"):
            await wire.say(request("PUT", "/", expected))
            assert (await wire.answer()).body == expected
        await wire.close()
        await port.connections(0)


@pytest.mark.parametrize("pieces", [1, 3])
async def test_a_file_never_leaves_in_the_clear(
    tls: TlsFiles, trusting: ssl.SSLContext, tmp_path: Path, pieces: int
) -> None:
    """An encrypted connection is the same to an application; files go by way of memory there."""
    path = tmp_path / "content"
    path.write_bytes(os.urandom(1_000_000))
    async with serving(file_app(path, pieces=pieces), tls=tls) as port:
        wire = await port.connect(ssl=trusting, server_hostname="localhost")
        for _ in range(2):
            await wire.say(request("GET"))
            assert (await wire.answer()).body == path.read_bytes()
        await wire.close()


async def test_an_early_answer_arrives_and_the_connection_ends(tls: TlsFiles, trusting: ssl.SSLContext) -> None:
    """TLS has no half-close: the answer is read, then the client closes."""
    async with serving(echo, tls=tls) as port:
        wire = await port.connect(ssl=trusting, server_hostname="localhost")
        await wire.say(b"GET / HTTP/1.1\r\n\r\n")
        assert (await wire.answer()).status == 400
        await wire.close()
        await port.connections(0)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
async def test_plain_http_is_told_that_the_port_is_https(tls: TlsFiles, method: str) -> None:
    """400 with the reason, as nginx says it, and nothing behind it; the application hears of nothing."""
    async with talking(
        unheard, request(method, "/b/k", b"body" if method == "PUT" else b"") + request("GET"), tls=tls
    ) as (port, wire):
        answer = await wire.answer(to_head=method == "HEAD")
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert method == "HEAD" or b"The plain HTTP request was sent to HTTPS port" in answer.body
        assert await wire.rest() == b""
        await wire.close()
        await port.connections(0)


async def unheard(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError(scope["path"])


async def test_what_is_neither_gets_no_answer_and_leaves_nothing(tls: TlsFiles) -> None:
    """The connection closes, the server goes on."""
    async with talking(echo, b"\x00" * 100, tls=tls) as (port, wire):
        assert b"HTTP/" not in await wire.rest()
        await wire.close()
        await port.connections(0)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"])
async def test_a_handshake_that_does_not_come_is_not_waited_for(tls: TlsFiles, said: bytes) -> None:
    """Neither for its first byte nor for the rest."""
    async with talking(echo, said, tls=tls, limits=ServerLimits(head_timeout_seconds=0.2)) as (port, wire):
        assert await wire.rest() in (b"", b"\x15\x03\x01\x00\x02\x02\x0a")
        await port.connections(0)


def test_old_tls_is_refused(tls: TlsFiles) -> None:
    """1.2 or later."""
    assert tls.context().minimum_version is ssl.TLSVersion.TLSv1_2


def test_unusable_files_are_a_startup_error(tls: TlsFiles) -> None:
    """The message names both files."""
    swapped = TlsFiles(tls.key, tls.certificate)
    with pytest.raises(StartupError, match=r"key\.pem.*certificate\.pem"):
        swapped.context()
    with pytest.raises(StartupError, match="missing"):
        TlsFiles(PemFile(tls.certificate.path.with_name("missing")), tls.key).context()

"""boto3's uploads, received into a sink behind the whole S3 port: parsed, authenticated, counted."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
import trustme
from botocore.config import Config
from botocore.exceptions import ClientError

from gateway.edge.s3_server import TlsFiles
from gateway.operations.context import RequestContext, Response
from gateway.operations.payload import receive_verified
from gateway.s3.error_codes import s3_error
from gateway.telemetry import metrics
from tests.support.asgi import ACCESS_KEY_ID, SECRET_ACCESS_KEY, call
from tests.support.certificates import tls_files
from tests.support.gateway_app import gateway_app
from tests.support.serving import serving

MIB = 1024**2
CONTENT = os.urandom(3 * MIB + 11)


@dataclass
class Sinking:
    """Stands in for the operations: every PUT goes to a sink, which may say no at some byte."""

    refuse_at: int | None = None
    contents: dict[str, bytes] = field(default_factory=dict)

    def perform(self, context: RequestContext) -> Coroutine[Any, Any, Response]:
        return self._put(context)

    async def _put(self, context: RequestContext) -> Response:
        content = bytearray()

        def sink(data: memoryview) -> None:
            content.extend(data)
            if self.refuse_at is not None and len(content) > self.refuse_at:
                raise s3_error("SlowDown")

        received = await receive_verified(context, sink)
        self.contents[context.object_key.key] = bytes(content)
        checksums = list(received.checksums.items())
        return Response(200, [("etag", f'"{received.md5.hex()}"'), *checksums], b"")


def client(port: int, ca_file: Path | None, **settings: Any) -> Any:
    scheme, verify = ("https", str(ca_file)) if ca_file else ("http", False)
    config = Config(retries={"total_max_attempts": 1}, read_timeout=30, proxies={}, **settings)
    keys = {"aws_access_key_id": ACCESS_KEY_ID, "aws_secret_access_key": SECRET_ACCESS_KEY}
    return boto3.client(
        "s3", endpoint_url=f"{scheme}://localhost:{port}", region_name="us-east-1", verify=verify, config=config, **keys
    )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[TlsFiles, Path]:
    directory = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    files = tls_files(authority.issue_cert("localhost"), directory)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return files, directory / "ca.pem"


SETTINGS: dict[str, dict[str, Any]] = {
    "boto3's defaults": {},
    "checksums where required": {"request_checksum_calculation": "when_required"},
    "unsigned": {"request_checksum_calculation": "when_required", "s3": {"payload_signing_enabled": False}},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_uploads_arrive_as_boto3_sends_them(
    scheme: str,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    certificates: tuple[TlsFiles, Path],
) -> None:
    """Hashed, with a trailer, or bare; small and large on one connection; the ETag is boto3's own MD5."""
    sinking = Sinking()
    monkeypatch.setattr("gateway.edge.asgi.perform", sinking.perform)
    tls, ca_file = certificates if scheme == "https" else (None, None)
    async with gateway_app(tmp_path) as gateway, serving(gateway.app, tls=tls) as port:
        s3 = client(port.port, ca_file, **settings)
        before = 0.0
        for key, content in (("large", CONTENT), ("small", b"small"), ("empty", b""), ("again", CONTENT)):
            answer = await asyncio.to_thread(s3.put_object, Bucket="bucket", Key=key, Body=content)
            assert answer["ETag"] == f'"{hashlib.md5(content).hexdigest()}"'
            assert sinking.contents[key] == content
            received_bytes = metrics.RECEIVED_BYTES.value("PutObject", "default")
            assert len(content) <= received_bytes - before <= len(content) + 200
            before = received_bytes
        s3.close()


async def test_a_sink_that_refuses_is_answered_as_s3_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of the body; the next upload finds the gateway as before."""
    sinking = Sinking(refuse_at=MIB)
    monkeypatch.setattr("gateway.edge.asgi.perform", sinking.perform)
    async with gateway_app(tmp_path) as gateway, serving(gateway.app) as port:
        s3 = client(port.port, None)
        with pytest.raises(ClientError) as caught:
            await asyncio.to_thread(s3.put_object, Bucket="bucket", Key="key", Body=CONTENT)
        assert caught.value.response["Error"]["Code"] == "SlowDown"
        assert sinking.contents == {}
        sinking.refuse_at = None
        await asyncio.to_thread(s3.put_object, Bucket="bucket", Key="key", Body=CONTENT)
        assert sinking.contents == {"key": CONTENT}
        s3.close()


async def test_a_server_of_another_make_receives_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without our server's offer in the scope, bodies are read as ASGI gives them."""
    sinking = Sinking()
    monkeypatch.setattr("gateway.edge.asgi.perform", sinking.perform)
    async with gateway_app(tmp_path) as gateway:
        pieces = [CONTENT[:MIB], CONTENT[MIB:]]
        assert (await call(gateway.app, "PUT", "/bucket/key", {}, pieces)).status == 200
        assert sinking.contents == {"key": CONTENT}
        sinking.refuse_at = MIB
        assert (await call(gateway.app, "PUT", "/bucket/key", {}, pieces)).status == 503

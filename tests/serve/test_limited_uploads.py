"""Uploads of a limited caller that ask before they send: no 100 is delayed, and they wait in turn."""

from __future__ import annotations

import socket
import time
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

KEY = ("one", "one-secret-0123456789")
BODY = b"0123456789" * 1000
CALLER_WAIT_SECONDS = 3.0


def config_of(origin: StrictOrigin) -> dict[str, Any]:
    return {
        "server": {"workers": 2, "caller_wait_max": f"{CALLER_WAIT_SECONDS}s"},
        "origin": origin.settings,
        "credentials": [
            {
                "access_key_id": KEY[0],
                "secret_access_key": KEY[1],
                "allow": ["s3://"],
                "max_concurrent_requests": 1,
            }
        ],
    }


def begin_upload(gateway: GatewayProcess, key: str) -> socket.socket:
    """A connection that has sent the head of a PUT, and waits for its 100."""
    client = boto3.client(
        "s3",
        endpoint_url=gateway.s3_url,
        aws_access_key_id=KEY[0],
        aws_secret_access_key=KEY[1],
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, signature_version="s3v4"),
    )
    url = urlsplit(client.generate_presigned_url("put_object", {"Bucket": "bucket", "Key": key}))
    connection = socket.create_connection((url.hostname or "", url.port or 0), timeout=30)
    connection.sendall(
        f"PUT {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(BODY)}\r\n"
        "Expect: 100-continue\r\n\r\n".encode()
    )
    return connection


def status(connection: socket.socket) -> bytes:
    """Of the next head that comes."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    return received[9:12]


@pytest.mark.slow
def test_a_100_is_not_delayed() -> None:
    """10.6 It comes at once where there is no room; the upload goes on in its turn, or has its 503 in time."""
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        with GatewayProcess(config_of(origin)) as gateway, begin_upload(gateway, "first") as first:
            assert status(first) == b"100"
            began = time.monotonic()
            with begin_upload(gateway, "second") as second, begin_upload(gateway, "third") as third:
                assert status(second) == b"100"
                assert status(third) == b"100"
                assert time.monotonic() - began < CALLER_WAIT_SECONDS / 2
                for one in (second, third):
                    one.sendall(BODY)
                assert {status(second), status(third)} == {b"503"}
                assert time.monotonic() - began > CALLER_WAIT_SECONDS - 0.5
            with begin_upload(gateway, "fourth") as fourth:
                assert status(fourth) == b"100"
                fourth.sendall(BODY)
                first.sendall(BODY)
                assert status(first) == b"200"
                assert status(fourth) == b"200"

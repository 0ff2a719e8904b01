"""boto3 clients as people make them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from tests.clients.origins import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY


@cache
def _session() -> Any:
    """One for all: a session of its own for each client would load S3's model each time, a fifth of a second."""
    return boto3.session.Session(
        aws_access_key_id=ACCESS_KEY_ID, aws_secret_access_key=SECRET_ACCESS_KEY, region_name=REGION
    )


def boto3_client(url: str, ca_file: Path | None = None, **settings: Any) -> Any:
    """boto3 with an endpoint and its defaults; `settings` go to botocore's Config.

    One attempt only: a retry would hide an error that the gateway must not make.
    """
    config = Config(
        **{"retries": {"total_max_attempts": 1}, "connect_timeout": 5, "read_timeout": 60, "proxies": {}} | settings
    )
    return _session().client("s3", endpoint_url=url, verify=str(ca_file) if ca_file else None, config=config)


def read(client: Any, bucket: str, key: str, **arguments: Any) -> bytes:
    """The body of a GetObject."""
    with client.get_object(Bucket=bucket, Key=key, **arguments)["Body"] as body:
        content: bytes = body.read()
        return content


def cache_header(response: Any) -> str | None:
    """What Forebay said about where the answer came from, without the reason of a miss."""
    value: str | None = response["ResponseMetadata"]["HTTPHeaders"].get("x-forebay-cache")
    return value.partition(";")[0] if value is not None else None


def described(response: Any) -> dict[str, Any]:
    """What an answer says about an object: everything but transport, ids and dates of the answer itself."""
    return {name: value for name, value in response.items() if name not in ("ResponseMetadata", "Body")}

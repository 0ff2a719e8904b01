"""A gateway whose slots change while it runs: its admin port, a client, an origin, and its configuration."""

from __future__ import annotations

import os
import signal
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.gateway_process import GatewayProcess, to_toml
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

KEY = (ACCESS_KEY_ID, SECRET_ACCESS_KEY)
BUCKET = "train"


def client_of(url: str, key: tuple[str, str] = KEY) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )


def refused(call: Callable[..., Any], **arguments: Any) -> str:
    """With which code."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    return str(caught.value.response["Error"]["Code"])


@contextmanager
def an_origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        client_of(origin.endpoint_url).create_bucket(Bucket=BUCKET)
        yield origin


def config_of(origin: StrictOrigin, **more: Any) -> dict[str, Any]:
    key = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    base: dict[str, dict[str, Any]] = {
        "origin": {"endpoint_url": origin.endpoint_url, **key},
        "server": {"workers": 2},
        "cache": {"persistent": True, "capacity": "64MiB", "block_size": "64KiB"},
    }
    return {
        name: {**base.get(name, {}), **table} if isinstance(table, dict) else table
        for name, table in {**base, **more}.items()
    }


class Admin:
    """The admin port of a gateway."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway

    def put(self, name: str, slot: Mapping[str, Any]) -> httpx.Response:
        return httpx.put(f"{self._gateway.admin_url}/api/v1/slots/{name}", json=slot, timeout=60)

    def delete(self, name: str) -> httpx.Response:
        return httpx.delete(f"{self._gateway.admin_url}/api/v1/slots/{name}", timeout=60)

    def is_gone(self, name: str) -> bool:
        """Whether a slot could be removed."""
        return self.delete(name).status_code == 200

    def get(self, path: str) -> Any:
        return httpx.get(f"{self._gateway.admin_url}{path}", timeout=60).json()

    @property
    def gateway(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/api/v1/status")["gateway"]
        return found

    def slots(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.get("/api/v1/slots")["slots"]}

    def reload(self, config: Mapping[str, Any], gateway: GatewayProcess) -> None:
        """Have the file read anew, and wait until that has been judged, and followed by all."""
        before = self.gateway
        text = gateway.config_file.read_text()
        gateway.config_file.write_text(to_toml(laid_over(text, config)))
        os.kill(gateway.pid, signal.SIGHUP)

        def is_over() -> bool:
            now = self.gateway
            if now["settings_problem"] is not None and now["settings_problem"] != before["settings_problem"]:
                return True
            return bool(now["generation"] > before["generation"]) and all(
                one["generation"] == now["generation"] for one in now["processes"]
            )

        eventually(is_over, "the file was not read anew")


def laid_over(text: str, config: Mapping[str, Any]) -> dict[str, Any]:
    document = tomllib.loads(text)
    for name, table in config.items():
        document[name] = {**document.get(name, {}), **table} if isinstance(table, dict) else table
    return document

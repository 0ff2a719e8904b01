"""Clause 3.19 of docs/semantics.md: what others have changed is seen when it was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.s3.requests import Operation
from tests.support.changing_slots import client_of
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def origin() -> Iterator[StrictOrigin]:
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        yield origin


@pytest.fixture(scope="module")
def gateway(origin: StrictOrigin) -> Iterator[GatewayProcess]:
    config: dict[str, Any] = {
        "origin": origin.settings,
        "server": {"workers": 2},
        "slots": [
            {"name": "indexed", "prefix": "s3://bucket/indexed/", "consistency": "immutable", "index": True},
            {"name": "plain", "prefix": "s3://bucket/plain/", "consistency": "immutable"},
        ],
    }
    with GatewayProcess(config) as gateway, gateway.explaining():
        yield gateway


def refresh(gateway: GatewayProcess, prefix: str) -> Result:
    return CliRunner().invoke(
        cli.app, ["refresh", prefix, "--wait", "--admin-url", gateway.admin_url], env={"FOREBAY_CONFIG": None}
    )


def seen(client: Any, prefix: str) -> dict[str, bytes]:
    """What LIST and GET show."""
    keys = [one["Key"] for one in client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", ())]
    found = {}
    for name in ("changed", "gone", "new", "same"):
        key = f"{prefix}{name}"
        try:
            found[name] = client.get_object(Bucket="bucket", Key=key)["Body"].read()
        except ClientError:
            assert key not in keys
        else:
            assert key in keys
    return found


@pytest.mark.slow
@pytest.mark.parametrize("slot", ["indexed", "plain"])
def test_3_19_a_refresh_shows_what_others_have_changed(
    origin: StrictOrigin, gateway: GatewayProcess, slot: str
) -> None:
    """3.19 In LIST, HEAD and GET, of an immutable slot too. With an index, by a crawl; else all is forgotten."""
    prefix, client = f"{slot}/", client_of(gateway.s3_url)
    before = {"changed": b"old", "gone": b"gone", "same": b"same"}
    for name, body in before.items():
        origin.model.put("bucket", f"{prefix}{name}", body)
    assert refresh(gateway, f"s3://bucket/{prefix}").exit_code == 0
    assert seen(client, prefix) == before
    origin.model.put("bucket", f"{prefix}changed", b"newer")
    origin.model.put("bucket", f"{prefix}new", b"new")
    client_of(origin.endpoint_url).delete_object(Bucket="bucket", Key=f"{prefix}gone")
    assert client.get_object(Bucket="bucket", Key=f"{prefix}changed")["Body"].read() == b"old"
    assert client.get_object(Bucket="bucket", Key=f"{prefix}gone")["Body"].read() == b"gone"
    result = refresh(gateway, f"s3://bucket/{prefix}")
    assert result.exit_code == 0, result.output
    told = "the index of indexed has listed it anew" if slot == "indexed" else "remembered of its bucket is forgotten"
    assert told in result.output
    assert ("forgotten" in result.output) == (slot == "plain")
    assert seen(client, prefix) == {"changed": b"newer", "new": b"new", "same": b"same"}


@pytest.mark.slow
def test_3_19_only_the_prefix_is_listed_anew(origin: StrictOrigin, gateway: GatewayProcess) -> None:
    eventually(lambda: all(one["complete"] for one in gateway.status()["indexes"]))
    before = origin.model.count(Operation.LIST_OBJECTS_V2)
    assert refresh(gateway, "s3://bucket/indexed/some/").exit_code == 0
    asked = [dict(one.query).get("prefix") for one in origin.model.calls if one.operation is Operation.LIST_OBJECTS_V2]
    assert 1 <= len(asked[before:]) <= 2


@pytest.mark.slow
def test_3_19_a_refresh_that_fails_is_told(origin: StrictOrigin, gateway: GatewayProcess) -> None:
    with origin.refused():
        result = refresh(gateway, "s3://bucket/indexed/")
    assert result.exit_code == 1
    assert "the index of indexed fails, and is tried again" in result.stderr

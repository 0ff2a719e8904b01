"""`forebay explain`, of a running gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest
from typer.testing import CliRunner

from gateway.admin.app import describe
from gateway.admin.formatting import size_text
from gateway.cli import app
from tests.support.gateway_process import GatewayProcess
from tests.support.memory_origin.faults import AlterHeaders, on
from tests.support.strict_origin import StrictOrigin
from tests.support.waiting import eventually

MEBI = 1024 * 1024
SIZE_BYTES = 5 * MEBI + 17
SLOTS = [
    {"name": "data", "prefix": "s3://bucket/data/", "consistency": "ttl", "metadata_ttl": "1h"},
    {"name": "small", "prefix": "s3://bucket/small/", "consistency": "immutable", "max_cached_object_size": "1MiB"},
    {"name": "back", "prefix": "s3://bucket/back/", "write": "back"},
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        for key in ("data/k", "small/k", "strict", "data/\x1b[2J"):
            origin.model.put_generated("bucket", key, SIZE_BYTES, 1)
        origin.model.put_generated("weak", "k", SIZE_BYTES, 1)
        weak = AlterHeaders({"etag": 'W/"0123"'})
        origin.model.inject(on(bucket="weak", key="k"), weak, times=None)
        config: dict[str, Any] = {
            "server": {"allow_unsigned": True},
            "origin": origin.settings,
            "cache": {"persistent": True, "block_size": "1MiB"},
            "slots": SLOTS,
        }
        with GatewayProcess(config, directory=tmp_path_factory.mktemp("gateway")) as one:
            yield one


def read(gateway: GatewayProcess, key: str, some: str | None = None) -> str:
    headers = {"range": some} if some is not None else {}
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.get(f"{gateway.s3_url}/bucket/{key}", headers=headers)
    assert answer.status_code in (200, 206)
    return answer.headers["x-forebay-cache"]


def explained(gateway: GatewayProcess, key: str, bucket: str = "bucket") -> dict[str, Any]:
    found = CliRunner().invoke(app, ["explain", f"s3://{bucket}/{key}", "--admin-url", gateway.admin_url, "--json"])
    assert found.exit_code == 0, found.output
    document: dict[str, Any] = orjson.loads(found.stdout)
    return document


def text(gateway: GatewayProcess, key: str) -> str:
    found = CliRunner().invoke(app, ["explain", f"s3://bucket/{key}", "--admin-url", gateway.admin_url])
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.mark.slow
def test_what_is_here_and_what_is_missing(gateway: GatewayProcess) -> None:
    assert explained(gateway, "data/none")["known"]["by"] is None
    read(gateway, "data/k", f"bytes={2 * MEBI}-{4 * MEBI - 1}")
    eventually(lambda: explained(gateway, "data/k")["held"]["bytes"] >= 2 * MEBI)
    document = explained(gateway, "data/k")
    assert document["slot"]["name"] == "data"
    assert (document["known"]["state"], document["known"]["bytes"]) == ("fresh", SIZE_BYTES)
    blocks = document["blocks"]
    assert blocks["total"] == blocks["looked_at"] == 6
    assert blocks["bytes_here"] == document["held"]["bytes"]
    read(gateway, "data/k")
    eventually(lambda: explained(gateway, "data/k")["blocks"]["here"] == 6)
    document = explained(gateway, "data/k")
    assert document["blocks"]["missing"] == []
    assert document["why_not_kept"] is None
    assert "6 of 6 blocks here" in text(gateway, "data/k")


def test_what_nobody_has_is_not_kept(gateway: GatewayProcess) -> None:
    """Whether nobody has asked for it yet, or the origin has said so."""
    assert "kept     no: nothing is known of it yet" in text(gateway, "data/none")
    assert explained(gateway, "data/none")["why_not_kept"] == "nothing is known of it yet"
    assert "kept     no: nothing is known of it yet" in text(gateway, "back/none")


def test_what_was_dropped_by_command_is_not_here(gateway: GatewayProcess) -> None:
    read(gateway, "data/k")
    eventually(lambda: explained(gateway, "data/k")["blocks"]["here"] == 6)
    evicting = CliRunner().invoke(app, ["evict", "s3://bucket/data/k", "--wait", "--admin-url", gateway.admin_url])
    assert evicting.exit_code == 0, evicting.output
    assert f"1 of 1  {size_text(SIZE_BYTES)} " in evicting.stdout
    document = explained(gateway, "data/k")
    assert document["held"] == {"blocks": 0, "bytes": 0}
    assert document["blocks"]["missing"] == [[0, SIZE_BYTES - 1]]
    assert read(gateway, "data/k", "bytes=0-9") == "miss; reason=first-read"


def test_what_is_not_kept_says_why(gateway: GatewayProcess) -> None:
    assert read(gateway, "small/k") == "miss; reason=not-kept"
    eventually(lambda: explained(gateway, "small/k")["known"]["by"] == "catalog")
    assert "max_cached_object_size" in explained(gateway, "small/k")["why_not_kept"]
    assert "no: it is larger" in text(gateway, "small/k")


def test_9_8_what_the_origin_cannot_do_is_a_reason(gateway: GatewayProcess) -> None:
    """9.8 A worker has found it out, and the process that answers here tells it."""
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.get(f"{gateway.s3_url}/weak/k")
    assert (answer.status_code, len(answer.content)) == (200, SIZE_BYTES)
    eventually(lambda: "weak ETags" in (explained(gateway, "k", "weak")["why_not_kept"] or ""))


def test_in_a_strict_slot_the_version_is_not_known(gateway: GatewayProcess) -> None:
    read(gateway, "strict")
    eventually(lambda: explained(gateway, "strict")["held"]["bytes"] == SIZE_BYTES)
    document = explained(gateway, "strict")
    assert (document["known"]["by"], document["blocks"]) == (None, None)
    assert "of all versions together" in text(gateway, "strict")


def test_what_is_pending_is_shown_and_terminals_are_spared(gateway: GatewayProcess) -> None:
    assert explained(gateway, "back/nothing")["pending"] is None
    shown = text(gateway, "data/\x1b[2J")
    assert "\x1b" not in shown
    assert "\\u001b" in shown


@pytest.mark.parametrize("asked", ["", "bucket/k", "s3://", "s3://bucket", "s3://bucket/"])
def test_what_names_no_object_is_refused(gateway: GatewayProcess, asked: str) -> None:
    with httpx.Client(trust_env=False) as client:
        answer = client.get(f"{gateway.admin_url}/api/v1/explain", params={"object": asked})
    assert answer.status_code == 400
    assert "s3://" in answer.json()["error"]


def test_what_is_shown_is_what_is_described(gateway: GatewayProcess) -> None:
    """Field by field, as the OpenAPI document has it."""
    described = describe()["paths"]["/api/v1/explain"]["get"]["responses"]["200"]["content"]["application/json"]
    read(gateway, "data/k")
    eventually(lambda: explained(gateway, "data/k")["blocks"] is not None)
    schema, document = described["schema"]["properties"], explained(gateway, "data/k")
    assert set(schema) == set(document)
    for name in ("slot", "known", "blocks", "held"):
        assert set(schema[name]["properties"]) == set(document[name])

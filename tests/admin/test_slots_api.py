"""Slots as the admin port and `forebay slots` show them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.requests import Request
from typer.testing import CliRunner

from gateway.admin import slots
from gateway.admin.app import describe
from gateway.admin.backends import Backends
from gateway.admin.slots import SlotsApi
from gateway.api.documents import OriginRequests, SlotsDocument
from gateway.cli import app, common
from gateway.cli import looks as shown
from gateway.config.live import LiveSettings
from gateway.telemetry import metric_kinds, metrics
from tests.support.settings import load

CONFIGURATION = """
[origin]
endpoint_url = "http://127.0.0.1:1"
access_key_id = "a"
secret_access_key = "b"
read_bandwidth = "100MB/s"
[cache]
capacity = "1GiB"
[[slots]]
name = "data"
prefix = "s3://bucket/data/"
weight = 3
capacity = "100MiB"
capacity_limit = "200MiB"
read_bandwidth = "50MB/s"
read_guarantee = "10MB/s"
[[slots]]
name = "other"
prefix = "s3://bucket/other/"
"""

MEBI = 1024 * 1024


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where all is counted; an answer takes no time."""
    monkeypatch.setattr(slots, "RATE_SECONDS", 0.0)
    metric_kinds.share(tmp_path, "worker0")
    try:
        yield tmp_path
    finally:
        metric_kinds.unshare()


def answered(directory: Path, while_looking: Any = lambda: None) -> dict[str, Any]:
    """The document; `while_looking` is called between the two looks that rates are made of."""
    samples: list[None] = []
    sample = slots._sample

    def sampled(of: Path) -> Any:
        if samples:
            while_looking()
        samples.append(None)
        return sample(of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "_sample", sampled)
        api = SlotsApi(LiveSettings(load(directory, CONFIGURATION).settings), directory, Backends())
        answer = asyncio.run(api.show(Request({"type": "http"})))
    return answer.document()


def of(document: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [one for one in document["slots"] if one["name"] == name]
    return dict(found)


def test_what_is_shown_is_what_is_described(counted: Path) -> None:
    """Field by field, as the OpenAPI document has it."""
    schema = describe()["paths"]["/api/v1/slots"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    document = answered(counted)
    described = schema["properties"]["slots"]["items"]["properties"]
    for slot in document["slots"]:
        assert set(slot) == set(described)
        for name in ("capacity", "read_bandwidth", "write_bandwidth", "origin_requests"):
            assert set(slot[name]) == set(described[name]["properties"])
    assert [slot["name"] for slot in document["slots"]] == ["data", "other", "default"]


def test_what_a_slot_has_and_what_it_is_entitled_to(counted: Path) -> None:
    metrics.CACHE_USAGE_BYTES.set(150 * MEBI, "data")
    metrics.CACHE_USAGE_BYTES.set(MEBI, "other")
    before = of(answered(counted), "data")["misses"].get("evicted", 0)
    metrics.MISSES.add(2, "GetObject", "data", "evicted")
    document = answered(counted)
    data, other = of(document, "data"), of(document, "other")
    assert data["capacity"]["borrowed_bytes"] == 50 * MEBI
    assert (data["capacity"]["lendable_bytes"], other["capacity"]["borrowed_bytes"]) == (0, MEBI)
    assert data["misses"]["evicted"] == before + 2
    assert data["binds"] == []
    assert (data["read_bandwidth"]["guarantee"], data["read_bandwidth"]["ceiling"]) == (10_000_000, 50_000_000)
    metrics.CACHE_USAGE_BYTES.set(199 * MEBI, "data")
    assert of(answered(counted), "data")["binds"] == ["capacity-limit"]


def test_which_limit_binds_now(counted: Path) -> None:
    """By what held pieces back between the two looks; shares are of those that move something."""
    metrics.CACHE_USAGE_BYTES.set(0, "data")

    def moves() -> None:
        metrics.ORIGIN_BYTES.add(1000, "read", "live", "data")
        metrics.ORIGIN_BYTES.add(1000, "read", "live", "other")
        metrics.BANDWIDTH_WAIT_SECONDS.add(0.5, "ceiling", "read", "data")
        metrics.BANDWIDTH_WAIT_SECONDS.add(0.1, "link", "read", "data")
        metrics.BANDWIDTH_WAIT_SECONDS.add(0.1, "link", "read", "other")

    moves()
    document = answered(counted)
    assert of(document, "data")["binds"] == []
    assert of(document, "data")["read_bandwidth"]["bytes_per_second"] == 0
    document = answered(counted, moves)
    assert (of(document, "data")["binds"], of(document, "other")["binds"]) == (["read-ceiling"], ["read-link"])
    shares = [of(document, name)["read_bandwidth"]["share"] for name in ("data", "other", "default")]
    assert shares == [75_000_000, 25_000_000, 20_000_000]
    assert of(document, "data")["write_bandwidth"]["share"] is None
    assert document["link"]["read"]["bytes_per_second"] > 0


def test_requests_that_the_origin_refuses_are_told_and_bind(counted: Path) -> None:
    """By what was held back between the two looks; who is refused and not held back is not bound by that."""

    def throttle() -> None:
        metrics.ORIGIN_THROTTLED.add(4, "data")
        metrics.ORIGIN_THROTTLE_WAIT_SECONDS.add(0.5, "data")
        metrics.ORIGIN_SLOW_DOWN.add(2, "other")

    throttle()
    before = of(answered(counted), "data")
    document = answered(counted, throttle)
    data, other = of(document, "data"), of(document, "other")
    assert before["binds"] == []
    assert (data["binds"], other["binds"]) == (["request-rate"], [])
    assert data["origin_requests"]["throttled"] == before["origin_requests"]["throttled"] + 4
    assert data["origin_requests"]["waited_seconds"] == before["origin_requests"]["waited_seconds"] + 0.5
    assert (data["origin_requests"]["in_vain"], other["origin_requests"]["slow_down"]) == (0, 4)
    metrics.ORIGIN_THROTTLED_IN_VAIN.add(1, "data")
    assert throttled_text(counted, "data") == "8 for 0.12 s, 1 in vain"
    assert throttled_text(counted, "default") == "-"


def throttled_text(counted: Path, slot: str) -> str:
    return shown._throttled(OriginRequests.model_validate(of(answered(counted), slot)["origin_requests"]))


def test_it_is_shown_to_people(counted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = answered(counted, lambda: metrics.ORIGIN_BYTES.add(10**9, "read", "live", "data"))

    class Client:
        def slots(self) -> SlotsDocument:
            return SlotsDocument.model_validate(document)

    monkeypatch.setattr(common, "admin_client", lambda *_: Client())
    found = CliRunner().invoke(app, ["slots"], env={"COLUMNS": "200"})
    assert found.exit_code == 0, found.output
    assert "s3://bucket/data/" in found.output
    assert "47.7 MiB/s ceiling" in found.output
    assert orjson.loads(CliRunner().invoke(app, ["slots", "--json"]).stdout) == document

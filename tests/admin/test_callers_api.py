"""Callers as the admin port and `forebay callers` show them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from typer.testing import CliRunner

from gateway.admin import slots
from gateway.admin.app import describe
from gateway.admin.backends import Backends
from gateway.admin.slots import SlotsApi
from gateway.api.documents import CallerRates, CallersDocument
from gateway.cli import app, common
from gateway.config.live import LiveSettings
from gateway.telemetry import metric_kinds, metrics
from gateway.telemetry.metric_reading import MetricReading
from tests.admin.test_control_app import assert_described
from tests.support.settings import load

CONFIGURATION = """
[origin]
endpoint_url = "http://127.0.0.1:1"
access_key_id = "a"
secret_access_key = "b"
[[credentials]]
access_key_id = "job"
secret_access_key = "s"
allow = ["s3://"]
max_concurrent_requests = 4
read_bandwidth = "1MiB/s"
[[caller_classes]]
name = "batch"
app = "batch"
requests_per_second = 2.5
"""


def test_who_calls_what_they_take_and_what_binds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody waited for between the two looks binds; what was before does not,
    but what somebody waits for still, for however long."""
    samples: list[None] = []
    look = slots._sample

    def looked(directory: Path) -> Any:
        if samples:
            metrics.CALLER_WAITS.add(1, "credential", "job", "concurrency")
            metrics.CALLER_REFUSED.add(1, "class", "batch", "rate")
        samples.append(None)
        return look(directory)

    monkeypatch.setattr(slots, "RATE_SECONDS", 0.0)
    monkeypatch.setattr(slots, "_sample", looked)
    metric_kinds.share(tmp_path, "worker0")
    try:
        metrics.CALLER_WAITS.add(3, "credential", "job", "read")
        metrics.CALLER_RUNNING.add(4, "credential", "job")
        metrics.CALLER_WAITING.add(2, "credential", "job", "write")
        metrics.CALLER_REQUESTS.add(7, "job")
        metrics.CALLER_REQUESTS.add(1, "none")
        api = SlotsApi(LiveSettings(load(tmp_path, CONFIGURATION).settings), tmp_path, Backends())
        answer = asyncio.run(api.callers(Request({"type": "http"})))
    finally:
        metric_kinds.unshare()
    document = answer.document()
    job, nobody, batch = document["callers"]
    assert (job["name"], job["running"], job["waiting"], job["binds"]) == ("job", 4, 2, ["concurrency", "write"])
    assert job["throttled"] == {"concurrency": 1, "rate": 0, "read": 3, "write": 0}
    assert job["used"]["requests"] == 7
    assert nobody["name"] == "none"
    assert (batch["limits"]["requests_per_second"], batch["binds"]) == (2.5, ["rate"])
    schema = describe()["paths"]["/api/v1/callers"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert_described(document, schema)

    class Client:
        def callers(self) -> CallersDocument:
            return CallersDocument.model_validate(document)

    monkeypatch.setattr(common, "admin_client", lambda *_: Client())
    result = CliRunner().invoke(app, ["callers"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert all(text in result.output for text in ("4 at a time", "1.0 MiB/s", "2.5/s", "concurrency 1"))


def test_the_dashboard_shows_callers_at_once_and_not_all_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those whom a limit binds first, then those who call most; what they take is that since the look before."""
    monkeypatch.setattr(slots, "CALLERS_SHOWN", 3)
    metric_kinds.share(tmp_path, "worker0")
    try:
        for number in range(5):
            metrics.CALLER_REQUESTS.add(10 + number, f"c{number}")
        metrics.CALLER_WAITING.add(1, "credential", "job", "rate")
        api = SlotsApi(LiveSettings(load(tmp_path, CONFIGURATION).settings), tmp_path, Backends())
        _, first = api.since_last(MetricReading(tmp_path), None)
        metrics.CALLER_REQUESTS.add(3, "c4")
        _, second = api.since_last(MetricReading(tmp_path), None)
    finally:
        metric_kinds.unshare()
    assert [one.name for one in first] == ["job", "c4", "c3"]
    assert (first[0].binds, first[1].per_second) == (["rate"], CallerRates(requests=0, sent_bytes=0, received_bytes=0))
    assert second[1].per_second is not None
    assert second[1].per_second.requests > 0

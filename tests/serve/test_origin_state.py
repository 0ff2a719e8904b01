"""What a running gateway tells of the state of its origins: of each by itself, soon after requests have failed, and by
its name where there is no key to ask with."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import StrictOrigin

SOON_SECONDS = 10.0
"""Far less than what a state that is well is remembered for."""


def metrics_of(gateway: GatewayProcess) -> dict[str, float]:
    lines = httpx.get(f"{gateway.admin_url}/metrics", timeout=30).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


@pytest.mark.slow
def test_an_origin_that_dies_is_told_as_soon_as_requests_fail_and_others_are_well() -> None:
    """In the metrics, the status and the log, by the name of the origin; what it was asked is counted by that, too."""
    with StrictOrigin() as main, StrictOrigin() as far:
        far.model.create_bucket("far")
        far.model.put("far", "k", b"content")
        config: dict[str, Any] = {
            "origin": main.settings,
            "server": {"allow_unsigned": True},
            "buckets": [{"name": "far", "endpoint_url": far.endpoint_url}],
        }
        name, far_name = (one.endpoint_url.removeprefix("http://") for one in (main, far))
        with GatewayProcess(config) as gateway:
            up = f'forebay_origin_up{{origin="{far_name}",used_by="bucket:far"}}'
            labels = f'method="GET",origin="{far_name}",purpose="live",slot="default",status="unreachable"'
            assert httpx.get(f"{gateway.s3_url}/far/k").content == b"content"
            before = metrics_of(gateway)
            assert before[up] == 1.0
            far.stop()
            stopped_at = time.monotonic()
            assert httpx.get(f"{gateway.s3_url}/far/k", timeout=30).status_code == 503
            while metrics_of(gateway)[up]:
                assert time.monotonic() < stopped_at + SOON_SECONDS, gateway.log
                time.sleep(0.1)
            after, [differing] = metrics_of(gateway), gateway.status()["origin"]["differing"]
            assert after[f'forebay_origin_up{{origin="{name}",used_by="default"}}'] == 1.0
            assert after[f'forebay_origin_state{{origin="{far_name}",state="unreachable",used_by="bucket:far"}}'] == 1.0
            assert before[f"forebay_origin_requests_total{{{labels}}}"] == 0.0
            counted = [
                value
                for one, value in after.items()
                if one.startswith("forebay_origin_requests_total") and far_name in one and "unreachable" in one
            ]
            assert sum(counted) >= 1.0
            assert (differing["state"], differing["reachable"]) == ("unreachable", False)
            assert "nobody listens" in differing["problem"]
            assert re.search(r"s3://far/: nobody listens", gateway.log)


@pytest.mark.slow
def test_a_slot_whose_key_cannot_be_had_is_told_as_that(tmp_path: Path) -> None:
    """Its origin answers everybody else: it is not called unreachable."""
    (tmp_path / "aws").write_text("[profile empty]\nregion = us-east-1\n", encoding="utf-8")
    with StrictOrigin() as main:
        main.model.create_bucket("bucket")
        config: dict[str, Any] = {
            "origin": main.settings,
            "server": {"allow_unsigned": True},
            "origin_credentials": [{"name": "lent", "profile": "empty"}],
            "slots": [{"name": "keyless", "prefix": "s3://bucket/keyless/", "origin_credentials": "lent"}],
        }
        with GatewayProcess(config, environment={"AWS_CONFIG_FILE": str(tmp_path / "aws")}) as gateway:
            found = metrics_of(gateway)
            labels = f'origin="{main.endpoint_url.removeprefix("http://")}"'
            assert found[f'forebay_origin_state{{{labels},state="no-credentials",used_by="slot:keyless"}}'] == 1.0
            assert found[f'forebay_origin_state{{{labels},state="unreachable",used_by="slot:keyless"}}'] == 0.0
            assert found[f'forebay_origin_state{{{labels},state="well",used_by="default"}}'] == 1.0
            shown = gateway.command("status")
            assert "not asked, for want of a key" in shown.stdout, shown
            assert "no credentials" in gateway.log
            refused = httpx.get(f"{gateway.s3_url}/bucket/keyless/k", timeout=30)
            assert (refused.status_code, "has no key to ask the origin with" in refused.text) == (503, True)

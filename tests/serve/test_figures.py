"""Each figure that people are shown, against what was done: a gateway is given known work, and asked what it did."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import orjson
import pytest
import yaml
from botocore.config import Config
from typer.testing import CliRunner, Result

from gateway import cli
from tests.support.gateway_process import ANSWER_SECONDS_MAX, GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
SIZES_BYTES = (3 * MIB, 1000, 2 * MIB + 1, 100_000)
WHOLE_BYTES = sum(SIZES_BYTES)
LISTING_BYTES_MAX = 10_000


class Told:
    """A gateway with a slot to read from and one that writes back, and everything that it says of itself."""

    def __init__(self, gateway: GatewayProcess, origin: StrictOrigin) -> None:
        self.gateway = gateway
        self.origin = origin
        self.s3 = boto3.client(
            "s3",
            endpoint_url=gateway.s3_url,
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, retries={"mode": "standard", "total_max_attempts": 8}),
        )

    def run(self, *arguments: str) -> Result:
        result = CliRunner().invoke(cli.app, [*arguments, "--admin-url", self.gateway.admin_url])
        assert result.exit_code == 0, result.output
        return result

    def job(self, *arguments: str) -> dict[str, Any]:
        document: dict[str, Any] = orjson.loads(self.run(*arguments, "--wait", "--json").stdout)
        return document

    def read_all(self) -> None:
        for number, size_bytes in enumerate(SIZES_BYTES):
            body = self.s3.get_object(Bucket="bucket", Key=f"data/{number}")["Body"].read()
            assert len(body) == size_bytes

    def document(self, path: str) -> dict[str, Any]:
        with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
            document: dict[str, Any] = client.get(f"{self.gateway.admin_url}/api/v1/{path}").json()
        return document

    def slot(self, name: str) -> dict[str, Any]:
        return next(one for one in self.document("status")["slots"] if one["name"] == name)

    def metrics(self) -> str:
        with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
            return client.get(f"{self.gateway.admin_url}/metrics").text

    def value(self, name: str, **labels: str) -> float:
        """The sum of a metric over all label sets that have these labels."""
        total = 0.0
        for line in re.findall(rf"^{name}(?:{{.*}})? .*$", self.metrics(), re.MULTILINE):
            if all(f'{label}="{value}"' in line for label, value in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def ratio(self, expression: str) -> float:
        """A PromQL quotient of rates, each rate being what was counted since the start."""

        def counted(found: re.Match[str]) -> str:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', re.sub(r'\w+=~"[^"]*",?', "", found[2] or "")))
            return str(self.value(found[1], **labels))

        figures = re.sub(r"sum(?: by \([^)]*\))?\s*\(rate\((\w+)({[^}]*})?\[[^\]]*\]\)\)", counted, expression)
        assert re.fullmatch(r"[\d.e+\s()/]+", figures), figures
        return float(eval(" ".join(figures.split())))


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    with StrictOrigin() as origin:
        origin.model.create_bucket("bucket")
        for number, size_bytes in enumerate(SIZES_BYTES):
            origin.model.put("bucket", f"data/{number}", bytes([number]) * size_bytes)
        config: dict[str, Any] = {
            "origin": origin.settings,
            "cache": {"persistent": True, "block_size": "1MiB"},
            "slots": [
                {"name": "data", "prefix": "s3://bucket/data/", "mode": "read-only"},
                {"name": "back", "prefix": "s3://bucket/back/", "write": "back"},
            ],
        }
        with GatewayProcess(config, directory=tmp_path / "cache") as gateway:
            yield Told(gateway, origin)


def hit_ratio_expressions() -> list[str]:
    """As documented, as recorded for Prometheus and as drawn by Grafana."""
    metrics = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    panels = json.loads((ROOT / "deploy/grafana/forebay.json").read_text(encoding="utf-8"))["panels"]
    documented = [one for one in re.findall(r"```\n(.*?)```", metrics, re.DOTALL) if "hit_bytes" in one]
    recorded = [one["expr"] for one in rules if "hit_bytes" in one["expr"]]
    drawn = [one["expr"] for panel in panels for one in panel.get("targets", ()) if "hit_bytes" in one["expr"]]
    assert documented
    assert recorded
    assert drawn
    return [*documented, *recorded, *drawn]


def shown_ratios(told: Told) -> set[float | None]:
    """The share of bytes from the cache, wherever people find it."""
    status, overview = told.document("status"), told.document("overview")
    counts = overview["counts"]
    line = re.search(r"([\d.]+)% of bytes from cache", told.run("status").output)
    return {
        status["cache"]["hit_ratio"],
        overview["status"]["cache"]["hit_ratio"],
        told.slot("data")["hit_ratio"],
        counts["hit_bytes"] / (counts["hit_bytes"] + counts["miss_bytes"]),
        float(line[1]) / 100 if line else None,
        *(told.ratio(one) for one in hit_ratio_expressions()),
    }


@pytest.mark.slow
def test_what_is_warmed_is_no_miss_and_what_is_read_then_is_a_hit(told: Told) -> None:
    """Warming, by a job or by HEAD, gives bytes to nobody: everything read afterwards comes from the cache, 100%."""
    job = told.job("warm", "s3://bucket/data/")
    assert (job["objects_done"], job["bytes_done"], job["bytes_fetched"]) == (4, WHOLE_BYTES, WHOLE_BYTES)
    status = told.document("status")["cache"]
    assert (status["hit_bytes"], status["miss_bytes"], status["hit_ratio"]) == (0, 0, None)
    warmed_bytes = told.value("forebay_origin_bytes_total", direction="read", purpose="warm")
    assert WHOLE_BYTES <= warmed_bytes < WHOLE_BYTES + LISTING_BYTES_MAX
    told.read_all()
    eventually(lambda: told.slot("data")["hit_bytes"] == WHOLE_BYTES)
    assert shown_ratios(told) == {1.0}
    assert told.value("forebay_origin_bytes_total", direction="read", purpose="live") == 0
    assert told.value("forebay_cache_hit_bytes_total", slot="data") == told.slot("data")["hit_bytes"] == WHOLE_BYTES
    again = told.job("warm", "s3://bucket/data/")
    assert (again["bytes_done"], again["bytes_fetched"]) == (WHOLE_BYTES, 0)
    assert told.value("forebay_cache_hit_bytes_total") == WHOLE_BYTES


@pytest.mark.slow
def test_an_object_warmed_by_head_is_no_miss(told: Told) -> None:
    """As above, where a client asks for it."""
    told.s3.head_object(Bucket="bucket", Key="data/0", Range="bytes=0-0")
    eventually(lambda: told.value("forebay_warm_up_objects_total", outcome="fetched") == 1)
    assert told.value("forebay_cache_miss_bytes_total") == 0
    told.s3.get_object(Bucket="bucket", Key="data/0")["Body"].read()
    eventually(lambda: told.slot("data")["hit_bytes"] == SIZES_BYTES[0])
    assert shown_ratios(told) == {1.0}


@pytest.mark.slow
def test_half_of_what_is_read_twice_comes_from_the_cache(told: Told) -> None:
    """Where nothing was warmed."""
    told.read_all()
    eventually(lambda: told.document("status")["cache"]["usage_bytes"] >= WHOLE_BYTES)
    told.read_all()
    eventually(lambda: told.value("forebay_sent_bytes_total", operation="GetObject") == 2 * WHOLE_BYTES)
    assert shown_ratios(told) == {0.5}
    assert told.value("forebay_origin_bytes_total", direction="read") >= WHOLE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("command", ["warm", "pin"])
def test_warming_nothing_is_a_failure_unless_allowed(told: Told, command: str) -> None:
    """A script trusts the exit code: a mistyped prefix is told, on standard error, in JSON mode too."""
    missing = ("s3://bucket/typo/", "--wait", "--admin-url", told.gateway.admin_url)
    for more in ((), ("--json",)):
        result = CliRunner().invoke(cli.app, [command, *missing, *more])
        assert result.exit_code == 1
        assert result.stderr.startswith("forebay: s3://bucket/typo/ holds no object: ")
    told.run(command, *missing[:2], "--allow-empty")

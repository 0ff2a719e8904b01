"""deploy/prometheus/rules.yaml, evaluated by a real Prometheus that lives a minute in each second.

Durations of the rules (`for: 2m`, `[5m]`) become a sixtieth, and so do the ages in seconds that they compare with.
Everything else is as it is deployed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from gateway.demo.ports import free_port

RULES = Path(__file__).resolve().parents[2] / "deploy/prometheus/rules.yaml"
SCALE = 60
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SCRAPE_SECONDS = 1
_START_SECONDS_MAX = 60.0

_CONFIG = """\
global: {{scrape_interval: {scrape_seconds}s, evaluation_interval: {scrape_seconds}s}}
rule_files: [rules.yaml]
scrape_configs:
  - job_name: forebay
    file_sd_configs: [{{files: ["targets/*.json"], refresh_interval: 1s}}]
"""


@dataclass(frozen=True, slots=True)
class Alert:
    """As it stands. `runbook` is the annotation: a page and its section."""

    name: str
    state: str
    severity: str
    summary: str
    runbook: str


class Alerting:
    """A running Prometheus. Each gateway is a target of its own, told apart by the label `instance`."""

    def __init__(self, directory: Path, url: str) -> None:
        self._directory = directory
        self._client = httpx.Client(base_url=url, trust_env=False, timeout=30)

    def watch(self, instance: str, admin_url: str) -> None:
        """Scrape this gateway from now on, in place of the one before of this name."""
        group = [{"targets": [admin_url.removeprefix("http://")], "labels": {"instance": instance}}]
        path = self._directory / "targets" / f"{instance}.json"
        path.with_suffix(".new").write_text(json.dumps(group), encoding="utf-8")
        path.with_suffix(".new").replace(path)

    def forget(self, instance: str) -> None:
        (self._directory / "targets" / f"{instance}.json").unlink(missing_ok=True)

    def alerts(self, instance: str) -> list[Alert]:
        """Those that are pending or firing now, by name."""
        found: list[dict[str, Any]] = self._get("/api/v1/alerts")["alerts"]
        told = {
            Alert(
                one["labels"]["alertname"],
                one["state"],
                one["labels"]["severity"],
                one["annotations"]["summary"],
                one["annotations"]["runbook"],
            )
            for one in found
            if one["labels"].get("instance") == instance
        }
        return sorted(told, key=lambda one: (one.name, one.summary))

    def is_scraped(self, instance: str) -> bool:
        """Whether the last look at this gateway's metrics was answered."""
        answer = self._client.get("/api/v1/query", params={"query": f'up{{instance="{instance}"}}'})
        found = answer.raise_for_status().json()["data"]["result"]
        return bool(found) and found[0]["value"][1] == "1"

    def close(self) -> None:
        self._client.close()

    def _get(self, path: str) -> dict[str, Any]:
        document: dict[str, Any] = self._client.get(path).raise_for_status().json()["data"]
        return document


def scaled(rules: str) -> str:
    """Rules for a Prometheus in which a second is a minute."""

    def shortened(found: re.Match[str]) -> str:
        seconds = int(found[2]) * _UNIT_SECONDS[found[3]]
        return f"{found[1]}{max(1, seconds // SCALE)}s{found[4]}"

    rules = re.sub(r"(\bfor: )(\d+)([smhd])(\b)", shortened, rules)
    rules = re.sub(r"(\[)(\d+)([smhd])(\])", shortened, rules)
    return re.sub(r"(_age_seconds(?:\{[^}]*\})? > )(\d+)\b", lambda found: f"{found[1]}{int(found[2]) // SCALE}", rules)


@contextmanager
def prometheus(directory: Path) -> Iterator[Alerting | None]:
    """None where the program is not installed."""
    program = shutil.which("prometheus")
    if program is None:
        yield None
        return
    (directory / "targets").mkdir(parents=True)
    (directory / "rules.yaml").write_text(scaled(RULES.read_text(encoding="utf-8")), encoding="utf-8")
    (directory / "prometheus.yml").write_text(_CONFIG.format(scrape_seconds=_SCRAPE_SECONDS), encoding="utf-8")
    port = free_port()
    options = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={directory / 'data'}"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, f"--config.file={directory / 'prometheus.yml'}", "--log.level=warn", *options],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    alerting = Alerting(directory, f"http://127.0.0.1:{port}")
    try:
        _wait_until_ready(process, port, directory / "log")
        yield alerting
    finally:
        alerting.close()
        process.terminate()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS_MAX
    with httpx.Client(trust_env=False) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if client.get(f"http://127.0.0.1:{port}/-/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
    raise RuntimeError(f"Prometheus does not start:\n{log.read_text(errors='replace')}")

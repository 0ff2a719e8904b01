"""The alerts in deploy/prometheus/: of metrics and labels that there are, each with its section of the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.metrics import DECLARED

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "deploy/prometheus/rules.yaml"
RUNBOOK = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
SERIES = {
    name: metric
    for metric in DECLARED
    for name in (
        [f"{metric.name}_{one}" for one in ("bucket", "sum", "count")] if metric.kind == "histogram" else [metric.name]
    )
}


def rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alerts_are_about_metrics_that_there_are() -> None:
    """And ask for labels that these have, with values that their descriptions name."""
    found = 0
    for rule in rules():
        for name, matchers in re.findall(r"\b(forebay_[a-z_]+)(?:\{([^}]*)\})?", rule["expr"]):
            metric = SERIES[name]
            found += 1
            for label, wanted in re.findall(r'(\w+)\s*[=!]~?\s*"([^"]*)"', matchers):
                assert label in metric.labels, f"{name} has no label {label}"
                known = (metric.values or {}).get(label)
                if known is not None:
                    assert all(one in known for one in wanted.split("|")), f"{name}{{{label}={wanted}}}"
                elif label == "state":
                    assert all(re.search(rf"\b{one}\b", metric.help) for one in wanted.split("|")), (name, wanted)
    assert found > 20


def test_recorded_series_are_those_that_alerts_use() -> None:
    """A rule of another name would never fire."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = {name for rule in rules() for name in re.findall(r"\bforebay:[a-z0-9_:]+", rule["expr"])}
    assert used <= recorded


def test_each_alert_has_its_section_of_the_runbook() -> None:
    """And no section is about an alert that there is not."""
    alerts = [rule["alert"] for rule in rules() if "alert" in rule]
    assert re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE) == alerts
    for rule in rules():
        if "alert" in rule:
            assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
            assert rule["labels"]["severity"] in ("info", "warning", "critical")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
@pytest.mark.parametrize("arguments", [("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml")])
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    """Syntax, and when alerts fire."""
    subprocess.run(["promtool", *arguments], cwd=RULES.parent, check=True)

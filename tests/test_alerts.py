"""Alerts in deploy/prometheus/ and the dashboard in deploy/grafana/: of metrics and labels that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.telemetry.metrics import DECLARED

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


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((ROOT / "deploy/grafana/forebay.json").read_text(encoding="utf-8"))
    return [one for one in dashboard["panels"] if one["type"] != "row"]


EXPRESSIONS = [rule["expr"] for rule in rules()] + [one["expr"] for panel in panels() for one in panel["targets"]]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_are_about_metrics_that_there_are(expression: str) -> None:
    """And ask for labels that these have, with values that they may have."""
    found = re.findall(r"\b(forebay_[a-z_]+)(?:\{([^}]*)\})?", expression)
    assert found or "forebay:" in expression or "up{" in expression
    for name, matchers in found:
        metric = SERIES[name]
        for label, wanted in re.findall(r'(\w+)\s*[=!]~?\s*"([^"]*)"', matchers):
            assert label in (*metric.labels, "instance"), f"{name} has no label {label}"
            known = {one for together in metric.values for one in together.get(label, ())}
            if known and len(metric.values) == 1:
                assert known.issuperset(wanted.split("|")), f"{name}{{{label}={wanted}}}"
            elif label == "state":
                assert all(re.search(rf"\b{one}\b", metric.help) for one in wanted.split("|")), (name, wanted)
    for labels in re.findall(r"\bby \(([^)]*)\)", expression):
        known_labels = {one for name, _ in found for one in SERIES[name].labels} | {"instance", "le"}
        assert set(re.findall(r"\w+", labels)) <= known_labels, labels


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    """Each has a number and a place of its own."""
    assert len({one["id"] for one in panels()}) == len(panels()) > 20
    taken = {
        (one["gridPos"]["x"] + x, one["gridPos"]["y"] + y)
        for one in panels()
        for x in range(one["gridPos"]["w"])
        for y in range(one["gridPos"]["h"])
    }
    assert len(taken) == sum(one["gridPos"]["w"] * one["gridPos"]["h"] for one in panels())


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


def test_of_each_alert_it_is_tried_when_it_fires_and_when_it_does_not() -> None:
    """promtool tries it, below: this holds that nothing is left out."""
    cases = yaml.safe_load((RULES.parent / "rules_test.yaml").read_text(encoding="utf-8"))["tests"]
    tried = {(one["alertname"], bool(one["exp_alerts"])) for case in cases for one in case["alert_rule_test"]}
    alerts = [rule["alert"] for rule in rules() if "alert" in rule]
    assert tried == {(alert, fires) for alert in alerts for fires in (True, False)}


def promtool(*arguments: str, folder: Path = RULES.parent) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).with_name("promtool")
    program = str(beside) if beside.exists() else "promtool"
    return subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.deploy
@pytest.mark.parametrize("arguments", [("check", "rules", "rules.yaml"), ("test", "rules", "rules_test.yaml")])
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    """Syntax, and when alerts fire."""
    done = promtool(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.deploy
def test_promtool_would_find_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    """The test above can fail: with another threshold it does, and names the alert."""
    changed = RULES.read_text(encoding="utf-8").replace("journal_bytes > 4 * 1024^3", "journal_bytes > 8 * 1024^3")
    (tmp_path / "rules.yaml").write_text(changed, encoding="utf-8")
    shutil.copy(RULES.parent / "rules_test.yaml", tmp_path)
    done = promtool("test", "rules", "rules_test.yaml", folder=tmp_path)
    assert done.returncode != 0
    assert "ForebayJournalLarge" in done.stdout + done.stderr

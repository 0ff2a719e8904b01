"""The incident drill: what its page says is what gateways say, and each sentence that leads to a cause is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.incident_drill.alerting import RULES, scaled
from tools.incident_drill.incidents import INCIDENTS, Incident
from tools.incident_drill.observing import ALERTS
from tools.incident_drill.transcript import page

ROOT = Path(__file__).resolve().parents[1]
NAMES = {one.name: one for one in INCIDENTS}


def test_the_page_is_what_the_drill_looks_for() -> None:
    """Else: `python -m tools.incident_drill --page > docs/incident-drill.md`."""
    assert page(INCIDENTS) == (ROOT / "docs/incident-drill.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("incident", INCIDENTS, ids=NAMES)
def test_what_to_do_is_written_down(incident: Incident) -> None:
    """The page and the section that the incident names are there, and so are those that its alerts name."""
    page, _, section = incident.advice.partition("#")
    headings = [line.lower() for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()]
    assert f"## {section.replace('-', ' ')}" in headings
    alerts = {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"][2:]}
    assert {clue.says.partition(",")[0] for clue in incident.clues if clue.where == ALERTS} <= alerts


def test_a_minute_of_the_rules_is_a_second_of_the_drill() -> None:
    """Durations and ages, and nothing else."""
    rules = yaml.safe_load(
        scaled(
            "- {alert: A, expr: 'rate(a_total[5m]) > 5', for: 2m}\n"
            "- {alert: B, expr: 'b_oldest_age_seconds > 3600', for: 1h}\n"
            "- {alert: C, expr: 'c_bytes > 120', for: 30s}\n"
        )
    )
    assert [(one["expr"], one["for"]) for one in rules] == [
        ("rate(a_total[5s]) > 5", "2s"),
        ("b_oldest_age_seconds > 60", "60s"),
        ("c_bytes > 120", "1s"),
    ]


def drilled(incident: Incident, directory: Path) -> dict[str, Any]:
    """Return everything that was said."""
    file = directory / "said.json"
    done = subprocess.run(
        [sys.executable, "-m", "tools.incident_drill", "--json", str(file), "--only", incident.name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert file.exists(), done.stderr
    return dict(json.loads(file.read_text()))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("incident", INCIDENTS, ids=NAMES)
def test_an_incident_can_be_traced_to_its_cause(incident: Incident, tmp_path: Path) -> None:
    """By what real gateways say of it; it ends, and nothing that was acknowledged is lost."""
    said = drilled(incident, tmp_path)
    if not said["incidents"]:
        assert incident.needs_mount
        pytest.skip("nothing can be mounted here: it takes root, or user namespaces")
    [account] = said["incidents"]
    assert account["failed"] is None
    assert account["lost"] == []
    assert account["acknowledged_objects"] >= 2
    for clue in incident.clues:
        if clue.where != ALERTS or said["alerts"]:
            lines = [line for moment in account["moments"] for line in moment["texts"].get(clue.where, [])]
            assert clue.says in "\n".join(lines), f"{clue.where}: {clue.says}"

"""The workflows for GitHub follow its schema, trust nothing that can change, and have no more rights than they need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_compose import against_schema

GITHUB = Path(__file__).resolve().parents[1] / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))

every_workflow = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    """By name."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return found


def test_there_are_two() -> None:
    """What is tested below is not nothing."""
    assert [path.stem for path in WORKFLOWS] == ["ci", "release"]


@pytest.mark.slow
@every_workflow
def test_workflows_follow_the_schema(workflow: Path, tmp_path: Path) -> None:
    """And a misspelt key would be found."""
    done = against_schema(workflow, "vendor.github-workflows")
    assert done.returncode == 0, done.stdout
    bad = tmp_path / "bad.yml"
    bad.write_text(workflow.read_text(encoding="utf-8").replace("runs-on:", "run-on:"), encoding="utf-8")
    assert against_schema(bad, "vendor.github-workflows").returncode == 1


@pytest.mark.slow
def test_dependabot_is_told_in_its_form() -> None:
    """Actions, images and packages are kept up to date."""
    done = against_schema(GITHUB / "dependabot.yml", "vendor.dependabot")
    assert done.returncode == 0, done.stdout


@every_workflow
def test_actions_are_pinned(workflow: Path) -> None:
    """By commit, with the release in a comment: a tag that is moved changes nothing."""
    used = re.findall(r"uses: (.*)$", workflow.read_text(encoding="utf-8"), re.MULTILINE)
    assert used
    for one in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one), one


@every_workflow
def test_jobs_have_few_rights_and_an_end(workflow: Path) -> None:
    """Reading is all, unless a job says otherwise; no checkout leaves a token behind; no secret is kept anywhere."""
    text = workflow.read_text(encoding="utf-8")
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert "secrets." not in text
    for name, job in jobs(workflow).items():
        assert job["timeout-minutes"] <= 120, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"] == {"persist-credentials": False}, name


def test_a_release_is_signed_before_it_is_published() -> None:
    """PyPI by trusted publishing from an environment of its own, image and chart by cosign, everything attested."""
    release = jobs(GITHUB / "workflows" / "release.yml")
    assert release["pypi"]["permissions"] == {"id-token": "write"}
    assert release["pypi"]["environment"]["name"] == "pypi"
    assert release["pypi"]["needs"] == "attest"
    assert release["github"]["needs"] == ["attest", "pypi", "image", "chart"]
    scripts = {name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in release.items()}
    assert "cosign sign" in scripts["image"]
    assert "cosign sign" in scripts["chart"]
    build = next(step for step in release["image"]["steps"] if step.get("id") == "build")["with"]
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert (build["sbom"], build["provenance"]) == (True, "mode=max")

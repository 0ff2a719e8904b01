"""Renders deploy/kubernetes/ from the chart: `python -m tools.render_manifests`; `tools/install_helm.py` brings helm.

Each file of deploy/helm/values/ gives one manifest, for those who do not use helm. The comment at its head becomes the
manifest's. A test fails when this was not run after a change.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tools.install_helm import HELM

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
CHART = DEPLOY / "helm" / "forebay"
VALUES = sorted((DEPLOY / "helm" / "values").glob("*.yaml"))

_RENDERED = "# Rendered from the chart deploy/helm/forebay; helm users install that instead.\n"


class ChartError(Exception):
    """Helm refuses the chart or its values, and the message is Helm's; or there is no helm."""


def render(*arguments: str, chart: Path = CHART) -> str:
    """What `helm template` gives for a release `forebay` in the namespace `forebay`. ChartError."""
    if not HELM.exists():
        raise ChartError(f"there is no {HELM}: run python -m tools.install_helm")
    command = [str(HELM), "template", "forebay", str(chart), "--namespace", "forebay", *arguments]
    done = subprocess.run(  # noqa: S603 - the helm that tools/install_helm.py has installed
        command, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ChartError(done.stderr.strip())
    return done.stdout


def manifest(values: Path) -> str:
    """The content of the manifest that belongs to a file of values."""
    lines = values.read_text(encoding="utf-8").splitlines(keepends=True)
    head = "".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
    return head + "#\n" + _RENDERED + _tidy(render("--values", str(values)).splitlines())


def _tidy(lines: Iterable[str]) -> str:
    """Without Helm's notes of where a part comes from, empty lines between parts, and spaces at the ends of lines."""
    kept: list[str] = []
    for line in (one.rstrip() for one in lines if not one.startswith("# Source: ")):
        if line == "---":
            while kept and kept[-1] == "":
                kept.pop()
        kept.append(line)
    return "\n".join(kept).rstrip() + "\n"


def main() -> None:
    """Rewrite them all."""
    for values in VALUES:
        (DEPLOY / "kubernetes" / values.name).write_text(manifest(values), encoding="utf-8")


if __name__ == "__main__":
    main()

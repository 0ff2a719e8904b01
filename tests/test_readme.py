"""What README, CONTRIBUTING and CHANGELOG name exists, and is what they say it is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from gateway import __version__
from gateway.config.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
README = PAGES[0].read_text(encoding="utf-8")

DECISIONS = ROOT / "docs/decisions"
LINKED = [*PAGES, *sorted((ROOT / "docs").glob("*.md")), DECISIONS / "README.md"]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


@pytest.mark.parametrize("page", LINKED, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is a file of this repository, and every anchor a heading of its page."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked.read_text(encoding="utf-8")), target


def _anchors(text: str) -> set[str]:
    """As forges make them: lower case, spaces to hyphens, other signs dropped."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*LINKED, ROOT / "examples/README.md"], ids=lambda path: path.name)
def test_make_targets_exist(page: Path) -> None:
    """Every `make …` that a page tells people to run is a target that `make help` lists."""
    listed = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    targets = set(re.findall(r"^  make (\S+)", listed, re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL))
    named = {*re.findall(r"`make ([a-z-]+)", text), *re.findall(r"^make ([a-z-]+)", blocks, re.MULTILINE)}
    assert named <= targets | {"help"}
    assert {"demo", "test", "check"} <= targets


def test_addresses_are_the_defaults() -> None:
    """The endpoint that README says is the one that `forebay serve` without settings listens on."""
    settings = Settings()
    s3, admin = (f"http://{one.host}:{one.port}" for one in (settings.server, settings.admin))
    assert f"S3 on {s3}, admin on {admin}" in README
    assert set(re.findall(r"AWS_ENDPOINT_URL_S3=(\S+)", README)) == {s3}


def test_the_image_is_named_by_this_version() -> None:
    """The build command makes the image that the manifests run."""
    installation = (ROOT / "docs/installation.md").read_text(encoding="utf-8")
    assert f"-t forebay:{__version__} ." in installation


def test_every_decision_is_in_the_index() -> None:
    """The index names each decision once, in order, and says whether it is in force."""
    rows = re.findall(
        r"^\| \d+ \| \[[^]]+\]\(([^)]+)\) \| (in force|superseded)", (DECISIONS / "README.md").read_text(), re.M
    )
    assert [name for name, _ in rows] == sorted(path.name for path in DECISIONS.glob("0*.md"))

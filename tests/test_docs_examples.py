"""Whoever copies a fragment of configuration or a command out of the documentation gets one that works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer.main

from gateway import cli
from gateway.config.defaults import DiskUsage
from gateway.config.loading import load_settings
from gateway.demo.report import TABLE_WIDTH
from tests.support.certificates import TlsFiles, make_certificate
from tools.demo_picture import FIGURES, PICTURE, README, picture, with_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _fragments() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for number, fragment in enumerate(re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL), 1):
            yield f"{page.name}-{number}", fragment


FRAGMENTS = dict(_fragments())

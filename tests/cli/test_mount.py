"""`forebay mount` on what cannot be mounted."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.commands import app

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["s3://train/"], "only --read-only mounts are made"),
        (["--read-only", "s3://"], "names no bucket"),
        (["--read-only", "s3://train/", "--remember", "soon"], "--remember soon"),
    ],
    ids=["writes", "no bucket", "no time"],
)
def test_a_mistake_is_said(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["mount", *arguments, str(tmp_path)], env=ENVIRONMENT)
    assert result.exit_code == 1
    assert said in result.output


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["mount", "s3://train/", str(tmp_path / "no"), "--read-only"], env=ENVIRONMENT)
    assert result.exit_code == 1
    assert "is no directory" in result.output

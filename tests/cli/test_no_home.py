"""A user without HOME and without an entry in passwd, as any uid in a container: no command ends in a traceback."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from gateway import cli
from gateway.config.loading import load_settings
from gateway.config.problems import SettingsError


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> NoReturn:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in os.environ:
        if name.startswith(("AWS_", "FOREBAY_")) or name in ("HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FOREBAY_ADMIN__PORT", "1")  # nobody is there


def test_the_cache_lies_among_temporary_files() -> None:
    """Under a name that another user does not have."""
    expected = Path(tempfile.gettempdir()) / f"forebay-{os.geteuid()}"
    assert load_settings(None, {}).settings.cache.directory in (expected, expected / "forebay")


def test_a_home_directory_that_nobody_knows_is_a_problem_of_the_setting() -> None:
    """It is named, as for any other mistake."""
    with pytest.raises(SettingsError, match=r"cache\.directory = '~/cache' \(from FOREBAY_CACHE__DIRECTORY\)"):
        load_settings(None, {"FOREBAY_CACHE__DIRECTORY": "~/cache"})


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "slots",
        "jobs",
        "top --json --count 1",
        "flush s3://",
        "warm s3://b/p",
        "explain s3://b/k",
        "checkpoints",
        "writeback list",
        "snapshot list",
        "writeback export {tmp_path}/out",
        "check-config {tmp_path}/forebay.toml",
        "doctor",
        "serve",
        "serve --cache-dir ~/cache",
    ],
)
def test_a_command_ends_with_words(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forebay.toml").touch()
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("FOREBAY_ORIGIN__ENDPOINT_URL", "http://127.0.0.1:1")
    result = CliRunner().invoke(cli.app, command.format(tmp_path=tmp_path).split())
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.output

"""`forebay mount` on what cannot be mounted."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.mount import Mount
from gateway.cli.commands import app

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
VARIABLE = {"FOREBAY_LOCAL_SOCKET": "read.sock"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["s3://train/"], "only --read-only mounts are made"),
        (["--read-only", "s3://"], "names no bucket"),
        (["--read-only", "train/images"], "does not begin with s3://"),
        (["--read-only", "s3://train/", "--remember", "soon"], "--remember soon"),
    ],
    ids=["writes", "no bucket", "no prefix", "no time"],
)
def test_a_mistake_is_said(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["mount", *arguments, str(tmp_path)], env=ENVIRONMENT)
    assert result.exit_code == 1
    assert said in result.output


def test_a_directory_in_which_nothing_can_be_mounted(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for name, said in (("no", "No such file"), ("full/file", "Not a directory"), ("full", "is not empty")):
        arguments = ["mount", "s3://train/", str(tmp_path / name), "--read-only"]
        result = CliRunner().invoke(app, arguments, env=ENVIRONMENT)
        assert result.exit_code == 1
        assert said in result.output


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_socket_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The process that serves goes to another one: a relative path must not send all reads over HTTP."""
    mounts: list[Mount] = []
    monkeypatch.setattr("forebay.mount.check", lambda *_: None)
    monkeypatch.setattr("forebay.mount.serve", lambda mount, *_, **__: mounts.append(mount))
    options, environment = (["--local-socket", "read.sock"], {}) if how == "option" else ([], VARIABLE)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mnt").mkdir()
    arguments = ["mount", "s3://train/", "mnt", "--read-only", *options]
    result = CliRunner().invoke(app, arguments, env=environment)
    assert result.exit_code == 0, result.output
    assert mounts[0]._new_reader()._path == str(tmp_path / "read.sock")

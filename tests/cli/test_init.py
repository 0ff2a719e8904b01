"""`forebay init`: a first configuration that `check-config` accepts, from options or from answers at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.config.defaults import DiskUsage
from gateway.config.loading import load_settings
from tests.support.prepared_process import PreparedProcess

DATA, CHECKPOINTS = "s3://train/data/", "s3://train/checkpoints/"


@pytest.fixture(autouse=True)
def _on_a_large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.config.slot_checks.disk_usage", lambda _: DiskUsage(2**50, 0, 2**50))
    for name in [name for name in os.environ if name.startswith(("AWS_", "FOREBAY_"))]:
        monkeypatch.delenv(name)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def test_options_make_a_file_that_check_config_accepts(tmp_path: Path) -> None:
    """With every option, with none, and with each one left out."""
    given = {
        "--origin": "https://s3.example.com",
        "--cache-dir": str(tmp_path / "cache"),
        "--capacity": "1GiB",
        "--data": DATA,
        "--checkpoints": CHECKPOINTS,
    }
    chosen = [given, *({name: value for name, value in given.items() if name != left} for left in given), {}]
    for number, options in enumerate(chosen):
        file = tmp_path / f"{number}.toml"
        written = run("init", str(file), *(word for option in options.items() for word in option))
        assert written.exit_code == 0, written.output
        assert f"forebay serve --config {file}" in written.stdout
        checked = run("check-config", str(file))
        assert checked.exit_code == 0, checked.output
        settings = load_settings(file, {}).settings
        assert [str(slot.prefix) for slot in settings.slots] == [
            options[name] for name in ("--data", "--checkpoints") if name in options
        ]
        assert settings.cache.persistent == ("--checkpoints" in options)
        assert ("--capacity" in options) == (settings.cache.capacity_bytes == 2**30)
        assert settings.origin.endpoint_url == options.get("--origin", "https://s3.us-east-1.amazonaws.com")
        lines = file.read_text().splitlines()
        assert all("#" in line for line in lines if re.match(r"(# )?(endpoint_url|capacity|persistent|write) =", line))


def test_what_an_option_says_is_written_as_it_is_or_refused(tmp_path: Path) -> None:
    """Whatever it is made of; what is refused leaves no file, and names the setting."""
    for value in ('s3://b/a"b/', "s3://b/a\\b/", "s3://b/ü/", "s3://b/\x7f/", 's3://b/"\nwrite = "back"\n#'):
        file = tmp_path / "forebay.toml"
        if run("init", str(file), "--data", value).exit_code == 0:
            assert [slot["prefix"] for slot in tomllib.loads(file.read_text())["slots"]] == [value]
            file.unlink()
        assert not file.exists()
    for options, key in (
        (("--capacity", "10Gigs"), "cache.capacity"),
        (("--data", "train/"), "prefix"),
        (("--data", DATA, "--checkpoints", DATA), "prefix"),
        (("--origin", "s3.example.com"), "origin.endpoint_url"),
    ):
        refused = run("init", str(tmp_path / "forebay.toml"), *options)
        assert (refused.exit_code, list(tmp_path.glob("*"))) == (1, [])
        assert key in refused.stderr


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    """A configuration may be the only record of what was decided."""
    file = tmp_path / "forebay.toml"
    file.write_text("# mine\n")
    refused = run("init", str(file))
    assert (refused.exit_code, file.read_text()) == (1, "# mine\n")
    assert "File exists" in refused.stderr


def test_json_says_what_was_written_and_asks_nothing(tmp_path: Path) -> None:
    """For programs, also at a terminal."""
    done = run("init", str(tmp_path / "a.toml"), "--json")
    assert json.loads(done.stdout) == {"ok": True, "file": str(tmp_path / "a.toml"), "warnings": []}


def test_five_questions_at_a_terminal(tmp_path: Path) -> None:
    """It asks for what no option says; an empty answer leaves a setting out."""
    ours, theirs = pty.openpty()
    command = ["gateway", "init", tmp_path / "forebay.toml", "--origin", "http://127.0.0.1:9"]
    asking = PreparedProcess(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.close(theirs)
    os.write(ours, f"{tmp_path}/cache\n\n{DATA}\n{CHECKPOINTS}\n".encode())
    _, told = asking.communicate(timeout=120)
    os.close(ours)
    assert asking.returncode == 0, told
    assert [word in told for word in ("Endpoint", "Directory", "Room", "only read", "checkpoints")] == [
        False, True, True, True, True,
    ]  # fmt: skip
    settings = load_settings(tmp_path / "forebay.toml", {}).settings
    assert (settings.origin.endpoint_url, settings.cache.directory) == ("http://127.0.0.1:9", tmp_path / "cache")
    assert [slot.write for slot in settings.slots] == ["through", "back"]

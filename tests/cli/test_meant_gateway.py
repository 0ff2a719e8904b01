"""Whichever gateway has the admin port: commands ask the one on the cache directory of their own settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpx
import orjson
import pytest
from typer.testing import CliRunner, Result

from gateway import cli
from gateway.config.defaults import are_same
from tests.support.gateway_process import GatewayProcess

COMMANDS = [
    ["status"],
    ["top", "--json", "--count", "1"],
    ["slots"],
    ["callers"],
    ["requests"],
    ["explain", "s3://b/k"],
    ["warm", "s3://b/p", "--wait"],
    ["evict", "s3://b/p"],
    ["pin", "s3://b/p"],
    ["unpin", "s3://b/p"],
    ["jobs"],
    ["flush", "s3://", "--wait"],
    ["checkpoints"],
    ["writeback", "list"],
    ["snapshot", "list"],
    ["snapshot", "create", "v1", "s3://b/p"],
    ["snapshot", "export", "v1"],
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """On a directory of others, so that it works below."""
    given = tmp_path_factory.mktemp("shared") / "sc räch"
    given.mkdir()
    given.chmod(0o1777)
    with GatewayProcess({"origin": {"endpoint_url": "http://127.0.0.1:1"}}, directory=given) as gateway:
        assert gateway.directory == given / "forebay"
        yield gateway


def run(gateway: GatewayProcess, tmp_path: Path, directory: Path | None, *arguments: str) -> Result:
    """With a configuration that names the gateway's admin port, and a cache directory."""
    file = tmp_path / "forebay.toml"
    cache = f'[cache]\ndirectory = "{directory}"\n' if directory is not None else ""
    file.write_text(f"[admin]\nport = {urlsplit(gateway.admin_url).port}\n{cache}")
    return CliRunner().invoke(cli.app, [*arguments, "--config", str(file)], env={"FOREBAY_CONFIG": None})


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_gateway_on_another_directory_is_not_asked(
    gateway: GatewayProcess, tmp_path: Path, arguments: list[str]
) -> None:
    """Nothing is done, both directories are named, and the command fails."""
    refused = run(gateway, tmp_path, tmp_path / "mine", *arguments)
    assert refused.exit_code == 1
    assert f"works in {os.path.realpath(gateway.directory)}, and the one of {tmp_path}/mine is meant" in refused.output
    assert "--admin-url" in refused.output
    assert httpx.get(f"{gateway.admin_url}/api/v1/jobs", timeout=60).json() == {"jobs": []}


def test_the_gateway_that_is_meant_is_asked(gateway: GatewayProcess, tmp_path: Path) -> None:
    """By the directory as it was given, or as it works; by a link; by its address; and by who names no directory."""
    (tmp_path / "link").symlink_to(gateway.directory.parent)
    for directory in (gateway.directory.parent, gateway.directory, tmp_path / "link", None):
        assert run(gateway, tmp_path, directory, "status").exit_code == 0, directory
    assert run(gateway, tmp_path, tmp_path / "mine", "status", "--admin-url", gateway.admin_url).exit_code == 0


@pytest.mark.parametrize("header", ["", "relative", quote("ä\0/x"), "%ff", "/" + "x" * 4000])
def test_a_header_that_names_no_directory_does_no_harm(gateway: GatewayProcess, header: str) -> None:
    """It is taken for none, or for another one."""
    answer = httpx.get(f"{gateway.admin_url}/api/v1/status", headers={"x-forebay-directory": header}, timeout=60)
    assert answer.status_code == (421 if header.startswith("/") else 200)


def test_a_directory_may_be_the_one_below_or_above() -> None:
    """Who may not look into it cannot tell."""
    assert are_same(Path("/a"), Path("/a/forebay"))
    assert are_same(Path("/a/forebay/forebay"), Path("/a/forebay"))
    assert not are_same(Path("/a"), Path("/a/b"))
    assert not are_same(Path("/a"), Path("/b/forebay"))


@pytest.mark.slow
def test_doctor_counts_another_gateway_as_an_error(gateway: GatewayProcess, tmp_path: Path) -> None:
    """Also another program, and a token that is not the gateway's; that none runs is a note."""

    def found(directory: Path | None, *more: str) -> list[tuple[str, str]]:
        result = run(gateway, tmp_path, directory, "doctor", "--origin", "http://127.0.0.1:1", "--json", *more)
        findings = orjson.loads(result.stdout[result.stdout.index('{\n  "ok"') :])["findings"]
        return [(one["level"], one["found"]) for one in findings if one["area"] == "running gateway"]

    [(level, told)] = found(tmp_path / "mine")
    assert (level, "is meant" in told) == ("error", True)
    [(level, _)] = found(None, "--admin-url", gateway.s3_url)
    assert level == "error"
    [(level, _)] = found(None, "--admin-url", "http://127.0.0.1:1")
    assert level == "note"

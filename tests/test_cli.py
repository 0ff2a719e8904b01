"""The `forebay` command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner, Result

from gateway import __version__, cli
from tests.support.gateway_process import GatewayProcess

REPOSITORY = Path(__file__).resolve().parents[1]
SECRET = "s3cr3t-never-to-be-seen"


def forebay(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env=environment)


def config(tmp_path: Path, text: str) -> str:
    file = tmp_path / "forebay.toml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_the_version_is_that_of_the_package() -> None:
    """One place says it."""
    assert forebay("--version").output == f"forebay {__version__}\n"


def test_who_does_not_ask_a_gateway_brings_no_client_along() -> None:
    """Commands start in half the time, and the supervisor, which lives as long as the gateway, is smaller."""
    asked = (
        "import sys, gateway.cli, gateway.serve.supervisor; print(*{'aiohttp', 'httpx', 'botocore'} & {*sys.modules})"
    )
    imported = subprocess.run([sys.executable, "-c", asked], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert imported.stdout == "\n"


@pytest.mark.parametrize("arguments", [["unheard-of"], ["serve", "--nothing"], ["check-config"], []])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    """Unlike a failure, which is 1."""
    assert forebay(*arguments).exit_code == 2


def test_check_config_prints_the_settings_in_force(tmp_path: Path) -> None:
    """File, environment and defaults together; secrets hidden."""
    file = config(tmp_path, f'[origin]\naccess_key_id = "id"\nsecret_access_key = "{SECRET}"\n')
    result = forebay("check-config", file, FOREBAY_SERVER__PORT="9100")
    assert result.exit_code == 0
    assert "server.port = 9100\n" in result.output
    assert 'origin.access_key_id = "id"\n' in result.output
    assert 'origin.secret_access_key = "**********"\n' in result.output
    assert SECRET not in result.output


def test_check_config_tells_warnings_on_standard_error(tmp_path: Path) -> None:
    """What is printed can be read by machines."""
    file = config(tmp_path, '[[slots]]\nname = "a"\nprefix = "s3://a/"\nweight = 4\n')
    result = forebay("check-config", file)
    assert "slots[0].weight is not in force" in result.stderr
    assert "not in force" not in result.stdout


def test_check_config_reports_every_error(tmp_path: Path) -> None:
    """One line each, exit code 1."""
    file = config(tmp_path, "[server]\nport = 70000\nworkers = 0\n")
    result = forebay("check-config", file)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 2


def test_check_config_speaks_json(tmp_path: Path) -> None:
    """Both when all is well and when it is not."""
    good = orjson.loads(forebay("check-config", "--json", config(tmp_path, "[server]\nport = 1\n")).stdout)
    assert good["ok"] is True
    assert good["settings"]["server"]["port"] == 1
    bad = orjson.loads(forebay("check-config", "--json", config(tmp_path, "[server]\nport = -1\n")).stdout)
    assert bad["ok"] is False
    assert bad["problems"][0]["key"] == "server.port"


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """No traceback."""
    result = forebay("serve", "--config", str(tmp_path / "none.toml"))
    assert result.exit_code == 1
    assert result.stderr.startswith("forebay: config = ")
    assert len(result.stderr.splitlines()) == 1


def test_status_of_no_gateway_is_exit_code_1() -> None:
    """With the address that was asked."""
    result = forebay("status", "--admin-url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:1" in result.stderr


def test_status_works_in_the_shell_of_a_job() -> None:
    """There AWS_ENDPOINT_URL_S3 names the gateway itself, which would be refused as its origin."""
    result = forebay("status", AWS_ENDPOINT_URL_S3="http://127.0.0.1:9000", FOREBAY_ADMIN__PORT="1")
    assert "no gateway answers at http://127.0.0.1:1" in result.stderr


def test_status_shows_a_running_gateway() -> None:
    """As a table and as JSON; with the token from the environment where one is needed."""
    admin: dict[str, Any] = {"port": 0}
    with GatewayProcess({"origin": {"endpoint_url": "http://127.0.0.1:1"}, "admin": admin}) as gateway:
        shown = forebay("status", "--admin-url", gateway.admin_url)
        assert shown.exit_code == 0, shown.output
        assert "worker0" in shown.stdout
        assert "127.0.0.1:1: not reachable" in shown.stdout
        document = orjson.loads(forebay("status", "--admin-url", gateway.admin_url, "--json").stdout)
        assert document["gateway"]["s3_url"] == gateway.s3_url


def test_a_demo_that_cannot_be_imported_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is what makes it work."""
    monkeypatch.setitem(sys.modules, "gateway.demo", None)
    result = forebay("demo")
    assert result.exit_code == 1
    assert "pip install 'forebay[demo]'" in result.stderr

"""The `forebay` command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import typer.main
from typer.testing import CliRunner, Result

from gateway import __version__, cli
from tests.support.gateway_process import GatewayProcess
from tests.support.prepared_process import run_prepared

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


@pytest.mark.slow
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


def test_check_config_says_ok_and_what_differs(tmp_path: Path) -> None:
    """Of the file that is given, or that --config or FOREBAY_CONFIG names; with --json it prints all."""
    cache = f'[cache]\ndirectory = "{tmp_path}"\ncapacity = "1GiB"\n'
    file = config(tmp_path, f'{cache}[server]\nport = 9100\nworkers = 1\n[[slots]]\nname = "a"\nprefix = "s3://a/"\n')
    given = forebay("check-config", file)
    lines = given.stdout.splitlines()
    assert lines[-1] == f"ok: {file}"
    assert {"server.port = 9100", 'slots[0].name = "a"', 'slots[0].prefix = "s3://a/"'} <= set(lines)
    assert not any(line.startswith(("server.workers", "server.head_timeout", "slots[0].weight")) for line in lines)
    assert forebay("check-config", "--config", file).stdout == given.stdout
    assert forebay("check-config", FOREBAY_CONFIG=file).stdout == given.stdout


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


def test_an_error_names_the_file_or_the_variable_that_a_value_came_from(tmp_path: Path) -> None:
    """With the value, what is wrong with it, and what is allowed; a secret's value is not shown."""
    file = config(tmp_path, "[server]\nport = 70000\n")
    variables = {"FOREBAY_CACHE__CAPACITY": "10Gigs", "FOREBAY_ADMIN__TOKEN": "short-secret"}
    result = forebay("check-config", file, **variables)
    port, token, capacity = result.stderr.splitlines()
    assert port.startswith(f"forebay: server.port = 70000 (from {file}): ")
    assert "cache.capacity = '10Gigs' (from FOREBAY_CACHE__CAPACITY): " in capacity
    assert capacity.endswith("the unit 'Gigs' is not known, known are B, KiB, MiB, GiB, TiB, PiB, KB, MB, GB, TB, PB")
    assert "(from FOREBAY_ADMIN__TOKEN)" in token
    assert "short-secret" not in result.output
    found = orjson.loads(forebay("check-config", "--json", file, **variables).stdout)["problems"]
    assert [one["source"] for one in found] == [file, "FOREBAY_ADMIN__TOKEN", "FOREBAY_CACHE__CAPACITY"]


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--port", "99999", "server.port = '99999' (from --port): "),
        ("--origin", "minio:9000", "origin.endpoint_url = 'minio:9000' (from --origin): http://host[:port]"),
    ],
)
def test_options_of_serve_win_and_are_named(tmp_path: Path, option: str, value: str, said: str) -> None:
    """Over variables and over the file; a wrong one is wrong usage."""
    file = config(tmp_path, '[server]\nport = 1\n[origin]\nendpoint_url = "http://127.0.0.1:1"\n')
    variables = {"FOREBAY_SERVER__PORT": "2", "FOREBAY_ORIGIN__ENDPOINT_URL": "http://127.0.0.1:2"}
    result = forebay("serve", "--config", file, option, value, **variables)
    assert (result.exit_code, said in result.stderr) == (2, True), result.output


@pytest.mark.slow
def test_options_of_serve_are_kept_to(tmp_path: Path) -> None:
    """The origin, the port and the directory; with --json the addresses are a document; `ps` shows who is who."""
    file = config(tmp_path, '[admin]\nport = 0\n[cache]\ncapacity = "64MiB"\nblock_size = "1MiB"\n')
    keys = {"FOREBAY_ORIGIN__ACCESS_KEY_ID": "id", "FOREBAY_ORIGIN__SECRET_ACCESS_KEY": SECRET}
    options = ["--origin", "http://127.0.0.1:1", "--port", "0", "--cache-dir", str(tmp_path / "here"), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "serve", "--config", file, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | keys | {"FOREBAY_CACHE__DIRECTORY": str(tmp_path / "elsewhere")},
    )
    try:
        assert process.stdout is not None
        found = orjson.loads(process.stdout.readline())
        status = orjson.loads(forebay("status", "--admin-url", found["admin_url"], "--json").stdout)
        assert status["origin"]["endpoint_url"] == "http://127.0.0.1:1"
        assert status["cache"]["directory"] == str(tmp_path / "here")
        assert status["gateway"]["s3_url"] == found["s3_url"]
        pids = [process.pid, *(one["process_id"] for one in status["gateway"]["processes"])]
        titles = [Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0") for pid in pids]
        assert titles == ["forebay: supervisor", "forebay: worker 0", "forebay: background"]
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in pids]
        assert all(b"FOREBAY_CACHE__DIRECTORY=" in one for one in environments)
    finally:
        process.terminate()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


def all_commands() -> Iterator[tuple[str, Any]]:
    """Every command by its words, those of groups included."""
    group: Any = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        below = getattr(command, "commands", None)
        if below is None:
            yield name, command
        else:
            yield from ((f"{name} {inner}", one) for inner, one in below.items())


def test_every_command_has_an_example_and_speaks_json() -> None:
    """And belongs to a group of `forebay --help`."""
    for name, command in all_commands():
        assert f"forebay {name}" in (command.epilog or ""), name
        if name != "mount":  # it prints nothing
            assert any("--json" in parameter.opts for parameter in command.params), name
    group: Any = typer.main.get_command(cli.app)
    assert all(command.rich_help_panel for command in group.commands.values())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete(shell: str) -> None:
    """The script that `--show-completion` prints asks the command itself."""
    asked = {"_FOREBAY_COMPLETE": f"complete_{shell}", "COMP_WORDS": "forebay wri", "COMP_CWORD": "1"}
    asked |= {"_TYPER_COMPLETE_ARGS": "forebay wri", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    result = CliRunner().invoke(cli.app, [], env=asked, prog_name="forebay")
    assert "writeback" in result.stdout


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    """No traceback."""
    result = forebay("serve", "--config", str(tmp_path / "none.toml"))
    assert result.exit_code == 1
    assert (
        result.stderr == f"forebay: the configuration {tmp_path}/none.toml cannot be read: No such file or directory\n"
    )
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_what_is_printed_is_what_was_asked_for(tmp_path: Path) -> None:
    """Events of the code that a command runs go to standard error: a program reads its JSON."""
    aws = tmp_path / "aws"
    aws.write_text("[default]\ncredential_process = /bin/false\n", encoding="utf-8")
    file = config(
        tmp_path,
        f'[origin]\nendpoint_url = "http://127.0.0.1:2"\n[cache]\ndirectory = "{tmp_path}/cache"\n[admin]\nport = 1\n',
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FOREBAY_"))}
    environment = kept | {"AWS_CONFIG_FILE": str(aws), "AWS_SHARED_CREDENTIALS_FILE": os.devnull}
    done = run_prepared("gateway", "doctor", "--json", "--config", file, timeout=60, env=environment)
    assert orjson.loads(done.stdout)["ok"] is False
    assert "could not be looked up" in done.stderr


def test_status_of_no_gateway_is_exit_code_1() -> None:
    """With the address that was asked."""
    result = forebay("status", "--admin-url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "no gateway answers at http://127.0.0.1:1" in result.stderr


def test_status_works_in_the_shell_of_a_job() -> None:
    """There AWS_ENDPOINT_URL_S3 names the gateway itself, which would be refused as its origin."""
    result = forebay("status", AWS_ENDPOINT_URL_S3="http://127.0.0.1:9000", FOREBAY_ADMIN__PORT="1")
    assert "no gateway answers at http://127.0.0.1:1" in result.stderr


def test_a_mistake_in_the_file_does_not_keep_a_running_gateway_from_being_asked(tmp_path: Path) -> None:
    """It runs with the settings from before. A mistake in [admin], where its address is, is told as ever."""
    file = tmp_path / "forebay.toml"
    file.write_text('[admin]\nport = 1\n[cache]\ncapacity = "10Gigs"\n')
    result = forebay("status", "--config", str(file))
    assert "no gateway answers at http://127.0.0.1:1" in result.stderr
    assert f"{file} has a setting that is not allowed" in result.stderr
    file.write_text("[admin]\nport = 70000\n")
    result = forebay("status", "--config", str(file))
    assert (result.exit_code, "admin.port = 70000" in result.stderr) == (1, True)
    assert "no gateway answers" not in result.stderr


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
    assert "pip install '.[demo]' in a clone" in result.stderr

"""The `forebay` command. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import orjson
import structlog
import typer
from rich.console import Console
from rich.table import Table

from gateway import __version__
from gateway.config import Settings, public_settings
from gateway.config.environment import CONFIG_VARIABLE
from gateway.config.loading import LoadedSettings, load_settings
from gateway.config.problems import SettingsError
from gateway.errors import ConfigError, StartupError
from gateway.logs import configure_logs
from gateway.serve.listeners import url

_STATUS_TIMEOUT_SECONDS = 10.0

app = typer.Typer(
    name="forebay",
    help="S3-compatible caching gateway for AI training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
ConfigOption = Annotated[
    Path | None, typer.Option("--config", envvar=CONFIG_VARIABLE, help="TOML file with the settings.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point of the installed command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """S3-compatible caching gateway for AI training."""


@app.command()
def serve(config: ConfigOption = None) -> None:
    """Serve S3 until SIGTERM or Ctrl-C; requests in flight are answered first."""
    from gateway.serve import supervisor

    loaded = _load(config)
    configure_logs(loaded.settings.logging.level, loaded.settings.logging.format, "supervisor")
    for warning in loaded.warnings:
        structlog.get_logger("forebay.config").warning(warning)
    try:
        code = supervisor.serve(loaded.settings)
    except (StartupError, ConfigError) as error:
        _fail(str(error))
    raise typer.Exit(code)


@app.command("check-config")
def check_config(
    file: Annotated[Path, typer.Argument(help="TOML file with the settings.")], json: JsonOption = False
) -> None:
    """Check a file together with the FOREBAY_* variables; print the settings in force, secrets hidden."""
    try:
        loaded = load_settings(file, os.environ)
    except SettingsError as error:
        _report_problems(error, json)
        raise typer.Exit(1) from None
    settings = public_settings(loaded.settings)
    if json:
        _print_json({"ok": True, "settings": settings, "warnings": loaded.warnings})
        return
    for key, value in _flat(settings):
        typer.echo(f"{key} = {orjson.dumps(value).decode()}")
    for warning in loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)


@app.command()
def status(
    config: ConfigOption = None,
    admin_url: Annotated[
        str | None, typer.Option("--admin-url", help="Admin port; otherwise the one that the settings name.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Ask a running gateway how it is. Exit code 0: ready."""
    if admin_url and config is None:  # settings that cannot be loaded here do not matter then
        document = _ask(admin_url, os.environ.get("FOREBAY_ADMIN__TOKEN"))
    else:
        settings = _load(config, _as_a_client(os.environ)).settings
        document = _ask(admin_url or _admin_url(settings), _token(settings))
    if json:
        _print_json(document)
    else:
        _show_status(document)
    raise typer.Exit(0 if (document["gateway"] or {}).get("ready") else 1)


@app.command()
def demo(json: JsonOption = False) -> None:
    """Run a small training job on an embedded bucket, directly and through Forebay, and print the figures."""
    try:
        from gateway.demo import main as run_demo
    except ImportError as error:
        _fail(f"the demo needs the package {error.name}: pip install 'forebay[demo]'")
    raise typer.Exit(run_demo(json=json))


def _as_a_client(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without AWS's endpoint variables: in a job's shell they name the gateway, not its origin."""
    return {name: value for name, value in environment.items() if not name.startswith("AWS_ENDPOINT_URL")}


def _load(config: Path | None, environment: Mapping[str, str] = os.environ) -> LoadedSettings:
    try:
        return load_settings(config, environment)
    except SettingsError as error:
        _report_problems(error, as_json=False)
        raise typer.Exit(1) from None


def _report_problems(error: SettingsError, as_json: bool) -> None:
    if as_json:
        problems = [
            {"key": problem.key, "allowed": problem.allowed, "message": str(problem)} for problem in error.problems
        ]
        _print_json({"ok": False, "problems": problems})
        return
    for problem in error.problems:
        typer.echo(f"forebay: {problem}", err=True)


def _fail(message: str) -> NoReturn:
    typer.echo(f"forebay: {message}", err=True)
    raise typer.Exit(1)


def _print_json(document: Any) -> None:
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")


def _flat(settings: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    lines: list[tuple[str, Any]] = []
    for name, value in settings.items():
        key = f"{above}{name}"
        if isinstance(value, dict):
            lines += _flat(value, f"{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, entry in enumerate(value):
                lines += _flat(entry, f"{key}[{i}].")
        else:
            lines.append((key, value))
    return lines


def _admin_url(settings: Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.admin.host, settings.admin.host)
    return url("http", host, settings.admin.port)


def _token(settings: Settings) -> str | None:
    return settings.admin.token.get_secret_value() if settings.admin.token else None


def _ask(admin_url: str, token: str | None) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        with httpx.Client(timeout=_STATUS_TIMEOUT_SECONDS, trust_env=False) as client:
            answer = client.get(f"{admin_url.rstrip('/')}/api/v1/status", headers=headers)
            answer.raise_for_status()
            document: dict[str, Any] = answer.json()
    except httpx.HTTPStatusError as error:
        _fail(f"{admin_url} answered {error.response.status_code}: {error.response.text.strip()[:200]}")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        _fail(f"no gateway answers at {admin_url}: {error}")
    return document


def _show_status(document: dict[str, Any]) -> None:
    console = Console()
    gateway, origin = document["gateway"], document["origin"]
    if gateway is None:
        console.print("starting")
        return
    state = "draining" if gateway["draining"] else "ready" if gateway["ready"] else "not ready"
    console.print(f"forebay {gateway['version']}: {state}, S3 on {gateway['s3_url']}", soft_wrap=True)
    reachable = "reachable" if origin["reachable"] else "not reachable"
    console.print(f"origin {origin['endpoint_url']}: {reachable}", soft_wrap=True)
    cache = document["cache"]
    ratio = "nothing read yet" if cache["hit_ratio"] is None else f"{cache['hit_ratio']:.1%} of bytes from cache"
    used, capacity = cache["usage_bytes"] / 2**30, cache["capacity_bytes"] / 2**30
    console.print(f"cache {cache['directory']}: {used:.1f} of {capacity:.1f} GiB in use, {ratio}", soft_wrap=True)
    table = Table("process", "pid", "state", "restarts")
    for process in gateway["processes"]:
        ready = "ready" if process["ready"] else "down"
        table.add_row(process["name"], str(process["process_id"] or "-"), ready, str(process["restarts"]))
    console.print(table)

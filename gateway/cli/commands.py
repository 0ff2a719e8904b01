"""The `forebay` command. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import structlog
import typer

from gateway import __version__
from gateway.cli import cluster, snapshots, writeback
from gateway.cli.checkpoints import checkpoints
from gateway.cli.common import (
    CACHE,
    LOOK,
    RUN,
    SNAPSHOTS,
    WRITING,
    AdminUrlOption,
    CommandGroup,
    ConfigOption,
    JsonOption,
    admin_client,
    asks,
    examples,
    fail,
    in_help,
    print_json,
    printable,
    report_problems,
)
from gateway.cli.doctor import doctor
from gateway.cli.flush import flush
from gateway.cli.init import init
from gateway.cli.jobs import evict, jobs, pin, refresh, unpin, warm
from gateway.cli.looks import callers, explain, requests, show_status, slots
from gateway.cli.mount import mount
from gateway.cli.top import top
from gateway.config import Settings, public_settings
from gateway.config.loading import CommandEnvironment, load_settings
from gateway.config.overlay import load_with_overlay
from gateway.config.problems import SettingsError
from gateway.core.errors import ConfigError, StartupError
from gateway.telemetry.logs import configure_logs

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient

app = typer.Typer(
    name="forebay",
    cls=CommandGroup,
    help="S3-compatible caching gateway for AI training.",
    epilog=examples(
        "forebay serve --origin https://s3.us-east-1.amazonaws.com",
        "AWS_ENDPOINT_URL_S3=http://127.0.0.1:9000 aws s3 ls s3://train/",
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the installed command. Results go to standard output, events to standard error."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
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


def serve(
    config: ConfigOption = None,
    origin: Annotated[
        str | None, typer.Option("--origin", metavar="URL", help="Where the buckets are: origin.endpoint_url.")
    ] = None,
    port: Annotated[str | None, typer.Option("--port", metavar="N", help="TCP port of S3: server.port.")] = None,
    cache_dir: Annotated[
        str | None, typer.Option("--cache-dir", metavar="DIR", help="Where the cache lies: cache.directory.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the addresses as JSON when all is ready.")] = False,
) -> None:
    """Serve S3 until SIGTERM or Ctrl-C; requests in flight are answered first.

    Options win over FOREBAY_* variables, and these over the file.
    """
    from gateway.serve import supervisor
    from gateway.serve.banner import tell_what_is_served
    from gateway.serve.own_credentials import find_own_key
    from gateway.serve.reloading import Reloader
    from gateway.serve.system import set_process_title

    environment = CommandEnvironment(
        os.environ,
        {
            "FOREBAY_ORIGIN__ENDPOINT_URL": ("--origin", origin),
            "FOREBAY_SERVER__PORT": ("--port", port),
            "FOREBAY_CACHE__DIRECTORY": ("--cache-dir", cache_dir),
        },
    )
    try:
        loaded = load_with_overlay(config, environment)
    except SettingsError as error:
        report_problems(error, as_json=False)
        is_usage = any(one.source in environment.options.values() for one in error.problems)
        raise typer.Exit(2 if is_usage else 1) from None
    set_process_title("supervisor")
    configure_logs(loaded.settings.logging.level, loaded.settings.logging.format, "supervisor")
    for warning in loaded.warnings:
        structlog.get_logger("forebay.config").warning(warning)
    key = find_own_key(loaded.settings, os.environ)
    if key is None and loaded.settings.origin.needs_key:
        fail(
            "no credentials for the origin: set origin.access_key_id and its secret, AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, a profile, or a role; or start without: origin.require_credentials = false"
        )
    try:
        code = supervisor.serve(
            loaded.settings,
            tell=lambda: tell_what_is_served(loaded.settings, key, loaded.warnings),
            reloader=Reloader(config, environment),
            as_json=json,
        )
    except (StartupError, ConfigError) as error:
        fail(str(error))
    raise typer.Exit(code)


def check_config(
    file: Annotated[Path | None, typer.Argument(help="TOML file with the settings; or give --config.")] = None,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Check a file together with the FOREBAY_* variables. Prints "ok" and the settings that differ from the defaults.

    --json prints all that are in force. Secrets are hidden.
    """
    file = file or config
    if file is None:
        raise typer.BadParameter("give FILE, --config FILE or FOREBAY_CONFIG")
    try:
        loaded = load_settings(file, os.environ)
    except SettingsError as error:
        report_problems(error, json)
        raise typer.Exit(1) from None
    settings = public_settings(loaded.settings)
    if json:
        print_json({"ok": True, "settings": settings, "warnings": loaded.warnings})
        return
    defaults = dict(_flat(public_settings(Settings())))
    for key, value in _flat(loaded.settings.model_dump(mode="json", by_alias=True, exclude_unset=True)):
        if key not in defaults or defaults[key] != value:
            typer.echo(f"{key} = {orjson.dumps(value).decode()}")
    typer.echo(f"ok: {printable(str(file))}")
    for warning in loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)


@asks
def status(client: AdminClient, json: JsonOption = False) -> None:
    """Show the state of the running gateway. Exit code 0 when it is ready."""
    answer = client.status()
    if json:
        print_json(answer.document())
    else:
        show_status(answer)
    raise typer.Exit(0 if answer.is_ready else 1)


def reload(config: ConfigOption = None, admin_url: AdminUrlOption = None, json: JsonOption = False) -> None:
    """Make the running gateway read its file, environment and secret files again, as at SIGHUP, and show what changed.

    Exit code 1 when it refuses them, or when something needs a restart: then nothing has changed.
    """
    answer = admin_client(admin_url, config).reload()
    if config is not None and answer.file != str(config.absolute()):
        typer.echo(f"forebay: the gateway has read {answer.file or 'no file'}, with which it was started", err=True)
    if not answer.in_force:
        typer.echo("forebay: a process does not answer; it follows before it serves anything else", err=True)
    if json:
        print_json(answer.document())
    elif answer.changed:
        typer.echo(printable(f"changed: {', '.join(answer.changed)}"))
    else:
        typer.echo("nothing differs; certificates and keys were read again")


def demo(
    json: JsonOption = False,
    nodes: Annotated[
        int, typer.Option(min=1, max=8, help="Show so many nodes that read one data set, alone and as a cluster.")
    ] = 1,
) -> None:
    """Run a small training job on an embedded bucket, directly and through Forebay, and print the figures."""
    try:
        from gateway.demo import main as run_demo
    except ImportError as error:
        fail(f"the demo needs the package {error.name}: pip install '.[demo]' in a clone")
    raise typer.Exit(run_demo(json=json, nodes=nodes))


_PREFIX = "s3://train/imagenet/"
_COMMANDS: tuple[tuple[Callable[..., None], str, str, *tuple[str, ...]], ...] = (
    (
        serve,
        RUN,
        "Serve S3 until SIGTERM or Ctrl-C.",
        "forebay serve",
        "forebay serve --config /etc/forebay/forebay.toml",
        "forebay serve --origin http://minio:9000 --port 9100 --cache-dir /mnt/nvme/forebay",
    ),
    (
        init,
        RUN,
        "Write a first configuration file.",
        "forebay init",
        "forebay init forebay.toml --cache-dir /mnt/nvme/forebay --data s3://train/data/",
    ),
    (
        check_config,
        RUN,
        "Check a configuration file; print what is in force.",
        "forebay check-config /etc/forebay/forebay.toml",
    ),
    (
        status,
        LOOK,
        "Show the state of a running gateway. Exit code 0: ready.",
        "forebay status",
        "forebay status --json | jq .gateway.ready",
    ),
    (
        reload,
        RUN,
        "Have the running gateway read its settings again.",
        "forebay reload --config /etc/forebay/forebay.toml",
    ),
    (demo, RUN, "Run a small training job; print the figures.", "forebay demo", "forebay demo --nodes 3"),
    (
        doctor,
        RUN,
        "Look for what is wrong, risky or slow here.",
        "forebay doctor --config /etc/forebay/forebay.toml",
        "forebay doctor --write-test s3://checkpoints/doctor/",
    ),
    (
        top,
        LOOK,
        "Show a running gateway live.",
        "forebay top",
        "forebay top --json --count 2 | tail -1 | jq .per_second",
    ),
    (slots, LOOK, "Show what slots have and move, and what binds them.", "forebay slots"),
    (callers, LOOK, "Show who calls, and which limit binds.", "forebay callers"),
    (
        requests,
        LOOK,
        "Show slow, failed and refused requests.",
        "forebay requests",
        "forebay requests --json | jq '.slowest[].key'",
    ),
    (explain, LOOK, "Say why an object is a hit or a miss.", f"forebay explain {_PREFIX}train-00001.tar"),
    (
        warm,
        CACHE,
        "Fetch objects into the cache.",
        f"forebay warm {_PREFIX} --wait",
        "forebay warm --manifest keys.txt",
    ),
    (refresh, CACHE, "See what others have changed in the bucket.", f"forebay refresh {_PREFIX} --wait"),
    (evict, CACHE, "Drop objects from the cache; the bucket keeps them.", f"forebay evict {_PREFIX}"),
    (pin, CACHE, "Fetch a prefix, and never evict it.", f"forebay pin {_PREFIX} --wait"),
    (unpin, CACHE, "Let a pinned prefix be evicted again.", f"forebay unpin {_PREFIX}"),
    (
        mount,
        CACHE,
        "Show a prefix as files that can be read.",
        "forebay mount s3://train/images /mnt/images --read-only",
    ),
    (jobs, CACHE, "Show such work, or cancel it.", "forebay jobs", "forebay jobs 1b9d6bcd0a3e --cancel"),
    (
        flush,
        WRITING,
        "Send acknowledged writes to the bucket now.",
        "forebay flush --wait --timeout 10m",
        "forebay flush s3://checkpoints/run/step-100 --wait",
    ),
    (
        checkpoints,
        WRITING,
        "Show checkpoints, and how much of each is flushed.",
        "forebay checkpoints",
        "forebay checkpoints s3://checkpoints/run/ --state failed,conflict",
    ),
)
for _command, *_help in _COMMANDS:
    app.command(**in_help(*_help))(_command)
app.add_typer(cluster.app, rich_help_panel=LOOK)
app.add_typer(writeback.app, rich_help_panel=WRITING)
app.add_typer(snapshots.app, rich_help_panel=SNAPSHOTS)


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

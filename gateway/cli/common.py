"""The common parts of commands: options, settings, examples, exits, and the running gateway's admin port."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import orjson
import typer
from typer.core import TyperCommand, TyperGroup

from gateway.config import Settings
from gateway.config.defaults import usual_directory
from gateway.config.loading import CONFIG_VARIABLE, LoadedSettings, load_settings
from gateway.config.problems import SettingsError
from gateway.core.errors import AdminPortError
from gateway.serve.listeners import url

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient

ConfigOption = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", envvar=CONFIG_VARIABLE, help="TOML file with the settings.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AdminUrlOption = Annotated[
    str | None, typer.Option("--admin-url", metavar="URL", help="Admin port; otherwise the one in the settings.")
]


RUN, LOOK, CACHE, WRITING, SNAPSHOTS = ("Run", "Look", "Cache", "Write-back and checkpoints", "Snapshots")
"""The groups of commands in `forebay --help`, in this order."""


class CommandGroup(TyperGroup):
    """Commands, in the order of their groups; what the admin port does not do ends them with exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AdminPortError as error:
            fail(printable(str(error)))


def examples(*lines: str) -> str:
    """Return the examples below a command's help."""
    return "\n\n".join([f"Example{'s' if len(lines) > 1 else ''}:", *(f"  {line}" for line in lines)])


class _Command(TyperCommand):
    """Its help breaks lines where the terminal ends, and not where the docstring does."""

    def __init__(self, *arguments: Any, help: str | None = None, **options: Any) -> None:
        paragraphs = inspect.cleandoc(help or "").split("\n\n")
        super().__init__(*arguments, help="\n\n".join(one.replace("\n", " ") for one in paragraphs), **options)


def explained(*lines: str) -> dict[str, Any]:
    """Return arguments of every command: help that fits the terminal, and these examples below it."""
    return {"cls": _Command, "epilog": examples(*lines)}


def in_help(panel: str, summary: str, *lines: str) -> dict[str, Any]:
    """How a command stands in `forebay --help`: in a group, by a summary of one line; and its examples."""
    return {"rich_help_panel": panel, "short_help": summary} | explained(*lines)


def as_a_client(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without AWS's endpoints, which in a job's shell name the gateway, not its origin."""
    return {name: value for name, value in environment.items() if not name.startswith("AWS_ENDPOINT_URL")}


def load(config: Path | None, environment: Mapping[str, str] = os.environ) -> LoadedSettings:
    try:
        return load_settings(config, environment)
    except SettingsError as error:
        report_problems(error, as_json=False)
        raise typer.Exit(1) from None


def report_problems(error: SettingsError, as_json: bool) -> None:
    if as_json:
        problems = [
            {"key": one.key, "allowed": one.allowed, "source": one.source, "message": str(one)}
            for one in error.problems
        ]
        print_json({"ok": False, "problems": problems})
        return
    for problem in error.problems:
        typer.echo(f"forebay: {printable(str(problem))}", err=True)


def fail(message: str) -> NoReturn:
    typer.echo(f"forebay: {message}", err=True)
    raise typer.Exit(1)


def print_json(document: Any) -> None:
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")


def check_url(name: str) -> None:
    """Refuse what names neither an object nor a prefix; BadParameter."""
    if not name.startswith("s3://"):
        raise typer.BadParameter(f"{printable(name)} does not begin with s3://")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter(f"{printable(name)} is no UTF-8, which S3's keys are") from None


def printable(text: str) -> str:
    """As one line on a terminal: keys may hold what it would obey."""
    return "".join(one if one.isprintable() else f"\\u{ord(one):04x}" for one in text)


def admin_client(admin_url: str | None, config: Path | None) -> AdminClient:
    """Return a client of the admin port that the options, or else the settings, name."""
    from gateway.admin.client import AdminClient  # brings an HTTP client with it, which `serve` does without

    return AdminClient(*admin_address(admin_url, config))


def asks(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a gateway; its first argument is a client of that gateway's admin port."""
    hints = get_type_hints(command, localns={"AdminClient": object}, include_extras=True)
    _, *own = inspect.signature(command).parameters.values()
    *own, json = [one.replace(annotation=hints[one.name]) for one in own]
    config = json.replace(name="config", default=None, annotation=ConfigOption)
    parameters = [*own, config, config.replace(name="admin_url", annotation=AdminUrlOption), json]

    @wraps(command)
    def run(config: Path | None, admin_url: str | None, **given: Any) -> None:
        command(admin_client(admin_url, config), **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def admin_address(admin_url: str | None, config: Path | None) -> tuple[str, str | None, str | None]:
    """Return address and token of the admin port, and the cache directory of the intended gateway.

    None for the directory: the settings here name none, or the user's address already identifies the gateway.
    """
    if admin_url and config is None:  # settings that cannot be loaded here do not matter then
        return admin_url, os.environ.get("FOREBAY_ADMIN__TOKEN"), None
    settings = _settings_of_admin(config)
    admin, directory = settings.admin, settings.cache.directory
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)
    token = admin.token.get_secret_value() if admin.token else None
    is_meant = admin_url is None and directory != usual_directory(os.environ)
    return admin_url or url("http", host, admin.port), token, os.path.realpath(directory) if is_meant else None


def _settings_of_admin(config: Path | None) -> Settings:
    """Return settings in spite of mistakes elsewhere in the file: the running gateway can still be asked."""
    environment = as_a_client(os.environ)
    try:
        return load_settings(config, environment).settings
    except SettingsError as error:
        try:
            found = load_settings(config, environment, only="admin").settings
        except SettingsError:
            report_problems(error, as_json=False)
            raise typer.Exit(1) from None
        count = len(error.problems)
        told = "a setting that is not allowed" if count == 1 else f"{count} settings that are not allowed"
        typer.echo(
            f"forebay: {printable(str(config))} has {told}, as forebay check-config says; [admin] is read", err=True
        )
        return found

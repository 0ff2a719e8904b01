"""`forebay flush`: what this node has acknowledged gets to the origin now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_port, print_json, printable
from gateway.config.units import DURATION_FORM, parse_duration_seconds
from gateway.control.words import are, counted, size_text

if TYPE_CHECKING:
    from gateway.cli.admin_port import AdminPort

_PATH = "/api/v1/flush"
_LOOK_SECONDS = 0.5
_PAUSE_PER_ANSWER = 5.0
"""With much pending an answer takes a while: the gateway has other things to do than to give them."""

_AGAIN_SECONDS = 3.0
"""So often what has failed is tried again at once while somebody waits for it."""

_GONE_SECONDS = 60.0
"""A background process that was killed is back by then, and goes on."""

_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    DownloadColumn(binary_units=True),
    TransferSpeedColumn(),
    TimeRemainingColumn(),
)

PrefixArgument = Annotated[
    str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="The keys that begin so; s3:// is everything.")
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Return when the origin has it; exit code 1 if it cannot.")]
TimeoutOption = Annotated[
    str | None, typer.Option("--timeout", metavar="DURATION", help="Wait no longer, such as 10m; then exit code 1.")
]


def flush(
    prefix: PrefixArgument,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Have a running gateway take to the origin what it has acknowledged under a prefix by now.

    What has failed is tried at once. Exit code 1 when something cannot get there: a conflict, or damaged bytes.
    """
    _check(prefix)
    seconds = _timeout_seconds(timeout, wait=wait)
    port = admin_port(admin_url, config)
    begun = _ask(port, prefix)
    left = _wait(port, begun, seconds, quiet=json) if wait else begun
    if json:
        print_json(left)
    else:
        _tell(begun, left, wait=wait)
    raise typer.Exit(1 if left["stuck"] or (wait and left["objects"]) else 0)


def _check(prefix: str) -> None:
    if not prefix.startswith("s3://"):
        raise typer.BadParameter("the prefix must be s3://BUCKET/PREFIX")


def _timeout_seconds(timeout: str | None, *, wait: bool) -> float | None:
    if timeout is None:
        return None
    if not wait:
        raise typer.BadParameter("--timeout needs --wait")
    try:
        return parse_duration_seconds(timeout)
    except ValueError:
        raise typer.BadParameter(f"--timeout must be {DURATION_FORM}") from None


def _ask(port: AdminPort, prefix: str, *, patience_seconds: float = 0.0) -> dict[str, Any]:
    asked = orjson.dumps({"prefix": prefix})
    return port.post(_PATH, asked, "application/json", patience_seconds=patience_seconds)


def _wait(port: AdminPort, begun: dict[str, Any], seconds: float | None, *, quiet: bool) -> dict[str, Any]:
    """What is left when nothing more can come of waiting."""
    path = f"{_PATH}?{urlencode({'prefix': begun['prefix'], 'through': begun['through']})}"
    deadline = None if seconds is None else time.monotonic() + seconds
    console, left = Console(stderr=True), begun
    again_at, pause = time.monotonic() + _AGAIN_SECONDS, _LOOK_SECONDS
    with Progress(*_COLUMNS, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("flush", total=begun["bytes"] or None)
        while True:
            done_bytes = begun["bytes"] - left["bytes"] + left["bytes_sent"]
            progress.update(task, description=_description(left), completed=max(0, done_bytes))
            if left["objects"] == left["stuck"] or (deadline is not None and time.monotonic() >= deadline):
                return left
            time.sleep(pause if deadline is None else max(0.0, min(pause, deadline - time.monotonic())))
            if left["failing"] and time.monotonic() >= again_at:
                again_at = time.monotonic() + _AGAIN_SECONDS
                _ask(port, begun["prefix"], patience_seconds=_GONE_SECONDS)
            asked_at = time.monotonic()
            left = port.get(path, patience_seconds=_GONE_SECONDS)
            pause = max(_LOOK_SECONDS, _PAUSE_PER_ANSWER * (time.monotonic() - asked_at))


def _description(left: dict[str, Any]) -> str:
    failing = f", {left['failing']} failing" if left["failing"] else ""
    return f"flush, {counted(left['objects'], 'object')} left{failing}"


def _tell(begun: dict[str, Any], left: dict[str, Any], *, wait: bool) -> None:
    for one in left["problems"]:
        failing = f"failing, {counted(one['failures'], 'time')}"
        what = one["state"] if one["state"] in ("conflict", "damaged") else failing
        reason = f": {one['reason']}" if one["reason"] else ""
        typer.echo(printable(f"s3://{one['bucket']}/{one['key']}: {what}{reason}"), err=True)
    if left["stuck"]:
        stuck = counted(left["stuck"], "object")
        typer.echo(f"{stuck} cannot get to the origin: forebay writeback list --problems", err=True)
    if not begun["objects"]:
        typer.echo(printable(f"nothing is pending under {begun['prefix']}"))
    elif not wait:
        typer.echo(f"{_amount(left)} on the way to the origin")
    elif left["objects"]:
        why = "" if left["objects"] == left["stuck"] else ": the time is over"
        typer.echo(f"{_amount(left)} not at the origin{why}")
    else:
        typer.echo(f"{_amount(begun)} at the origin")


def _amount(pending: dict[str, Any]) -> str:
    """`3 objects, 1.0 MiB, are`"""
    objects = pending["objects"]
    return f"{counted(objects, 'object')}, {size_text(pending['bytes'])}, {are(objects)}"

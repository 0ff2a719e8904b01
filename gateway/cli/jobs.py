"""`forebay warm`, `evict`, `pin`, `unpin` and `jobs`: work that the running gateway does in the background."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column, Table

from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_port, fail, print_json
from gateway.control.media_types import MANIFEST_TYPE
from gateway.control.words import size_text

if TYPE_CHECKING:
    from gateway.cli.admin_port import AdminPort

_LOOK_SECONDS = 0.5
_READ_BYTES = 1024 * 1024

_COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    DownloadColumn(binary_units=True),
    TransferSpeedColumn(),
    TimeRemainingColumn(),
)
_COLUMNS_OF_A_LISTING = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
"""How many there are is known at the end, and no bytes are moved."""

PrefixArgument = Annotated[str | None, typer.Argument(metavar="s3://BUCKET/PREFIX", help="What the job is about.")]
PinnedArgument = Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="The keys that begin so.")]
ManifestOption = Annotated[
    Path | None,
    typer.Option("--manifest", help="File with one s3://bucket/key a line, in the order in which they are wanted."),
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Show the progress until it is done; exit code 1 if not all.")]


def add_to(app: typer.Typer) -> None:
    """Give the application these commands."""
    app.command()(warm)
    app.command()(evict)
    app.command()(pin)
    app.command()(unpin)
    app.command()(jobs)


def warm(
    prefix: PrefixArgument = None,
    manifest: ManifestOption = None,
    wait: WaitOption = False,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Have a running gateway fetch what is not in its cache yet."""
    _run("warm", prefix, manifest, wait, admin_port(admin_url, config), json)


def evict(
    prefix: PrefixArgument = None,
    manifest: ManifestOption = None,
    wait: WaitOption = False,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Have a running gateway drop what is in its cache. Nothing is deleted at the origin."""
    _run("evict", prefix, manifest, wait, admin_port(admin_url, config), json)


def pin(
    prefix: PinnedArgument,
    wait: WaitOption = False,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Have a running gateway fetch what lies under a prefix, and never evict it. `forebay status` lists the pins."""
    _run("pin", prefix, None, wait, admin_port(admin_url, config), json)


def unpin(
    prefix: PinnedArgument,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Have a running gateway evict again what lies under a pinned prefix, when room is needed."""
    port = admin_port(admin_url, config)
    document = port.post("/api/v1/unpin", orjson.dumps({"prefix": prefix}), "application/json")
    if json:
        print_json(document)
    else:
        typer.echo(f"{document['prefix']} is not pinned any more")


def jobs(
    job_id: Annotated[str | None, typer.Argument(metavar="JOB", help="One job; otherwise all.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="End the job.")] = False,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show the jobs of a running gateway, or one, or end it."""
    port = admin_port(admin_url, config)
    if cancel and job_id is None:
        raise typer.BadParameter("--cancel needs a job")
    if job_id is None:
        found = port.get("/api/v1/jobs")["jobs"]
    else:
        path = f"/api/v1/jobs/{job_id}"
        found = [port.delete(path) if cancel else port.get(path)]
    if json:
        print_json({"jobs": found} if job_id is None else found[0])
    else:
        _show(found)


def _run(kind: str, prefix: str | None, manifest: Path | None, wait: bool, port: AdminPort, json: bool) -> None:
    if (prefix is None) == (manifest is None):
        raise typer.BadParameter("give either s3://BUCKET/PREFIX or --manifest FILE")
    if manifest is not None:
        job = port.post(f"/api/v1/{kind}", pieces_of(manifest), MANIFEST_TYPE)
    else:
        job = port.post(f"/api/v1/{kind}", orjson.dumps({"prefix": prefix}), "application/json")
    if wait:
        job = follow(port, job, quiet=json)
    if json:
        print_json(job)
    elif wait:
        _show([job])
    else:
        typer.echo(f"job {job['id']} is running: forebay jobs {job['id']}")
    if wait and job["state"] != "done":
        raise typer.Exit(1)


def pieces_of(path: Path) -> Iterator[bytes]:
    """A file's content, of standard input for `-`; ends the command when it cannot be read."""
    try:
        with open(0, "rb", closefd=False) if str(path) == "-" else path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                yield piece
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror}")


def follow(port: AdminPort, job: dict[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Look at a job until it has ended, with a bar on a terminal."""
    console = Console(stderr=True)
    columns = _COLUMNS_OF_A_LISTING if job["kind"] == "snapshot" else _COLUMNS
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(job["kind"], total=None)
        while True:
            _advance(progress, task, job)
            if job["state"] != "running":
                return job
            time.sleep(_LOOK_SECONDS)
            job = port.get(f"/api/v1/jobs/{job['id']}")


def _advance(progress: Progress, task: TaskID, job: dict[str, Any]) -> None:
    of = job["objects_found"] if job["found_all"] else f"{job['objects_found']}+"
    progress.update(
        task,
        description=f"{job['kind']} {job['objects_done']}/{of} objects",
        completed=job["bytes_done"],
        total=job["bytes_found"] if job["found_all"] and job["bytes_found"] else None,
    )


def _show(found: list[dict[str, Any]]) -> None:
    console = Console()
    columns = ("what", "state", "objects", "bytes", "rate", "left", "from the origin", "failed")
    table = Table(Column("job", no_wrap=True, min_width=12), *columns)
    for job in found:
        more = "" if job["found_all"] else "+"
        table.add_row(
            job["id"],
            " ".join(filter(None, (job["kind"], job["name"], job["prefix"] or "manifest"))),
            job["state"] + (" (cache is full)" if job["full"] else ""),
            f"{job['objects_done']} of {job['objects_found']}{more}",
            f"{size_text(job['bytes_done'])} of {size_text(job['bytes_found'])}{more}" if job["bytes_found"] else "-",
            "-" if job["bytes_per_second"] is None else f"{size_text(job['bytes_per_second'])}/s",
            "-" if job["seconds_left"] is None else str(timedelta(seconds=round(job["seconds_left"]))),
            size_text(job["bytes_fetched"]),
            str(job["objects_failed"]),
        )
    console.print(table)
    for job in found:
        for error in job["errors"]:
            console.print(f"{job['id']}: {error}", soft_wrap=True, highlight=False, markup=False)

"""`forebay snapshot`: data sets frozen under a name, for runs that can be repeated."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote

import orjson
import typer
from rich.console import Console
from rich.table import Column, Table

from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_port, fail, print_json
from gateway.cli.jobs import follow, pieces_of
from gateway.control.media_types import LINES_TYPE
from gateway.control.words import counted, size_text

app = typer.Typer(name="snapshot", help="Freeze data sets under a name.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The snapshot.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Though it freezes a slot: its requests fail from then on.")]

_PATH = "/api/v1/snapshots"


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="How it is to be called.")],
    prefix: Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="What it is of.")],
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Do not wait for its end: forebay jobs shows it.")] = False,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Have a running gateway list a prefix in the bucket, and keep what is there now under a name."""
    port = admin_port(admin_url, config)
    job = port.post(_PATH, orjson.dumps({"name": name, "prefix": prefix}), "application/json")
    if no_wait:
        print_json(job) if json else typer.echo(f"job {job['id']} is running: forebay jobs {job['id']}")
        return
    job = follow(port, job, quiet=json)
    if job["state"] != "done":
        fail(f"the snapshot was not made: {'; '.join(job['errors']) or job['state']}")
    _tell(port.get(_path(name)), "made", json)


@app.command("list")
def list_(config: ConfigOption = None, admin_url: AdminUrlOption = None, json: JsonOption = False) -> None:
    """Show the snapshots of a running gateway."""
    document = admin_port(admin_url, config).get(_PATH)
    if json:
        print_json(document)
    else:
        _show(document["snapshots"])


@app.command()
def diff(
    name: NameArgument,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="Another snapshot; otherwise the bucket now.")
    ] = None,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show what was added, removed and changed since, in another snapshot or in the bucket now."""
    port = admin_port(admin_url, config)
    counts: dict[str, Any] | None = None
    for line in port.lines(f"{_path(name)}/diff", {"with": other} if other is not None else {}):
        document = orjson.loads(line)
        if "error" in document:
            fail(document["error"])
        if "change" not in document:
            counts = document
        if json:
            sys.stdout.buffer.write(line + b"\n")
        elif "change" in document:
            typer.echo(f"{document['change']:8} {document['key']}")
    if counts is None:
        fail("the answer broke off: what is shown is not all")
    if not json:
        typer.echo(", ".join(f"{count} {what}" for what, count in counts.items()))


@app.command()
def delete(
    name: NameArgument,
    force: ForceOption = False,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a snapshot. Nothing is deleted in the bucket, and nothing that is cached."""
    query = "?force=true" if force else ""
    document = admin_port(admin_url, config).delete(_path(name) + query)
    print_json(document) if json else typer.echo(f"snapshot {document['name']} is deleted")


@app.command()
def export(
    name: NameArgument,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Otherwise standard output.")] = None,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
) -> None:
    """Write a snapshot as JSON lines, which `import` makes a snapshot of again, here or elsewhere."""
    port = admin_port(admin_url, config)
    with _output(file) as output:
        left: int | None = None
        for line in port.lines(f"{_path(name)}/objects", {}):
            left = orjson.loads(line)["objects"] if left is None else left - 1
            output.write(line + b"\n")
        if left != 0:
            fail("the answer broke off: not all objects have come")


@app.command("import")
def import_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="How it is to be called.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines, in any order; `-` for standard input.")],
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Make a snapshot of JSON lines, as `export` writes them."""
    port = admin_port(admin_url, config)
    _tell(port.put(_path(name), pieces_of(file), LINES_TYPE), "imported", json)


def _path(name: str) -> str:
    return f"{_PATH}/{quote(name, safe='')}"


@contextmanager
def _output(file: Path | None) -> Iterator[BinaryIO]:
    """Standard output, or a file that is there as a whole or not at all."""
    if file is None:
        yield sys.stdout.buffer
        return
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as output:
            yield output
        part.replace(file)
    except OSError as error:
        fail(f"{file} cannot be written: {error.strerror}")
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _tell(snapshot: dict[str, Any], done: str, json: bool) -> None:
    if json:
        print_json(snapshot)
        return
    typer.echo(
        f"snapshot {snapshot['name']} of {snapshot['prefix']} is {done}: {counted(snapshot['objects'], 'object')}, "
        f"{size_text(snapshot['bytes'])}, digest {snapshot['digest'][:12]}"
    )


def _show(snapshots: list[dict[str, Any]]) -> None:
    console = Console()
    table = Table(Column("snapshot", no_wrap=True), "prefix", "objects", "bytes", "listed (UTC)", "freezes")
    for one in snapshots:
        freezes = ", ".join(one["slots"]) or "-"
        if "prefix" not in one:
            table.add_row(one["name"], "-", "-", "-", "-", freezes)
            continue
        begun, ended = (datetime.fromtimestamp(one[when], UTC) for when in ("started_at", "ended_at"))
        listed = f"{begun:%Y-%m-%d %H:%M:%S} to {ended:%H:%M:%S}"
        table.add_row(one["name"], one["prefix"], f"{one['objects']:,}", size_text(one["bytes"]), listed, freezes)
    console.print(table)
    for one in snapshots:
        if one["problem"] is not None:
            console.print(
                f"{one['name']}: {one['problem']}", style="red", soft_wrap=True, highlight=False, markup=False
            )

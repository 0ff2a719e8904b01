"""`forebay snapshot`: data sets frozen under a name, for runs that can be repeated."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import orjson
import typer

from gateway.admin.formatting import counted, size_text
from gateway.api import LINES_TYPE
from gateway.cli.common import JsonOption, asks, explained, fail, print_json, printable
from gateway.cli.jobs import AllowEmptyOption, follow, pieces_of
from gateway.cli.tables import NOTHING, Column, Columns, print_table

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient
    from gateway.api import documents as to

app = typer.Typer(name="snapshot", help="Freeze data sets under a name.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The snapshot.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Delete it even though it freezes a slot, whose requests fail then.")
]


@app.command(**explained("forebay snapshot create imagenet-2026-11 s3://train/imagenet/"))
@asks
def create(
    client: AdminClient,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new snapshot.")],
    prefix: Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="The keys that it holds.")],
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Do not wait for the snapshot: forebay jobs shows the progress.")
    ] = False,
    allow_empty: AllowEmptyOption = False,
    json: JsonOption = False,
) -> None:
    """List a prefix in the bucket, and save the listing under a name."""
    job = client.create_snapshot(name, prefix, allow_empty=allow_empty)
    if no_wait:
        print_json(job.document()) if json else typer.echo(f"job {job.id} is running: forebay jobs {job.id}")
        return
    job = follow(client, job, quiet=json)
    if job.state != "done":
        fail(printable(f"the snapshot was not made: {'; '.join(job.errors) or job.state}"))
    _tell(client.snapshot(name), "made", json)


@app.command("list", **explained("forebay snapshot list"))
@asks
def list_(client: AdminClient, json: JsonOption = False) -> None:
    """Show the snapshots."""
    answer = client.snapshots()
    if json:
        print_json(answer.document())
    elif answer.snapshots:
        _show(answer.snapshots)
    else:
        typer.echo("there are no snapshots", err=True)


@app.command(**explained("forebay snapshot diff imagenet-2026-11"))
@asks
def diff(
    client: AdminClient,
    name: NameArgument,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="Another snapshot; otherwise the bucket now.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what was added, removed and changed since, in another snapshot or in the bucket now."""
    counts: dict[str, Any] | None = None
    for line in client.snapshot_differences(name, other):
        document = orjson.loads(line)
        if "error" in document:
            fail(printable(document["error"]))
        if "change" not in document:
            counts = document
        if json:
            sys.stdout.buffer.write(line + b"\n")
        elif "change" in document:
            typer.echo(f"{document['change']:8} {printable(document['key'])}")
    if counts is None:
        fail("the answer broke off: what is shown is not all")
    if not json:
        typer.echo(", ".join(f"{count} {what}" for what, count in counts.items()))


@app.command(**explained("forebay snapshot delete imagenet-2026-11"))
@asks
def delete(client: AdminClient, name: NameArgument, force: ForceOption = False, json: JsonOption = False) -> None:
    """Delete a snapshot. The bucket and the cache keep their objects."""
    answer = client.delete_snapshot(name, force=force)
    print_json(answer.document()) if json else typer.echo(f"snapshot {answer.name} is deleted")


@app.command(**explained("forebay snapshot export imagenet-2026-11 imagenet.jsonl"))
@asks
def export(
    client: AdminClient,
    name: NameArgument,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Where to write it; `-`, or nothing, for standard output.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a snapshot as JSON lines, which `import` makes a snapshot of again, here or elsewhere.

    With --json and a file it says as JSON what it wrote; without a file the lines are all that is printed.
    """
    objects, file = 0, None if file == Path("-") else file
    with _output(file) as output:
        left: int | None = None
        for line in client.snapshot_lines(name):
            objects += left is not None
            left = orjson.loads(line)["objects"] if left is None else left - 1
            output.write(line + b"\n")
        if left != 0:
            fail("the answer broke off: not all objects have come")
    if file is not None and json:
        print_json({"name": name, "file": str(file), "objects": objects})


@app.command("import", **explained("forebay snapshot import imagenet-2026-11 imagenet.jsonl"))
@asks
def import_(
    client: AdminClient,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the new snapshot.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines, in any order; `-` for standard input.")],
    json: JsonOption = False,
) -> None:
    """Make a snapshot of JSON lines, as `export` writes them."""
    _tell(client.import_snapshot(name, pieces_of(file), LINES_TYPE), "imported", json)


@contextmanager
def _output(file: Path | None) -> Iterator[BinaryIO]:
    """Open standard output, or a file that is there as a whole or not at all."""
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


def _tell(snapshot: to.SnapshotDocument, done: str, json: bool) -> None:
    if json:
        print_json(snapshot.document())
        return
    typer.echo(
        f"snapshot {snapshot.name} of {printable(snapshot.prefix or NOTHING)} is {done}: "
        f"{counted(snapshot.objects, 'object')}, {size_text(snapshot.bytes)}, digest {snapshot.digest[:12]}"
    )


_TABLE: Columns[to.SnapshotDocument] = (
    Column("snapshot", lambda one: one.name),
    Column("prefix", lambda one: printable(one.prefix) if one.prefix else NOTHING, shortened=True),
    Column("objects", lambda one: f"{one.objects:,}" if one.prefix else NOTHING, right=True),
    Column("bytes", lambda one: size_text(one.bytes) if one.prefix else NOTHING, right=True),
    Column("listed (UTC)", lambda one: _listed(one) if one.prefix else NOTHING, rank=2),
    Column("freezes", lambda one: ", ".join(one.slots) or NOTHING, rank=1),
)


def _show(snapshots: list[to.SnapshotDocument]) -> None:
    print_table(_TABLE, snapshots, lambda one: "" if one.problem is None else "red")
    for one in snapshots:
        if one.problem is not None:
            typer.echo(printable(f"{one.name}: {one.problem}"))


_TIME_MAX = 253_402_300_799
"""The last second that can be shown. Versions before took in snapshots that say later ones."""


def _listed(one: to.SnapshotDocument) -> str:
    begun, ended = (datetime.fromtimestamp(min(max(at, 0), _TIME_MAX), UTC) for at in (one.started_at, one.ended_at))
    return f"{begun:%Y-%m-%d %H:%M:%S} to {ended:%H:%M:%S}"

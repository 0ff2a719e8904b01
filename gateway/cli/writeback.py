"""`forebay writeback`: what this node has acknowledged and the origin does not have yet; `export` needs no gateway."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import orjson
import typer

from gateway.admin.formatting import age_text, are, counted, no_objects_yet_text, size_text
from gateway.cli.common import (
    ConfigOption,
    JsonOption,
    as_a_client,
    asks,
    check_url,
    explained,
    fail,
    load,
    print_json,
    printable,
)
from gateway.cli.tables import NOTHING, Column, Columns, bytes_progress, print_table, some_bytes_text
from gateway.config.defaults import OWN_NAME, is_own
from gateway.core.errors import StartupError, WritebackError
from gateway.serve.claim import kept_from_gateways

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient
    from gateway.api import documents as to

    Entry = TypeVar("Entry", to.PendingObject, to.OpenUploadDocument)
    from gateway.writeback.offline_export import Findings


app = typer.Typer(
    name="writeback", help="Look at writes that the bucket lacks, and decide about them.", no_args_is_help=True
)

_LISTED_MAX = 1000
"""More is for machines, and takes the gateway seconds."""

_WORDS = "give up"
_SHOWN_MAX = 20
_ABORTED_AT_ONCE = 20
"""Each upload may have 10,000 parts, and a request has ten seconds."""

_TO_BE_DECIDED = ("conflict", "damaged")


class ConflictDecision(StrEnum):
    """As the admin port knows them."""

    KEEP_OURS = "keep-ours"
    KEEP_THEIRS = "keep-theirs"
    DISCARD = "discard"


PrefixArgument = Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="All keys with this prefix.")]
ObjectArgument = Annotated[str, typer.Argument(metavar="s3://BUCKET/KEY", help="The object.")]
DecisionArgument = Annotated[
    ConflictDecision,
    typer.Argument(
        metavar="keep-ours|keep-theirs|discard",
        help="keep-ours: overwrite what others wrote, or send a manifest without its files. keep-theirs, discard: give "
        "up this node's write: a conflict, or one that is damaged or fails.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask before an acknowledged write is given up.")]
ProblemsOption = Annotated[bool, typer.Option("--problems", help="Only writes that do not get to the origin.")]
OptionalObjectArgument = Annotated[str | None, typer.Argument(metavar="s3://BUCKET/KEY", help="The upload's object.")]
UploadIdOption = Annotated[
    str | None, typer.Option("--upload-id", metavar="ID", help="This upload, as `list --uploads` names it.")
]
UnderOption = Annotated[bool, typer.Option("--prefix", help="All uploads of the keys that begin so.")]
AbortYesOption = Annotated[bool, typer.Option("--yes", help="Do not ask before uploads are aborted.")]
UploadsOption = Annotated[bool, typer.Option("--uploads", help="Uploads that their clients have not completed.")]


LimitOption = Annotated[
    int, typer.Option("--limit", metavar="N", min=0, help="Show at most this many; 0: all of them.")
]


@app.command("list", **explained("forebay writeback list --problems"))
@asks
def list_(
    client: AdminClient,
    prefix: PrefixArgument = "s3://",
    problems: ProblemsOption = False,
    uploads: UploadsOption = False,
    limit: LimitOption = _LISTED_MAX,
    json: JsonOption = False,
) -> None:
    """Show the writes that the gateway has acknowledged and the bucket does not have yet, a line each."""
    if problems and uploads:
        raise typer.BadParameter("give --problems or --uploads")
    check_url(prefix)
    if uploads:
        _list(client.open_uploads(prefix), limit, "open upload", _UPLOADS, json=json)
    else:
        _list_objects(client, prefix, limit, problems=problems, json=json)


def _list_objects(client: AdminClient, prefix: str, limit: int, *, problems: bool, json: bool) -> None:
    undecided = 0

    def style(one: to.PendingObject) -> str:
        nonlocal undecided
        undecided += one.state in _TO_BE_DECIDED
        return "red" if one.state in _TO_BE_DECIDED else ""

    _list(client.pending_objects(prefix, problems=problems), limit, "object", _OBJECTS, style, json=json)
    if json:
        return
    if undecided:
        typer.echo(f"{undecided:,} {are(undecided)} yours to decide: forebay writeback resolve --help", err=True)
    left = client.flush_progress(prefix, 0)
    if left.open_uploads:
        typer.echo(f"{no_objects_yet_text(left)}: --uploads shows them", err=True)


def _list(
    found: Iterator[Entry],
    limit: int,
    noun: str,
    columns: Columns[Entry],
    style: Callable[[Entry], str] = lambda _: "",
    *,
    json: bool,
) -> None:
    """Print the first of them as they come, then their sum, and whether there are more."""
    count = size_bytes = 0

    def counting() -> Iterator[Entry]:
        nonlocal count, size_bytes
        for one in islice(found, limit or None):
            count, size_bytes = count + 1, size_bytes + one.bytes
            yield one

    if json:
        for one in counting():
            sys.stdout.buffer.write(orjson.dumps(one.document()) + b"\n")
    else:
        print_table(columns, counting(), style)
        typer.echo(f"{counted(count, noun)}, {size_text(size_bytes)}", err=True)
    if next(found, None) is not None:
        typer.echo("there are more: --limit 0 shows them all", err=True)


@app.command(**explained("forebay writeback resolve s3://checkpoints/run/step-100/model.pt keep-ours"))
@asks
def resolve(
    client: AdminClient,
    name: ObjectArgument,
    decision: DecisionArgument,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Decide about a write that does not get to the bucket by itself.

    keep-ours overwrites exactly what the origin has at this moment: what others write later is a conflict again. A
    manifest that waits for files is sent without them.
    """
    check_url(name)
    sequence = _confirmed(client, name) if decision is not ConflictDecision.KEEP_OURS and not yes else None
    answer = client.resolve(name, decision.value, sequence)
    if json:
        print_json(answer.document())
    elif decision is ConflictDecision.KEEP_OURS:
        found = answer.etag_at_origin
        typer.echo(
            f"{printable(name)} is on its way to the origin, in place of {'nothing' if found is None else found}"
        )
    else:
        typer.echo(f"{printable(name)}: what this node had acknowledged is given up")


@app.command(**explained("forebay writeback abort s3://checkpoints/run/ --prefix"))
@asks
def abort(
    client: AdminClient,
    name: OptionalObjectArgument = None,
    upload_id: UploadIdOption = None,
    under: UnderOption = False,
    yes: AbortYesOption = False,
    json: JsonOption = False,
) -> None:
    """Abort multipart uploads that their clients have not completed. The buffer gets their room back.

    A client that goes on with one is answered NoSuchUpload. Exit code 1 when no such upload is open.
    """
    if name is None and (upload_id is None or under):
        raise typer.BadParameter("give s3://BUCKET/KEY or --upload-id")
    if name is not None:
        check_url(name)
    if name is None:
        upload_ids = [upload_id or ""]
    else:
        found = _open_uploads(client, name, upload_id, under=under)
        if upload_id is None and not yes:
            _confirm_abort(found)
        upload_ids = [one.upload_id for one in found]
    ended: dict[str, list[str]] = {"aborted": [], "not_open": []}
    for first in range(0, len(upload_ids), _ABORTED_AT_ONCE):
        answer = client.abort_uploads(upload_ids[first : first + _ABORTED_AT_ONCE])
        ended = {"aborted": ended["aborted"] + answer.aborted, "not_open": ended["not_open"] + answer.not_open}
    if json:
        print_json(ended)
    elif ended["aborted"]:
        typer.echo(f"{counted(len(ended['aborted']), 'upload')} aborted")
    if not ended["aborted"]:
        fail(f"no such upload is open: {printable(name or upload_id or '')}")


def _open_uploads(client: AdminClient, name: str, upload_id: str | None, *, under: bool) -> list[to.OpenUploadDocument]:
    """Return the open uploads of one key, or of all under a prefix."""
    return [
        one for one in client.open_uploads(name) if (under or one.url == name) and upload_id in (None, one.upload_id)
    ]


def _confirm_abort(uploads: list[to.OpenUploadDocument]) -> None:
    """Ask a user at a terminal, who sees the uploads, to agree."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("it gives up parts that clients have sent: --yes is needed where nobody can be asked")
    if not uploads:
        return
    print_table(_UPLOADS, uploads[:_SHOWN_MAX])
    if len(uploads) > _SHOWN_MAX:
        typer.echo(f"and {len(uploads) - _SHOWN_MAX:,} more")
    size_bytes = sum(one.bytes for one in uploads)
    _agree(f'{counted(len(uploads), "open upload")}, {size_text(size_bytes)}. Type "{_WORDS}" to give up their parts')


def _confirmed(client: AdminClient, name: str) -> int | None:
    """Return the number of the object that a user at a terminal agrees to give up."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("it gives up what only this node has: --yes is needed where nobody can be asked")
    one = next((one for one in client.pending_objects(name) if one.url == name), None)
    if one is None:
        fail(f"nothing is pending under {printable(name)}")
    print_table(_OBJECTS, [one])
    _agree(f'Only this node has these bytes. Type "{_WORDS}" to give them up')
    return one.sequence


def _agree(question: str) -> None:
    if typer.prompt(question, default="", show_default=False) != _WORDS:
        raise typer.Abort


_OBJECTS: Columns[to.PendingObject] = (
    Column("state", lambda one: one.state),
    Column("age", lambda one: age_text(one.acknowledged_at), right=True, rank=1),
    Column("size", lambda one: "deletion" if one.deleted else size_text(one.bytes), right=True),
    Column("sent", lambda one: some_bytes_text(one.bytes_sent), right=True, rank=2),
    Column("failures", lambda one: f"{one.failures:,}" if one.failures else NOTHING, right=True, rank=3),
    Column("object", lambda one: printable(one.url), shortened=True),
    Column("reason", lambda one: printable(one.reason or NOTHING), shortened=True, rank=4),
)
_UPLOADS: Columns[to.OpenUploadDocument] = (
    Column("age", lambda one: age_text(one.initiated_at), right=True),
    Column("last part", lambda one: age_text(one.touched_at), right=True, rank=2),
    Column("parts", lambda one: f"{one.parts:,}", right=True, rank=1),
    Column("size", lambda one: size_text(one.bytes), right=True),
    Column("object", lambda one: printable(one.url), shortened=True),
    Column("upload id", lambda one: one.upload_id, shortened=True, rank=3),
)


TargetArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Where to copy to; made if missing.")]
DirectoryOption = Annotated[
    Path | None, typer.Option("--directory", metavar="CACHE_DIR", help="cache.directory, or a copy of it.")
]
RunningOption = Annotated[
    bool,
    typer.Option(
        "--while-running", help="Export although a gateway is running; what it flushes meanwhile is left out."
    ),
]


@app.command(**explained("forebay writeback export /mnt/rescue --directory /var/lib/forebay"))
def export(
    target: TargetArgument,
    directory: DirectoryOption = None,
    while_running: RunningOption = False,
    config: ConfigOption = None,
    json: JsonOption = False,
) -> None:
    """Copy everything that the bucket does not have out of a cache directory. No gateway is needed.

    Exit code 1 when something could not be copied; everything else is copied all the same.
    """
    from gateway.writeback.offline_export import buffer_of, export

    if directory is not None and not is_own(directory) and is_own(directory / OWN_NAME):
        directory /= OWN_NAME
    cache = directory or load(config, as_a_client(os.environ)).settings.cache.directory
    try:
        with kept_from_gateways(cache) as is_free, _Bar(quiet=json) as bar:
            if not is_free and not while_running:
                fail(f"a gateway is at work in {cache}: stop it first, or give --while-running")
            found = export(buffer_of(cache), target, bar, running=not is_free)
    except (StartupError, WritebackError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"the export has stopped: {error}; run again, it goes on where it was")
    if json:
        print_json(found.document() | {"directory": str(target)})
    else:
        _tell(found, target)
    raise typer.Exit(0 if found.whole else 1)


def _tell(found: Findings, target: Path) -> None:
    typer.echo(
        f"{counted(found.objects, 'object')}, {size_text(found.size_bytes)}, {are(found.objects)} in {target}; "
        f"{counted(found.tombstones, 'deletion')} and {counted(found.uploads, 'open upload')} are named in its manifest"
    )
    if found.damaged:
        damaged = f"{counted(found.damaged, 'object')} {are(found.damaged)} damaged and not exported"
        typer.echo(f"{damaged}: the manifest names what", err=True)
    for warning in found.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if found.warnings and found.unnamed_files:
        typer.echo(
            f"{found.unnamed_files} staged files are named by nothing that can be read in the journal: they may hold "
            "what it has lost",
            err=True,
        )


class _Bar:
    """The progress of an export, on a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._progress = bytes_progress(quiet=quiet)
        self._task = self._progress.add_task("export", total=None)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, objects: int, size_bytes: int) -> None:
        self._progress.update(self._task, description=f"export of {objects} objects", total=size_bytes)

    def advance(self, size_bytes: int) -> None:
        self._progress.advance(self._task, size_bytes)

    def damaged(self, name: str, reason: str) -> None:
        with suppress(OSError):  # a user who does not read the message wants the bytes all the same
            typer.echo(f"forebay: {name}: {reason}", err=True)

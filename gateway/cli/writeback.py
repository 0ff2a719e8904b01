"""`forebay writeback`: what this node has acknowledged and the origin does not have yet."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlencode

import orjson
import typer

from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_port, fail, print_json, printable
from gateway.cli.export import export
from gateway.control.words import age_text, are, counted, no_objects_yet_text, size_text

if TYPE_CHECKING:
    from gateway.cli.admin_port import AdminPort

app = typer.Typer(name="writeback", help="See to what the origin does not have yet.", no_args_is_help=True)

_PATH = "/api/v1/writeback"
_PAGE = 1000
_LISTED_MAX = 1000
"""More is for machines, and takes the gateway seconds."""

_WORDS = "give up"
_SHOWN_MAX = 20
_ABORTED_AT_ONCE = 20
"""Each upload may have 10,000 parts, and a request has ten seconds."""

_TO_BE_DECIDED = ("conflict", "damaged")


class Decision(StrEnum):
    """As the admin port knows them."""

    KEEP_OURS = "keep-ours"
    KEEP_THEIRS = "keep-theirs"
    DISCARD = "discard"


PrefixArgument = Annotated[str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="The keys that begin so.")]
ObjectArgument = Annotated[str, typer.Argument(metavar="s3://BUCKET/KEY", help="The object.")]
DecisionArgument = Annotated[
    Decision,
    typer.Argument(
        metavar="keep-ours|keep-theirs|discard",
        help="Overwrite what others wrote, or send a manifest without its files; or give this node's write up: a "
        "conflict, or what is damaged or fails.",
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask before an acknowledged write is given up.")]
ProblemsOption = Annotated[bool, typer.Option("--problems", help="Only what does not get to the origin.")]
OptionalObjectArgument = Annotated[str | None, typer.Argument(metavar="s3://BUCKET/KEY", help="The upload's object.")]
UploadIdOption = Annotated[
    str | None, typer.Option("--upload-id", metavar="ID", help="This upload, as `list --uploads` names it.")
]
UnderOption = Annotated[bool, typer.Option("--prefix", help="All uploads of the keys that begin so.")]
AbortYesOption = Annotated[bool, typer.Option("--yes", help="Do not ask before uploads are aborted.")]
UploadsOption = Annotated[bool, typer.Option("--uploads", help="Uploads that their clients have not completed.")]


LimitOption = Annotated[
    int, typer.Option("--limit", metavar="N", min=0, help="Show no more than so many; 0: all of them.")
]


@app.command("list")
def list_(
    prefix: PrefixArgument = "s3://",
    problems: ProblemsOption = False,
    uploads: UploadsOption = False,
    limit: LimitOption = _LISTED_MAX,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show what a running gateway has acknowledged and the origin does not have yet: a line, or JSON line, each."""
    if problems and uploads:
        raise typer.BadParameter("give --problems or --uploads")
    _check(prefix)
    port = admin_port(admin_url, config)
    asked = {"prefix": prefix} | ({"problems": "true"} if problems else {})
    what, noun, line = ("uploads", "open upload", _upload_line) if uploads else ("objects", "object", _object_line)
    found = _pages(port, what, asked)
    count = size_bytes = undecided = 0
    for one in islice(found, limit or None):
        if not json and not count:
            typer.echo(_UPLOADS_HEAD if uploads else _OBJECTS_HEAD)
        count, size_bytes = count + 1, size_bytes + one["bytes"]
        undecided += one.get("state") in _TO_BE_DECIDED
        if json:
            sys.stdout.buffer.write(orjson.dumps(one) + b"\n")
        else:
            typer.echo(line(one))
    if not json:
        typer.echo(f"{counted(count, noun)}, {size_text(size_bytes)}", err=True)
        if undecided:
            typer.echo(f"{undecided:,} {are(undecided)} yours to decide: forebay writeback resolve --help", err=True)
    if next(found, None) is not None:
        typer.echo("there are more: --limit 0 shows them all", err=True)
    if not json and not uploads:
        left = port.get(f"/api/v1/flush?{urlencode({'prefix': prefix, 'through': '0'})}")
        if left["open_uploads"]:
            typer.echo(f"{no_objects_yet_text(left)}: --uploads shows them", err=True)


@app.command()
def resolve(
    name: ObjectArgument,
    decision: DecisionArgument,
    yes: YesOption = False,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Decide what is to become of an object that does not get to the origin by itself.

    keep-ours overwrites exactly what the origin has at this moment: what others write later is a conflict again. Of a
    manifest that waits for files it says that none is to be waited for.
    """
    _check(name)
    port = admin_port(admin_url, config)
    asked: dict[str, Any] = {"object": name, "decision": decision.value}
    if decision is not Decision.KEEP_OURS and not yes:
        asked["sequence"] = _confirmed(port, name)
    answer = port.post(f"{_PATH}/resolve", orjson.dumps(asked), "application/json")
    if json:
        print_json(answer)
    elif decision is Decision.KEEP_OURS:
        found = answer["etag_at_origin"]
        typer.echo(
            f"{printable(name)} is on its way to the origin, in place of {'nothing' if found is None else found}"
        )
    else:
        typer.echo(f"{printable(name)}: what this node had acknowledged is given up")


@app.command()
def abort(
    name: OptionalObjectArgument = None,
    upload_id: UploadIdOption = None,
    under: UnderOption = False,
    yes: AbortYesOption = False,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Abort multipart uploads that their clients have not completed, here and at the origin: the buffer has their room.

    A client that goes on with one is answered NoSuchUpload. Exit code 1 when no such upload is open.
    """
    if name is None and (upload_id is None or under):
        raise typer.BadParameter("give s3://BUCKET/KEY or --upload-id")
    if name is not None:
        _check(name)
    port = admin_port(admin_url, config)
    if name is None:
        upload_ids = [upload_id or ""]
    else:
        found = _open_uploads(port, name, upload_id, under=under)
        if upload_id is None and not yes:
            _confirm_abort(found)
        upload_ids = [one["upload_id"] for one in found]
    ended: dict[str, list[str]] = {"aborted": [], "not_open": []}
    for first in range(0, len(upload_ids), _ABORTED_AT_ONCE):
        asked = orjson.dumps({"upload_ids": upload_ids[first : first + _ABORTED_AT_ONCE]})
        answer = port.post(f"{_PATH}/abort", asked, "application/json")
        ended = {what: ended[what] + answer[what] for what in ended}
    if json:
        print_json(ended)
    elif ended["aborted"]:
        typer.echo(f"{counted(len(ended['aborted']), 'upload')} aborted")
    if not ended["aborted"]:
        fail(f"no such upload is open: {printable(name or upload_id or '')}")


app.command()(export)


def _open_uploads(port: AdminPort, name: str, upload_id: str | None, *, under: bool) -> list[dict[str, Any]]:
    """The open uploads that are meant, those of one key or of all under a prefix."""
    return [
        one
        for one in _pages(port, "uploads", {"prefix": name})
        if (under or _name(one) == name) and upload_id in (None, one["upload_id"])
    ]


def _confirm_abort(uploads: list[dict[str, Any]]) -> None:
    """Have somebody at a terminal agree, who sees them."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("it gives up parts that clients have sent: --yes is needed where nobody can be asked")
    if not uploads:
        return
    for one in uploads[:_SHOWN_MAX]:
        typer.echo(_upload_line(one))
    if len(uploads) > _SHOWN_MAX:
        typer.echo(f"and {len(uploads) - _SHOWN_MAX:,} more")
    size_bytes = sum(one["bytes"] for one in uploads)
    _agree(f'{counted(len(uploads), "open upload")}, {size_text(size_bytes)}. Type "{_WORDS}" to give up their parts')


def _check(name: str) -> None:
    if not name.startswith("s3://"):
        raise typer.BadParameter(f"{printable(name)} does not begin with s3://")


def _pages(port: AdminPort, what: str, asked: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Every object or upload, read page by page."""
    after = None
    while True:
        query = asked | {"limit": str(_PAGE)} | ({"after": after} if after is not None else {})
        page = port.get(f"{_PATH}/{what}?{urlencode(query)}")
        yield from page[what]
        after = page["next"]
        if after is None:
            return


def _confirmed(port: AdminPort, name: str) -> int:
    """The number of the object that somebody at a terminal agrees to give up."""
    if not sys.stdin.isatty():
        raise typer.BadParameter("it gives up what only this node has: --yes is needed where nobody can be asked")
    one = next((one for one in _pages(port, "objects", {"prefix": name}) if _name(one) == name), None)
    if one is None:
        fail(f"nothing is pending under {printable(name)}")
    typer.echo(_object_line(one))
    question = f'Only this node has these bytes. Type "{_WORDS}" to give them up'
    _agree(question)
    sequence: int = one["sequence"]
    return sequence


def _agree(question: str) -> None:
    if typer.prompt(question, default="", show_default=False) != _WORDS:
        raise typer.Abort


def _name(one: dict[str, Any]) -> str:
    return f"s3://{one['bucket']}/{one['key']}"


_OBJECTS_HEAD = f"{'state':8} {'age':>10} {'size':>10} {'sent':>10} {'failures':>8}  object"
_UPLOADS_HEAD = f"{'age':>10} {'last part':>10} {'parts':>7} {'size':>10}  object and upload id"


def _object_line(one: dict[str, Any]) -> str:
    """`conflict    0:12:05    1.0 MiB        0 B        2  s3://bucket/key  AccessDenied`"""
    size = "deletion" if one["deleted"] else size_text(one["bytes"])
    figures = f"{age_text(one['acknowledged_at']):>10} {size:>10} {size_text(one['bytes_sent']):>10}"
    reason = f"  {one['reason']}" if one["reason"] else ""
    return f"{one['state']:8} {figures} {one['failures']:>8,}  {printable(_name(one) + reason)}"


def _upload_line(one: dict[str, Any]) -> str:
    ages = f"{age_text(one['initiated_at']):>10} {age_text(one['touched_at']):>10}"
    return f"{ages} {one['parts']:>7,} {size_text(one['bytes']):>10}  {printable(_name(one))} {one['upload_id']}"

"""`forebay checkpoints`: which checkpoints a running gateway knows, and how far each has got."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from gateway.admin.formatting import counted, size_text
from gateway.cli.common import JsonOption, asks, check_url, printable
from gateway.cli.tables import NOTHING, fitted, folded, terminal_width

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient
    from gateway.api import documents as to

_LISTED_MAX = 1000
_RANKS_SHOWN_MAX = 10
_UNGROUPED_MAX = 1000
"""The gateway counts up to this."""
_DAY_SECONDS = 86_400 - 0.5

PrefixArgument = Annotated[
    str, typer.Argument(metavar="s3://BUCKET/PREFIX", help="Checkpoints whose names have this prefix; s3:// is all.")
]
StateOption = Annotated[
    str | None,
    typer.Option("--state", metavar="STATE", help="Only those in this state, or in one of several: failed,conflict."),
]
ClusterOption = Annotated[
    bool, typer.Option("--cluster", help="One table over all nodes: a save may have come through several.")
]
LimitOption = Annotated[
    int, typer.Option("--limit", metavar="N", min=0, help="Show at most this many; 0: all of them.")
]


@asks
def checkpoints(
    client: AdminClient,
    prefix: PrefixArgument = "s3://",
    state: StateOption = None,
    limit: LimitOption = _LISTED_MAX,
    cluster: ClusterOption = False,
    json: JsonOption = False,
) -> None:
    """Show the checkpoints of a running gateway: state, files, size, ranks, time of the save, how much the origin has.

    left: how long the rest will take to reach the origin. exposed: how long something has been on this node only.
    With --cluster, a checkpoint is what all nodes have of it; exit code 1 if a node could not be asked.
    """
    check_url(prefix)
    unanswered = dict[str, str]()
    found = _of_all_nodes(client, prefix, state, unanswered) if cluster else client.checkpoints(prefix, state)
    count, shown = 0, _shown(terminal_width())
    for one in islice(found, limit or None):
        if json:
            sys.stdout.buffer.write(orjson.dumps(one.document()) + b"\n")
            continue
        if not count:
            typer.echo(_line({name: name for name in shown}, shown))
        count += 1
        for line in _lines(one, shown):
            typer.echo(line)
    if not json:
        typer.echo(counted(count, "checkpoint"), err=True)
        if not count and state is None and not cluster:
            typer.echo(printable(_why_none(client, prefix)), err=True)
    if next(found, None) is not None:
        typer.echo("there are more: --limit 0 shows them all", err=True)
    for node, problem in sorted(unanswered.items()):
        typer.echo(printable(f"without what {node} has: {problem}"), err=True)
    if unanswered:
        raise typer.Exit(1)


def _of_all_nodes(
    client: AdminClient, prefix: str, state: str | None, unanswered: dict[str, str]
) -> Iterator[to.Checkpoint]:
    for page in client.cluster_checkpoints(prefix, state):
        unanswered |= {f"{one.node} ({one.address})": one.problem for one in page.unanswered}
        yield from page.checkpoints


def _why_none(client: AdminClient, prefix: str) -> str:
    """Return why no checkpoint was found, and what to do about it."""
    from gateway.api.documents import CheckpointsDocument
    from gateway.writeback.checkpoints.layouts import LAYOUTS

    page = client.get("/api/v1/checkpoints", CheckpointsDocument, {"prefix": prefix, "limit": "1"})
    found = page.ungrouped
    if page.checkpoints:
        return "one has just begun"
    if found is None:
        return (
            f'nothing under {prefix} has come through this gateway of late in a slot with write = "back": it shows '
            "what was saved through it (docs/checkpoints.md)"
        )
    more = " or more" if found.objects >= _UNGROUPED_MAX else ""
    belong = "belongs" if found.objects == 1 and not more else "belong"
    slot = f" of slot {found.slot}" if found.slot is not None else ""
    return (
        f"{counted(found.objects, 'object')}{more} under {prefix} {belong} to no checkpoint, such as {found.first}: "
        f"no known layout ({', '.join(LAYOUTS)}) and no pattern in `checkpoints`{slot} fits. Add a pattern to the "
        'slot, such as checkpoints = ["built-in", "runs/*/save-{step}/"]; it holds for what is saved from then on '
        "(docs/checkpoints.md#patterns-of-a-slot)"
    )


_WIDTHS = {"state": -22, "files": 6, "size": 10, "ranks": 5, "save": 7, "flushed": 7, "left": 7, "exposed": 7}
"""Widths of columns; below 0: aligned to the left."""

_LEAVE_FIRST = ("ranks", "save", "files", "exposed", "left", "size")


def _shown(width: int | None) -> list[str]:
    """Return the columns that a terminal has room for."""
    shown = list(_WIDTHS)
    for name in _LEAVE_FIRST:
        if width is None or len(_line({}, shown)) <= width:
            break
        shown.remove(name)
    return shown


def _line(cells: dict[str, str], shown: Sequence[str]) -> str:
    widths = {name: _WIDTHS[name] for name in shown}
    return "  " + " ".join(
        f"{cells.get(name, ''):{'<' if wide < 0 else '>'}{abs(wide)}}" for name, wide in widths.items()
    )


def _lines(one: to.Checkpoint, shown: Sequence[str]) -> Iterator[str]:
    """Give the name a line of its own, so that the rest fits into 80 columns."""
    yield fitted(printable(one.url))
    whole_bytes = one.bytes or int(one.state != "durable")
    cells = {
        "state": one.state,
        "files": str(one.files),
        "size": size_text(one.bytes),
        "ranks": str(one.ranks or NOTHING),
        "save": _time(one.save_seconds),
        "flushed": share_text(one.bytes_flushed, whole_bytes),
        "left": _time(one.flush_seconds_left),
        "exposed": _time(one.exposed_seconds),
    }
    yield _line(cells, shown)
    if (width := terminal_width()) is not None:
        yield from folded(
            [f"{name}: {cells[name]}" for name in cells if name not in shown and cells[name] != NOTHING], width
        )
    if one.nodes:
        yield f"  nodes: {printable(_some(one.nodes))}"
    missing = _missing(one.missing)
    if missing:
        yield f"  missing: {printable(missing)}"
    if (restore := one.restore) is not None:
        yield f"  {printable(_restored(restore))}"
    if one.bytes_local:
        yield f"  not durable: {size_text(one.bytes_local)} on this node only, and not to be sent"
    if one.kept_reason:
        yield f"  not kept in the cache: {printable(one.kept_reason)}"
    if one.reason:
        yield f"  {printable(one.reason)}"


def _missing(missing: to.MissingDocument) -> str:
    ranks, objects, uploads = missing.ranks, missing.objects, missing.open_uploads
    said = []
    if ranks:
        said.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {_some(list(map(str, ranks)))}")
    if objects:
        said.append(_some([one.rpartition("/")[2] for one in objects]))
    if uploads:
        said.append(counted(uploads, "open upload"))
    return "; ".join(said)


def _restored(restore: to.Restore) -> str:
    """`stalled restore: 89% of 8 files, within 12.5 s; behind of rank 3: __3_0.distcp 12%`."""
    state, share = restore.state, share_text(restore.bytes_read, restore.bytes)
    name = {"reading": "restore under way", "stalled": "stalled restore", "over": "restored"}[state]
    files, seconds = counted(restore.files, "file"), restore.last_at - restore.began_at
    said = f"{name}: {share} of {files}, within {_time(seconds)}"
    behind = restore.behind.objects
    if state == "over" or not behind:
        return said
    shown = [f"{one.key.rpartition('/')[2]} {share_text(one.bytes_read, one.bytes)}" for one in behind]
    hidden = restore.files_behind - len(shown)
    ranks = restore.behind.ranks
    of_ranks = f" of {'rank' if len(ranks) == 1 else 'ranks'} {_some(list(map(str, ranks)))}" if ranks else ""
    return f"{said}; behind{of_ranks}: {_some(shown, hidden)}"


def share_text(part: int, whole: int) -> str:
    """Not 100% before the last byte is there."""
    return "100%" if part >= whole else f"{min(part / whole, 0.99):.0%}"


def _some(names: Sequence[str], hidden: int = 0) -> str:
    """Return the first of them; `hidden` are not named at all."""
    more_count = max(0, len(names) - _RANKS_SHOWN_MAX) + hidden
    more = f" and {more_count} more" if more_count else ""
    return ", ".join(names[:_RANKS_SHOWN_MAX]) + more


def _time(seconds: float | None) -> str:
    """`0.8 s`, `0:12:05`, `4.2 d`; `-` for none."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return str(timedelta(seconds=round(seconds))) if seconds < _DAY_SECONDS else f"{seconds / _DAY_SECONDS:.1f} d"

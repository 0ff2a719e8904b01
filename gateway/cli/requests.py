"""`forebay requests`: recent requests that were slow, failed or were refused, and failures of the origin."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.admin.formatting import size_text
from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_client, print_json, printable
from gateway.cli.tables import NOTHING, Column, Row, print_table

if TYPE_CHECKING:
    from gateway.api import documents as to

_COLUMNS = (
    Column("at", rank=3),
    Column("took", right=True),
    Column("operation"),
    Column("object", shortened=True),
    Column("status"),
    Column("cache", rank=2),
    Column("sent", right=True, rank=4),
    Column("received", right=True, rank=6),
    Column("caller", shortened=True, rank=5),
    Column("request id", rank=1),
)
_OF_ORIGIN = (
    Column("at", rank=1),
    Column("took", right=True),
    Column("method"),
    Column("object", shortened=True),
    Column("status"),
    Column("purpose", rank=2),
    Column("slot", rank=3),
)

LimitOption = Annotated[
    int, typer.Option("--limit", metavar="N", min=1, max=1000, help="Show so many of each kind at most.")
]


def requests(
    limit: LimitOption = 20, config: ConfigOption = None, admin_url: AdminUrlOption = None, json: JsonOption = False
) -> None:
    """Show recent requests: the slowest of five minutes, the last that failed or were refused, failures of the origin.

    404, 412 and 416 are no refusals: clients ask for these on purpose.
    """
    answer = admin_client(admin_url, config).requests(limit)
    if json:
        print_json(answer.document())
        return
    parts = [
        ("slowest of the last five minutes", _COLUMNS, _rows(answer.slowest)),
        ("failed, the latest first", _COLUMNS, _rows(answer.errors)),
        ("refused, the latest first", _COLUMNS, _rows(answer.refusals)),
        ("the origin failed, the latest first", _OF_ORIGIN, [Row(_of_origin(one)) for one in answer.origin_failures]),
    ]
    parts = [one for one in parts if one[2]]
    if not parts:
        typer.echo("no request in the last minutes", err=True)
    for number, (title, columns, rows) in enumerate(parts):
        typer.echo(("\n" if number else "") + f"{title}:")
        print_table(columns, rows)


def _rows(found: Sequence[to.RecentRequest]) -> list[Row]:
    return [Row(_cells(one), "red" if one.is_error else "") for one in found]


def _cells(one: to.RecentRequest) -> list[str]:
    return [
        time.strftime("%H:%M:%S", time.localtime(one.at)),
        seconds_text(one.seconds),
        one.operation,
        printable(one.url),
        one.status if one.error is None else f"{one.status} {printable(one.error)}",
        NOTHING if one.cache is None else one.cache if one.reason is None else f"{one.cache}; {one.reason}",
        size_text(one.sent_bytes),
        size_text(one.received_bytes),
        printable(one.caller),
        one.request_id,
    ]


def _of_origin(one: to.OriginFailure) -> list[str]:
    return [
        time.strftime("%H:%M:%S", time.localtime(one.at)),
        seconds_text(one.seconds),
        one.method,
        printable(one.url),
        one.status,
        one.purpose,
        printable(one.slot),
    ]


def seconds_text(seconds: float) -> str:
    """`0.4 ms`, `12 ms`, `1.53 s`, `0:02:05`."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"

"""`forebay cluster`: the nodes that read from each other."""

from __future__ import annotations

import sys
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.admin.formatting import age_text, cluster_text, counted, differing_blocks_texts, size_text
from gateway.cli.common import JsonOption, asks, explained, print_json, printable
from gateway.cli.looks import seconds_text
from gateway.cli.tables import NOTHING, Column, Columns, print_table, print_text

if TYPE_CHECKING:
    from gateway.admin.client import AdminClient
    from gateway.api import documents as to

app = typer.Typer(name="cluster", help="Show the nodes that read from each other.", no_args_is_help=True)

NodeArgument = Annotated[str, typer.Argument(help="Its name, as `forebay cluster status` shows it.", metavar="NODE")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

_MEMBERS: Columns[to.ClusterMember] = (
    Column("node", lambda one: printable(one.name) or NOTHING, shortened=True),
    Column("address", lambda one: one.address),
    Column("zone", lambda one: printable(one.zone) or NOTHING, rank=4),
    Column("weight", lambda one: f"{one.weight:,}", right=True, rank=5),
    Column("share", lambda one: f"{one.share:.2%}", right=True),
    Column("state", lambda one: one.state),
    Column("given", lambda one: _bytes(one, one.sent_bytes), right=True, rank=5),
    Column("taken", lambda one: _bytes(one, one.received_bytes), right=True, rank=5),
    Column("version", lambda one: printable(one.version or NOTHING), rank=3),
    Column("member for", lambda one: _seconds(one.age_seconds), right=True, rank=2),
    Column("clock", lambda one: _clock(one.clock_seconds), right=True, rank=6),
    Column("problem", lambda one: printable(one.problem or ""), rank=1),
)


@app.callback()
def _commands() -> None:
    """Show the nodes that read from each other."""


@app.command(**explained("forebay cluster status", "forebay cluster status --json | jq '.members[].state'"))
@asks
def status(client: AdminClient, json: JsonOption = False) -> None:
    """Show the members of the cluster as this node knows them: share of the blocks, state, traffic, version, clock."""
    answer = client.cluster()
    if json:
        print_json(answer.document())
        return
    zone = f", zone {printable(answer.zone)}" if answer.zone else ""
    print_text(f"{printable(cluster_text(answer))}; this node is {printable(answer.node)} at {answer.address}{zone}")
    print_text(f"gave {size_text(answer.sent_bytes)} to others, took {size_text(answer.received_bytes)} from them")
    if (redis := answer.redis) is not None:
        version = f"Redis {printable(redis.version)}" if redis.version else "Redis"
        if redis.believed:
            print_text(f"{version}: believed for {age_text(redis.since)}")
        else:
            print_text(f"{version}: not believed: {printable(redis.problem or '')}", "yellow")
    if not any(one.this_node for one in answer.members):
        print_text("this node is not among the members: it asks them, and looks after no blocks", "yellow")
    for text in chain.from_iterable(map(differing_blocks_texts, answer.members)):
        print_text(printable(text), "yellow")
    print_table(_MEMBERS, answer.members, lambda one: "" if one.state == "up" else "red")


@app.command(**explained("forebay cluster forget gpu-017", "forebay cluster forget gpu-017 --yes"))
@asks
def forget(client: AdminClient, node: NodeArgument, yes: YesOption = False, json: JsonOption = False) -> None:
    """Give up a node that does not come back, and the writes that only it has. The others then wait for it no longer.

    If it comes back all the same, it tells Redis again what it has pending.
    """
    found = client.forget_node(node, only_ask=True)
    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("it gives up what only that node has: --yes is needed where nobody can be asked")
        keys = counted(found.pending, "key")
        if not typer.confirm(f"{printable(node)} alone has the last version of {keys}. Give it up?"):
            raise typer.Abort
    found = client.forget_node(node, only_ask=False)
    if json:
        print_json(found.document())
    else:
        print_text(f"{printable(node)} is forgotten, with {counted(found.pending, 'pending key')}")


def _seconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else seconds_text(seconds)


def _bytes(member: to.ClusterMember, size_bytes: int) -> str:
    return NOTHING if member.this_node else size_text(size_bytes)


def _clock(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds:+.1f} s"

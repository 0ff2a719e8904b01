"""`forebay writeback`: what this node has acknowledged and the origin does not have yet."""

from __future__ import annotations

import typer

from gateway.cli.export import export

app = typer.Typer(name="writeback", help="See to what the origin does not have yet.", no_args_is_help=True)
app.command()(export)

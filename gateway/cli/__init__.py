"""The `forebay` command."""

from gateway.cli.commands import app, main

__all__ = ["app", "main"]

"""The `forebay` command."""

import sys

from gateway.cli import inherited

if sys.argv[1:2] == ["serve"]:
    inherited.put_in_order()

from gateway.cli.commands import app, main

__all__ = ["app", "main"]

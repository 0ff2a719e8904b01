"""`forebay init`: a first configuration, from five answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.common import JsonOption, as_a_client, fail, print_json, printable, report_problems
from gateway.config.loading import load_settings
from gateway.config.problems import SettingsError

_QUESTIONS = (
    "Endpoint of the buckets, such as https://s3.example.com (empty: AWS)",
    "Directory on a local SSD for the cache, of its own",
    "Room for cached objects, such as 1TiB (empty: half of what is free)",
    "Prefix that jobs only read, such as s3://train/data/ (empty: none)",
    "Prefix of checkpoints to acknowledge from this disk, which must outlive a restart (empty: none)",
)
_DIRECTORY = "~/.cache/forebay"
_HEAD = """\
# Forebay on this node. Settings that are not here have defaults: docs/configuration.md.
# The key for the buckets comes from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the machine's role.
[origin]
{0}endpoint_url = {1}    # where the buckets are; left out: AWS, or what AWS_ENDPOINT_URL_S3 names

[cache]
directory = {2}    # on a local disk; only this gateway uses it
{3}capacity = {4}    # for cached objects; left out: half of what is free. Acknowledged checkpoints come on top
persistent = {5}    # true: the directory outlives a restart of machine and pod, as write = "back" needs
"""
_DATA = """
[[slots]]
name = "data"
prefix = {0}
mode = "read-only"
consistency = "ttl"    # "immutable" is faster, if objects under this prefix never change
metadata_ttl = "60s"    # jobs see what others change in the bucket after this time
"""
_CHECKPOINTS = """
[[slots]]
name = "checkpoints"
prefix = {0}
write = "back"    # acknowledged when synced to this disk, sent to the bucket in the background; "through": at once
consistency = "ttl"
"""


def init(
    file: Annotated[Path, typer.Argument(help="The file to write; it must not exist yet.")] = Path("forebay.toml"),
    origin: Annotated[str | None, typer.Option("--origin", metavar="URL", help="origin.endpoint_url.")] = None,
    cache_dir: Annotated[str | None, typer.Option("--cache-dir", metavar="DIR", help="cache.directory.")] = None,
    capacity: Annotated[str | None, typer.Option("--capacity", metavar="SIZE", help="cache.capacity.")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="PREFIX", help="A read-only slot.")] = None,
    checkpoints: Annotated[
        str | None, typer.Option("--checkpoints", metavar="PREFIX", help="A write-back slot.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a first configuration, with comments. At a terminal it asks for what no option says."""
    given = [origin, cache_dir, capacity, data, checkpoints]
    if sys.stdin.isatty() and not json:
        for i, question in enumerate(_QUESTIONS):
            if given[i] is None:
                given[i] = typer.prompt(question, default=_DIRECTORY if i == 1 else "", show_default=i == 1, err=True)
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(_configuration(*(one or "" for one in given)))
        warnings = load_settings(file, as_a_client(os.environ)).warnings
    except OSError as error:
        fail(printable(f"{file} cannot be written: {error.strerror}"))
    except SettingsError as error:
        file.unlink()
        report_problems(error, json)
        raise typer.Exit(1) from None
    for warning in warnings:
        typer.echo(f"warning: {printable(warning)}", err=True)
    if json:
        print_json({"ok": True, "file": str(file), "warnings": warnings})
    else:
        typer.echo(printable(f"{file} is written. Next: forebay serve --config {file}"))


def _configuration(origin: str, cache_dir: str, capacity: str, data: str, checkpoints: str) -> str:
    def text(value: str) -> str:
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    url, room = text(origin or "https://s3.example.com"), text(capacity or "1TiB")
    omitted = ["" if one else "# " for one in (origin, capacity)]
    persistent = "true" if checkpoints else "false"
    head = _HEAD.format(omitted[0], url, text(cache_dir or _DIRECTORY), omitted[1], room, persistent)
    slots = [slot.format(text(one)) for slot, one in ((_DATA, data), (_CHECKPOINTS, checkpoints)) if one]
    return "".join([head, *slots])

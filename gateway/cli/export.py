"""`forebay writeback export`: what the origin does not have, out of a cache directory, without a gateway."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.admin.formatting import are, counted, size_text
from gateway.cli.common import ConfigOption, JsonOption, as_a_client, fail, load, print_json
from gateway.cli.progress import bytes_progress
from gateway.config.own_directory import NAME, is_own
from gateway.core.errors import StartupError, WritebackError
from gateway.serve.preparation import kept_from_gateways

if TYPE_CHECKING:
    from gateway.writeback.offline_export import Findings

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

    if directory is not None and not is_own(directory) and is_own(directory / NAME):
        directory /= NAME
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

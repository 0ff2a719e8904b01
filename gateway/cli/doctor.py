"""`forebay doctor`: what is wrong or risky here, and what to do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from gateway.admin.formatting import counted
from gateway.cli.common import (
    AdminUrlOption,
    ConfigOption,
    JsonOption,
    admin_address,
    as_a_client,
    print_json,
    printable,
)
from gateway.cli.tables import print_text, wrapped
from gateway.config.loading import CommandEnvironment, LoadedSettings, load_settings
from gateway.config.problems import SettingsError

if TYPE_CHECKING:
    from gateway.doctor import Finding
    from gateway.policy.slots import Prefix

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}

WriteTestOption = Annotated[
    str | None,
    typer.Option(
        "--write-test",
        metavar="s3://BUCKET/PREFIX/",
        help="Try writes under this prefix, too: put small objects and delete them again.",
    ),
]


def doctor(
    config: ConfigOption = None,
    origin: Annotated[
        str | None, typer.Option("--origin", metavar="URL", help="Where the buckets are: origin.endpoint_url.")
    ] = None,
    admin_url: AdminUrlOption = None,
    write_test: WriteTestOption = None,
    json: JsonOption = False,
) -> None:
    """Look for what is wrong, risky or slow here: configuration, origin, rights, disk, limits, clients, gateway.

    No gateway needs to run; if one does, it has more to say. It writes nothing at the origin without --write-test. Exit
    code 1 when there are errors.
    """
    tested = _tested(write_test)
    environment = CommandEnvironment(os.environ, {"FOREBAY_ORIGIN__ENDPOINT_URL": ("--origin", origin)})
    console = Console(highlight=False, markup=False)
    findings = _findings(config, environment, admin_url, tested)
    found = asyncio.run(_collected(findings, None if json else console))
    counts = {level: sum(one.level == level for one in found) for level in _STYLES}
    if json:
        documents = [
            {"area": one.area, "level": one.level.value, "found": one.found, "advice": one.advice} for one in found
        ]
        print_json({"ok": counts["error"] == 0, "counts": counts, "findings": documents})
    else:
        told = [counted(counts[level], level) for level in ("error", "warning", "note")]
        console.print(Text(f"\n{', '.join(told)}", "bold red" if counts["error"] else "bold"))
    raise typer.Exit(1 if counts["error"] else 0)


def _tested(name: str | None) -> Prefix | None:
    from gateway.policy.slots import Prefix

    if name is None:
        return None
    try:
        prefix = Prefix.parse(name)
    except ValueError as error:
        raise typer.BadParameter(f"--write-test: {error}") from None
    if not prefix.bucket:
        raise typer.BadParameter("--write-test needs a bucket: s3://BUCKET/PREFIX/")
    return prefix


async def _collected(findings: AsyncGenerator[Finding, None], console: Console | None) -> list[Finding]:
    found: list[Finding] = []
    area = ""
    async with aclosing(findings):
        async for one in findings:
            found.append(one)
            if console is None:
                continue
            if one.area != area:
                console.print(Text(f"{'' if not area else chr(10)}{one.area}", "bold"))
                area = one.area
            head = f"  {one.level.value:8}"
            for line in wrapped(head + printable(one.found), len(head)):
                text = Text(line)
                if line.startswith(head):
                    text.stylize(_STYLES[one.level.value], 0, len(head))
                console.print(text, soft_wrap=True)
            if one.advice:
                print_text(f"{'':{len(head)}}-> {printable(one.advice)}", indent=len(head) + 3)
    return found


async def _findings(
    config: Path | None, environment: Mapping[str, str], admin_url: str | None, tested: Prefix | None
) -> AsyncGenerator[Finding, None]:
    from gateway.doctor.configuration import clients, configuration, unusable
    from gateway.doctor.machine import disk, limits
    from gateway.doctor.origin import AREA as ORIGIN
    from gateway.doctor.origin import origin

    try:
        loaded = _loaded(config, environment)
    except SettingsError as problems:
        for finding in unusable(problems):
            yield finding
        yield ORIGIN.note("not looked at: the configuration cannot be used", "mend it first")
        for finding in _running(config, admin_url, None):
            yield finding
        return
    settings = loaded.settings
    for finding in configuration(config, loaded):
        yield finding
    async with aclosing(origin(settings, environment, tested)) as of_origin:
        async for finding in of_origin:
            yield finding
    for part in (disk(settings), limits(settings), clients(settings, environment)):
        for finding in part:
            yield finding
    for finding in _running(config, admin_url, loaded):
        yield finding


def _loaded(config: Path | None, environment: Mapping[str, str]) -> LoadedSettings:
    """As the gateway would load it here; in the shell of a job, whose AWS_ENDPOINT_URL names the gateway, without."""
    try:
        return load_settings(config, environment)
    except SettingsError as problems:
        is_of_aws = "FOREBAY_ORIGIN__ENDPOINT_URL" not in environment
        if not is_of_aws or not any(one.key == "origin.endpoint_url" for one in problems.problems):
            raise
        return load_settings(config, as_a_client(environment))


def _running(config: Path | None, admin_url: str | None, loaded: LoadedSettings | None) -> Iterator[Finding]:
    from gateway.admin.client import AdminClient
    from gateway.doctor.running import AREA, running

    if loaded is None and admin_url is None:
        yield AREA.note(
            "not looked at: the configuration, which names its admin port, cannot be used", "give --admin-url"
        )
        return
    address = admin_address(admin_url, config if loaded is not None else None)
    yield from running(AdminClient(*address), loaded.settings if loaded is not None else None)

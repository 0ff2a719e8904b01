"""`forebay demo`: Forebay's main job on a bucket of its own, measured; nothing to set up, nothing left behind."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from gateway.demo.clients import without_aws_settings
from gateway.demo.dataset import Workload
from gateway.demo.nodes import NODES_WORKLOAD, run_nodes
from gateway.demo.report import TABLE_WIDTH, Narrator, Report, next_steps
from gateway.demo.stack import DemoError, Interrupted, Interruptions, Stack, running_stack
from gateway.demo.story import run_job


def main(json: bool = False, workload: Workload | None = None, nodes: int = 1) -> int:
    """Run the demo; with `json` the figures go to stdout as one JSON document. Several `nodes` are shown as a cluster.

    Returns the exit code: 0 when everything was read, written and verified, and everything read again came from cache
    (in a cluster: everything came from the bucket once), 1 when a step failed, 128 + n when signal n ended it. In any
    event all processes are stopped and all files removed.
    """
    console = Console(stderr=True)
    interruptions = Interruptions()
    try:
        with interruptions.installed(), without_aws_settings():
            narrator = Narrator(console, interruptions.check)
            _require_extra()
            if nodes > 1:
                of_nodes = run_nodes(nodes, workload or NODES_WORKLOAD, narrator, interruptions)
                _print(of_nodes.as_dict(), of_nodes.table(), as_json=json)
                if of_nodes.problem is not None:
                    console.print(f"forebay demo failed: {of_nodes.problem}", soft_wrap=True)
                return 0 if of_nodes.problem is None else 1
            report = _run(workload or Workload(), narrator, interruptions)
    except Interrupted as interrupted:
        console.print("forebay demo: interrupted; what it started is stopped, what it wrote is removed", soft_wrap=True)
        return 128 + interrupted.signal_number
    except DemoError as error:
        if error.log:
            console.print(error.log, markup=False, highlight=False, style="dim", soft_wrap=True)
        console.print(f"forebay demo failed: {error}", markup=False, highlight=False, style="bold red", soft_wrap=True)
        return 1
    _print(report.as_dict(), report.table(), as_json=json)
    if not json:
        _console().print(next_steps(_own_command()), markup=False, highlight=False, soft_wrap=True)
    missed = report.not_from_cache()
    for one in missed:
        rounds = [dict(reading.cache) for reading in (*one.forebay, *one.strict)]
        console.print(f"forebay demo failed: “{one.what}” did not all come from cache again: {rounds}", soft_wrap=True)
    return 1 if missed else 0


def _run(workload: Workload, narrator: Narrator, interruptions: Interruptions) -> Report:
    narrator.say("forebay demo: a bucket at a distance, Forebay in front of it, and a small training job")
    with ExitStack() as owner:
        with narrator.step("start the bucket and Forebay"):
            stack = owner.enter_context(running_stack(workload, interruptions))
        return _run_job(workload, stack, narrator)


def _run_job(workload: Workload, stack: Stack, narrator: Narrator) -> Report:
    """Whatever a client raises becomes a DemoError that carries the logs, read before they are removed."""
    try:
        return run_job(workload, stack, narrator)
    except DemoError as error:
        raise DemoError(str(error), stack.servers.logs()) from error
    except Exception as error:
        raise DemoError(f"{type(error).__name__}: {error}", stack.servers.logs()) from error


def _require_extra() -> None:
    missing = [name for name in ("boto3", "moto", "flask") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"{', '.join(missing)} not installed; the demo needs: pip install '.[demo]' in a clone")


def _print(document: Mapping[str, Any], table: Table, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    console = _console()
    console.print()
    console.print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def _own_command() -> str:
    """`forebay` where the shell finds it, else the path that it was called by, such as .venv/bin/forebay."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "forebay" and shutil.which("forebay") is None else "forebay"

"""`forebay demo`: Forebay's main job on a bucket of its own, measured; nothing to set up, nothing left behind."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import orjson
from rich.console import Console

from gateway.demo.clients import without_aws_settings
from gateway.demo.dataset import Workload
from gateway.demo.report import TABLE_WIDTH, Narrator, Report, next_steps
from gateway.demo.stack import DemoError, Interrupted, Interruptions, Stack, running_stack
from gateway.demo.story import run_job


def main(json: bool = False, workload: Workload | None = None) -> int:
    """Run the demo; with `json` the figures go to stdout as one JSON document.

    Returns the exit code: 0 when everything was read, written and verified, and everything read again came from cache,
    1 when a step failed, 128 + n when signal n ended it. In any event all processes are stopped and all files removed.
    """
    console = Console(stderr=True)
    interruptions = Interruptions()
    try:
        with interruptions.installed(), without_aws_settings():
            report = _run(workload or Workload(), Narrator(console, interruptions.check), interruptions)
    except Interrupted as interrupted:
        console.print("forebay demo: interrupted; what it started is stopped, what it wrote is removed", soft_wrap=True)
        return 128 + interrupted.signal_number
    except DemoError as error:
        if error.log:
            console.print(error.log, markup=False, highlight=False, style="dim", soft_wrap=True)
        console.print(f"forebay demo failed: {error}", markup=False, highlight=False, style="bold red", soft_wrap=True)
        return 1
    _show(report, as_json=json)
    missed = report.not_from_cache()
    for one in missed:
        rounds = [dict(reading.cache) for reading in (*one.forebay, *one.strict)]
        console.print(f"forebay demo failed: “{one.what}” did not all come from cache again: {rounds}", soft_wrap=True)
    return 1 if missed else 0


def _run(workload: Workload, narrator: Narrator, interruptions: Interruptions) -> Report:
    _require_extra()
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
        raise DemoError(str(error), stack.logs()) from error
    except Exception as error:
        raise DemoError(f"{type(error).__name__}: {error}", stack.logs()) from error


def _require_extra() -> None:
    missing = [name for name in ("boto3", "moto", "flask") if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(f"{', '.join(missing)} not installed; the demo needs: pip install '.[demo]' in a clone")


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(orjson.dumps(report.as_dict(), option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    console.print()
    console.print(report.table())
    console.print(next_steps(_own_command()), markup=False, highlight=False, soft_wrap=True)


def _own_command() -> str:
    """`forebay` where the shell finds it, else the path that it was called by, such as .venv/bin/forebay."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "forebay" and shutil.which("forebay") is None else "forebay"

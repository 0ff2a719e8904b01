"""Children that behave badly, for the supervisor's tests: `main` runs in the child process.

How is said by the file `behaviour` in the cache directory: a line per process, `NAME WHAT`.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from gateway.admin.backends import GatewayState
from gateway.serve import child
from gateway.serve.child_config import ChildContext

SLOW_SECONDS = 4.0
"""Longer than a hung process is left alone in the test, which does so for a shorter time than in earnest."""

READING_SECONDS = 0.3


def load() -> None:
    """What a background process needs at its start; there is nothing more."""
    importlib.import_module("gateway.admin.backends")


def main(arguments: Sequence[str]) -> None:
    """As `gateway.serve.child.main`, with other work."""
    child.main(arguments, _behave)


async def _behave(context: ChildContext) -> None:
    directory = context.config.settings.cache.directory
    behaviours = dict(line.split() for line in (directory / "behaviour").read_text().splitlines())
    what = behaviours.get(context.name, "well")
    with (directory / f"starts-{context.name}").open("a") as starts:
        starts.write(".")
    is_first = (directory / f"starts-{context.name}").stat().st_size == 1
    if what == "dies-early" or (what == "dies-early-once" and is_first):
        signal.raise_signal(signal.SIGKILL)
    if what == "no-thread":
        raise RuntimeError("can't start new thread")
    if what == "stops-when-started-again" and (directory / f"starts-{context.name}").stat().st_size == 2:
        signal.raise_signal(signal.SIGSTOP)
    if what == "starts-slowly":
        await asyncio.sleep(SLOW_SECONDS)
    if what == "reads-states-slowly":
        _read_states_slowly(directory)
    context.ready()
    if what == "ignores-sigterm":
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await asyncio.Event().wait()
    if what == "hangs" and (directory / f"starts-{context.name}").stat().st_size == 1:
        signal.raise_signal(signal.SIGSTOP)
    if what == "dies-when-ready" or (
        what == "stops-when-started-again" and (directory / f"starts-{context.name}").stat().st_size == 1
    ):
        signal.raise_signal(signal.SIGKILL)
    await context.stop.wait()


def _read_states_slowly(directory: Path) -> None:
    """Take a while over the state that says that all are ready; the file `shown` is there afterwards."""
    read = GatewayState.model_validate_json

    def slowly(line: bytes) -> GatewayState:
        state = read(line)
        if state.ready:
            time.sleep(READING_SECONDS)
            (directory / "shown").touch()
        return state

    GatewayState.model_validate_json = slowly  # type: ignore[method-assign, assignment]

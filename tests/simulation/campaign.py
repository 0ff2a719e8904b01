"""Many histories side by side, and a file that says which have been played."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TextIO

import structlog

from tests.simulation.cluster.world import play_cluster
from tests.simulation.dialects import CLUSTER, WRITING
from tests.simulation.world import Setting, play
from tests.simulation.writing.world import play_writing

SAID_LINES = 60
AT_ONCE = 4
"""Histories that each process is given ahead."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one history. `rule` and `text` of the first violation, empty where there is none; `said`: what came before."""

    seed: int
    dialect: str
    steps: int
    rule: str = ""
    text: str = ""
    said: tuple[str, ...] = ()


def played(settings: Iterator[Setting], processes: int) -> Iterator[Outcome]:
    """The outcomes, as they come."""
    if processes == 1:
        _quiet()
        yield from map(_outcome, settings)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("forkserver"), initializer=_quiet) as pool:
        running: set[Future[Outcome]] = {pool.submit(_outcome, one) for one in islice(settings, AT_ONCE * processes)}
        try:
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(_outcome, one) for one in islice(settings, len(done))}
                yield from (one.result() for one in done)
        finally:
            pool.shutdown(cancel_futures=True)


_PLAYS: Mapping[str, Callable[[Setting], Any]] = {CLUSTER: play_cluster, WRITING: play_writing}


def _outcome(setting: Setting) -> Outcome:
    world = _PLAYS.get(setting.dialect, play)(setting)
    made = Outcome(setting.seed, setting.dialect, world.steps)
    if not world.judge.violations:
        return made
    first = world.judge.violations[0]
    return replace(made, rule=first.rule, text=first.text, said=tuple(world.said[-SAID_LINES:]))


def _quiet() -> None:
    gc.collect()
    gc.set_threshold(20_000, 20, 20)
    gc.freeze()  # collections at power cuts look at what histories have made, not at modules
    level = logging.INFO if os.environ.get("SIMULATION_LOG") else logging.CRITICAL
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))


def left_of(settings: Iterable[Setting], before: Iterable[Outcome]) -> Iterator[Setting]:
    """Those that were not played before."""
    known = {(one.seed, one.dialect) for one in before}
    return (one for one in settings if (one.seed, one.dialect) not in known)


def write(record: TextIO | None, outcome: Outcome, like: Setting) -> None:
    """Keep an outcome, and what its history was like."""
    if record is not None:
        made = {**asdict(outcome), **_kind(like)}
        del made["said"]
        record.write(json.dumps(made) + "\n")
        record.flush()


def known(record: Path | None, like: Setting) -> Iterator[Outcome]:
    """What a file has of histories of this kind; a line whose writer was killed over it is none."""
    if record is None or not record.exists():
        return
    kind = _kind(like)
    for line in record.read_text().splitlines(keepends=True):
        made = json.loads(line) if line.endswith("\n") else {}
        if {name: made.pop(name, None) for name in kind} == kind:
            yield Outcome(**made)


def _kind(like: Setting) -> dict[str, object]:
    of_all = {"length": like.steps, "skew": like.skew_seconds, "lies": like.lies, "often": like.often}
    return {**of_all, "rules": sorted(like.only)}

"""A short sample of the simulation, and that it is one: a seed replays, and what is wrong is found."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation.campaign import Outcome, known, left_of, played, write
from tests.simulation.dialects import DIALECTS
from tests.simulation.invariants import Judge
from tests.simulation.processes import Connection
from tests.simulation.virtual_time import VirtualTimeLoop
from tests.simulation.world import Setting, play

SEED = int(os.environ.get("FOREBAY_SIMULATION_SEED", "20261123"))
HISTORIES = int(os.environ.get("FOREBAY_SIMULATION_HISTORIES", "1"))
"""Of each dialect, of a hundred steps each."""


def test_what_is_read_again_is_as_others_have_left_it(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    with (
        closing(sqlite3.connect(path, factory=Connection, isolation_level=None)) as writer,
        closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, factory=Connection, isolation_level=None)) as reader,
    ):
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("CREATE TABLE told (number INTEGER)")

        def read() -> list[tuple[int, ...]]:
            reader.execute("BEGIN")
            found: list[tuple[int, ...]] = reader.execute("SELECT number FROM told WHERE number > ?", (0,)).fetchall()
            reader.execute("ROLLBACK")
            return found

        assert read() == []
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO told VALUES (1)")
        assert read() == []
        writer.execute("COMMIT")
        assert [read(), read()] == [[(1,)], [(1,)]]


def test_time_passes_however_short_the_sleep() -> None:
    """A sleep may be shorter than the step of a clock that is far ahead: the loop must move time all the same."""

    async def sleeps() -> float:
        for _ in range(3):
            await asyncio.sleep(1e-10)
        return loop.time()

    with closing(VirtualTimeLoop()) as loop:
        assert loop.run_until_complete(sleeps()) == pytest.approx(3e-10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_rules_hold(dialect: str) -> None:
    """Whatever the origin is like, and whatever happens: 1,600 steps in all, and a million in a campaign."""
    for seed in range(SEED, SEED + HISTORIES):
        world = play(Setting(seed, dialect))
        assert not world.judge.violations, "\n".join([*world.said[-60:], f"seed {seed}: {world.judge.violations[0]}"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", ["latest", "every-2nd"])
def test_rules_hold_where_superseded_checkpoints_are_left_out(rule: str) -> None:
    """The flush leaves out only what a newer object at the origin supersedes, and loses nothing: 50 steps a rule."""
    often = {"save_run": 6.0, "put": 2.0, "delete": 2.0, "read": 4.0, "trouble": 3.0, "heal": 4.0, "away": 1.0}
    often |= {"pass_time": 8.0, "kill_worker": 1.0, "kill_background": 2.0, "cut_power": 1.0, "others_delete": 1.0}
    left_out = 0
    for seed in range(SEED, SEED + HISTORIES):
        world = play(Setting(seed, "aws", 50, often=often, flush=rule))
        assert not world.judge.violations, "\n".join([*world.said[-60:], f"seed {seed}: {world.judge.violations[0]}"])
        left_out += world.judge.left_out
    assert left_out > 0


@pytest.mark.slow
def test_a_seed_replays() -> None:
    """In another process, whose strings have other hashes, too."""
    script = (
        "from tests.simulation.world import *; print('=====', *play(Setting(7, 'aws', 40, ['none'])).said, sep='\\n')"
    )
    other = "0" if os.environ.get("PYTHONHASHSEED") != "0" else "1"
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": os.pathsep.join(["."])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    said = [line for line in play(Setting(7, "aws", 40, ["none"])).said for line in line.splitlines()]
    assert told.partition("=====\n")[2].splitlines() == said
    assert len(said) > 40


DEPENDED_ON_ADDRESSES = [(700002, "mixed"), (700033, "rgw"), (700122, "no-conditions")]
"""Histories that once did."""


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "dialect"), DEPENDED_ON_ADDRESSES[:HISTORIES])
def test_a_seed_replays_with_other_addresses(seed: int, dialect: str) -> None:
    """In one process: what is in sets of tasks comes in the same order, wherever they lie."""
    setting = Setting(seed, dialect, only=["none"])
    first = play(setting).said
    in_the_way = [bytearray(size) for size in range(1000)]
    assert play(setting).said == first
    assert in_the_way


def test_what_is_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge who is told of a write that nobody has made misses it in the end."""
    made = Judge.check_end

    def check_end(judge: Judge) -> None:
        attempt = judge.of("bucket", "nowhere").begin(b"never written", judge.origin.clock.monotonic())
        attempt.ended, attempt.acknowledged = judge.origin.clock.monotonic(), True
        made(judge)

    monkeypatch.setattr(Judge, "check_end", check_end)
    assert [one.rule for one in play(Setting(1, "aws", 5, ["nothing is lost"])).judge.violations] == ["nothing is lost"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_disk_that_lies_is_told_from_one_that_does_not() -> None:
    """What was acknowledged is lost in power cuts where syncs do nothing; in the same histories else nothing is."""
    often = {"put": 10.0, "upload": 3.0, "trouble": 2.0, "heal": 2.0, "cut_power": 3.0}
    for seed in range(3):
        honest = Setting(seed, "aws", 40, ["nothing is lost"], 0.0, often=often)
        assert not play(honest).judge.violations
        if play(replace(honest, lies=True)).judge.violations:
            return
    raise AssertionError("no power cut has shown that the disk lies")


@pytest.mark.slow
def test_a_campaign_goes_on(tmp_path: Path) -> None:
    """What the record has is not played again; half a line is nothing, and neither is a history of another kind."""
    record, like = tmp_path / "record", Setting(1, "aws", 3)
    settings = [replace(like, seed=seed) for seed in (1, 2, 3)]
    with record.open("a") as file:
        for outcome in played(iter(settings[:2]), 1):
            write(file, outcome, like)
        write(file, Outcome(3, "aws", 3), replace(like, lies=True))
        file.write('{"seed": 3, "dia')
    assert [one.seed for one in left_of(settings, known(record, like))] == [3]
    assert list(known(record, like)) == [Outcome(1, "aws", 3), Outcome(2, "aws", 3)]

"""Processes tell each other that an origin is silent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.origin.retry import BELIEVED_SECONDS, CircuitBreaker, OriginHealth
from tests.support.manual_clock import ManualClock


def test_what_one_finds_out_the_others_know(tmp_path: Path) -> None:
    """The other process asks the origin itself before it asks it for anybody; an answer ends it for all."""
    clock = ManualClock()
    one, other = (CircuitBreaker(clock, OriginHealth(tmp_path / "silence").cell("host")) for _ in range(2))
    asyncio.run(clock.advance(10.0))
    one.probe_failed(clock.monotonic() - 8, silent=True)
    assert one.answers_nobody
    assert other.hears_from_others()
    assert other.answers_nobody
    assert other.may_be_probed()
    other.answered()
    assert not other.hears_from_others()
    third = CircuitBreaker(clock, OriginHealth(tmp_path / "silence").cell("host"))
    assert not third.hears_from_others()


def test_who_was_answered_since_believes_nobody_else(tmp_path: Path) -> None:
    """Another process may have lost its path to the origin."""
    clock = ManualClock()
    one, other = (CircuitBreaker(clock, OriginHealth(tmp_path / "silence").cell("host")) for _ in range(2))
    asyncio.run(clock.advance(10.0))
    one.probe_failed(clock.monotonic() - 8, silent=True)
    asyncio.run(clock.advance(1.0))
    other.answered()
    assert not other.hears_from_others()


@pytest.mark.parametrize("later", [BELIEVED_SECONDS + 1, -5.0])
def test_what_is_old_or_makes_no_sense_is_not_believed(later: float) -> None:
    """Whoever told it is gone; a record half written says anything."""
    board = OriginHealth()
    assert not board.cell("host").is_silent(0.0, float("-inf"))
    board.cell("host").tell(1000.0)
    assert board.cell("host").is_silent(1001.0, 0.0)
    assert not board.cell("host").is_silent(1000.0 + later, 0.0)
    assert not board.cell("another host").is_silent(1001.0, 0.0)


def test_without_a_place_for_it_a_process_is_alone(tmp_path: Path) -> None:
    """It works all the same."""
    cell = OriginHealth(tmp_path / "missing" / "silence").cell("host")
    cell.tell(1000.0)
    assert cell.is_silent(1001.0, 0.0)

"""A child speaks to a supervisor that may not listen."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest

from gateway.serve.report_pipe import WAITING_BYTES_MAX, ReportPipe


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_nobody_waits_for_a_supervisor_that_does_not_read(pipe: tuple[int, int]) -> None:
    """What it has not taken is bounded; when it goes on it has every line that was not refused, whole and in order."""
    reading, writing = pipe

    async def scenario() -> None:
        report = ReportPipe(writing)
        report.follow(asyncio.get_running_loop())
        said, began = [], time.monotonic()
        for number in range(100):
            line = f"asks {number} " + "é" * 15_000
            if report.tell(line):
                said.append(line)
        assert time.monotonic() - began < 5
        assert 0 < len(said) * 30_000 < 2 * WAITING_BYTES_MAX
        assert len(said) < 100
        took = b""
        while took.count(b"\n") < len(said):
            took += await asyncio.to_thread(os.read, reading, 10_000)
        assert took.decode().splitlines() == said
        assert report.tell("follows 1\nand more")
        assert os.read(reading, 100) == b"follows 1 and more\n"

    asyncio.run(scenario())


def test_a_supervisor_that_is_gone_is_told_nothing(pipe: tuple[int, int]) -> None:
    """And nothing fails by it."""
    reading, writing = os.pipe()
    report = ReportPipe(writing)
    os.close(reading)
    assert report.tell("ready")
    os.close(writing)

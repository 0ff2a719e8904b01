"""`forebay top`: figures between two looks, a screen that fits, and an end that leaves the terminal right."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import orjson
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from gateway import cli
from gateway.api.documents import Checkpoint, Counts, JobDocument, Overview, SlotDocument, Status
from gateway.cli.top import Figures, Rates, curve, rates, screen
from tests.support import admin_documents
from tests.support.admin_documents import filled
from tests.support.gateway_process import GatewayProcess


def counts(at: float, **moved: float) -> Counts:
    return filled(Counts, moved, at=at)


def test_rates_are_those_between_two_looks() -> None:
    """Counters that begin again say nothing: the gateway was started anew."""
    moved = {"sent_bytes": 120, "requests": 10, "request_seconds": 0.5, "hit_bytes": 90, "miss_bytes": 10}
    moved |= {"origin_read_bytes": 7, "origin_written_bytes": 3, "flush_bytes": 3}
    before, now = counts(10.0), counts(12.0, **moved)
    assert rates(before, now) == Rates(60.0, 0.0, 5.0, 3.5, 1.5, 1.5, 0.05, 0.9)
    assert rates(now, counts(13.0)) is None
    still = rates(now, counts(13.0, **moved))
    assert still is not None
    assert (still.request_seconds, still.hit_ratio) == (None, None)


def status() -> Status:
    gateway = {"version": "1", "started_at": 900.0, "s3_url": "http://h:1", "ready": True}
    cache = {"capacity_bytes": 2**30, "usage_bytes": 2**20, "hit_ratio": 0.5, "disk": {"state": "full"}}
    return admin_documents.status(
        gateway=gateway | {"processes": [{"name": "worker0", "process_id": 1, "ready": True}]},
        origin={"endpoint_url": f"https://{'long.' * 30}example.com", "reachable": True},
        cache=cache,
        writeback={"objects": 3, "bytes": 2**20, "oldest_acknowledged_at": 940.0, "conflicts": 1},
    )


def figures(slots: int = 30) -> Figures:
    slot = {"prefix": f"s3://bucket/{'x' * 90}/", "hit_ratio": 0.5, "binds": ["read-link"]}
    job = {"kind": "warm", "prefix": "s3://b/\x1b[2J", "bytes_per_second": 1.0, "seconds_left": 1.0, "found_all": True}
    checkpoint = {"bucket": "b", "prefix": "run/step-1/", "state": "flushing", "bytes": 2, "bytes_flushed": 1}
    overview = filled(
        Overview,
        status=status(),
        slots=[filled(SlotDocument, slot, name=f"slot-{i}") for i in range(slots)],
        jobs=[filled(JobDocument, job, id=str(i), state="done" if i % 2 else "running") for i in range(6)],
        checkpoints=[filled(Checkpoint, checkpoint)] * 3,
        requests={"slowest": [SLOW] * 4},
    )
    return Figures(1000.0, None, 1000.0, overview, Rates(2.0**20, 0.0, 5.0, 3.5, 1.5, 1.5, 0.05, 0.9))


SLOW = {"operation": "GetObject", "bucket": "b", "key": f"\x1b[2J/{'k' * 150}", "slot": "a", "status": "503"}
SLOW |= {"cache": "miss", "reason": "evicted", "error": "SlowDown", "caller": "job", "request_id": "ID0"}
SLOW |= {"at": 990.0, "seconds": 1.25, "sent_bytes": 0, "received_bytes": 0}  # type: ignore[dict-item]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10), (20, 5), (80, 3)])
def test_the_screen_fits_any_terminal(width: int, height: int) -> None:
    """What has no room is counted; nothing that a key holds reaches the terminal."""
    lines = [text for text, _ in screen(figures(), deque([1.0, 3.0]), width, height)]
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert "\x1b" not in "".join(lines)


def test_the_screen_has_what_matters_at_80_columns() -> None:
    """Health first, then throughput, what only this node has, slots, jobs and checkpoints."""
    text = "\n".join(text for text, _ in screen(figures(2), [1.0], 80, 40))
    assert "forebay 1: ready, up 0:01:40" in text
    assert "disk      full" in text
    assert "served    1.0 MiB/s, received 0 B/s, hits 90.0%" in text
    assert "unflushed 3 objects, 1.0 MiB, the oldest for 0:01:00; 1 conflict" in text
    assert re.search(r"1\.25 s  0:00:10  GetObject  s3://b/\S*…k+  503 +miss", text)
    for shown in ("slot-1", "warm s3://b/\\u001b[2J", "s3://b/run/step-1/", "flushing", "50%"):
        assert shown in text


def test_a_table_is_shown_with_a_row_or_not_at_all() -> None:
    """On a small terminal what matters most has the room, and the rest is counted."""
    lines = [text for text, _ in screen(figures(2), [1.0], 60, 20)]
    head = next(place for place, text in enumerate(lines) if text.startswith("slot "))
    assert [text.split()[0] for text in lines[head + 1 : head + 3]] == ["slot-0", "slot-1"]
    assert lines[-1] == "… no room for 3 checkpoints, 4 slow requests"
    assert lines[-2] == "… and 4 more jobs"
    for height in range(12, 40):
        shown = [text for text, _ in screen(figures(2), [1.0], 60, height)]
        assert not any(one == "" and other.startswith("…") for one, other in zip(shown, shown[2:], strict=False))


def test_a_gateway_that_is_away_is_said_to_be() -> None:
    """With what was known before, and for how long."""
    known = figures(1)
    away = Figures(1060.0, "no gateway answers", 1000.0, known.overview)
    lines = [text for text, _ in screen(away, [], 80, 24)]
    assert lines[:3] == [
        f"forebay 1: no answer, {time.strftime('%H:%M:%S', time.localtime(1060))}",
        "no gateway answers",
        "the figures below are 0:01:00 old; asking again",
    ]
    assert "slot-0" in "\n".join(lines)
    document = away.document()
    assert (document["state"], document["slots"], document["health"]) == ("no answer", [], None)


def test_the_curve_has_a_full_block_for_the_most() -> None:
    """And none is higher."""
    assert curve([0.0, 2**20, 2.0**21]) == "▁▅█  up to 2.0 MiB/s"


@pytest.mark.slow
def test_top_watches_a_running_gateway_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    """A document a line for programs; on a terminal the whole screen, until Ctrl-C: exit code 0, and a cursor."""
    with GatewayProcess({"origin": {"endpoint_url": "http://127.0.0.1:1"}}) as gateway:
        arguments = ["top", "--admin-url", gateway.admin_url, "--interval", "100ms"]
        result = CliRunner().invoke(cli.app, [*arguments, "--count", "2", "--json"])
        first, second = map(orjson.loads, result.stdout.splitlines())
        assert (result.exit_code, first["state"], first["per_second"]["served_bytes"]) == (0, "ready", 0)
        assert [one["name"] for one in first["slots"]] == ["default"]
        assert second["per_second"]["served_bytes"] == 0
        shell, terminal = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", *arguments],
            stdin=terminal,
            stdout=terminal,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
        )
        os.close(terminal)
        shown = b""
        try:
            while b"ready, up" not in shown:
                shown += os.read(shell, 65536)
            process.send_signal(signal.SIGINT)
            with suppress(OSError):  # nobody has the terminal any more
                while True:
                    shown += os.read(shell, 65536)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            os.close(shell)
        assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is back"
        assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"\x1b[?1049h"), "so is what was on the screen"


def test_nobody_there_is_exit_code_1() -> None:
    """It goes on looking unless it is told how often."""
    result = CliRunner().invoke(cli.app, ["top", "--admin-url", "http://127.0.0.1:1", "--count", "1", "--json"])
    assert (result.exit_code, orjson.loads(result.stdout)["state"]) == (1, "no answer")
    wrong = CliRunner().invoke(cli.app, ["top", "--interval", "soon"])
    assert (wrong.exit_code, "--interval soon: a duration such as" in wrong.stderr) == (2, True)

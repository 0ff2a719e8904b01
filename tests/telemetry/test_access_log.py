"""The access log: a line for each request, written by a thread, in a file that others rename, on a disk that fails."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import orjson
import pytest

from gateway.shared.recent_requests import FinishedRequest
from gateway.telemetry import access_log, log_file, metrics
from gateway.telemetry.access_log import GATHERED_MAX, AccessLog
from tests.support.counting import counted
from tests.support.finished import FINISHED, finished
from tests.telemetry.log_files import Hands, lines


@asynccontextmanager
async def a_log(path: Path) -> AsyncIterator[tuple[AccessLog, Hands]]:
    clock = Hands()
    log = AccessLog(path, "worker0", wall=lambda: 1.5, clock=clock)
    yield log, clock
    await log.aclose()


async def drained(log: AccessLog) -> None:
    log._hand_over()
    assert await asyncio.to_thread(log._file.drain, 60.0)


async def test_a_line_says_what_a_request_was(tmp_path: Path) -> None:
    """All that docs/operations.md has in its section; the file is nobody else's. A key may be no UTF-8."""
    path = tmp_path / "access.jsonl"
    async with a_log(path) as (log, _clock):
        log.add(FINISHED)
        log.add(FINISHED._replace(key="\udcff\n", bucket=None))
    one, other = lines(path)
    assert one == {
        "time": "1970-01-01T00:00:01.500Z",
        "process": "worker0",
        "request_id": "ID",
        "caller": "someone",
        "remote": "127.0.0.1",
        "operation": "GetObject",
        "bucket": "bucket",
        "key": "key",
        "slot": "default",
        "status": "200",
        "error": None,
        "cache": "hit",
        "reason": None,
        "seconds": 0.001,
        "sent_bytes": 10,
        "received_bytes": 0,
    }
    assert (other["bucket"], other["key"]) == (None, "\\udcff\n")
    text = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    section = text.split("## Access log\n")[1].split("\n## ")[0]
    assert [name for name in one if f"`{name}`" not in section] == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_requests_are_written_soon_though_no_others_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And at once where there are many: each of them once, in their order."""
    monkeypatch.setattr(access_log, "GATHERED_SECONDS", 0.01)
    path = tmp_path / "a"
    async with a_log(path) as (log, _clock):
        for number in range(2 * GATHERED_MAX):
            log.add(finished(key=str(number)))
        assert not log._gathered
        log.add(finished(key="last"))
        async with asyncio.timeout(30):
            while log._gathered:  # noqa: ASYNC110 - a timer is what is waited for
                await asyncio.sleep(0.01)
        await drained(log)
        keys = [one["key"] for one in lines(path)]
        assert keys == [*map(str, range(2 * GATHERED_MAX)), "last"]


@pytest.mark.slow
async def test_what_waits_for_a_disk_is_bounded(tmp_path: Path) -> None:
    """A million requests while nothing is written: nobody waits, and the memory has an end."""
    path = tmp_path / "a"
    count = 80 * GATHERED_MAX
    async with a_log(path) as (log, _clock):
        with log._file._change:  # the thread that writes gets nothing
            for _ in range(count):
                log.add(FINISHED)
            assert log._file._waiting_bytes <= log_file._WAITING_BYTES_MAX
            assert not log._gathered
        await drained(log)
    lost = counted(metrics.ACCESS_LOST)
    assert 0 < lost < count
    assert len([one for one in lines(path) if "event" not in one]) == count - lost


async def test_lines_of_several_workers_do_not_mix(tmp_path: Path) -> None:
    """Many at once go with one write; a torn line swallows none of another's, and none comes twice."""
    path = tmp_path / "a"

    async def scenario(log: AccessLog, clock: Hands) -> None:
        other = AccessLog(path, "worker1", clock=clock)
        with path.open("ab") as file:
            file.write(b'{"torn')
        for number in range(100):
            for one in (log, other):
                one.add(_numbered(number, one))
                one.add(_numbered(number + 1000, one))
                one._hand_over()
        for one in (log, other):
            await drained(one)
        await other.aclose()

    async with a_log(path) as (log, clock):
        await scenario(log, clock)
    keys = []
    for line in path.read_bytes().splitlines():
        if not line.startswith(b'{"torn'):
            one = orjson.loads(line)
            keys.append((one["process"], one["key"]))
    assert len(keys) == len(set(keys)) == 400


def _numbered(number: int, log: AccessLog) -> FinishedRequest:
    return finished(key=f"{log._file._process}-{number}")


@pytest.mark.parametrize("is_made_anew", [True, False])
async def test_nobody_keeps_a_file_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made_anew: bool
) -> None:
    """Also where no request comes: it would take its room on the disk, which somebody has just made."""
    monkeypatch.setattr(log_file, "LOOK_SECONDS", 0.01)
    path = tmp_path / "sub" / "a"
    path.parent.mkdir()
    async with a_log(path) as (log, clock):
        log.add(FINISHED)
        await drained(log)
        removed = path.stat()
        with path.open("rb"):  # its number is nobody else's meanwhile
            path.unlink()
            if not is_made_anew:
                path.parent.rmdir()
            async with asyncio.timeout(30):
                while any(os.path.samestat(one, removed) for one in _opened_for_writing()):
                    clock.now += 0.01
                    await asyncio.sleep(0.01)


def _opened_for_writing() -> list[os.stat_result]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                found.append(os.fstat(int(name)))
    return found

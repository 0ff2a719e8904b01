"""The audit log's file: whole lines, renamed under it, on a disk that is full."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from gateway import metrics
from gateway.audit import LOOK_SECONDS, AuditLog


class Hands:
    """Of a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def log(path: Path, clock: Hands | None = None) -> AuditLog:
    return AuditLog(path, "worker0", wall=lambda: 1.5, clock=clock or Hands())


def write(audit: AuditLog, *keys: str | None, request_id: str = "ID") -> None:
    audit.request(
        caller="someone",
        remote="127.0.0.1",
        operation="PutObject",
        bucket="b",
        keys=keys or ["k"],
        status="200",
        request_id=request_id,
        received_bytes=7,
        answer={"etag": '"e"'},
    )


def drained(audit: AuditLog) -> None:
    assert audit._sink.drain(10.0)


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_a_line_says_who_did_what(tmp_path: Path) -> None:
    """In a file that nobody else reads."""
    path = tmp_path / "audit.jsonl"
    audit = log(path)
    write(audit)
    audit.admin(remote=None, method="POST", path="/api/v1/flush", query="a=b", status=202)
    audit.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert lines(path) == [
        {
            "time": "1970-01-01T00:00:01.500Z",
            "process": "worker0",
            "event": "request",
            "caller": "someone",
            "remote": "127.0.0.1",
            "operation": "PutObject",
            "bucket": "b",
            "key": "k",
            "status": "200",
            "request_id": "ID",
            "received_bytes": 7,
            "etag": '"e"',
        },
        {
            "time": "1970-01-01T00:00:01.500Z",
            "process": "worker0",
            "event": "admin",
            "caller": "admin",
            "remote": None,
            "operation": "POST /api/v1/flush",
            "query": "a=b",
            "status": "202",
        },
    ]


@pytest.mark.parametrize("key", ['a"b', "a\nb", "\x00", "é", "\ud800", "a" * 1024])
def test_any_key_is_one_line(tmp_path: Path, key: str) -> None:
    """Nobody writes lines of his own by it."""
    audit = log(tmp_path / "a")
    write(audit, key, None)
    audit.close()
    one, other = lines(tmp_path / "a")
    assert one["key"] == key.encode("utf-8", "backslashreplace").decode()
    assert other["key"] is None


def test_many_processes_and_threads_do_not_mix_lines(tmp_path: Path) -> None:
    """Each is one write to the file's end."""
    logs = [log(tmp_path / "a") for _ in range(4)]

    def work(one: AuditLog) -> None:
        for _ in range(300):
            write(one, "k" * 700)

    threads = [threading.Thread(target=work, args=(one,)) for one in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in logs:
        one.close()
    assert len(lines(tmp_path / "a")) == 1200


def test_a_renamed_file_is_made_anew(tmp_path: Path) -> None:
    """Within a second; what comes meanwhile is in the old one. None is lost."""
    path, clock = tmp_path / "a", Hands()
    audit = log(path, clock)
    for number in range(6):
        write(audit, request_id=str(number))
        drained(audit)
        if number == 1:
            path.rename(tmp_path / "a.1")
        if number == 3:
            clock.now += LOOK_SECONDS
    audit.close()
    assert [one["request_id"] for one in lines(tmp_path / "a.1")] == ["0", "1", "2", "3"]
    assert [one["request_id"] for one in lines(path)] == ["4", "5"]


def test_lines_that_are_not_taken_are_counted_and_told(tmp_path: Path) -> None:
    """The file is removed and cannot be opened for a while: nobody waits for it. A renamed one goes on."""
    path, clock = tmp_path / "sub" / "a", Hands()
    path.parent.mkdir()
    audit = log(path, clock)
    write(audit)
    drained(audit)
    before = metrics.AUDIT_LOST.value()
    path.rename(tmp_path / "old")
    path.mkdir()
    clock.now += LOOK_SECONDS
    write(audit)
    drained(audit)
    assert len(lines(tmp_path / "old")) == 2
    (tmp_path / "old").unlink()
    clock.now += LOOK_SECONDS
    for _ in range(3):
        write(audit)
        drained(audit)
    path.rmdir()
    clock.now += LOOK_SECONDS
    write(audit)
    audit.close()
    assert [one.get("lines", one["event"]) for one in lines(path)] == [3, "request"]
    assert metrics.AUDIT_LOST.value() - before == 3


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Whoever can write in the directory would have another file written to."""
    (tmp_path / "victim").touch()
    os.symlink(tmp_path / "victim", tmp_path / "a")
    with pytest.raises(OSError, match="symbolic"):
        log(tmp_path / "a")

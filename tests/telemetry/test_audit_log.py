"""The audit log's file: whole lines, renamed under it, on a disk that is full."""

from __future__ import annotations

import os
import socket
import stat
import threading
from contextlib import closing, suppress
from pathlib import Path

import orjson
import pytest

from gateway.telemetry import metrics
from gateway.telemetry.access_log import AuditLog
from gateway.telemetry.log_file import _WAITING_BYTES_MAX, LOOK_SECONDS
from tests.support.counting import counted
from tests.telemetry.log_files import Hands, lines


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
    assert audit.drain(10.0)


def test_a_line_says_who_did_what(tmp_path: Path) -> None:
    """In a file that nobody else reads."""
    path = tmp_path / "audit.jsonl"
    audit = log(path)
    write(audit)
    audit.admin(remote=None, method="POST", path="/api/v1/flush", status=202)
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
            "status": "202",
        },
    ]


@pytest.mark.parametrize("name", ["q%3Ftoken%3Dvisible", "q?token=visible", "visible:x", "visible" * 20, "%76isible"])
def test_what_no_name_can_be_is_not_written_down(tmp_path: Path, name: str) -> None:
    """Whoever writes a secret into a path has it replaced; a problem that quotes one, too."""
    audit = log(tmp_path / "a")
    audit.admin(remote=None, method="DELETE", path=f"/api/v1/slots/{name}", status=404)
    problem = "slots[0].prefix = 's3://b/?X-Amz-Signature=visible&token=visible': no"
    audit.change(caller="admin", remote=None, operation="PUT", generation=1, problem=problem)
    audit.close()
    admin, change = lines(tmp_path / "a")
    assert admin["operation"] == "DELETE /api/v1/slots/(no name)"
    assert change["problem"] == "slots[0].prefix = 's3://b/?X-Amz-Signature=(hidden)&token=(hidden)': no"


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


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """Whoever can write in the directory would have another file written to."""
    (tmp_path / "victim").touch()
    os.symlink(tmp_path / "victim", tmp_path / "a")
    with pytest.raises(OSError, match="no plain file"):
        log(tmp_path / "a")


@pytest.mark.slow
@pytest.mark.parametrize("key", ["k", '"', "\n", "\udcff", "€"], ids=["plain", "quotes", "controls", "no-utf8", "wide"])
def test_the_greatest_requests_lose_no_line_and_are_bounded(tmp_path: Path, key: str) -> None:
    """DeleteObjects of 1,000 keys of 1 KiB, eight of them at a time, on a disk that works; nobody waits meanwhile."""
    audit = log(tmp_path / "a")
    keys = [f"{number:04}" + key * (1020 // len(key.encode("utf-8", "surrogateescape"))) for number in range(1000)]
    for _ in range(8):
        write(audit, *keys)
    assert audit.drain(60.0)
    audit.close()
    assert not counted(metrics.AUDIT_LOST)
    assert len(lines(tmp_path / "a")) == 8000


@pytest.mark.slow
def test_what_waits_for_a_disk_is_bounded_and_requests_are_lost_as_a_whole(tmp_path: Path) -> None:
    """A thousand of them while nothing is written: the rest is counted, key by key."""
    audit = log(tmp_path / "a")
    with audit._change:  # the thread that writes gets nothing
        keys = [f"{number:04}" + "k" * 1020 for number in range(1000)]
        for _ in range(100):
            write(audit, *keys)
        assert audit._waiting_bytes <= _WAITING_BYTES_MAX
    assert audit.drain(60.0)
    audit.close()
    lost = counted(metrics.AUDIT_LOST)
    assert lost > 0
    assert lost % 1000 == 0
    found = lines(tmp_path / "a")
    told = [one["lines"] for one in found if one["event"] == "lost"]
    assert len(found) - len(told) == 100_000 - lost
    assert sum(told) == lost or not told  # told with the line after


@pytest.mark.parametrize("torn", [1, 40, 200])
def test_a_torn_line_swallows_no_line_of_another_process(tmp_path: Path, torn: int) -> None:
    """The disk has taken a part of one process's line; what others write, and what it writes later, is whole."""
    path = tmp_path / "a"
    one, other = log(path), log(path)
    write(one, "before")
    drained(one)
    with path.open("ab") as file:  # and is full
        file.write(path.read_bytes()[:torn])
    one._is_torn = True
    write(other, "innocent")
    drained(other)
    write(one, "later")
    write(other, "last")
    for audit in (one, other):
        audit.close()
    whole = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            whole.append(orjson.loads(line)["key"])
    assert sorted(whole) == ["before", "innocent", "last", "later"]
    assert b"\n\n" not in path.read_bytes()


@pytest.mark.parametrize("kind", ["fifo", "link", "device", "socket", "directory"])
def test_what_comes_to_the_path_while_it_runs_and_is_no_file_takes_nothing(tmp_path: Path, kind: str) -> None:
    """The renamed file goes on, and a file that comes later has the lines from then on; a removed one's are counted."""
    path, clock = tmp_path / "a", Hands()
    audit = log(path, clock)
    write(audit, "first")
    drained(audit)
    for has_gone in (False, True):
        clock.now += LOOK_SECONDS
        path.rename(tmp_path / "old") if not has_gone else (tmp_path / "old").unlink()
        if not has_gone:
            put(path, kind)
        before = counted(metrics.AUDIT_LOST)
        write(audit, "meanwhile")
        drained(audit)
        assert counted(metrics.AUDIT_LOST) - before == has_gone
        if not has_gone:
            assert [one["key"] for one in lines(tmp_path / "old")] == ["first", "meanwhile"]
    path.rmdir() if kind == "directory" else path.unlink()
    clock.now += LOOK_SECONDS
    write(audit, "after")
    audit.close()
    assert [one.get("key", one.get("lines")) for one in lines(path)] == [1, "after"]
    assert not (tmp_path / "victim").read_bytes()


def put(path: Path, kind: str) -> None:
    """Something that is no plain file. (A device would need root: a link to one.)"""
    (path.parent / "victim").touch()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with closing(socket.socket(socket.AF_UNIX)) as made:
            made.bind(os.fspath(path))
    else:
        path.symlink_to(path.parent / "victim" if kind == "link" else "/dev/null")

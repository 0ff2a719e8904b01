"""Nobody waits for what reads the log, or fails because of it; what is lost is counted, and told."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gateway.telemetry.log_file import WAITING_BYTES_MAX, LogSink

PATIENCE_SECONDS = 30.0


def told_lost(count: int) -> str:
    return f"lost {count}\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for one in (reading, writing):
        with suppress(OSError):
            os.close(one)


def read_until(descriptor: int, line: bytes) -> list[bytes]:
    """The lines up to this one."""
    read = b""
    while not read.endswith(line):
        read += os.read(descriptor, 65536)
    return read.splitlines()


def test_lines_come_whole_and_in_their_order(pipe: tuple[int, int]) -> None:
    """Also the last ones of a process that ends."""
    sink = LogSink(pipe[1], told_lost)
    for number in range(1000):
        sink.write(f"{number} é\ud800\n")
    sink.close()
    assert read_until(pipe[0], b"999 \xc3\xa9\\ud800\n") == [f"{number} é\\ud800".encode() for number in range(1000)]


def test_who_does_not_read_is_not_waited_for(pipe: tuple[int, int]) -> None:
    """Some lines wait, the others are lost, also while the process ends; whoever reads again is told how many."""
    sink = LogSink(pipe[1], told_lost)
    count, line = 4 * WAITING_BYTES_MAX // 100, "x" * 99 + "\n"
    for _ in range(count):
        sink.write(line)
    assert not sink.drain(0.01)
    read = b""
    while not sink.drain(0.0):
        if select.select([pipe[0]], [], [], 0.01)[0]:  # all may be read that is not known to be written yet
            read += os.read(pipe[0], 65536)
    sink.write("at last\n")
    lines = [*read.splitlines(), *read_until(pipe[0], b"at last\n")]
    notices = [one for one in lines if one.startswith(b"lost")]
    lost = sum(int(one.split()[1]) for one in notices)
    assert lost > count // 2
    assert len(lines) == count - lost + len(notices) + len(["at last"])


def test_a_reader_that_has_gone_is_no_failure() -> None:
    """Nor is a disk that is full."""
    reading, writing = os.pipe()
    os.close(reading)
    sink = LogSink(writing, told_lost)
    for _ in range(10):
        sink.write("x\n")
        assert sink.drain(PATIENCE_SECONDS)
    sink.close()
    os.close(writing)


def test_a_disk_that_takes_lines_again_gets_them(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the number of those that it has not taken; a line that was torn off is ended."""
    path = tmp_path_factory.mktemp("log") / "log"
    full, well = os.open("/dev/full", os.O_WRONLY), os.open(path, os.O_CREAT | os.O_RDWR)
    descriptor = os.dup(full)
    sink = LogSink(descriptor, told_lost)
    for _ in range(3):
        sink.write("x\n")
        assert sink.drain(PATIENCE_SECONDS)
    os.dup2(well, descriptor)
    sink.write("y\n")
    assert sink.drain(PATIENCE_SECONDS)
    sink._is_torn = True
    sink.write("z\n")
    sink.close()
    assert path.read_text() == "lost 3\ny\n\nz\n"
    for one in (full, well, descriptor):
        os.close(one)

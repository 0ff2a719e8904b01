"""The supervisor against children that behave badly."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gateway.serve.fork_server import describe_exit, restart_delay_seconds
from gateway.serve.shared_directory import in_memory_directory
from tests.support.cache_directory import begun
from tests.support.prepared_process import PreparedProcess

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60.0

SERVE = """
import sys
from pathlib import Path
from gateway.config import CacheSettings, AdminSettings, OriginSettings, ServerSettings, Settings
from gateway.serve import child_monitor
from gateway.serve.supervisor import serve
from tests.support.prepared_gateway import has_fork_server
exec(sys.argv[2])
if not has_fork_server():
    sys.exit()
settings = Settings(
    server=ServerSettings(port=0, workers=2, shutdown_grace_seconds=0),
    admin=AdminSettings(port=0),
    origin=OriginSettings(endpoint_url="http://127.0.0.1:1"),
    cache=CacheSettings(directory=Path(sys.argv[1])),
)
try:
    code = serve(settings, child_module="tests.serve.child_double")
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
sys.exit(code)
"""

HASTY = "child_monitor.HANG_LOOK_SECONDS = 0.05; child_monitor.FIRST_BEAT_LOOKS = 10**6; "
"""Children hang after 1.5 seconds; they may take as long as they like to load their code."""

FAULTY = """
from gateway.serve.reloading import Reloader
def load(self, running, change, count_max):
    with (running.cache.directory / "changes").open("a") as changes:
        changes.write(".")
    raise TypeError("nobody has thought of this")
Reloader.load = load
(Path(sys.argv[1]) / "changes").touch()
"""
"""Each change fails, and is counted."""


def until_started(process: subprocess.Popen[str], starts: Path, times: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while starts.stat().st_size < times:
        assert process.poll() is None
        assert time.monotonic() < deadline, f"{starts.name} {starts.stat().st_size} times"
        time.sleep(0.02)


@contextmanager
def supervised(
    directory: Path, behaviour: str, before: str = "", stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    begun(directory)
    (directory / "behaviour").write_text(behaviour)
    command = ["-c", SERVE, directory, before]
    process = PreparedProcess(command, stdout=stdout, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worker1", "background"])
def test_a_child_that_is_killed_before_it_is_ready_is_started_again(tmp_path: Path, name: str) -> None:
    """As one that is killed later: the others are told of it, and the gateway starts."""
    with supervised(tmp_path, f"{name} dies-early-once") as process:
        assert process.stdout is not None
        assert any(line.startswith("forebay: S3 on ") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert (tmp_path / f"starts-{name}").read_text() == ".."


@pytest.mark.slow
def test_a_child_that_dies_each_time_before_it_is_ready_ends_the_start(tmp_path: Path) -> None:
    """With its name and how it ended; nothing is announced."""
    with supervised(tmp_path, "worker1 dies-early") as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert err.strip().splitlines()[-1] == "KilledEarly: worker1 ended before it was ready (SIGKILL)"
    assert "forebay: S3 on" not in out


def test_a_child_that_can_start_no_thread_says_which_limit_it_is(tmp_path: Path) -> None:
    with supervised(tmp_path, "worker1 no-thread") as process:
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert err.strip().splitlines()[-1] == (
        "StartupError: worker1: can't start new thread: the limit of processes is reached (ulimit -u, TasksMax=, "
        "pids.max)"
    )


@pytest.mark.slow
def test_the_admin_port_is_ready_when_the_gateway_says_so(tmp_path: Path) -> None:
    """Who has read the readiness line and asks /readyz at once gets 200, however slow the background process is."""
    with supervised(tmp_path, "background reads-states-slowly") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("forebay: S3 on ")
        assert (tmp_path / "shown").exists()


@pytest.mark.slow
def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """A little after the grace time; the gateway as a whole ends well."""
    with supervised(tmp_path, "worker0 ignores-sigterm") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("forebay: S3 on ")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err


@pytest.mark.slow
def test_a_child_that_keeps_dying_is_started_again_and_again(tmp_path: Path) -> None:
    """The gateway lives on with the others, and a stop is obeyed also between two starts."""
    with supervised(tmp_path, "worker0 dies-when-ready") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("forebay: S3 on ")
        while (tmp_path / "starts-worker0").stat().st_size < 4:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert (tmp_path / "starts-worker1").read_text() == "."


@pytest.mark.slow
@pytest.mark.parametrize("is_read", [True, False], ids=["a reader that stops", "no reader"])
def test_a_standard_output_that_takes_nothing_keeps_nobody_waiting(tmp_path: Path, is_read: bool) -> None:
    """Processes are kept, and a stop is obeyed, although the readiness line gets nowhere: `forebay serve | sleep`."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 4096)
    os.set_blocking(writing, True)
    if not is_read:
        os.close(reading)
    (begun(tmp_path) / "starts-worker0").touch()
    logs = "from gateway.telemetry.logs import configure_logs; configure_logs('info', 'json', 'supervisor')"
    with supervised(tmp_path, "worker0 dies-when-ready", logs, stdout=writing) as process:
        os.close(writing)
        until_started(process, tmp_path / "starts-worker0", 3)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    if is_read:
        os.close(reading)


@pytest.mark.slow
def test_a_child_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    """It lives, and does not turn: the supervisor says so, ends it, and the gateway lives on with the next one."""
    with supervised(tmp_path, "worker0 hangs", HASTY) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("forebay: S3 on ")
        while (tmp_path / "starts-worker0").stat().st_size < 2:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "a process hangs and is killed" in out
    assert (tmp_path / "starts-worker1").read_text() == "."


@pytest.mark.slow
def test_a_child_that_is_stopped_while_it_starts_is_killed_and_started_again(tmp_path: Path) -> None:
    """It may hold what the others need to start. So it is ended after the same time, not when it should be ready.

    A busy supervisor first looks at it when it has stopped already, and then takes it for one that loads its code.
    """
    hasty = HASTY + "child_monitor.FIRST_BEAT_LOOKS = 400"
    with supervised(tmp_path, "worker0 stops-when-started-again", hasty) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("forebay: S3 on ")
        until_started(process, tmp_path / "starts-worker0", 3)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "a process hangs and is killed" in out


@pytest.mark.slow
def test_a_child_that_starts_slowly_and_turns_is_waited_for(tmp_path: Path) -> None:
    """It may have a large directory to look through; killed, it would begin again, for ever."""
    with supervised(tmp_path, "worker0 starts-slowly", HASTY + "child_monitor.SLOW_START_SECONDS = 0.5") as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not (line := process.stdout.readline()).startswith("forebay: S3 on "):
            lines.append(line)
            assert line, "ended"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert (tmp_path / "starts-worker0").read_text() == "."
    assert any("a process takes long to start" in line for line in lines)


def test_a_stop_during_the_start_is_a_good_one(tmp_path: Path) -> None:
    """At once, with exit code 0, and with no word of a fault."""
    (begun(tmp_path) / "starts-worker0").touch()
    with supervised(tmp_path, "worker0 starts-slowly") as process:
        until_started(process, tmp_path / "starts-worker0", 1)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, err
    assert "S3 on" not in out
    assert "never retrieved" not in out + err


@pytest.mark.slow
def test_processes_share_new_files_where_the_old_ones_are_removed(tmp_path: Path) -> None:
    """systemd does that when its user logs out. All are started again, so that all share the same ones."""
    with supervised(tmp_path, "", HASTY.replace("0.05", "0.2")) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("forebay: S3 on ")
        shared = in_memory_directory(tmp_path)
        was = shared.stat().st_ino
        shutil.rmtree(shared)
        for name in ("worker0", "worker1", "background"):
            until_started(process, tmp_path / f"starts-{name}", 2)
        assert shared.stat().st_ino != was
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "Forebay makes them anew" in out
    assert "hangs and is killed" not in out
    assert "unexpectedly" not in out
    assert not shared.exists()


@pytest.mark.slow
def test_a_change_that_fails_as_nobody_has_thought_of_ends_nothing(tmp_path: Path) -> None:
    """It is told in the log, and the next one is looked at as if nothing had been."""
    with supervised(tmp_path, "", FAULTY) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("forebay: S3 on ")
        for count in (1, 2):
            process.send_signal(signal.SIGHUP)
            until_started(process, tmp_path / "changes", count)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert out.count("[error    ] changed settings are not in force") == 2
    assert (tmp_path / "starts-worker0").read_text() == "."


def test_restarts_slow_down() -> None:
    """At once after the first death, then 0.1 s doubling, never more than ten seconds."""
    delays = [restart_delay_seconds(deaths) for deaths in range(1, 12)]
    assert delays[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == 10.0
    assert restart_delay_seconds(5000) == 10.0


@pytest.mark.parametrize(("status", "words"), [(0, "exit code 0"), (1, "exit code 1"), (-9, "SIGKILL")])
def test_ends_are_named(status: int, words: str) -> None:
    """Signals by name."""
    assert describe_exit(status) == words

"""A real `forebay serve` for tests: started on free ports, waited for, and never left behind."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from gateway.config.defaults import own_directory
from tests.support import network_namespace
from tests.support.names import NAMES_VARIABLE
from tests.support.prepared_process import PreparedProcess, run_prepared
from tests.support.processes import MARK_VARIABLE, is_over, kill_if_there, marked

_READY = re.compile(r"forebay: S3 on (\S+), admin on (\S+)\n")
_REPOSITORY = Path(__file__).resolve().parents[2]
_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_GONE_SECONDS = 60.0
_COMMAND_SECONDS = 110.0
_POLL_SECONDS = 0.02
_LOG_SHOWN_CHARACTERS = 50_000

ANSWER_SECONDS_MAX = 60.0
"""For what is answered at once, on a machine that does much else, by a process that may have to start before."""

ORIGIN_KEYS = ("origin-key", "origin-secret-0123456789")
"""The key pair that the gateway signs with unless told otherwise; with no [[credentials]], callers sign with it too."""


def wait_for_metric(gateway: GatewayProcess, pattern: str) -> None:
    """Until a line of /metrics begins so: some counts are told a moment later."""
    due, url = time.monotonic() + ANSWER_SECONDS_MAX, f"{gateway.admin_url}/metrics"
    while not re.search(f"^{pattern}", text := httpx.get(url, timeout=60).text, re.MULTILINE):
        assert time.monotonic() < due, f"no {pattern} in\n{text}"
        time.sleep(_POLL_SECONDS)


def to_toml(document: Mapping[str, Any]) -> str:
    """Tables of plain values, and lists of such tables, as TOML."""
    lines: list[str] = []
    for name, table in document.items():
        for one in table if isinstance(table, list) else [table]:
            lines.append(f"[[{name}]]" if isinstance(table, list) else f"[{name}]")
            lines += [f"{key} = {_toml_value(value)}" for key, value in one.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_toml_value(one)}' for key, one in value.items())}}}"
    if isinstance(value, int | float):
        return str(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


class GatewayProcess:
    """`python -m gateway serve` in a process of its own.

    with GatewayProcess({"origin": {"endpoint_url": origin_url}}, directory=tmp_path / "cache") as gateway:
        requests go to gateway.s3_url

    `config` is laid over ports 0, a small cache in `directory` (a temporary one unless given, which leaving removes)
    and ORIGIN_KEYS; None takes a setting away. `before_exec` runs in the supervisor's process before it is one; `code`
    is where the package lies. Where one of these or `environment` is given, or `is_prepared` is False, the processes
    load their code as users' do. `namespace` is the path of the network namespace of prepared ones, `names` the file in
    which they look up names. Leaving stops the gateway and asserts that no process of it is left; when the block
    raised, the gateway's log goes to standard error, which pytest shows.
    """

    def __init__(
        self,
        config: Mapping[str, Mapping[str, Any] | list[Mapping[str, Any]]],
        *,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
        before_exec: Callable[[], None] | None = None,
        code: Path | None = None,
        is_prepared: bool = True,
        namespace: str | None = None,
        names: Path | None = None,
    ) -> None:
        self._before_exec = before_exec
        self._code = code or _REPOSITORY
        self._is_prepared = is_prepared and not (environment or before_exec or code)
        self._temporary = tempfile.TemporaryDirectory(prefix="forebay-test-")
        base = Path(self._temporary.name)
        given = directory or base / "cache"
        self.directory = own_directory(given)
        """Where the gateway works."""
        self.config_file = base / "forebay.toml"
        self.config_file.write_text(to_toml(_with_defaults(config, given)), encoding="utf-8")
        self._log_file = base / "stderr.log"
        # Every process of this gateway inherits the mark, by which those left behind are found.
        self._mark = base / "mark"
        self._mark.touch()
        self._environment = _clean_environment() | dict(environment or {}) | {MARK_VARIABLE: str(self._mark)}
        if namespace is not None:
            assert self._is_prepared
            self._environment[network_namespace.VARIABLE] = namespace
        if names is not None:
            self._environment[NAMES_VARIABLE] = str(names)
        self._process: subprocess.Popen[str] | None = None
        self._orphans: set[int] = set()
        """Of a supervisor that is killed: nobody waits for them. One that ends lets go of its environment, by which it
        would be found, before it lets go of its files, locks and mounts."""
        self.s3_url = ""
        self.admin_url = ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            sys.stderr.write(f"--- log of the gateway\n{self.log}")
        self._clean_up()

    def start(self) -> None:
        """Start and wait for the readiness line; once more after `terminate` or `kill` on the same directory."""
        arguments = ["serve", "--config", str(self.config_file)]
        with self._log_file.open("ab") as log:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": log}
            if self._is_prepared:
                self._process = PreparedProcess(
                    ["tests.support.prepared_gateway", *arguments], env=self._environment, **streams
                )
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "gateway", *arguments],
                    text=True,
                    cwd=self._code,
                    env=self._environment,
                    preexec_fn=self._before_exec,
                    **streams,
                )
        line = self._first_line(self._process)
        match = _READY.fullmatch(line)
        assert match, f"no readiness line but {line!r}\n{self.log}"
        self.s3_url, self.admin_url = match[1], match[2]

    def _first_line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        stdout = process.stdout
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        try:
            return lines.get(timeout=_START_SECONDS)
        except queue.Empty:
            process.kill()
            raise AssertionError(f"not ready after {_START_SECONDS:g} seconds\n{self.log}") from None

    @property
    def pid(self) -> int:
        """The supervisor's."""
        assert self._process is not None, "not started"
        return self._process.pid

    def rest_of_stdout(self) -> str:
        """Everything behind the readiness line; returns when the supervisor has closed it."""
        assert self._process is not None, "not started"
        assert self._process.stdout is not None
        return self._process.stdout.read()

    @property
    def log(self) -> str:
        """Everything on standard error so far."""
        return self._log_file.read_text(encoding="utf-8") if self._log_file.exists() else ""

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Put the end of the log on standard error when the block fails: for a gateway that comes from a fixture."""
        try:
            yield
        except BaseException:
            sys.stderr.write(f"--- the log of the gateway ends with\n{self.log[-_LOG_SHOWN_CHARACTERS:]}")
            raise

    def status(self) -> dict[str, Any]:
        """The document of /api/v1/status."""
        with httpx.Client(trust_env=False, timeout=ANSWER_SECONDS_MAX) as client:
            answer = client.get(f"{self.admin_url}/api/v1/status")
        answer.raise_for_status()
        document: dict[str, Any] = answer.json()
        return document

    def command(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Let `forebay` of a prepared process ask this gateway; the environment is added to that of now."""
        command = ("gateway", *arguments, "--admin-url", self.admin_url)
        return run_prepared(*command, timeout=_COMMAND_SECONDS, env=os.environ | environment)

    def worker_pids(self) -> list[int | None]:
        """Process ids by worker; None for one that is down right now."""
        processes = self.status()["gateway"]["processes"]
        return [one["process_id"] for one in processes if one["name"].startswith("worker")]

    def kill_worker(self, number: int) -> int:
        """SIGKILL worker `number`; returns its process id."""
        pid = self.worker_pids()[number]
        assert pid is not None, f"worker {number} is down"
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_for_worker(self, number: int, *, other_than: int) -> int:
        """Wait until worker `number` is ready as another process than `other_than`; returns its process id."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):  # the process that was killed may be the one that was asked
                one = self.status()["gateway"]["processes"][number]
                if one["ready"] and one["process_id"] != other_than:
                    return int(one["process_id"])
            time.sleep(_POLL_SECONDS)
        raise AssertionError(f"worker {number} did not come back\n{self.log}")

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask the gateway to stop; wait; return its exit code."""
        self.signal(number)
        return self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor, and do not wait."""
        assert self._process is not None, "not started"
        if number == signal.SIGKILL:
            self._orphans |= set(marked(self._mark))
        self._process.send_signal(number)

    def wait(self, timeout_seconds: float = _STOP_SECONDS) -> int:
        """Wait for the supervisor's end and for its children's; return its exit code."""
        assert self._process is not None, "not started"
        code = self._process.wait(timeout_seconds)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._assert_nothing_left()
        return code

    def kill(self) -> None:
        """SIGKILL the supervisor, and wait until its children have noticed."""
        self.signal(signal.SIGKILL)
        self.wait()

    def _assert_nothing_left(self) -> None:
        deadline = time.monotonic() + _GONE_SECONDS
        while left := [pid for pid in {*self._orphans, *marked(self._mark)} if not is_over(pid)]:
            if time.monotonic() > deadline:
                for pid in left:
                    kill_if_there(pid)
                raise AssertionError(f"processes {left} outlived the gateway\n{self.log}")
            time.sleep(_POLL_SECONDS)
        self._orphans.clear()

    def _clean_up(self) -> None:
        try:
            if self._process is not None and self._process.poll() is None:
                self.terminate()
            elif self._process is not None and self._process.stdout is not None:
                self._process.stdout.close()
            self._assert_nothing_left()
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._temporary.cleanup()


def _with_defaults(
    config: Mapping[str, Mapping[str, Any] | list[Mapping[str, Any]]], directory: Path
) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "server": {"port": 0},
        "admin": {"port": 0},
        "origin": {"access_key_id": ORIGIN_KEYS[0], "secret_access_key": ORIGIN_KEYS[1]},
        "cache": {"directory": str(directory), "capacity": "64MiB", "block_size": "1MiB"},
    }
    for name, table in config.items():
        tables[name] = table if isinstance(table, list) else tables.get(name, {}) | dict(table)
    return tables


def _clean_environment() -> dict[str, str]:
    """This environment without what would configure the gateway or its AWS credentials from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "FOREBAY_"))}
    isolated = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull}
    return kept | isolated | {"AWS_SHARED_CREDENTIALS_FILE": os.devnull}

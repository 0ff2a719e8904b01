"""The servers of the demo: a bucket, its distance, and two gateways. They end with the `with` block.

One gateway has the slots that README recommends. The other differs in `consistency = "strict"` alone.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from gateway.core.errors import ForebayError
from gateway.demo.dataset import CHECKPOINT_PREFIX, DATA_PREFIX, Workload


class DemoError(ForebayError):
    """A step failed. The message says which and why; `log` is the end of the log that tells more, or empty."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class Interrupted(BaseException):
    """A signal asked the demo to stop. Not an Exception: nothing on the way to the clean-up may swallow it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"signal {signal_number}")
        self.signal_number = signal_number


_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruptions:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP into `Interrupted`, raised in the main thread; ignores later ones.

    What runs at that moment may swallow it: a finalizer cannot raise anything. `check` raises it again.
    """

    def __init__(self) -> None:
        self._holds = 0
        self._pending: int | None = None
        self._raised = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals until the block ends. Only the main thread may enter."""
        before = {number: signal.signal(number, self._on_signal) for number in _ENDING_SIGNALS}
        try:
            yield
            self.check()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay signals until the end of the block, for steps that must not be interrupted, such as cleaning up."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        self._raise_pending()

    def check(self) -> None:
        """Raise the signal that has arrived, if any."""
        if self._pending is not None:
            raise Interrupted(self._pending)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._raised:
            self._pending = number
            self._raise_pending()

    def _raise_pending(self) -> None:
        if self._pending is not None and not self._holds and not self._raised:
            self._raised = True
            raise Interrupted(self._pending)


_PACKAGE_HOME = Path(__file__).resolve().parents[2]
_READY_SECONDS = 60.0
_STOP_SECONDS = 10.0
_EXCERPT_LINES = 20


class DemoProcess:
    """`python -m MODULE ARGUMENTS…` in a process group of its own, so that the terminal's Ctrl-C reaches only the demo.

    stdout and stderr go to `log`. Raises DemoError when the child ends, or takes over a minute, before a line of its
    stdout matches `ready`.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], ready: re.Pattern[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        self._ready = ready
        self._match: re.Match[str] | None = None
        self._answered = threading.Event()
        python = [sys.executable, "-P", "-m"]  # -P: a folder named gateway where the user stands is not ours
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(  # noqa: S603 - our own modules
                [*python, "gateway.demo.child", str(os.getpid()), *python, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**environment, "PYTHONPATH": str(_PACKAGE_HOME)},
                start_new_session=True,
            )
        self._pump = threading.Thread(target=self._read_stdout, name=f"{name}-stdout", daemon=True)
        self._pump.start()

    def wait_until_ready(self) -> re.Match[str]:
        """Return the match of the readiness line."""
        self._answered.wait(_READY_SECONDS)
        if self._match is None:
            state = f"ended with code {self._process.poll()}" if self._answered.is_set() else "did not become ready"
            raise DemoError(f"{self.name} {state}", self.log_excerpt())
        return self._match

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to its whole group when that is not heeded in ten seconds. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._pump.join()

    def log_excerpt(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_EXCERPT_LINES:])

    def _read_stdout(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101 - a pipe was asked for
        with stdout, self.log.open("ab") as log:
            for raw in stdout:
                log.write(raw)
                log.flush()
                if self._match is None and (found := self._ready.search(raw.decode(errors="replace"))):
                    self._match = found
                    self._answered.set()
        self._answered.set()


REGION = "us-east-1"
_LISTENING = re.compile(r"listening on (\d+)")
_FOREBAY_READY = re.compile(r"forebay: S3 on (\S+), admin on ([^\s,]+)")
_ROOM_BYTES = 3 * 1024**3  # the bucket, two caches and the checkpoint files, with room to spare


@dataclass(frozen=True, slots=True)
class AccessKey:
    """Made up for one run."""

    access_key_id: str
    secret_access_key: str


class Servers:
    """Servers that were started for the demo in a temporary directory. `undo` stops and removes everything."""

    def __init__(self, interruptions: Interruptions, undo: ExitStack) -> None:
        self._interruptions = interruptions
        self._undo = undo
        with interruptions.held():
            self.directory = Path(tempfile.mkdtemp(prefix="forebay-demo-"))
            undo.callback(shutil.rmtree, self.directory)
        _require_room(self.directory)
        self.keys = AccessKey("demo-key", secrets.token_urlsafe(24))
        self._environment = _child_environment(self.directory, self.keys)
        self.processes: list[DemoProcess] = []

    def start(self, name: str, arguments: list[str], ready: re.Pattern[str]) -> re.Match[str]:
        """Start a process, and return the match of its readiness line."""
        with self._interruptions.held():  # the end of a child is registered before it is waited for
            log = self.directory / f"{name}.log"
            self.processes.append(DemoProcess(name, arguments, ready, self._environment, log))
            self._undo.callback(self.processes[-1].stop)
        return self.processes[-1].wait_until_ready()

    def start_bucket(self, workload: Workload) -> str:
        """Start a bucket at a distance, and return its URL."""
        port = self.start("origin", ["gateway.demo.bucket"], _LISTENING)[1]
        shape = [str(workload.first_byte_seconds), str(workload.connection_bytes_per_second)]
        return f"http://127.0.0.1:{self.start('distance', ['gateway.demo.bucket', port, *shape], _LISTENING)[1]}"

    def start_forebay(self, config: Path) -> re.Match[str]:
        """Start a gateway by its configuration file; groups 1 and 2 are the URLs of its S3 port and its admin port."""
        return self.start(config.stem, ["gateway", "serve", "--config", str(config)], _FOREBAY_READY)

    def logs(self) -> str:
        """Return the ends of all logs, for a failure whose place is not known."""
        return "\n".join(f"--- {process.name}\n{process.log_excerpt()}" for process in self.processes)


@dataclass(frozen=True, slots=True)
class Stack:
    """The addresses of the servers. Their `processes` are in the order of the data path, from the bucket on."""

    bucket_url: str
    forebay_url: str
    strict_url: str
    keys: AccessKey
    directory: Path
    servers: Servers


@contextmanager
def started_servers(interruptions: Interruptions) -> Iterator[Servers]:
    """Yield what starts servers; stop everything and remove it in any event."""
    undo = ExitStack()
    try:
        yield Servers(interruptions, undo)
    finally:
        with interruptions.held():
            undo.close()


@contextmanager
def running_stack(workload: Workload, interruptions: Interruptions) -> Iterator[Stack]:
    """Start everything in a temporary directory; stop everything and remove it in any event."""
    with started_servers(interruptions) as servers:
        bucket_url, urls = servers.start_bucket(workload), list[str]()
        for name, rules in (("forebay", _RECOMMENDED), ("forebay-strict", _STRICT)):
            config = _write_config(servers.directory, name, bucket_url, workload.bucket, rules)
            urls.append(servers.start_forebay(config)[1])
        forebay_url, strict_url = urls
        yield Stack(bucket_url, forebay_url, strict_url, servers.keys, servers.directory, servers)


def _require_room(directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < _ROOM_BYTES:
        raise DemoError(
            f"{directory.parent} has {free // 1024**2} MiB free, the demo needs {_ROOM_BYTES // 1024**2} MiB; "
            "set TMPDIR to a directory with more room"
        )


def _child_environment(directory: Path, keys: AccessKey) -> dict[str, str]:
    """Return the user's environment less what leads S3 clients elsewhere or configures Forebay otherwise."""
    kept = {name: value for name, value in os.environ.items() if not name.upper().startswith(("AWS_", "FOREBAY_"))}
    return kept | {
        "AWS_ACCESS_KEY_ID": keys.access_key_id,
        "AWS_SECRET_ACCESS_KEY": keys.secret_access_key,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
        "TMPDIR": str(directory),
        "PYTHONUNBUFFERED": "1",
    }


_RECOMMENDED = ('consistency = "immutable"', 'consistency = "ttl"\nmetadata_ttl = "10m"')
_STRICT = ('consistency = "strict"', 'consistency = "strict"')
"""The rules of the slots of data and of checkpoints."""


def _write_config(directory: Path, name: str, bucket_url: str, bucket: str, rules: tuple[str, str]) -> Path:
    path = directory / f"{name}.toml"
    path.write_text(
        f"""\
[server]
port = 0
[admin]
port = 0
[origin]
endpoint_url = "{bucket_url}"
region = "{REGION}"
[cache]
directory = "{directory / f"{name}-cache"}"
capacity = "1GiB"
persistent = true
[[slots]]
name = "data"
prefix = "s3://{bucket}/{DATA_PREFIX}"
mode = "read-only"
{rules[0]}
[[slots]]
name = "checkpoints"
prefix = "s3://{bucket}/{CHECKPOINT_PREFIX}"
write = "back"
{rules[1]}
""",
        encoding="utf-8",
    )
    return path

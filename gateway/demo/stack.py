"""The servers of the demo: a bucket, its distance, and two gateways. They end with the `with` block.

One gateway has the slots that README recommends. The other differs in `consistency = "strict"` alone.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.demo.errors import DemoError
from gateway.demo.interruptions import Interruptions
from gateway.demo.processes import DemoProcess
from gateway.demo.workload import CHECKPOINT_PREFIX, DATA_PREFIX, Workload

REGION = "us-east-1"
_LISTENING = re.compile(r"listening on (\d+)")
_FOREBAY_READY = re.compile(r"forebay: S3 on (\S+), admin on \S+")
_ROOM_BYTES = 3 * 1024**3  # the bucket, two caches and the checkpoint files, with room to spare


@dataclass(frozen=True, slots=True)
class AccessKey:
    """Made up for one run."""

    access_key_id: str
    secret_access_key: str


@dataclass(frozen=True, slots=True)
class Stack:
    """The addresses of the servers. `processes` are in the order of the data path, from the bucket to the client."""

    bucket_url: str
    forebay_url: str
    strict_url: str
    keys: AccessKey
    directory: Path
    processes: tuple[DemoProcess, ...]

    def logs(self) -> str:
        """Return the ends of all logs, for a failure whose place is not known."""
        return "\n".join(f"--- {process.name}\n{process.log_excerpt()}" for process in self.processes)


@contextmanager
def running_stack(workload: Workload, interruptions: Interruptions) -> Iterator[Stack]:
    """Start everything in a temporary directory; stop everything and remove it in any event."""
    undo = ExitStack()
    try:
        yield _start(workload, interruptions, undo)
    finally:
        with interruptions.held():
            undo.close()


def _start(workload: Workload, interruptions: Interruptions, undo: ExitStack) -> Stack:
    with interruptions.held():
        directory = Path(tempfile.mkdtemp(prefix="forebay-demo-"))
        undo.callback(shutil.rmtree, directory)
    _require_room(directory)
    keys = AccessKey("demo-key", secrets.token_urlsafe(24))
    start = _Starter(undo, interruptions, _child_environment(directory, keys), directory)
    origin = start("origin", ["gateway.demo.origin"], _LISTENING)
    shape = [str(workload.first_byte_seconds), str(workload.connection_bytes_per_second)]
    distance = start("distance", ["gateway.demo.shaping", origin.match[1], *shape], _LISTENING)
    bucket_url = f"http://127.0.0.1:{distance.match[1]}"
    gateways = [
        start(name, ["gateway", "serve", "--config", str(config)], _FOREBAY_READY)
        for name, config in (
            ("forebay", _write_config(directory, "forebay", bucket_url, _recommended_slots(workload.bucket))),
            ("forebay-strict", _write_config(directory, "forebay-strict", bucket_url, _strict_slots(workload.bucket))),
        )
    ]
    forebay, strict = gateways
    return Stack(
        bucket_url=bucket_url,
        forebay_url=forebay.match[1],
        strict_url=strict.match[1],
        keys=keys,
        directory=directory,
        processes=(origin.process, distance.process, forebay.process, strict.process),
    )


@dataclass(frozen=True, slots=True)
class _Started:
    process: DemoProcess
    match: re.Match[str]


@dataclass(frozen=True, slots=True)
class _Starter:
    """Starts children whose end is registered before they are waited for."""

    undo: ExitStack
    interruptions: Interruptions
    environment: Mapping[str, str]
    directory: Path

    def __call__(self, name: str, arguments: list[str], ready: re.Pattern[str]) -> _Started:
        with self.interruptions.held():
            process = DemoProcess(name, arguments, ready, self.environment, self.directory / f"{name}.log")
            self.undo.callback(process.stop)
        return _Started(process, process.wait_until_ready())


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


def _recommended_slots(bucket: str) -> str:
    return f"""\
[[slots]]
name = "data"
prefix = "s3://{bucket}/{DATA_PREFIX}"
mode = "read-only"
consistency = "immutable"
[[slots]]
name = "checkpoints"
prefix = "s3://{bucket}/{CHECKPOINT_PREFIX}"
write = "back"
consistency = "ttl"
metadata_ttl = "10m"
"""


def _strict_slots(bucket: str) -> str:
    return f"""\
[[slots]]
name = "data"
prefix = "s3://{bucket}/{DATA_PREFIX}"
mode = "read-only"
consistency = "strict"
[[slots]]
name = "checkpoints"
prefix = "s3://{bucket}/{CHECKPOINT_PREFIX}"
write = "back"
consistency = "strict"
"""


def _write_config(directory: Path, name: str, bucket_url: str, slots: str) -> Path:
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
{slots}""",
        encoding="utf-8",
    )
    return path

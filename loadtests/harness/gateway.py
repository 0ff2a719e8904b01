"""The gateway under test: a real `forebay serve` on the server core, in front of the load origin."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway.config.entries import SlotSettings
from loadtests.harness import machine
from loadtests.harness.content import BUCKET
from loadtests.harness.server_process import ServerProcess
from tests.support.gateway_process import GatewayProcess

_NAMED_THREADS = Path(__file__).parent / "named_threads"


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway, as a contender."""

    process: GatewayProcess
    name: str = "forebay"

    @property
    def url(self) -> str:
        return self.process.s3_url

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def cpu_seconds(self) -> float:
        """Of the supervisor, the worker and the background process together."""
        return machine.cpu_seconds(self.process.pid)

    @property
    def worker_pid(self) -> int:
        pid = self.process.worker_pids()[0]
        assert pid is not None, "the worker is down"
        return pid

    def forget_pages(self) -> None:
        """Drop everything it has cached from the page cache; it stays on disk."""
        blocks = self.process.directory / "blocks"
        os.sync()
        machine.page_out(self.worker_pid, blocks)
        machine.forget_pages(self.process.directory)

    def ignored_settings(self) -> list[str]:
        """What the gateway says about settings that this version does not act on."""
        return [json.loads(line)["event"] for line in self.process.log.splitlines() if "not in force" in line]


@dataclass(frozen=True, slots=True)
class WorkerOf:
    """The same gateway, by the CPU of its worker alone; `name` is that of a figure."""

    of: Gateway
    name: str

    @property
    def url(self) -> str:
        return self.of.url

    @property
    def address(self) -> tuple[str, int]:
        return self.of.address

    def cpu_seconds(self) -> float:
        return machine.cpu_seconds(self.of.worker_pid)


def slot_knows(key: str) -> bool:
    """Whether this version's slots have a setting, by its name in the file."""
    return any(key in (name, one.alias) for name, one in SlotSettings.model_fields.items())


@contextmanager
def gateway(
    origin: ServerProcess | Gateway | None,
    *,
    name: str = "forebay",
    capacity: str = "8GiB",
    block_size: str = "8MiB",
    slot: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] | None = None,
    cores: set[int] | None = None,
    more_slots: Sequence[Mapping[str, Any]] = (),
    server: Mapping[str, Any] | None = None,
    link: Mapping[str, Any] | None = None,
    before: Callable[[Path], None] | None = None,
    names_threads: bool = False,
    cluster: Mapping[str, Any] | None = None,
    buckets: Sequence[Mapping[str, Any]] = (),
    replica: ServerProcess | None = None,
) -> Iterator[Gateway]:
    """One worker, bucket `load` as one slot, `consistency = "immutable"` unless `slot` says otherwise; on one core
    unless `cores` are given. `link` is more of `[origin]`. `replica` is asked for bytes before `origin`. `more_slots`
    lie beside that one, or within it. `before` is given the cache's directory before the gateway is started. With
    `names_threads` the kernel knows its threads' names. `buckets` have another home than `origin`.

    Settings in `slot` that this version does not know are left out.
    """
    wanted = {"consistency": "immutable"} | dict(slot or {})
    known = {key: value for key, value in wanted.items() if slot_knows(key)}
    config: dict[str, Any] = {
        "origin": {"endpoint_url": origin.url if origin is not None else "http://127.0.0.1:1"} | dict(link or {}),
        "cache": {"capacity": capacity, "block_size": block_size} | dict(cache or {}),
        "server": dict(server or {}),
        "buckets": list(buckets),
        "slots": [{"name": "load", "prefix": f"s3://{BUCKET}/"} | known, *more_slots],
    }
    if cluster is not None:
        config["cluster"] = cluster
    if replica is not None:
        config["buckets"] = [{"name": BUCKET, "replicas": [{"endpoint_url": replica.url}]}]
    directory = Path(tempfile.mkdtemp(prefix="forebay-load-"))
    try:
        if before is not None:
            before(directory / "cache")
        with machine.on_cores(cores or machine.server_core()):
            environment = {"PYTHONPATH": str(_NAMED_THREADS)} if names_threads else None
            process = GatewayProcess(config, directory=directory / "cache", environment=environment, is_prepared=False)
            process.__enter__()
        error: BaseException | None = None
        try:
            yield Gateway(process, name)
        except BaseException as raised:
            error = raised
            raise
        finally:
            process.__exit__(None if error is None else type(error), error, None)
    finally:
        shutil.rmtree(directory)

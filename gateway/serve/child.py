"""The first thing a child process does: read its configuration, set up logs and metrics, then become what it is to be.

    argv: NAME REPORT_DESCRIPTOR LISTENER_DESCRIPTOR...

NAME is `worker0`, `worker1`, … or `background`. The child writes lines to its report descriptor: first `ready`,
`failed` and the reason, or `unusable` and why the disk under the cache directory fails; then, after each change of its
configuration, `follows` and its generation, or `behind` and why it cannot; and what its work has to say.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import orjson
import structlog

from gateway import __version__
from gateway.app.bandwidth import keep_names_in_metrics
from gateway.config import TracingSettings
from gateway.config.live import LiveSettings
from gateway.core.errors import ForebayError, StoreUnavailable
from gateway.serve import pipes
from gateway.serve.child_config import BACKGROUND, SHOWS_READY, ChildConfig, ChildContext, process_number
from gateway.serve.claim import refusal_when_full
from gateway.serve.pipes import ReportPipe
from gateway.serve.system import set_process_title
from gateway.shared.heartbeats import Heartbeats
from gateway.telemetry import metric_kinds
from gateway.telemetry.access_log import AccessLog, AuditLog
from gateway.telemetry.logs import configure_logs
from gateway.telemetry.tracing import Tracer, open_tracer

Work = Callable[[ChildContext], Awaitable[None]]

_YOUNG_OBJECTS_MAX = 10_000
"""New objects until the garbage collector looks at them, a few MiB. The default, 700, is a few requests."""

_NO_THREAD = "can't start new thread"
"""As Python says it, with an exception that has no class of its own."""

_log = structlog.get_logger("forebay.serve")


def load() -> None:
    """Import whatever a child may become (see `gateway.serve.fork_server`)."""
    importlib.import_module("gateway.serve.background")
    importlib.import_module("gateway.serve.worker")


def main(arguments: Sequence[str], work: Work | None = None) -> None:
    """Run as the child that `arguments` name; `work` replaces what its name stands for."""
    name, report = arguments[0], ReportPipe(int(arguments[1]))
    set_process_title(name)
    listeners = [socket.socket(fileno=int(descriptor)) for descriptor in arguments[2:]]
    lines = pipes.lines()
    if (first := next(lines, None)) is None:  # the supervisor is gone, or has given up this start
        sys.exit(1)
    config = ChildConfig.from_line(first)
    changes = _Changes(config, _states() if name == BACKGROUND else lambda _line: False, report.tell)
    try:
        configure_logs(config.settings.logging.level, config.settings.logging.format, name)
        pipes.hold(lines, changes.take)
        _count_into(config, name)
        asyncio.run(_run(name, config, listeners, report, work or _work_of(name), changes))
    except StoreUnavailable as error:
        refusal = refusal_when_full(config.settings.cache.directory, error)
        report.tell(f"unusable {error}" if refusal is None else f"failed {refusal}")
        sys.exit(1)
    except (ForebayError, OSError, ImportError) as error:
        _log.error("the process cannot go on", error=str(error), exc_info=not isinstance(error, ForebayError))
        report.tell(f"failed {error}")
        sys.exit(1)
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        report.tell(f"failed {error}: the limit of processes is reached (ulimit -u, TasksMax=, pids.max)")
        sys.exit(1)


class _Changes:
    """The supervisor's messages while the process runs: written by one thread, read by the event loop."""

    def __init__(self, config: ChildConfig, states: Callable[[bytes], bool], tell: Callable[[str], bool]) -> None:
        self._states = states
        self._tell = tell
        self._loop: asyncio.AbstractEventLoop | None = None
        self._come = asyncio.Event()
        self._latest = config

    def take(self, line: bytes) -> None:
        """Take a line that has come; any thread."""
        document = orjson.loads(line)
        if "settings" not in document:
            if self._states(line):
                self._call(self._tell, SHOWS_READY)
            return
        self._latest = ChildConfig.from_document(document)
        self._call(self._come.set)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended, and the process is about to
                self._loop.call_soon_threadsafe(function, *arguments)

    def come_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on tell this loop what comes."""
        self._loop = loop

    async def follow(self, config: ChildConfig, live: LiveSettings) -> None:
        """For ever, follow the last configuration that has come. If that fails, another process must follow it."""
        generation = config.generation
        while True:
            latest = self._latest
            if latest.generation != generation:
                generation = latest.generation
                try:
                    await live.change(latest.settings, latest.numbers, generation)
                except Exception as error:  # noqa: BLE001 - told, and this process is replaced
                    if self._latest is not latest:  # a later change may mend it
                        continue
                    _log.error("changed settings cannot be put in force", error=str(error), exc_info=error)
                    self._tell(f"behind {error}")
                else:
                    keep_names_in_metrics(latest.settings)
                    self._tell(f"follows {generation}")
            if self._latest is latest:
                await self._come.wait()
                self._come.clear()


def _states() -> Callable[[bytes], bool]:
    """Return what takes a state in, and says whether the admin port shows a ready gateway from now on."""
    from gateway.admin.backends import CURRENT

    return CURRENT.take


def _count_into(config: ChildConfig, name: str) -> None:
    try:
        metric_kinds.share(config.metrics_directory, name)
        keep_names_in_metrics(config.settings)
    except OSError as error:
        metric_kinds.unshare()
        _log.error("metrics of this process are not exported", error=str(error))


def _work_of(name: str) -> Work:
    # Imported late: a worker needs no admin application, and neither is needed to report a failure.
    if name == BACKGROUND:
        from gateway.serve.background import serve_background

        return serve_background
    from gateway.serve.worker import serve_s3

    return serve_s3


def _tracer(settings: TracingSettings, name: str) -> Tracer | None:
    if settings.endpoint_url is None:
        return None
    return open_tracer(settings.endpoint_url, settings.service_name, __version__, name, settings.sample_ratio)


async def _run(
    name: str,
    config: ChildConfig,
    listeners: list[socket.socket],
    report: ReportPipe,
    work: Work,
    changes: _Changes,
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the supervisor decides
    gc.freeze()  # imported objects live for ever and need no further look
    gc.set_threshold(_YOUNG_OBJECTS_MAX)
    live = LiveSettings(config.settings, config.numbers, config.memory, config.generation)
    following: asyncio.Task[None] | None = None

    report.follow(loop)
    changes.come_to(loop)

    def ready() -> None:
        """From now on all parts are there that are to follow."""
        nonlocal following
        report.tell("ready")
        following = asyncio.create_task(changes.follow(config, live), name="changes of settings")

    path = config.settings.logging.audit_file
    audit = AuditLog(path, name) if path is not None else None
    path = config.settings.logging.access_file
    access = AccessLog(path, name) if path is not None and name != BACKGROUND else None
    tracer = _tracer(config.settings.tracing, name) if name != BACKGROUND else None
    async with Heartbeats(config.heartbeats).beating(process_number(name)):
        try:
            await work(ChildContext(name, config, live, report.tell, listeners, stop, ready, audit, access, tracer))
        finally:
            if following is not None:
                following.cancel()
            if access is not None:
                await access.aclose()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
            if audit is not None:
                await asyncio.to_thread(audit.close)

"""The supervisor: opens the ports, keeps the processes, and ends them in good order.

Workers stop first, each when its requests in flight are answered or the grace time is over; the background process
goes last, so that health and metrics can be asked until the end.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from socket import socket

import orjson
import structlog

from gateway import __version__
from gateway.admin.backends import GatewayState
from gateway.app.bandwidth import make_memory
from gateway.config import Settings
from gateway.config.checks import own_address_problem
from gateway.config.live import Numbers
from gateway.config.overlay import SlotTable, changed_keys
from gateway.core.clock import SystemClock
from gateway.core.errors import ForebayError, StartupError
from gateway.serve import listeners
from gateway.serve.child_config import BACKGROUND, ChildConfig
from gateway.serve.child_monitor import ChildMonitor, ChildProcess, ChildSpec
from gateway.serve.claim import claim, leave_mark, recover_buffer, report_closed
from gateway.serve.fork_server import Children, ForkServer
from gateway.serve.reloading import FileThreads, Reloader, SlotChange
from gateway.serve.shared_directory import SharedFiles, SharedMemory, room_needed_bytes
from gateway.serve.system import answered, notify_ready, notify_reloading, notify_stopping, raise_descriptor_limit
from gateway.shared import peer_bytes, seen_nonces
from gateway.shared.arena import names_max, path_of
from gateway.telemetry import metric_kinds
from gateway.telemetry.access_log import AuditLog
from gateway.telemetry.log_file import write_bounded

CHILD_MODULE = "gateway.serve.child"
_BEYOND_GRACE_SECONDS = 5.0
_SHARED_LOOK_SECONDS = 1.0
_SAME_STOP_SECONDS = 1.0
_SHOWN_SECONDS = 2.0
"""A signal so soon after the first is that one told twice: `timeout` signals the process and its group."""
_ANSWERS_KEPT = 64
"""Limit of answers to questions over the admin port: each is looked at many times a second."""

_log = structlog.get_logger("forebay.serve")


@dataclass(frozen=True, slots=True)
class ServerResources:
    """Resources that are opened before any child is started."""

    config: ChildConfig
    s3_listeners: list[socket]
    admin_listeners: list[socket]
    peer_listeners: list[socket]
    """Empty without a cluster."""

    local_listeners: list[socket]
    """Empty without `server.local_socket`."""

    lock: int | None
    state: GatewayState
    shared: SharedMemory


def serve(
    settings: Settings,
    child_module: str = CHILD_MODULE,
    tell: Callable[[], None] = lambda: None,
    reloader: Reloader | None = None,
    *,
    as_json: bool = False,
) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. Raises StartupError or ConfigError when it cannot start.

    `tell` is called when all is ready. `reloader` says where settings are read anew while it runs. With `as_json` the
    readiness line is a JSON document.
    """
    with ExitStack() as undo:
        resources = _prepare(settings, undo)
        reloader = reloader or Reloader(None, os.environ)
        return asyncio.run(_Supervisor(resources, child_module, tell, reloader, as_json=as_json).run())


def _prepare(settings: Settings, undo: ExitStack) -> ServerResources:
    raise_descriptor_limit()
    directory = settings.cache.directory
    lock, closed = claim(directory)
    if lock is not None:
        undo.callback(os.close, lock)
        closed = recover_buffer(settings)
    s3 = listeners.open_listeners("server", settings.server.host, settings.server.port)
    undo.callback(listeners.close_all, s3)
    admin = listeners.open_listeners("admin", settings.admin.host, settings.admin.port)
    undo.callback(listeners.close_all, admin)
    peers: list[socket] = []
    if settings.cluster is not None:
        peers = listeners.open_listeners("cluster", *listeners.host_and_port(settings.cluster.listen))
        undo.callback(listeners.close_all, peers)
    local = [listeners.open_local(path)] if (path := settings.server.local_socket) is not None else []
    undo.callback(listeners.close_all, local)
    if path is not None:
        undo.callback(path.unlink, missing_ok=True)
    settings = _with_ports(settings, listeners.port_of(s3), listeners.port_of(admin))
    shared = _share(settings)
    undo.callback(shared.remove)
    undo.callback(metric_kinds.unshare)
    numbers = Numbers.begin(settings)
    memory = make_memory(settings, numbers, SystemClock().monotonic())
    undo.callback(os.close, memory)
    config = ChildConfig(
        settings,
        secrets.token_hex(8),
        shared.files.path,
        Path(path_of(memory)),
        numbers,
        closed,
        peer_listeners=len(peers),
        local_listeners=len(local),
    )
    return ServerResources(config, s3, admin, peers, local, lock, _first_state(config), shared)


def _as_text(problem: str | None) -> str | None:
    return problem if problem is None else problem.encode(errors="backslashreplace").decode()


def _share(settings: Settings) -> SharedMemory:
    """StartupError where nothing can be shared."""
    room_bytes = room_needed_bytes(settings.server.workers, names_max(len(settings.slots)))
    if settings.cluster is not None:
        room_bytes += seen_nonces.FILE_BYTES + 2 * (settings.server.workers + 1) * peer_bytes.FILE_BYTES
    try:
        shared = SharedMemory(settings.cache.directory, room_bytes, _count_into)
        metric_kinds.share(shared.files.path, "supervisor")
    except OSError as error:
        raise StartupError(f"there is no place for what the processes share: {error}") from error
    return shared


def _count_into(files: SharedFiles) -> None:
    try:
        metric_kinds.share(files.path, "supervisor")
    except OSError as error:
        metric_kinds.unshare()
        _log.error("metrics of the supervisor are not exported", error=str(error))


def _with_ports(settings: Settings, s3_port: int, admin_port: int) -> Settings:
    """Port 0 replaced by what was picked. Only now can every origin be told from this gateway itself."""
    settings = settings.model_copy(
        update={
            "server": settings.server.model_copy(update={"port": s3_port}),
            "admin": settings.admin.model_copy(update={"port": admin_port}),
        }
    )
    problem = own_address_problem(settings, os.environ)
    if problem:
        raise problem
    return settings


def _first_state(config: ChildConfig) -> GatewayState:
    server, admin, cluster = config.settings.server, config.settings.admin, config.settings.cluster
    return GatewayState(
        version=__version__,
        instance_id=config.instance_id,
        process_id=os.getpid(),
        started_at=time.time(),
        s3_url=listeners.url("https" if server.certificate_file else "http", server.host, server.port),
        admin_url=listeners.url("http", admin.host, admin.port),
        peer_address=cluster.advertise or cluster.listen if cluster is not None else None,
        directory=str(config.settings.cache.directory),
        draining=False,
        ready=False,
        processes=[],
        closed=config.closed,
        generation=0,
        config_file=None,
        settings_problem=None,
    )


def _open_audit(settings: Settings) -> AuditLog | None:
    """Return the audit log if one is set; StartupError."""
    path = settings.logging.audit_file
    try:
        return AuditLog(path, "supervisor") if path is not None else None
    except OSError as error:
        raise StartupError(f"the audit log {path} cannot be written: {error.strerror}") from error


class _Supervisor:
    def __init__(
        self,
        resources: ServerResources,
        child_module: str,
        tell: Callable[[], None],
        reloader: Reloader,
        *,
        as_json: bool,
    ) -> None:
        self._resources = resources
        self._config = resources.config
        self._tell = tell
        self._reloader = reloader
        self._as_json = as_json
        self._wanted: list[SlotChange | None] = []
        self._is_wanted = asyncio.Event()
        self._settings_problem: str | None = None
        self._audit: AuditLog | None = None
        self._reading = FileThreads(hanging_max=8)
        self._writing = FileThreads(hanging_max=1)  # a late write must not undo a later one
        self._overlay: Sequence[SlotTable] | None = None
        """Overlay before the last change of slots: it is in force while the disk's own state is unknown."""
        self._answers: deque[tuple[str, str | None, tuple[str, ...]]] = deque(maxlen=_ANSWERS_KEPT)
        self._closed = resources.config.closed
        self._draining = False
        self._stop_told_at = 0.0
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        workers_own = [*resources.s3_listeners, *resources.local_listeners, *resources.peer_listeners]
        of_workers, admin = (tuple(one.fileno() for one in group) for group in (workers_own, resources.admin_listeners))
        self._children = Children(ends_orphans=True)
        settings = resources.config.settings
        given = [settings.origin.access_key_id, *(one.access_key_id for one in settings.origin_credentials)]
        # Few gateways need it: loaded once for all their processes, as the package may be gone later.
        seldom_needed = ("gateway.origin.sts",) if None in given else ()
        self._forks = ForkServer(child_module, self._children, seldom_needed)
        shared = (resources.lock,) if resources.lock is not None else ()
        workers = range(settings.server.workers)
        self._workers = [self._monitor(ChildSpec(f"worker{number}", of_workers, shared)) for number in workers]
        self._background = self._monitor(ChildSpec(BACKGROUND, admin, shared))

    def _monitor(self, spec: ChildSpec) -> ChildMonitor:
        def config_lines(files: SharedFiles) -> bytes:
            line = replace(self._config, metrics_directory=files.path, closed=self._closed).to_line()
            return line + self._state().to_line() if spec.name == BACKGROUND else line

        shared = self._resources.shared
        make = partial(ChildProcess.start, self._forks)
        return ChildMonitor(spec, make, config_lines, shared.whole_files, self._publish, self._close, self._on_asked)

    @property
    def _monitors(self) -> list[ChildMonitor]:
        return [*self._workers, self._background]

    def _state(self) -> GatewayState:
        return self._resources.state.changed(
            closed=self._closed,
            draining=self._draining,
            processes=[monitor.state for monitor in self._monitors],
            generation=self._config.generation,
            settings_problem=self._settings_problem,
            answers=tuple(self._answers),
            config_file=self._reloader.shown_path,
        )

    def _publish(self) -> None:
        self._background.tell(self._state().to_line())

    def _close(self, reason: str) -> None:
        """Close the cache directory to all, as a worker cannot open it: none may remember what another cannot void."""
        if self._closed is None:
            self._closed = reason
            report_closed(self._resources.config.settings.cache.directory, reason)
            for monitor in self._workers:
                monitor.restart()
            self._publish()

    async def run(self) -> int:
        with (
            answered(signal.SIGTERM, self._on_signal),
            answered(signal.SIGINT, self._on_signal),
            answered(signal.SIGHUP, partial(self._want, None), signal.SIG_IGN),  # a late one ends no process
            self._children.watched(),
        ):
            # Those that came while code was loaded (gateway/cli).
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
            try:
                return await self._serve()
            except BaseException:
                await self._abandon()
                raise
            finally:
                await self._forks.close()
                if self._audit is not None:
                    await asyncio.to_thread(self._audit.close)

    async def _serve(self) -> int:
        if not await self._start_all():
            return 0
        self._audit = _open_audit(self._config.settings)
        with suppress(TimeoutError):  # who reads the line may ask the admin port at once
            await asyncio.wait_for(self._background.shows_ready.wait(), _SHOWN_SECONDS)
        self._announce()
        keeping = [asyncio.create_task(monitor.keep()) for monitor in self._monitors]
        besides = [
            asyncio.create_task(self._keep_sharing(), name="shared files"),
            asyncio.create_task(self._keep_changing(), name="changes of settings"),
            asyncio.create_task(self._forks.keep(), name="fork server"),
        ]
        await self._until_stopped([*keeping, *besides])
        for task in besides[:2]:
            task.cancel()
        try:
            return await self._drain(keeping[:-1], keeping[-1])
        finally:
            besides[2].cancel()

    def _on_asked(self, line: str) -> None:
        self._want(SlotChange.from_line(line))

    def _want(self, change: SlotChange | None) -> None:
        if change is not None or None not in self._wanted:
            self._wanted.append(change)
        self._is_wanted.set()

    async def _keep_changing(self) -> None:
        while True:
            await self._is_wanted.wait()
            self._is_wanted.clear()
            wanted, self._wanted = self._wanted, []
            for change in wanted:
                await self._change(change)

    async def _change(self, change: SlotChange | None) -> None:
        """Report the outcome, and go on: with the earlier settings if the change fails."""
        problem, changed = None, list[str]()
        is_reload = change is None or change.name is None
        if is_reload:
            notify_reloading()
        try:
            changed = await self._put_in_force(change)
        except (ForebayError, OSError) as error:
            problem = str(error)
            _log.error("changed settings are refused: nothing was changed", problem=problem)
        except Exception as error:  # noqa: BLE001 - reported: an unforeseen change must not end the gateway
            problem = f"the change failed by a fault of the gateway ({type(error).__name__}): its log says more"
            _log.error("changed settings are not in force because of a fault of the gateway", exc_info=error)
        self._tell_audit(change, problem)
        if change is not None:
            self._answers.append((change.asked, _as_text(problem), tuple(changed)))
        if problem is None or is_reload:
            self._settings_problem = _as_text(problem)
        if is_reload:
            notify_ready(self._served())
        self._publish()

    async def _put_in_force(self, change: SlotChange | None) -> list[str]:
        """Tell all processes of a change, waiting for none; all that may fail comes first. Return the changed keys."""
        load = partial(self._reloader.load, self._config.settings, self._config.numbers, change)
        if self._writing.hang and self._overlay is not None:
            load = partial(load, known=self._overlay)
        loaded = await self._reading.run(load)
        settings = _with_ports(loaded.settings, self._config.settings.server.port, self._config.settings.admin.port)
        config = replace(
            self._config, settings=settings, numbers=loaded.numbers, generation=self._config.generation + 1
        )
        ChildConfig.from_line(config.to_line())  # as each process will read it
        if loaded.overlay is not None:
            self._overlay = loaded.overlay_before
            await self._writing.run(loaded.keep, loaded.undo)
        changed = changed_keys(self._config.settings, settings)
        self._config = config
        self._tell_all()
        for warning in loaded.warnings:
            _log.warning(warning)
        _log.info("settings were changed", generation=config.generation, slots=len(settings.slots), keys=changed)
        return changed

    def _tell_audit(self, change: SlotChange | None, problem: str | None) -> None:
        """Before the change is answered: a process that dies meanwhile takes no line with it."""
        if self._audit is not None:
            self._audit.change(
                caller="signal" if change is None else "admin",
                remote=None if change is None else change.remote,
                operation="SIGHUP" if change is None else change.operation,
                generation=self._config.generation,
                problem=problem,
            )

    def _tell_all(self) -> None:
        for monitor in self._monitors:
            if monitor.files is not None:
                line = replace(self._config, metrics_directory=monitor.files.path, closed=self._closed).to_line()
                monitor.tell(line)

    def _on_signal(self) -> None:
        now = time.monotonic()
        if not self._stop.is_set():
            self._stop_told_at = now
            self._stop.set()
        elif now - self._stop_told_at > _SAME_STOP_SECONDS:
            self._force.set()

    async def _start_all(self) -> bool:
        """All children ready: true. Stopped while starting: false. Raises StartupError when one fails."""
        starting = asyncio.gather(*(monitor.start() for monitor in self._monitors))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                return True
        except OSError as error:
            raise StartupError(f"no process can be started: {error.strerror}") from error
        finally:
            stopping.cancel()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await self._abandon()
        return False

    def _announce(self) -> None:
        state = self._state()
        line = f"forebay: S3 on {state.s3_url}, admin on {state.admin_url}"
        if self._as_json:
            peers = {"peer_address": state.peer_address} if state.peer_address is not None else {}
            line = orjson.dumps({"s3_url": state.s3_url, "admin_url": state.admin_url, **peers}).decode()
        write_bounded(sys.stdout.fileno(), f"{line}\n")
        notify_ready(self._served())
        self._tell()
        _log.info("ready", s3_url=state.s3_url, admin_url=state.admin_url, workers=len(self._workers))

    def _served(self) -> str:
        """One line for `systemctl status`."""
        state = self._state()
        peers = f", peers on {state.peer_address}" if state.peer_address is not None else ""
        refused = "; changed settings were refused, see the log" if self._settings_problem is not None else ""
        return f"S3 on {state.s3_url}, admin on {state.admin_url}{peers}{refused}"

    async def _until_stopped(self, keeping: list[asyncio.Task[None]]) -> None:
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((stopping, *keeping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in keeping:
            if task.done():
                task.result()  # a monitor that fails leaves its child unkept: the gateway must not go on

    async def _keep_sharing(self) -> None:
        """All processes share the same files: where these were removed and made anew, all are started again.

        One at a time, so that the others answer meanwhile.
        """
        while True:
            await asyncio.sleep(_SHARED_LOOK_SECONDS)
            files = await self._resources.shared.whole_files()
            if self._closed is not None:
                leave_mark(self._resources.config.settings.cache.directory)
            behind = [monitor for monitor in self._monitors if monitor.files not in (files, None)]
            if behind and not any(monitor.is_starting for monitor in self._monitors):
                behind[0].restart()

    async def _drain(self, workers: list[asyncio.Task[None]], background: asyncio.Task[None]) -> int:
        grace_seconds = self._resources.config.settings.server.shutdown_grace_seconds
        _log.info("stopping", grace_seconds=grace_seconds)
        self._draining = True
        notify_stopping()
        self._publish()
        listeners.close_all(self._resources.s3_listeners)
        listeners.close_all(self._resources.peer_listeners)
        listeners.close_all(self._resources.local_listeners)
        for monitor in self._workers:
            monitor.stop()
        forced = await self._all_ended(workers, grace_seconds + _BEYOND_GRACE_SECONDS)
        self._background.stop()
        forced |= await self._all_ended([background], 2 * _BEYOND_GRACE_SECONDS)
        self._forks.kill()  # one that is stopped would be waited for
        for monitor in self._monitors:
            monitor.stop(signal.SIGKILL)
        await asyncio.gather(*workers, background)
        _log.info("stopped", forced=forced)
        return 1 if self._force.is_set() else 0

    async def _all_ended(self, keeping: list[asyncio.Task[None]], timeout_seconds: float) -> bool:
        """Wait for the children's end, the time-out, or a second signal. Return True if any child is left."""
        forcing = asyncio.create_task(self._force.wait())
        ending = asyncio.gather(*keeping)
        await asyncio.wait((ending, forcing), timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        forcing.cancel()
        return not ending.done()

    async def _abandon(self) -> None:
        self._forks.kill()
        for monitor in self._monitors:
            monitor.stop(signal.SIGKILL)
        await asyncio.gather(*(monitor.gone() for monitor in self._monitors))

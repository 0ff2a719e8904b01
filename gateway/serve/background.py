"""The background process: the admin port, and work for which no request waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import unquote

import structlog

from gateway.admin.app import control_app
from gateway.admin.backends import CURRENT, Backends, SlotChanges
from gateway.admin.operations import problem
from gateway.admin.origin_check import REMEMBERED_WELL_SECONDS, OriginChecks, OriginFinding
from gateway.admin.overview import CountsHistory
from gateway.app.cluster import polling
from gateway.app.node import (
    BackgroundServices,
    background_services,
    origin_for_checks,
    services_without_directory,
    silence_board,
)
from gateway.config import ServerSettings
from gateway.core import cancellation
from gateway.core.errors import ForebayError, S3Error
from gateway.edge.cycle import in_task
from gateway.edge.response import Refusal
from gateway.edge.s3_server import ASGIApp, Message, Receive, S3Server, Scope, Send
from gateway.serve.child_config import ChildConfig, ChildContext
from gateway.serve.claim import use_reserve_when_full
from gateway.serve.worker import server_limits

CONNECTIONS_MAX = 256
"""Connections of the admin port; above it those that wait for a request make room, the longest first."""

AT_WORK_MAX = 16
"""Requests that the admin port works on at a time, so that a turn of the event loop stays short for the flush."""

WAIT_SECONDS_MAX = 10.0
"""Seconds for which a request waits for its turn; then it gets 503."""

BODY_BYTES_MAX = 4 * 1024**3
"""Longest body: a snapshot or a manifest of ten million objects fits."""

_NOT_COUNTED = frozenset({"/healthz", "/readyz"})
"""Cheap, and asked for by those who restart what does not answer."""

_GRACE_SECONDS = 5
_PAUSE_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_COUNT_SECONDS_MAX = 2.0
_OPENING_SECONDS_MAX = 5.0
"""Seconds after which the workers serve without a slow disk."""

_log = structlog.get_logger("forebay.background")


def admin_server(app: ASGIApp, sockets: Sequence[socket.socket], settings: ServerSettings) -> S3Server:
    """Return the admin port's server. It owns the sockets, and takes its timeouts and sizes from `[server]`."""
    limits = replace(server_limits(settings), max_connections=CONNECTIONS_MAX)
    return S3Server(_FewAtATime(app), sockets=sockets, limits=limits, refusal=_refusal)


def _refusal(error: S3Error) -> Refusal:
    answer = problem(error.status, error.message, {"connection": "close"})
    return answer.status_code, answer.raw_headers, bytes(answer.body)


class _FewAtATime:
    """Hands `app` AT_WORK_MAX requests at a time.

    A request that waits for its client, or whose answer has begun, does not count: a slow client delays no other.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._places = asyncio.Semaphore(AT_WORK_MAX)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await in_task()
        cancellation.register_request(anywhere=scope["method"] in ("GET", "HEAD"))
        scope["path"] = unquote(scope["path"])
        if scope["path"] in _NOT_COUNTED:
            await self._app(scope, receive, send)
            return
        request = _Request(self._places, receive, send)
        try:
            await request.take_place()
        except S3Error as error:
            await problem(error.status, error.message, {"retry-after": "1"})(scope, receive, send)
            return
        try:
            await self._app(scope, request.receive, request.send)
        finally:
            request.leave_place()


class _Request:
    """One request and its place among those at work."""

    def __init__(self, places: asyncio.Semaphore, receive: Receive, send: Send) -> None:
        self._places = places
        self._receive, self._send = receive, send
        self._has_place = False
        self._left_bytes = BODY_BYTES_MAX

    async def take_place(self) -> None:
        """Raise SlowDown when there is none for WAIT_SECONDS_MAX, ClientDisconnected when the client leaves before."""
        try:
            with cancellation.turn():
                async with asyncio.timeout(WAIT_SECONDS_MAX):
                    await self._places.acquire()
        except TimeoutError:
            raise S3Error("SlowDown", "the admin port has too much to do: try again later", 503) from None
        self._has_place = True

    def leave_place(self) -> None:
        """Leave the place; may be repeated."""
        if self._has_place:
            self._has_place = False
            self._places.release()

    async def receive(self) -> Message:
        """Return the next piece of the body. Raise S3Error when the body is late, malformed or too long."""
        had_place = self._has_place
        self.leave_place()
        message = await self._receive()
        self._left_bytes -= len(message.get("body", b""))
        if self._left_bytes < 0:
            raise S3Error("EntityTooLarge", f"the body is longer than {BODY_BYTES_MAX} bytes", 413)
        if had_place:
            await self.take_place()
        return message

    async def send(self, message: Message) -> None:
        """Hand a message of the answer on; with its head the work is done."""
        self.leave_place()
        await self._send(message)


async def serve_background(context: ChildContext) -> None:
    """Serve the admin port, and keep up the cache directory, until told to stop."""
    config = context.config
    async with origin_for_checks(context.live, config.instance_id) as (origin, keys):
        board = silence_board(config.metrics_directory)
        check = OriginChecks(origin, context.live, keys.problem, board=board, on_change=_tell_of_origin)
        telling = asyncio.create_task(_ask_origins(check), name="origin check")
        try:
            closed = partial(_is_closed, config)
            polled = polling(context.live, config.instance_id, config.metrics_directory, board, closed=closed)
            async with polled as cluster:
                await _serve(context, Backends(cluster=cluster), check)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)


async def _ask_origins(check: OriginChecks) -> None:
    while True:
        await check.findings()
        await asyncio.sleep(REMEMBERED_WELL_SECONDS)


def _tell_of_origin(where: str, found: OriginFinding) -> None:
    if found.problem is None:
        _log.info(f"{where} answers")
    else:
        _log.warning(f"{where}: {found.problem}", state=found.state)


async def _serve(context: ChildContext, lent: Backends, check: OriginChecks) -> None:
    tried = asyncio.Event()
    keeping_up = asyncio.create_task(_keep_up(context, lent, tried), name="upkeep")
    try:
        await _serve_admin(context, lent, tried, check)
        await _tell_what_stays(context.config, lent)
    finally:
        keeping_up.cancel()
        await asyncio.gather(keeping_up, return_exceptions=True)


async def _tell_what_stays(config: ChildConfig, lent: Backends) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_COUNT_SECONDS_MAX):
            left = await lent.pending()
        if left is not None and left.objects:
            _log.warning(
                "STOPPED WITH UNFLUSHED WRITES, which only this disk has: the next gateway on this directory sends "
                "them, forebay writeback export copies them",
                objects=left.objects,
                bytes=left.bytes,
                directory=str(config.settings.cache.directory),
            )


async def _serve_admin(context: ChildContext, lent: Backends, tried: asyncio.Event, check: OriginChecks) -> None:
    """Ready once it was tried to open the cache directory: so commands that come with the first line find it open."""
    changes = SlotChanges(context.tell, CURRENT)
    directory = context.config.metrics_directory
    history = CountsHistory(directory)
    app = control_app(context.live, CURRENT, directory, lent, check, changes, context.audit, history)
    server = admin_server(app, context.listeners, context.config.settings.server)
    serving = asyncio.create_task(
        server.serve(context.stop, grace_seconds=_GRACE_SECONDS, on_ready=lambda: None), name="admin port"
    )
    keeping = asyncio.create_task(history.keep(), name="history")
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_OPENING_SECONDS_MAX):
                await tried.wait()
        context.ready()
        await serving
    finally:
        keeping.cancel()


async def _keep_up(context: ChildContext, lent: Backends, tried: asyncio.Event) -> None:
    """Flush what is pending, survey the blocks where that is needed, scrub them, keep up indexes, and do jobs.

    What fails is tried again: the workers serve meanwhile. `tried` is set after the first attempt to begin.
    """
    config, told = context.config, ""
    while True:
        pause_seconds = _PAUSE_SECONDS
        if _is_closed(config):
            tried.set()
            await _do_without(context, lent)
        await asyncio.to_thread(use_reserve_when_full, config.settings.cache.directory)
        try:
            async with background_services(
                context.live, instance_id=config.instance_id, shared_directory=config.metrics_directory
            ) as kept:
                lent.jobs, lent.changes, lent.snapshots = kept.jobs, kept.events, kept.snapshots
                lent.explainer, lent.indexes, lent.writeback = kept.explainer, kept.indexes, kept.writeback
                lent.registry, lent.stores, lent.feeds = kept.beats, kept.stores, kept.feeds
                tried.set()
                await _work(kept, lent)
                pause_seconds = 0.0
        except Exception as error:  # noqa: BLE001 - reported, and all begins anew: acknowledged writes wait for it
            if str(error) != told:
                expected = isinstance(error, (ForebayError, OSError))
                _log.warning(
                    "the maintenance of the cache directory has failed: it is tried again later",
                    error=str(error),
                    exc_info=not expected,
                )
            told = str(error)
        finally:
            tried.set()
            lent.take_back()
        await asyncio.sleep(pause_seconds)


async def _work(kept: BackgroundServices, lent: Backends) -> None:
    outdated = asyncio.create_task(kept.is_outdated.wait(), name="outdated")
    tasks: list[asyncio.Task[Any]] = [outdated]
    tasks += [asyncio.create_task(_care(kept, lent), name="care"), asyncio.create_task(_settle(kept), name="settle")]
    tasks += [asyncio.create_task(feed.run(), name="event feed") for feed in kept.feeds]
    if kept.flushing is not None:
        tasks.append(asyncio.create_task(kept.flushing.run(), name="flushing"))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _care(kept: BackgroundServices, lent: Backends) -> None:
    await kept.snapshots.warn()
    await kept.blocks.rebuild_index()
    lent.scrubber = kept.scrubber
    await (kept.scrubber.run() if kept.scrubber is not None else asyncio.Event().wait())


async def _settle(kept: BackgroundServices) -> None:
    """Whenever all processes keep to changed settings, bring in line with them what lies on disk."""
    settled = -1
    while True:
        state = CURRENT.state
        if state is not None and state.is_followed and state.generation != settled:
            await kept.settle()
            settled = state.generation
        await asyncio.sleep(_LOOK_SECONDS)


def _is_closed(config: ChildConfig) -> bool:
    return config.closed is not None or (CURRENT.state is not None and CURRENT.state.closed is not None)


async def _do_without(context: ChildContext, lent: Backends) -> None:
    """For good: where there is no cache directory, none is opened before the gateway is started again."""
    config = context.config
    async with services_without_directory(
        context.live, instance_id=config.instance_id, shared_directory=config.metrics_directory
    ) as lent.registry:
        await asyncio.Event().wait()

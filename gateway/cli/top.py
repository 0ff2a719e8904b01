"""`forebay top`: the overview of a running gateway, again and again, with rates between two of them."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gateway.admin.formatting import (
    DISK_STATES,
    cluster_text,
    counted,
    origin_text,
    size_text,
    waiting_text,
    wrong_with,
)
from gateway.cli.checkpoints import share_text
from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_address, printable
from gateway.cli.jobs import JOBS
from gateway.cli.looks import request_style, seconds_text
from gateway.cli.tables import (
    NOTHING,
    Column,
    Columns,
    Row,
    cut,
    duration_text,
    rate_text,
    rows_of,
    some_bytes_text,
    table_lines,
    terminal_width,
)
from gateway.config.units import parse_duration_seconds
from gateway.core.errors import AdminPortError

if TYPE_CHECKING:
    from gateway.admin.client import LiveAdminClient
    from gateway.api import documents as to

_TIMEOUT_SECONDS = 5.0
_INTERVAL_SECONDS_MIN = 0.1
_FIRST_SECONDS = 1.0
"""In a pipe the first figures come after this time: they are rates already."""

_CHECKPOINTS_MAX = 20
_PIPE_WIDTH = 160
_BARS = "▁▂▃▄▅▆▇█"
_COMFORTABLE = 28
"""For names in tables: figures matter more."""

_HISTORY = 60
"""Takings that the curve of throughput goes back."""

Line = tuple[str, str]

IntervalOption = Annotated[str, typer.Option("--interval", metavar="DURATION", help="How often to take figures.")]
CountOption = Annotated[int | None, typer.Option("--count", metavar="N", min=1, help="End after so many times.")]


def top(
    interval: IntervalOption = "1s",
    count: CountOption = None,
    config: ConfigOption = None,
    admin_url: AdminUrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show a running gateway live: throughput, hits, slots, unflushed data, checkpoints, jobs, slow requests, health.

    Ctrl-C ends it. In a pipe it prints plain text, with --json a document a line.
    """
    from gateway.admin.client import LiveAdminClient

    seconds = _interval_seconds(interval)
    client = LiveAdminClient(*admin_address(admin_url, config), timeout_seconds=_TIMEOUT_SECONDS)
    is_live = terminal_width() is not None and not json
    show = _on_terminal(client, seconds, count) if is_live else _in_pipe(client, seconds, count, json)
    try:
        is_ready = asyncio.run(show)
    except (KeyboardInterrupt, asyncio.CancelledError):
        return
    raise typer.Exit(0 if is_ready else 1)


def _interval_seconds(interval: str) -> float:
    try:
        return max(_INTERVAL_SECONDS_MIN, parse_duration_seconds(interval))
    except ValueError as error:
        raise typer.BadParameter(f"--interval {printable(interval)}: {error}") from None


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, between two samples. `request_seconds`, `hit_ratio`: None without a request, or a read, meanwhile."""

    served_bytes: float
    received_bytes: float
    requests: float
    origin_read_bytes: float
    origin_written_bytes: float
    flush_bytes: float
    request_seconds: float | None
    hit_ratio: float | None


_PER_SECOND = ("served_bytes", "received_bytes", "requests", "origin_read_bytes", "origin_written_bytes", "flush_bytes")
_COUNTED = ("sent_bytes", *_PER_SECOND[1:], "request_seconds", "hit_bytes", "miss_bytes")


def rates(before: to.Counts, now: to.Counts) -> Rates | None:
    """Return None where no time has passed, or counters have begun again: the gateway was started anew."""
    seconds = now.at - before.at
    moved = {name: getattr(now, name) - getattr(before, name) for name in _COUNTED}
    if seconds <= 0 or min(moved.values()) < 0:
        return None
    read = moved["hit_bytes"] + moved["miss_bytes"]
    return Rates(
        **{name: moved[count] / seconds for name, count in zip(_PER_SECOND, _COUNTED, strict=False)},
        request_seconds=moved["request_seconds"] / moved["requests"] if moved["requests"] else None,
        hit_ratio=moved["hit_bytes"] / read if read else None,
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """One taking, `at` in seconds since 1970. With a `problem`, `overview` is the last that the gateway answered."""

    at: float
    problem: str | None = None
    answered_at: float | None = None
    overview: to.Overview | None = None
    rates: Rates | None = None

    @property
    def state(self) -> str:
        """`ready`, `not ready`, `draining`, `starting` or `no answer`."""
        if self.problem is not None:
            return "no answer"
        gateway = self.overview.status.gateway if self.overview is not None else None
        if gateway is None:
            return "starting"
        return "draining" if gateway.draining else "ready" if gateway.ready else "not ready"

    def document(self) -> dict[str, Any]:
        """Return the figures for programs."""
        told = {"at": round(self.at, 3), "state": self.state, "problem": self.problem}
        shown = self.overview if self.problem is None else None
        if shown is None:
            return told | dict.fromkeys(_OF_STATUS) | {name: [] for name in _LISTS}
        status, moved = shown.status, asdict(self.rates) if self.rates is not None else {}
        of_status = (
            {
                "processes": [one.document() for one in status.gateway.processes] if status.gateway is not None else [],
                "origin_reachable": status.origin.reachable,
                "origin_problem": status.origin.problem,
                "cache_disk": status.cache.disk.state,
            },
            {name: round(moved[name], 1 if name == "requests" else None) for name in _PER_SECOND} if moved else None,
            moved.get("request_seconds"),
            moved.get("hit_ratio"),
            status.cache.hit_ratio,
            {"used_bytes": status.cache.usage_bytes, "capacity_bytes": status.cache.capacity_bytes},
            self._unflushed(status.writeback) if status.writeback is not None else None,
        )
        checkpoints, slowest = latest(shown.checkpoints), shown.requests.slowest
        lists: tuple[Sequence[to.Document], ...] = (shown.slots, shown.jobs, checkpoints, slowest)
        told |= dict(zip(_OF_STATUS, of_status, strict=True))
        return told | {name: [one.document() for one in found] for name, found in zip(_LISTS, lists, strict=True)}

    def _unflushed(self, pending: to.Writeback) -> dict[str, Any]:
        age_seconds = self.oldest_age_seconds(pending)
        return pending.model_dump(include=_UNFLUSHED) | {
            "oldest_age_seconds": None if age_seconds is None else round(age_seconds, 1)
        }

    def oldest_age_seconds(self, pending: to.Writeback) -> float | None:
        oldest_at = pending.oldest_acknowledged_at
        return None if oldest_at is None else max(0.0, self.at - oldest_at)


_UNFLUSHED = {"objects", "bytes", "conflicts", "damaged", "failing", "waiting_for_bucket"}
_OF_STATUS = ("health", "per_second", "request_seconds", "hit_ratio", "hit_ratio_since_start", "cache", "unflushed")
_LISTS = ("slots", "jobs", "checkpoints", "slowest_requests")


def latest(found: list[to.Checkpoint]) -> list[to.Checkpoint]:
    """Return checkpoints that are not durable first, then the latest."""
    return sorted(found, key=lambda one: (one.state == "durable", -(one.last_at or 0.0)))[:_CHECKPOINTS_MAX]


class _Watch:
    """Takes figures of one gateway, and goes on when it is away and comes back. Event loop only."""

    def __init__(self, client: LiveAdminClient) -> None:
        self._client = client
        self._last = Figures(time.time())

    async def take(self) -> Figures:
        """Return the present figures, or why there are none."""
        from gateway.api.documents import Overview

        try:
            now = await self._client.get("/api/v1/overview", Overview)
        except AdminPortError as error:
            self._last = replace(self._last, at=time.time(), problem=str(error), rates=None)
            return self._last
        at, before = time.time(), self._last.overview if self._last.problem is None else None
        moved = rates(before.counts, now.counts) if before is not None else None
        if before is not None and before.counts.at == now.counts.at:  # the gateway gives a fresh document again
            moved = self._last.rates
        self._last = Figures(at, None, at, now, moved)
        return self._last


@asynccontextmanager
async def _watching(client: LiveAdminClient) -> AsyncIterator[_Watch]:
    """SIGTERM ends it as Ctrl-C does: the terminal is put right."""
    watch, task = _Watch(client), asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield watch
    finally:
        await client.aclose()


async def _in_pipe(client: LiveAdminClient, seconds: float, count: int | None, json: bool) -> bool:
    """Print figures to a pipe; return True if the gateway was ready the last time."""
    history: deque[float] = deque(maxlen=_HISTORY)
    async with _watching(client) as watch:
        if (await watch.take()).problem is None:
            await asyncio.sleep(_FIRST_SECONDS)
        while True:
            due = time.monotonic() + seconds
            figures = await watch.take()
            if json:
                sys.stdout.buffer.write(orjson.dumps(figures.document()) + b"\n")
                sys.stdout.buffer.flush()
            else:
                lines = screen(figures, history, _PIPE_WIDTH, sys.maxsize)
                typer.echo("\n".join([text for text, _ in lines] + [""]))
            if count is not None:
                count -= 1
                if count == 0:
                    return figures.state == "ready"
            await asyncio.sleep(max(0.0, due - time.monotonic()))


async def _on_terminal(client: LiveAdminClient, seconds: float, count: int | None) -> bool:
    """Do the same on the whole screen, drawn again whenever the terminal's size changes."""
    console = Console(highlight=False, markup=False)
    history: deque[float] = deque(maxlen=_HISTORY)
    figures = Figures(time.time())
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:

        def draw() -> None:
            size = console.size
            lines = screen(figures, history, size.width, size.height, now=time.time())
            live.update(
                Group(*(Text(text, style, no_wrap=True, overflow="crop") for text, style in lines)), refresh=True
            )

        asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, draw)
        async with _watching(client) as watch:
            taking = asyncio.create_task(watch.take())
            while True:
                await asyncio.wait((taking,), timeout=seconds)
                if taking.done():
                    figures = taking.result()
                    if figures.rates is not None:
                        history.append(figures.rates.served_bytes)
                    if count is not None and (count := count - 1) == 0:
                        return figures.state == "ready"
                draw()  # a gateway that does not answer is told while it is waited for
                if taking.done():
                    await asyncio.sleep(max(0.0, figures.at + seconds - time.time()))
                    taking = asyncio.create_task(watch.take())


def screen(figures: Figures, history: Sequence[float], width: int, height: int, now: float | None = None) -> list[Line]:
    """Return the lines, no more than `height`, none wider than `width`."""
    lines = [(cut(text, width), style) for text, style in _head(figures, history, now or figures.at)]
    tables = [one for one in _tables(figures) if one[2]]
    room = height - len(lines)
    without: list[str] = []
    # An empty line, a head, a row, and how many more there are: with less room a table says nothing.
    while tables and sum(min(4, len(rows) + 2) for _, _, rows in tables) > room - bool(without):
        name, _, rows = tables.pop()
        without.insert(0, f"{len(rows)} {name}")
    room -= bool(without)
    for left, (name, columns, rows) in zip(range(len(tables), 0, -1), tables, strict=True):
        # An empty line and a head besides the rows; tables that need less leave their room to the others.
        shown = min(len(rows), max(2, room // left - 2))
        told = [("", ""), *table_lines(columns, rows[:shown], width, fold=False, comfortable=_COMFORTABLE)]
        if shown < len(rows):
            told[-1] = (f"… and {len(rows) - shown + 1} more {name}", "dim")
        lines += told
        room -= len(told)
    if without:
        lines.append((cut(f"… no room for {', '.join(without)}", width), "dim"))
    return lines[:height]


def _tables(figures: Figures) -> Iterator[tuple[str, Columns[Any], list[Row]]]:
    if (shown := figures.overview) is None:
        return
    yield "slots", _SLOTS, list(rows_of(_SLOTS, shown.slots, lambda one: "yellow" if one.binds else ""))
    yield "jobs", JOBS, list(rows_of(JOBS, shown.jobs, lambda one: "red" if one.state == "failed" else ""))
    yield "checkpoints", _CHECKPOINTS, list(rows_of(_CHECKPOINTS, latest(shown.checkpoints), _state_style))
    requests = _requests_at(figures.at)
    yield "slow requests", requests, list(rows_of(requests, shown.requests.slowest, request_style))


def _head(figures: Figures, history: Sequence[float], now: float) -> Iterator[Line]:
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    status = figures.overview.status if figures.overview is not None else None
    gateway = status.gateway if status is not None else None
    version = f" {gateway.version}" if gateway is not None else ""
    up = f", up {timedelta(seconds=round(max(0.0, now - gateway.started_at)))}" if gateway is not None else ""
    if figures.problem is not None:
        yield f"forebay{version}: no answer, {clock}", "bold red"
        yield printable(figures.problem), "red"
        if figures.answered_at is None:
            return
        ago = timedelta(seconds=round(max(0.0, now - figures.answered_at)))
        yield f"the figures below are {ago} old; asking again", "red"
    elif figures.answered_at is None:
        yield f"forebay: asked for the first time, {clock}", "bold"
        return
    else:
        yield f"forebay{version}: {figures.state}{up}, {clock}", "bold" if figures.state == "ready" else "bold red"
    if status is not None:
        yield from _health(status)
        yield from _throughput(figures, status, history)


def _health(status: to.Status) -> Iterator[Line]:
    gateway, cache = status.gateway, status.cache
    if gateway is not None:
        up = sum(one.ready for one in gateway.processes)
        restarts = sum(one.restarts for one in gateway.processes)
        text = f"S3        {gateway.s3_url}, {up} of {len(gateway.processes)} processes ready"
        text += f", {counted(restarts, 'restart')}" if restarts else ""
        yield text, "" if up == len(gateway.processes) else "red"
        for problem in filter(None, (gateway.closed, gateway.settings_problem)):
            yield printable(problem), "red"
    for origin in (status.origin, *status.origin.differing):
        text = f"origin    {origin.endpoint_url}: {origin_text(origin)}"
        yield printable(text), "red" if origin.problem is not None else ""
    ratio = "" if cache.hit_ratio is None else f", {cache.hit_ratio:.1%} of bytes from it since the start"
    yield f"cache     {size_text(cache.usage_bytes)} of {size_text(cache.capacity_bytes)} in use{ratio}", ""
    if (cluster := status.cluster) is not None and any(one.state != "up" for one in cluster.members):
        yield f"nodes     {printable(cluster_text(cluster))}", "red"
    if cache.disk.state != "well":
        yield f"disk      {'; '.join(DISK_STATES[cache.disk.state])}", "bold red"


def _throughput(figures: Figures, status: to.Status, history: Sequence[float]) -> Iterator[Line]:
    rates = figures.rates
    if rates is None:
        yield f"served    {NOTHING}", ""
    else:
        hits = "" if rates.hit_ratio is None else f", hits {rates.hit_ratio:.1%}"
        yield f"served    {size_text(rates.served_bytes)}/s, received {size_text(rates.received_bytes)}/s{hits}", ""
        each = "" if rates.request_seconds is None else f", {rates.request_seconds * 1000:.3g} ms each"
        yield f"requests  {rates.requests:.4g}/s{each}", ""
        yield (
            f"origin    read {size_text(rates.origin_read_bytes)}/s, written "
            f"{size_text(rates.origin_written_bytes)}/s, of it flushes {size_text(rates.flush_bytes)}/s",
            "",
        )
    pending = status.writeback
    if pending is not None:
        amount = f"{counted(pending.objects, 'object')}, {size_text(pending.bytes)}"
        age_seconds = figures.oldest_age_seconds(pending)
        oldest = "" if age_seconds is None else f", the oldest for {timedelta(seconds=round(age_seconds))}"
        wrong = wrong_with(pending)
        told = ", ".join(filter(None, (*wrong, waiting_text(pending))))
        text = f"unflushed {amount}{oldest}" + (f"; {told}" if told else "")
        yield text, "red" if wrong else ""
        if pending.journal_problem is not None:
            yield printable(f"journal   takes nothing now: {pending.journal_problem}"), "bold red"
    if any(history):
        yield f"          {curve(history)}", "cyan"


def curve(history: Sequence[float]) -> str:
    """Return the last rates as blocks, the greatest of them as a full one; and its number."""
    most = max(history)
    return "".join(_BARS[round(one / most * (len(_BARS) - 1))] for one in history) + f"  up to {size_text(most)}/s"


_SLOTS: Columns[to.SlotDocument] = (
    Column("slot", lambda one: printable(one.name), shortened=True),
    Column("prefix", lambda one: printable(one.prefix), shortened=True, rank=3),
    Column("used", lambda one: size_text(one.capacity.used_bytes), right=True),
    Column("at most", lambda one: some_bytes_text(one.capacity.limit_bytes), right=True, rank=4),
    Column("hits", lambda one: NOTHING if one.hit_ratio is None else f"{one.hit_ratio:.1%}", right=True),
    Column("read", lambda one: rate_text(one.read_bandwidth.bytes_per_second), right=True),
    Column("write", lambda one: rate_text(one.write_bandwidth.bytes_per_second), right=True),
    Column("unflushed", lambda one: size_text(one.unflushed.bytes) if one.unflushed else NOTHING, right=True, rank=1),
    Column("bound by", lambda one: ", ".join(one.binds) or NOTHING, rank=2),
)
_CHECKPOINTS: Columns[to.Checkpoint] = (
    Column("checkpoint", lambda one: printable(one.url), shortened=True),
    Column("state", lambda one: one.state),
    Column("files", lambda one: f"{one.files:,}", right=True, rank=2),
    Column("size", lambda one: size_text(one.bytes), right=True),
    Column("flushed", lambda one: share_text(one.bytes_flushed, one.bytes or int(one.state != "durable")), right=True),
    Column("left", lambda one: duration_text(one.flush_seconds_left), right=True, rank=1),
    Column("exposed", lambda one: duration_text(one.exposed_seconds), right=True, rank=1),
)


def _requests_at(at: float) -> Columns[to.RecentRequest]:
    return (
        Column("slowest", lambda one: seconds_text(one.seconds), right=True),
        Column("ago", lambda one: duration_text(max(0.0, at - one.at)), right=True, rank=2),
        Column("operation", lambda one: one.operation),
        Column("object", lambda one: printable(one.url), shortened=True),
        Column("status", lambda one: one.status),
        Column("cache", lambda one: one.cache or NOTHING, rank=1),
        Column("sent", lambda one: size_text(one.sent_bytes), right=True, rank=3),
        Column("caller", lambda one: printable(one.caller), shortened=True, rank=4),
        Column("request id", lambda one: one.request_id, rank=5),
    )


def _state_style(one: to.Checkpoint) -> str:
    yellow = dict.fromkeys(("stalled", "waiting for the bucket"), "yellow")
    return {"failed": "red", "conflict": "red", "durable": "green", **yellow}.get(one.state, "")

"""`forebay top`: a running gateway, live."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from gateway.admin.formatting import counted, origin_text, size_text, waiting_text, wrong_with
from gateway.admin.troubles import DISK_STATES
from gateway.cli.common import AdminUrlOption, ConfigOption, JsonOption, admin_address, printable
from gateway.cli.requests import seconds_text
from gateway.cli.tables import NOTHING, Column, Row, cut, table_lines, terminal_width
from gateway.cli.top_figures import Figures, Rates, Watch
from gateway.config.units import parse_duration_seconds

if TYPE_CHECKING:
    from gateway.admin.client import Checkpoint, Job, LiveAdminClient, RecentRequest, Slot, Status

_TIMEOUT_SECONDS = 5.0
_INTERVAL_SECONDS_MIN = 0.1
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


@asynccontextmanager
async def _watching(client: LiveAdminClient) -> AsyncIterator[Watch]:
    """SIGTERM ends it as Ctrl-C does: the terminal is put right."""
    watch, task = Watch(client), asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield watch
    finally:
        await watch.aclose()


async def _in_pipe(client: LiveAdminClient, seconds: float, count: int | None, json: bool) -> bool:
    """Print figures to a pipe; return True if the gateway was ready the last time."""
    history: deque[float] = deque(maxlen=_HISTORY)
    async with _watching(client) as watch:
        while True:
            due = time.monotonic() + seconds
            figures = await watch.take(whole=True)
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
    tables = [
        ("slots", _SLOTS, [Row(_slot(one), "yellow" if one.binds else "") for one in figures.slots]),
        ("jobs", _JOBS, [Row(_job(one), "red" if one.state == "failed" else "") for one in _newest(figures.jobs)]),
        ("checkpoints", _CHECKPOINTS, [Row(_checkpoint(one), _state_style(one)) for one in figures.checkpoints]),
        ("slow requests", _REQUESTS, _slowest(figures)),
    ]
    tables = [one for one in tables if one[2]]
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
        found = [("", ""), *table_lines(columns, rows[:shown], width, fold=False, comfortable=_COMFORTABLE)]
        if shown < len(rows):
            found[-1] = (f"… and {len(rows) - shown + 1} more {name}", "dim")
        lines += found
        room -= len(found)
    if without:
        lines.append((cut(f"… no room for {', '.join(without)}", width), "dim"))
    return lines[:height]


def _head(figures: Figures, history: Sequence[float], now: float) -> Iterator[Line]:
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    status = figures.status
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


def _health(status: Status) -> Iterator[Line]:
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
        text = f"origin    {origin.endpoint_url}: {origin_text(origin.model_dump())}"
        yield printable(text), "red" if origin.problem is not None else ""
    ratio = "" if cache.hit_ratio is None else f", {cache.hit_ratio:.1%} of bytes from it since the start"
    yield f"cache     {size_text(cache.usage_bytes)} of {size_text(cache.capacity_bytes)} in use{ratio}", ""
    if cache.disk.state != "well":
        yield f"disk      {'; '.join(DISK_STATES[cache.disk.state])}", "bold red"


def _throughput(figures: Figures, status: Status, history: Sequence[float]) -> Iterator[Line]:
    rates = figures.rates
    yield f"served    {_served(rates)}", ""
    if rates is not None:
        yield f"requests  {_requests(rates)}", ""
        yield (
            f"origin    read {size_text(rates.origin_read_bytes)}/s, written "
            f"{size_text(rates.origin_written_bytes)}/s, of it flushes {size_text(rates.flush_bytes)}/s",
            "",
        )
    pending = figures.unflushed()
    if pending is not None:
        amount = f"{counted(pending['objects'], 'object')}, {size_text(pending['bytes'])}"
        age = pending["oldest_age_seconds"]
        oldest = "" if age is None else f", the oldest for {timedelta(seconds=round(age))}"
        wrong = wrong_with(pending)
        told = ", ".join(filter(None, (*wrong, waiting_text(pending))))
        text = f"unflushed {amount}{oldest}" + (f"; {told}" if told else "")
        yield text, "red" if wrong else ""
        if status.writeback is not None and status.writeback.journal_problem is not None:
            yield printable(f"journal   takes nothing now: {status.writeback.journal_problem}"), "bold red"
    if any(history):
        yield f"          {curve(history)}", "cyan"


def _served(rates: Rates | None) -> str:
    if rates is None:
        return NOTHING
    text = f"{size_text(rates.served_bytes)}/s, received {size_text(rates.received_bytes)}/s"
    return text if rates.hit_ratio is None else f"{text}, hits {rates.hit_ratio:.1%}"


def _requests(rates: Rates) -> str:
    text = f"{rates.requests:.4g}/s"
    return text if rates.request_seconds is None else f"{text}, {rates.request_seconds * 1000:.3g} ms each"


def curve(history: Sequence[float]) -> str:
    """Return the last rates as blocks, the greatest of them as a full one; and its number."""
    most = max(history)
    return "".join(_BARS[round(one / most * (len(_BARS) - 1))] for one in history) + f"  up to {size_text(most)}/s"


_SLOTS = (
    Column("slot", shortened=True),
    Column("prefix", shortened=True, rank=3),
    Column("used", right=True),
    Column("at most", right=True, rank=4),
    Column("hits", right=True),
    Column("read", right=True),
    Column("write", right=True),
    Column("unflushed", right=True, rank=1),
    Column("bound by", rank=2),
)


def _slot(one: Slot) -> list[str]:
    limit, pending = one.capacity.limit_bytes, one.unflushed
    return [
        printable(one.name),
        printable(one.prefix),
        size_text(one.capacity.used_bytes),
        NOTHING if limit is None else size_text(limit),
        NOTHING if one.hit_ratio is None else f"{one.hit_ratio:.1%}",
        f"{size_text(one.read_bandwidth.bytes_per_second)}/s",
        f"{size_text(one.write_bandwidth.bytes_per_second)}/s",
        size_text(pending.bytes) if pending is not None else NOTHING,
        ", ".join(one.binds) or NOTHING,
    ]


_JOBS = (
    Column("job", rank=2),
    Column("what", shortened=True),
    Column("state"),
    Column("done", right=True),
    Column("rate", right=True, rank=1),
    Column("left", right=True),
)


def _newest(jobs: Sequence[Job]) -> list[Job]:
    """Return running jobs first, then the latest."""
    running = [job for job in jobs if job.state == "running"]
    return running + [job for job in jobs[::-1] if job.state != "running"]


def _job(one: Job) -> list[str]:
    share = f"{one.bytes_done / one.bytes_found:.0%}" if one.found_all and one.bytes_found else f"{one.objects_done:,}"
    return [
        one.id,
        printable(" ".join(filter(None, (one.kind, one.name, one.prefix or "manifest")))),
        one.state,
        share,
        NOTHING if one.bytes_per_second is None else f"{size_text(one.bytes_per_second)}/s",
        NOTHING if one.seconds_left is None else str(timedelta(seconds=round(one.seconds_left))),
    ]


_CHECKPOINTS = (
    Column("checkpoint", shortened=True),
    Column("state"),
    Column("files", right=True, rank=2),
    Column("size", right=True),
    Column("flushed", right=True),
    Column("left", right=True, rank=1),
    Column("exposed", right=True, rank=1),
)


def _checkpoint(one: Checkpoint) -> list[str]:
    share = one.bytes_flushed / one.bytes if one.bytes else float(one.state == "durable")
    times = (one.flush_seconds_left, one.exposed_seconds)
    return [
        printable(one.url),
        one.state,
        f"{one.files:,}",
        size_text(one.bytes),
        "100%" if share >= 1 else f"{min(share, 0.99):.0%}",  # not 100% before the last byte is there
        *(NOTHING if seconds is None else str(timedelta(seconds=round(seconds))) for seconds in times),
    ]


_REQUESTS = (
    Column("slowest", right=True),
    Column("ago", right=True, rank=2),
    Column("operation"),
    Column("object", shortened=True),
    Column("status"),
    Column("cache", rank=1),
    Column("sent", right=True, rank=3),
    Column("caller", shortened=True, rank=4),
    Column("request id", rank=5),
)


def _slowest(figures: Figures) -> list[Row]:
    found = figures.requests.slowest if figures.requests is not None else []
    return [Row(_request(one, figures.at), "red" if one.is_error else "") for one in found]


def _request(one: RecentRequest, at: float) -> list[str]:
    return [
        seconds_text(one.seconds),
        str(timedelta(seconds=round(max(0.0, at - one.at)))),
        one.operation,
        printable(one.url),
        one.status,
        one.cache or NOTHING,
        size_text(one.sent_bytes),
        printable(one.caller),
        one.request_id,
    ]


def _state_style(one: Checkpoint) -> str:
    yellow = dict.fromkeys(("stalled", "waiting for the bucket"), "yellow")
    return {"failed": "red", "conflict": "red", "durable": "green", **yellow}.get(one.state, "")

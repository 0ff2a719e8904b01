"""What a gateway says at one moment, by each of the ways in which it can be asked, and what of that is new."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

REPOSITORY = Path(__file__).resolve().parents[2]

LOG, STATUS, DOCTOR, READY, OVERVIEW = "log", "forebay status", "forebay doctor", "/readyz", "/api/v1/overview"
METRICS, ALERTS, CLIENT, COMMAND = "metrics", "alerts", "client", "command"
CHANNELS = (CLIENT, ALERTS, LOG, STATUS, DOCTOR, READY, OVERVIEW, METRICS, COMMAND)
"""In the order in which somebody comes to them."""

Texts = dict[str, list[str]]
"""Channel -> lines."""

_COMMAND_SECONDS_MAX = 120.0
_SHOWN_METRICS = re.compile(
    r"forebay_(origin_up|origin_state|worker_restarts_total|cache_disk_state_processes|cache_disk_errors_total"
    r"|writeback_(journal_state_processes|not_flushed_objects|disk_full|pending_objects|through_total|flushed_objects_total)"
    r"|misses_total|requests_total|origin_requests_total)\b"
)
_SHOWN_OVERVIEW = re.compile(
    r"status\.(gateway\.(ready|draining|closed|settings_problem|processes\[\d+\]\.(ready|restarts|hangs|last_end)$)|origin\."
    r"|cache\.disk\.|writeback\.(objects|conflicts|failing|damaged|journal_problem)$)"
    r"|problems\[\d+\]\.(key|state|reason)$|checkpoints\[\d+\]\.(state|missing)$"
)
_PROCESS = re.compile(r"(process|worker\d+|background) ")
_PROCESS_ID = re.compile(r"^(\w+) +\d+")
_NOT_SHOWN_STATUS = re.compile(r"cache .* in use, |scrub: ")
_OF_THE_MACHINE = ("configuration", "limits", "clients here")
"""Areas of the doctor's: what it says there is so before, too."""

_FAILED = re.compile(r'status="(5\d\d|4\d\d|unreachable|broken-off)"')
_LEVEL = re.compile(r"\[(warning|error|critical) *\]")
_COUNT = re.compile(r"failures=\d+ |reason=.*")
_TIME = re.compile(r"^\S+Z? +")


@dataclass
class Moment:
    """`title` says when it was; `texts` what was new then."""

    title: str
    texts: Texts = field(default_factory=dict)


def admin(admin_url: str, path: str) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.get(f"{admin_url}{path}")


def command(environment: Mapping[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`forebay ARGUMENTS` of this repository."""
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**environment, "COLUMNS": "200", "PYTHONPATH": str(REPOSITORY)},
        timeout=_COMMAND_SECONDS_MAX,
        check=False,
    )


class Looks:
    """Asks one gateway again and again, and tells what differs from the first time."""

    def __init__(self, environment: Mapping[str, str], config_file: Path) -> None:
        self._environment = environment
        self._config_file = config_file
        self._before: Texts = {}
        self._log_seen = 0

    def first(self, admin_url: str, log: str, *, with_doctor: bool) -> None:
        """How it is while all is well."""
        self._before = self._asked(admin_url, with_doctor=with_doctor)
        self._log_seen = len(log)

    def new(self, admin_url: str, log: str, *, with_doctor: bool) -> Texts:
        """What is said now and was not at first; of the log, what was said since the last look."""
        now = self._asked(admin_url, with_doctor=with_doctor)
        texts = {channel: _without(lines, self._before.get(channel, [])) for channel, lines in now.items()}
        texts[METRICS] = [_moved(line, self._before[METRICS]) for line in texts[METRICS]]
        texts[LOG] = self.log(log)
        return texts

    def log(self, log: str) -> list[str]:
        """Warnings and errors since the last look, each once, the last one of those that count; without their time."""
        lines, self._log_seen = log[self._log_seen :].splitlines(), len(log)
        told = [" ".join(_TIME.sub("", line).split()) for line in lines if _LEVEL.search(line)]
        return list({_COUNT.sub("", line): line for line in told}.values())

    def _asked(self, admin_url: str, *, with_doctor: bool) -> Texts:
        where = ("--config", str(self._config_file), "--admin-url", admin_url)
        with ThreadPoolExecutor(1) as beside:  # what hangs is killed soon: nobody waits for one answer before the next
            doctor = beside.submit(command, self._environment, "doctor", "--json", *where) if with_doctor else None
            status = _said(command(self._environment, "status", *where))
            found = {
                STATUS: [one for one in status if not _NOT_SHOWN_STATUS.match(one)],
                READY: _leaves_or_problem(admin_url, "/readyz", None),
                OVERVIEW: _leaves_or_problem(admin_url, "/api/v1/overview", _SHOWN_OVERVIEW),
                METRICS: _metrics(admin_url),
            }
            if doctor is not None:
                found[DOCTOR] = findings(doctor.result())
        return found


def _said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines with something in them; those of the table of processes without the width of its columns."""
    lines = [line.rstrip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return [" ".join(_PROCESS_ID.sub(r"\1 PID", line).split()) if _PROCESS.match(line) else line for line in lines]


def findings(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Errors and warnings, each with what to do."""
    try:
        found = json.loads(done.stdout)["findings"]
    except (ValueError, KeyError):
        return _said(done)
    return [
        f"{one['level']}  {one['area']}: {one['found']}" + (f"  -> {one['advice']}" if one["advice"] else "")
        for one in found
        if one["level"] in ("error", "warning") and one["area"] not in _OF_THE_MACHINE
    ]


def _leaves_or_problem(admin_url: str, path: str, shown: re.Pattern[str] | None) -> list[str]:
    try:
        answer = admin(admin_url, path)
    except httpx.TransportError as error:
        return [f"no answer: {type(error).__name__}"]
    lines = [
        f"{name} = {json.dumps(value)}" for name, value in _leaves(answer.json()) if shown is None or shown.match(name)
    ]
    return lines if answer.status_code == 200 else [f"status {answer.status_code}", *lines]


def _leaves(document: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(document, list) and document and isinstance(document[0], Mapping):
        for number, value in enumerate(document):
            yield from _leaves(value, f"{name}[{number}]")
    else:
        yield name, document


def _metrics(admin_url: str) -> list[str]:
    """Those that tell of incidents: requests only where they failed."""
    try:
        text = admin(admin_url, "/metrics").text
    except httpx.TransportError as error:
        return [f"no answer: {type(error).__name__}"]
    return [
        line
        for line in text.splitlines()
        if (found := _SHOWN_METRICS.match(line)) and (found[1] not in _COUNT_REQUESTS or _FAILED.search(line))
    ]


_COUNT_REQUESTS = ("requests_total", "origin_requests_total")


def _moved(line: str, before: Sequence[str]) -> str:
    """`series: 0 -> 3`."""
    series, _, value = line.rpartition(" ")
    old = next((one.rpartition(" ")[2] for one in before if one.rpartition(" ")[0] == series), "0")
    return f"{series}: {_plain(old)} -> {_plain(value)}" if series.startswith("forebay_") else line


def _plain(value: str) -> str:
    return value.removesuffix(".0")


def _without(lines: Sequence[str], before: Sequence[str]) -> list[str]:
    known = set(before)
    return [line for line in lines if line not in known]

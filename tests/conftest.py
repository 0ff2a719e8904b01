"""What holds for all tests."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import itertools
import re
import resource
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import settings

from gateway.metadata import bucket_metadata
from gateway.metadata.listing import index as listing_index
from gateway.telemetry import metric_kinds
from tests.support import root, thrift
from tests.support.opening import run_with_opened

settings.register_profile("forebay", deadline=None, print_blob=True, max_examples=50)
settings.load_profile("forebay")
"""A generated case may take as long as it takes: a machine that stands still for 200 ms is no failure of it. A failure
prints what repeats it."""

structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)
"""The way it comes with draws a traceback with every local variable, which takes 50 ms."""


@pytest.fixture(scope="session", autouse=True)
def patient_with_the_disk() -> Iterator[None]:
    """A question waits for the disk longer than a client should wait: others may be writing to the same one.

    Tests of a disk that is too slow say how slow that is.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_metadata, "RECALL_SECONDS_MAX", 60.0)
        patch.setattr(listing_index, "NOTE_SECONDS_MAX", 60.0)
        yield


@pytest.fixture(autouse=True)
def counting_from_zero() -> None:
    """Let each test see only its own counts."""
    metric_kinds.unshare()


_DESCRIPTORS_MAX = 20_000

_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(_soft, _DESCRIPTORS_MAX), _hard), _hard))
"""Tests open thousands of connections at both ends; an ordinary user begins with 1,024 descriptors."""

gc.set_threshold(30_000, 10, 10)
"""To look for garbage after each 700 new objects was a tenth of a run; to leave it lie for long takes memory."""

_TESTS = Path(__file__).parent
_OF_NO_DISK = frozenset(
    [
        *("admin", "app", "cli", "config", "doctor", "edge", "jobs", "loadtests", "metadata", "operations", "origin"),
        *("policy", "s3", "scenarios", "semantics", "serve", "simulation", "telemetry", "writeback"),
        *(f"blocks/test_{name}.py" for name in ("index", "pins", "policies", "processes", "slots")),
    ]
)
"""Rooms and files whose quick tests are the same on every file system."""

thrift.save_cpu()

LEFT_OUT = {
    "root": (
        "need root (they mount file systems, cut the power and networks, take memory away)",
        "sudo make test-root",
    ),
    "torch": ("need PyTorch", "make test-torch"),
    "clients": ("run real S3 clients", "make test-clients"),
    "radosgw": ("need Ceph's programs", "make test-radosgw"),
    "azure": ("need node and Azurite", "make test-azure"),
    "browser": ("need a browser", "make test-browser"),
    "api": ("need schemathesis", "make test-api"),
    "deploy": ("need promtool and systemd-analyze", "make test-deploy"),
    "slow": ("take long (kills, large objects, long histories)", "make test-slow"),
}
"""By marker: what a reader of the summary is told of the tests that a run leaves out. The first that fits counts."""

_left_out: Counter[str] = Counter()

TESTS_BETWEEN_FREEZES = 200
_ended = itertools.count(1)
_MARKER = re.compile(rf"(?:{'|'.join(LEFT_OUT)})\b")
_TIMEOUT_SECONDS = 120


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that does not name the marker whose tests are asked for: to import all takes each process seconds.

    What is left out is not counted then.
    """
    wanted = _MARKER.match(config.getoption("markexpr"))
    if wanted is None or not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    return True if wanted[0] not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files whose tests may take longest, so that no process ends long after the others."""
    seconds: Counter[Path] = Counter()
    for item in items:
        marker = item.get_closest_marker("timeout")
        seconds[item.path] = max(seconds[item.path], int(marker.args[0] if marker else _TIMEOUT_SECONDS))
    items.sort(key=lambda item: -seconds[item.path])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    missing = root.begin_test(is_marked=item.get_closest_marker(root.MARKER) is not None)
    if missing is not None:
        pytest.fail(missing, pytrace=False)
    return (yield)


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of the test's own: in memory for quick tests that look at no disk, each of which makes many files."""
    file = request.path.relative_to(_TESTS)
    is_long = any(request.node.get_closest_marker(name) for name in ("slow", root.MARKER))
    if _OF_NO_DISK.isdisjoint((file.parts[0], str(file))) or is_long or not thrift.IS_ROOM_IN_MEMORY:
        yield tmp_path
        return
    in_memory: Any = {"dir": thrift.MEMORY, "ignore_cleanup_errors": True}
    with tempfile.TemporaryDirectory(prefix="forebay-test-", **in_memory) as directory:
        yield Path(directory)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test on an event loop of its own; its fixtures are made and taken down outside.

    What an `Opening` among them opens is opened and closed in that loop.
    Of a generated one, each case has its own.
    """
    if generated := getattr(pyfuncitem.obj, "hypothesis", None):
        if inspect.iscoroutinefunction(inner := generated.inner_test):
            generated.inner_test = functools.wraps(inner)(lambda *args, **kwargs: asyncio.run(inner(*args, **kwargs)))
        return None
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(run_with_opened(pyfuncitem.obj, {name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_collection_finish() -> None:
    """What has been collected stays to the end: no test that asks for a collection waits for it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """So does what has stayed behind hundreds of tests, such as their reports."""
    if next(_ended) % TESTS_BETWEEN_FREEZES == 0:
        gc.collect()
        gc.freeze()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        marker = next((name for name in LEFT_OUT if item.get_closest_marker(name)), None)
        if marker is not None:
            _left_out[marker] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes tells the one that prints."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = dict(_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Each process left the same tests out."""
    for name, count in getattr(node, "workeroutput", {}).get("left_out", {}).items():
        _left_out[name] = max(_left_out[name], count)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What did not run, and how to run it."""
    if _MARKER.match(terminalreporter.config.getoption("markexpr")):
        return
    for name, (words, command) in LEFT_OUT.items():
        if _left_out[name]:
            terminalreporter.write_line(f"left out: {_left_out[name]} tests that {words}; run them with `{command}`")

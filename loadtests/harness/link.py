"""What slots move over a gateway's link: bytes by slot over time, and readers that want all they can get."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gateway.app.bandwidth import SharedLimits
from gateway.config.live import LiveSettings
from gateway.config.loading import load_settings
from gateway.core.clock import SystemClock
from gateway.origin.client import Direction
from gateway.policy.bandwidth import Bandwidth
from gateway.serve.shared_directory import in_memory_directory
from gateway.telemetry import metric_reading, metrics
from loadtests.harness.content import Family, load_object
from loadtests.harness.gateway import Gateway
from loadtests.harness.stream import stream_seconds

LOOK_SECONDS = 0.1
WINDOW_SECONDS = 5.0

Bytes = Counter[str]
"""By slot."""

Look = Callable[[], Bytes]


@dataclass(frozen=True, slots=True)
class Sample:
    """What had been moved until then."""

    at: float
    moved: Bytes


def counted(of: Gateway, direction: Direction) -> Bytes:
    """What all processes have counted. Of bodies that are read that is what has arrived, and not all has passed yet."""
    reading = metric_reading.MetricReading(in_memory_directory(of.process.directory))
    found = reading.by_labels(_LABELS, metrics.ORIGIN_BYTES)
    moved = Bytes()
    for (way, slot), count in found.items():
        if way == direction:
            moved[slot] += int(count)
    return moved


_LABELS = ("direction", "slot")


def passed(of: Gateway, direction: Direction) -> Look:
    """What has passed the link while somebody waited for it, as the memory says that the gateway's processes share.

    It tells what shares by weight are exactly: what has arrived waits before the link in pieces, several per reader.
    What a slot passes by its guarantee is not all in it, for that is not held against it for ever.
    """
    bandwidth = _bandwidth_of(of)
    shares, numbers = bandwidth._links[direction].shares, dict(bandwidth._slots)

    def look() -> Bytes:
        weights = shares.weights
        return Bytes({slot: round(sum(shares._cells_of(n)[0]) * weights[n]) for slot, n in numbers.items()})

    return look


ALL = "all slots"


def passed_by_all(of: Gateway, direction: Direction) -> Look:
    """What has passed the link, of `ALL`."""
    link = _bandwidth_of(of)._links[direction].shares.link
    assert link is not None, "the link has no ceiling"

    def look() -> Bytes:
        return Bytes({ALL: link.taken_bytes()})

    return look


def _bandwidth_of(of: Gateway) -> Bandwidth:
    settings = load_settings(of.process.config_file, {}).settings
    live = LiveSettings(settings, memory=_memory_of(of.process.pid), generation=-1)  # it decides nothing
    return SharedLimits(live, SystemClock(), 0).bandwidth


def _memory_of(supervisor: int) -> Path:
    """Where the memory can be opened."""
    for entry in Path(f"/proc/{supervisor}/fd").iterdir():
        if "forebay-shared" in os.readlink(entry):
            return entry
    raise LookupError(f"process {supervisor} shares no memory")


class Watch:
    """`with Watch({"read": look, ...}) as watch:` looks ten times a second, on a thread, until it is left."""

    def __init__(self, looks: Mapping[str, Look]) -> None:
        self._looks = looks
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure: BaseException | None = None
        self.samples: dict[str, list[Sample]] = {name: [] for name in looks}

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._ended.wait(LOOK_SECONDS):
                for name, look in self._looks.items():
                    # Looking takes a while on a busy machine: the middle of it is the time that it tells of.
                    began = time.monotonic()
                    moved = look()
                    self.samples[name].append(Sample((began + time.monotonic()) / 2, moved))
        except BaseException as error:
            self._failure = error


def watched(looks: Mapping[str, Look], seconds: float) -> dict[str, list[Sample]]:
    """The samples of so many seconds."""
    with Watch(looks) as watch:
        time.sleep(seconds)
    return watch.samples


def rates(samples: Sequence[Sample], window_seconds: float = WINDOW_SECONDS) -> list[dict[str, float]]:
    """Bytes per second by slot, in every span of that length."""
    found = []
    for number, one in enumerate(samples):
        behind = next((later for later in samples[number:] if later.at >= one.at + window_seconds), None)
        if behind is not None:
            found.append(rate(one, behind))
    return found


def rate(one: Sample, later: Sample) -> dict[str, float]:
    """Bytes per second by slot between them."""
    return {slot: (later.moved[slot] - one.moved[slot]) / (later.at - one.at) for slot in later.moved}


def least_used(samples: Sequence[Sample], link: float, window_seconds: float) -> float:
    """The least part of a link that all have had together in any span of that length."""
    return min(sum(one.values()) for one in rates(samples, window_seconds)) / link


def farthest(shares: Sequence[float]) -> float:
    """The one farthest from 1."""
    return max(shares, key=lambda share: abs(share - 1))


def between(samples: Sequence[Sample], begin: float, end: float) -> list[Sample]:
    """Those of that time."""
    return [one for one in samples if begin <= one.at <= end]


@contextmanager
def working(workers: Sequence[Callable[[threading.Event], None]]) -> Iterator[None]:
    """All of them, each in a thread, until the context ends: the event tells them. Raises what the first has raised."""
    ended, failures = threading.Event(), list[BaseException]()

    def work(one: Callable[[threading.Event], None]) -> None:
        try:
            one(ended)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


class Readers:
    """So many readers of a family of objects, each of which reads what nobody has read; they may pause and go on."""

    def __init__(self, of: Gateway, family: Family, count: int) -> None:
        self._of = of
        self._family = family
        self._count = count
        self._numbers = iter(range(family.count))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """As long as the context lasts, and until the objects that they have begun are read."""

        def read(ended: threading.Event) -> None:
            while not ended.is_set():
                number = next(self._numbers, None)
                if number is None:
                    raise RuntimeError(f"all objects of {self._family} have been read")
                stream_seconds(self._of.address, load_object(self._family.path(number), self._family.size_bytes))

        with working([read] * self._count):
            yield


@contextmanager
def at_work(*groups: Readers) -> Iterator[None]:
    """All of them side by side."""
    with ExitStack() as stack:
        for group in groups:
            stack.enter_context(group.at_work())
        yield

"""Counters, gauges and histograms whose numbers are summed over all processes of the gateway.

A process counts in its own memory until `share` maps files that the admin port reads. The files belong to a stable name
(`worker0`, `background`), so a restarted worker continues the counts of its predecessor. An addition costs one
dictionary look-up and one locked addition.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from threading import Lock, RLock
from time import time
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import structlog
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import mark_process_dead
from prometheus_client.utils import floatToGoString

from gateway.disk.atomic_write import UNFINISHED, set_aside

GROWTH_BYTES = 2**18
"""A full file grows by this size and is mapped anew; its earlier mappings stay."""

_VALUE_BYTES = 24
"""The size of a value without its key, with padding: the key's length, the number and its time."""

_lock = Lock()


Rename = Callable[[str, Mapping[str, str]], Mapping[str, str] | None]
"""Maps a metric's name and the labels of a number to its new labels; None drops the number."""


def _renamed(key: str, renamed: Rename) -> str | None:
    metric, name, labels, text = json.loads(key)
    becomes = renamed(metric, labels)
    if becomes is None or becomes == labels:
        return None if becomes is None else key
    return mmap_key(metric, name, list(becomes), list(becomes.values()), text)


class Value:
    """A number in this process's memory."""

    def __init__(self) -> None:
        self._value = 0.0

    def inc(self, amount: float) -> None:
        with _lock:
            self._value += amount

    def set(self, value: float, timestamp: float = 0.0) -> None:
        with _lock:
            self._value = value

    def get(self) -> float:
        return self._value


class SharedValue(Value):
    """A number in a file, which stays mapped here as long as this lives, also when it is mapped larger.

    Processes must not fork.
    """

    def __init__(self, file: _WholeFile, key: str) -> None:
        """OSError. The caller holds the lock."""
        self._value = file.read_value(key)[0]  # type: ignore[no-untyped-call]
        self._cells = file.cells(key)
        """Value and time."""
        file.values[key] = self

    def inc(self, amount: float) -> None:
        with _lock:
            self._value += amount
            self._cells[0] = self._value

    def set(self, value: float, timestamp: float = 0.0) -> None:
        with _lock:
            self._value = self._cells[0] = value
            self._cells[1] = timestamp

    def move_to(self, cells: memoryview[float]) -> None:
        """Count on in these cells, from their number. The caller holds the lock."""
        self._cells, self._value = cells, cells[0]


class SharedValues:
    """Makes values that count into the files of `slot`, one for each kind.

    A value without room in its file counts in this process's memory, and is not exported: `on_lost` gets the error.
    """

    def __init__(self, directory: Path, slot: str, on_lost: Callable[[OSError], None] = lambda _: None) -> None:
        self._directory = directory
        self._slot = slot
        self._on_lost = on_lost
        self._files: dict[str, _WholeFile] = {}

    def value(self, kind: str, key: str) -> Value:
        try:
            with _lock:
                if kind not in self._files:
                    self._files[kind] = _WholeFile(self._directory / f"{kind}_{self._slot}.db")
                return SharedValue(self._files[kind], key)
        except OSError as error:
            self._on_lost(error)
            return Value()

    def fold(self, renamed: Rename) -> None:
        """Give numbers other labels, and sum those with equal ones. A reader sees the old file or the new one.

        OSError, and no change, without room for the new file.
        """
        with _lock:
            for kind, file in list(self._files.items()):
                if any(_renamed(key, renamed) != key for key in file._positions):
                    self._files[kind] = file.folded(renamed)

    def close(self) -> None:
        """Make no further values. Those in use go on counting."""
        for file in self._files.values():
            file._f.close()


class _WholeFile(MmapedDict):
    """A file whose pages the file system has all set aside: a process that touches a missing page is killed.

    Bytes 4 to 7, which prometheus_client does not use, tell the file from an earlier one with its name.
    """

    def __init__(self, path: Path) -> None:
        """Make the file if there is none. OSError."""
        set_aside(path, GROWTH_BYTES)
        super().__init__(os.fspath(path))  # type: ignore[no-untyped-call]
        if not any(self._m[4:8]):
            self._m[4:8] = (1 + secrets.randbelow(2**31 - 1)).to_bytes(4, sys.byteorder)
        self.path = path
        self.values: dict[str, SharedValue] = {}

    def cells(self, key: str) -> memoryview[float]:
        place = self._positions[key]
        return memoryview(self._m)[place : place + 16].cast("d")

    def folded(self, renamed: Rename) -> _WholeFile:
        """Replace the file by one with other labels. OSError."""
        path = self.path.with_suffix(UNFINISHED)
        path.unlink(missing_ok=True)
        new = _WholeFile(path)
        try:
            for key in self._positions:
                becomes = _renamed(key, renamed)
                if becomes is not None:
                    if becomes not in new._positions:
                        new._init_value(becomes)
                    cells, (value, at) = new.cells(becomes), self.cells(key)
                    cells[0], cells[1] = cells[0] + value, max(cells[1], at)
            path.rename(self.path)
        except OSError:
            path.unlink(missing_ok=True)
            new._f.close()
            raise
        new.path = self.path
        for key, value_of in self.values.items():
            if key in new._positions:
                new.values[key] = value_of
                value_of.move_to(new.cells(key))
        self._f.close()
        return new

    def _init_value(self, key: str) -> None:
        """Add a value. OSError, and no change, without room for it."""
        needed = self._used + len(key.encode()) + _VALUE_BYTES + 8
        if needed > self._capacity:
            size_bytes = -(-needed // GROWTH_BYTES) * GROWTH_BYTES
            descriptor = self._f.fileno()
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._m = mmap.mmap(descriptor, size_bytes)
            self._capacity = size_bytes
        super()._init_value(key)  # type: ignore[no-untyped-call]


_log = structlog.get_logger("forebay.metrics")

LATENCY_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_KINDS = ("counter", "histogram", "gauge_livesum", "gauge_mostrecent")
_BYTES_OF_SLOT = 12288
"""A process's files need this room for the usual numbers of one slot."""

DECLARED: list[Metric] = []
"""All metrics, in the order of their declarations."""

GONE = "(gone)"
"""This label value sums up the numbers of slots, credentials and classes that no longer exist."""

UNTOLD_BUCKETS = "(other)"
"""This label value sums up the buckets that no slot names. It is not a valid bucket name."""

_Labels = Mapping[str, str]
_LabelValues = tuple[str, ...]
V = TypeVar("V")


class Known(NamedTuple):
    """The label values that exist now: slots, origins, processes, credentials. `together` lists combinations."""

    values: Mapping[str, Sequence[str]]
    together: Mapping[tuple[str, ...], Sequence[_LabelValues]] = {}

    def with_slots(self, slots: Sequence[str]) -> Known:
        return self._replace(values={**self.values, "slot": slots})


class _State:
    """The place that this process counts in, and the label values that it counts under."""

    def __init__(self) -> None:
        self.shared: SharedValues | None = None
        """None: the process counts in its own memory."""
        self.kept: Callable[[_Labels], _Labels] | None = None
        """Maps labels to those that stay; None: all labels stay."""
        self.has_lost = False
        self.lock = RLock()

    def label_values(self, labels: Sequence[str], label_values: _LabelValues) -> _LabelValues:
        """Return the label values that a new number is counted under."""
        if self.kept is None or not labels:
            return label_values
        return tuple(self.kept(dict(zip(labels, label_values, strict=True))).values())


_STATE = _State()


class _Metric(Generic[V]):
    """Base of the three kinds. `V` holds the numbers of one combination of label values."""

    kind = ""
    """The kind that Prometheus has it for."""
    file = ""
    """The kind of file that its numbers are in."""

    def __init__(self, spec: str, help: str, *several: Mapping[str, str], **values: str) -> None:
        """`spec` is written as a sample: `name{label,label} unit`.

        `values`, and each of `several`, give values of labels beyond those in `Known`, with blanks between them: their
        combinations are exported as 0 from the start.
        """
        sample, self.unit = spec.split(" ", 1)
        self.name, _, labels = sample.removesuffix("}").partition("{")
        self.labels = tuple(labels.split(",")) if labels else ()
        self.help = help
        together = (*several, values) if values else several
        self.values = [{label: names.split() for label, names in one.items()} for one in together]
        DECLARED.append(self)
        self.reset()

    def zeros(self, known: Known) -> Iterable[_LabelValues]:
        """Return the label values that are exported as 0 before their first event."""
        for together in self.values or [{}] if self.labels else ():
            yield from product(*({**known.values, **together}.get(label, ()) for label in self.labels))
        yield from known.together.get(self.labels, ())

    def reset(self) -> None:
        """Drop all numbers in memory; numbers in files are read anew."""
        self._found: dict[_LabelValues, V] = {}
        self._made: dict[_LabelValues, V] = {}
        """Each number once, while `_found` also has those whose label values have become GONE."""
        if not self.labels:
            self._of(())

    def kept(self) -> Mapping[_LabelValues, V]:
        """Return the numbers by their label values."""
        return self._found

    def forget(self, renamed: Callable[[str, _Labels], _Labels | None]) -> None:
        """Drop the numbers whose labels have changed; count names that exist again, after they were GONE."""
        with _STATE.lock:
            for label_values in list(self._found):
                labels = dict(zip(self.labels, label_values, strict=True))
                if renamed(self.name, labels) != labels:
                    self._made.pop(label_values, None)
                    del self._found[label_values]
            if self.kind != "gauge":
                self._found = dict(self._made)

    def _of(self, label_values: _LabelValues) -> V:
        found = self._found.get(label_values)
        return found if found is not None else self._enter(label_values)

    def _enter(self, label_values: _LabelValues) -> V:
        if len(label_values) != len(self.labels):
            raise ValueError(f"{self.name} has the labels {self.labels}, not values for {label_values}")
        now = tuple(map(str, _STATE.label_values(self.labels, label_values)))
        with _STATE.lock:
            if now not in self._made:
                self._made[now] = self._make(now)
            return self._found.setdefault(label_values, self._made[now])

    def _make(self, label_values: _LabelValues) -> V:
        raise NotImplementedError

    def _value(self, suffix: str, label_values: _LabelValues, bound: str | None = None) -> Value:
        if _STATE.shared is None:
            return Value()
        name, labels = self.name.removesuffix("_total"), self.labels
        if bound is not None:
            labels, label_values = (*labels, "le"), (*label_values, bound)
        # Without the help text, which would be half of the file: who reads it knows it.
        return _STATE.shared.value(self.file, mmap_key(name, name + suffix, list(labels), list(label_values), ""))


Metric: TypeAlias = _Metric[Any]


class _Number(_Metric[Value]):
    def value(self, *label_values: str) -> float:
        return self._of(label_values).get()


class Counter(_Number):
    """A sum that only grows."""

    kind = file = "counter"

    def add(self, amount: float, *label_values: str) -> None:
        """Add `amount`, which is at least 0."""
        value = self._found.get(label_values)
        (value if value is not None else self._enter(label_values)).inc(amount)

    def _make(self, label_values: _LabelValues) -> Value:
        return self._value("_total", label_values)


class Gauge(_Number):
    """A state, summed over living processes."""

    kind = "gauge"
    file = "gauge_livesum"

    def set(self, value: float, *label_values: str) -> None:
        if not self._is_gone(label_values):
            self._of(label_values).set(float(value))

    def add(self, amount: float, *label_values: str) -> None:
        """Add `amount`, which may be negative. Do nothing for label values that are gone."""
        value = self._found.get(label_values)
        if value is not None:
            value.inc(amount)
        elif not self._is_gone(label_values):
            self._of(label_values).inc(amount)

    def zeros(self, known: Known) -> Iterable[_LabelValues]:
        """Return those in `Known.together`: the state of others is not known."""
        return known.together.get(self.labels, ())

    def _is_gone(self, label_values: _LabelValues) -> bool:
        return label_values not in self._found and _STATE.label_values(self.labels, label_values) != label_values

    def _make(self, label_values: _LabelValues) -> Value:
        return self._value("", label_values)


class LatestGauge(Gauge):
    """A state that any process sets for all: the latest value counts. Not for `add`."""

    file = "gauge_mostrecent"

    def set(self, value: float, *label_values: str) -> None:
        if not self._is_gone(label_values):
            self._of(label_values).set(float(value), time())


class Histogram(_Metric[tuple[Value, Sequence[Value]]]):
    """A distribution of durations, in seconds."""

    kind = file = "histogram"

    def __init__(
        self,
        spec: str,
        help: str,
        buckets_seconds: Sequence[float] = LATENCY_BUCKETS_SECONDS,
        **values: str,
    ) -> None:
        self.buckets_seconds = tuple(buckets_seconds)
        super().__init__(spec, help, **values)

    def observe(self, seconds: float, *label_values: str) -> None:
        """Count one event that took `seconds`."""
        total, buckets = self._of(label_values)
        total.inc(seconds)
        buckets[bisect_left(self.buckets_seconds, seconds)].inc(1)

    def observe_all(self, seconds: Sequence[float], *label_values: str) -> None:
        """Count events that took so long each."""
        counts = [0] * (len(self.buckets_seconds) + 1)
        for one in seconds:
            counts[bisect_left(self.buckets_seconds, one)] += 1
        self.add(counts, sum(seconds), *label_values)

    def add(self, counts: Sequence[int], total_seconds: float, *label_values: str) -> None:
        """Count many events: `counts` has the number in each bucket, the last one unbounded."""
        total, buckets = self._of(label_values)
        total.inc(total_seconds)
        for bucket, count in zip(buckets, counts, strict=True):
            if count:
                bucket.inc(count)

    def _make(self, label_values: _LabelValues) -> tuple[Value, Sequence[Value]]:
        bounds = (floatToGoString(bound) for bound in (*self.buckets_seconds, float("inf")))  # type: ignore[no-untyped-call]
        total = self._value("_sum", label_values)
        return total, [self._value("_bucket", label_values, bound=bound) for bound in bounds]


NOT_EXPORTED = Counter(
    "forebay_metric_values_not_exported_total values",
    "Numbers of other metrics that a process counts in its own memory, and that are missing here: the memory that the "
    "gateway's processes share had no room for them.",
)


def room_bytes(slots: int) -> int:
    """Return the most that the files of one process take with this number of slots."""
    return len(_KINDS) * GROWTH_BYTES + slots * _BYTES_OF_SLOT


def reset() -> None:
    """Begin every metric anew: in memory at zero, in shared files at the numbers that they have."""
    _STATE.kept = None
    for metric in DECLARED:
        metric.reset()


def share(directory: Path, name: str) -> None:
    """Count into the files of `name` in `directory` from now on.

    `name` is unique among living processes, and has no `_`, which separates the parts of a file's name.
    Raises OSError if a file cannot be made.
    """
    for kind in _KINDS:  # a full disk is best met here, when the files are made
        set_aside(directory / f"{kind}_{name}.db", GROWTH_BYTES)
    unshare()
    _STATE.shared = SharedValues(directory, name, _lost)
    _STATE.has_lost = False
    reset()


def _lost(error: OSError) -> None:
    """Count a number that is not exported, and log the first one."""
    if not _STATE.has_lost:
        _STATE.has_lost = True
        _log.error("some metrics of this process are not exported: there is no room for them", error=str(error))
    if NOT_EXPORTED.kept():  # it has its own place, which it was given first
        NOT_EXPORTED.add(1)


def keep_names(
    slots: Iterable[str],
    credentials: Iterable[str],
    classes: Iterable[str],
    buckets: Iterable[str] = (),
    users: Iterable[str] = (),
) -> None:
    """Count only these names by themselves from now on, so that files do not grow with names that come and go.

    The counts of other names move to GONE. Their gauges are dropped, except those of callers whose requests still run
    or wait. Event loop only. Without room for a new file this logs a warning, and the next call tries again.
    """
    if (shared := _STATE.shared) is None:
        return
    of_credentials, of_classes = {*credentials, "none", GONE}, {*classes, GONE}
    known_of = {
        "slot": {*slots, "none", GONE},
        "credential": of_credentials,
        "bucket": {*buckets, UNTOLD_BUCKETS, GONE},
        "used_by": {*users, GONE},
    }

    def kept(labels: _Labels) -> _Labels:
        found = {label: GONE for label, known in known_of.items() if label in labels and labels[label] not in known}
        scope = labels.get("scope")
        if scope is not None and labels["name"] not in (of_classes if scope == "class" else of_credentials):
            found["name"] = GONE
        return {**labels, **found} if found else labels

    gauges = [metric for metric in DECLARED if isinstance(metric, Gauge)]
    dropped = {gauge.name for gauge in gauges}
    used = {
        (gauge.name, *sorted(zip(gauge.labels, label_values, strict=True)))
        for gauge in gauges
        if "scope" in gauge.labels
        for label_values, value in list(gauge.kept().items())
        if value.get()
    }

    def renamed(name: str, labels: _Labels) -> _Labels | None:
        becomes = kept(labels)
        if becomes == labels or (name, *sorted(labels.items())) in used:
            return labels
        return None if name in dropped else becomes

    _STATE.kept = kept
    for metric in DECLARED:
        if {*known_of, "scope"} & set(metric.labels):
            metric.forget(renamed)
    try:
        shared.fold(renamed)
    except OSError as error:
        _log.warning("metrics still have the names of slots and callers that are gone", error=str(error))


def unshare() -> None:
    """Count in memory again, from zero."""
    shared, _STATE.shared = _STATE.shared, None
    reset()
    if shared is not None:
        shared.close()


def forget_process(directory: Path, name: str) -> None:
    """Remove a dead process's gauges (requests in flight, say) from the sums. Its counters stay."""
    mark_process_dead(name, str(directory))  # type: ignore[no-untyped-call]

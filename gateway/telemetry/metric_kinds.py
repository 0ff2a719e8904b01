"""Counters, gauges and histograms whose numbers are summed over all processes of the gateway.

A process counts in its own memory until `share` maps files that the admin port reads. The files belong to a stable name
(`worker0`, `background`), so a restarted worker continues the counts of its predecessor. An addition costs one
dictionary look-up and one locked addition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from threading import RLock
from time import time
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import structlog
from prometheus_client.multiprocess import mark_process_dead
from prometheus_client.utils import floatToGoString
from prometheus_client.values import MutexValue

from gateway.disk.atomic_write import set_aside
from gateway.telemetry.metric_values import GROWTH_BYTES, SharedValues, Value

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

    def __init__(self, spec: str, help: str, *several: Mapping[str, Sequence[str]], **values: Sequence[str]) -> None:
        """`spec` is written as a sample: `name{label,label} unit`.

        `values`, and each of `several`, give values of labels beyond those in `Known`: their combinations are exported
        as 0 from the start.
        """
        sample, self.unit = spec.split(" ", 1)
        self.name, _, labels = sample.removesuffix("}").partition("{")
        self.labels = tuple(labels.split(",")) if labels else ()
        self.help = help
        self.values = (*several, values) if values else several
        DECLARED.append(self)
        self.reset()

    def zeros(self, known: Known) -> Iterable[_LabelValues]:
        """Return the label values that are exported as 0 before their first event."""
        for together in self.values or ({},) if self.labels else ():
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
        """Drop the numbers whose labels have changed."""
        with _STATE.lock:
            for label_values in list(self._found):
                labels = dict(zip(self.labels, label_values, strict=True))
                if renamed(self.name, labels) != labels:
                    self._made.pop(label_values, None)
                    del self._found[label_values]

    def forget_renamed(self) -> None:
        """Count label values that exist again, after they were GONE, under their own names."""
        with _STATE.lock:
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

    def _value(self, suffix: str, label_values: _LabelValues, mode: str = "", bound: str | None = None) -> Value:
        make = _STATE.shared if _STATE.shared is not None else MutexValue
        name = self.name.removesuffix("_total")
        labels = self.labels
        if bound is not None:
            labels, label_values = (*labels, "le"), (*label_values, bound)
        value: Value = make(self.kind, name, name + suffix, labels, label_values, self.help, multiprocess_mode=mode)
        return value


Metric: TypeAlias = _Metric[Any]


class _Number(_Metric[Value]):
    def value(self, *label_values: str) -> float:
        return self._of(label_values).get()


class Counter(_Number):
    """A sum that only grows."""

    kind = "counter"

    def add(self, amount: float, *label_values: str) -> None:
        """Add `amount`, which is at least 0."""
        value = self._found.get(label_values)
        (value if value is not None else self._enter(label_values)).inc(amount)

    def _make(self, label_values: _LabelValues) -> Value:
        return self._value("_total", label_values)


class Gauge(_Number):
    """A state, summed over living processes."""

    kind = "gauge"
    _mode = "livesum"

    def set(self, value: float, *label_values: str) -> None:
        if not self._is_gone(label_values):
            self._of(label_values).set(float(value))

    def add(self, amount: float, *label_values: str) -> None:
        """Add `amount`, which may be negative. Do nothing for label values that are gone."""
        if not self._is_gone(label_values):
            self._of(label_values).inc(amount)

    def zeros(self, known: Known) -> Iterable[_LabelValues]:
        """Return those in `Known.together`: the state of others is not known."""
        return known.together.get(self.labels, ())

    def _is_gone(self, label_values: _LabelValues) -> bool:
        return label_values not in self._found and _STATE.label_values(self.labels, label_values) != label_values

    def _make(self, label_values: _LabelValues) -> Value:
        return self._value("", label_values, self._mode)


class LatestGauge(Gauge):
    """A state that any process sets for all: the latest value counts. Not for `add`."""

    _mode = "mostrecent"

    def set(self, value: float, *label_values: str) -> None:
        if not self._is_gone(label_values):
            self._of(label_values).set(float(value), time())


class Histogram(_Metric[tuple[Value, Sequence[Value]]]):
    """A distribution of durations, in seconds."""

    kind = "histogram"

    def __init__(
        self,
        spec: str,
        help: str,
        buckets_seconds: Sequence[float] = LATENCY_BUCKETS_SECONDS,
        **values: Sequence[str],
    ) -> None:
        self.buckets_seconds = tuple(buckets_seconds)
        super().__init__(spec, help, **values)

    def observe(self, seconds: float, *label_values: str) -> None:
        """Count one event that took `seconds`."""
        total, buckets = self._of(label_values)
        total.inc(seconds)
        buckets[bisect_left(self.buckets_seconds, seconds)].inc(1)

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
            if not isinstance(metric, Gauge):
                metric.forget_renamed()
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

"""Counters, gauges and histograms that sum up over the gateway's processes.

Metrics are counted in this process's memory until `share` lays them into files that the admin port reads. Files belong
to stable slots (`worker0`, `background`), so that a restarted worker goes on where the killed one stopped. Counting is
cheap: one dictionary look-up and one locked addition, past prometheus_client's own layers.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import prometheus_client
import structlog
from prometheus_client import values
from prometheus_client.multiprocess import mark_process_dead

from gateway.disk.atomic_write import set_aside
from gateway.telemetry.metric_values import GROWTH_BYTES, SharedValues, Value

_log = structlog.get_logger("forebay.metrics")

LATENCY_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_KINDS = ("counter", "histogram", "gauge_livesum", "gauge_mostrecent")
_BYTES_OF_SLOT = 12288
"""For the numbers of one slot in a process's files, where most of what can happen in it has happened."""

DECLARED: list[Metric] = []
"""Every metric, in order of declaration."""


GONE = "(gone)"
"""The name under which the numbers of what is no more stand together: of slots, credentials and classes."""

UNTOLD_BUCKETS = "(other)"
"""The name under which the numbers of buckets stand together that no slot names. No bucket can be called so."""

_Labels = Mapping[str, str]


class Known(NamedTuple):
    """What may be counted of: slots, origins, processes, credentials, by the label that names them. `together`: where
    several labels name one, all of them."""

    values: Mapping[str, Sequence[str]]
    together: Mapping[tuple[str, ...], Sequence[tuple[str, ...]]] = {}

    def with_slots(self, slots: Sequence[str]) -> Known:
        return self._replace(values={**self.values, "slot": slots})


class _Names:
    """Which names have numbers of their own: whoever counts for another one late does not bring it back."""

    def __init__(self) -> None:
        self.kept: Callable[[_Labels], _Labels] | None = None
        """What labels become; None: all stay."""

    def now(self, labels: Sequence[str], label_values: tuple[str, ...]) -> tuple[str, ...]:
        """The values of labels under which something is counted that comes now."""
        if self.kept is None or not labels:
            return label_values
        return tuple(self.kept(dict(zip(labels, label_values, strict=True))).values())


_NAMES = _Names()


class Metric:
    """The declaration that all kinds share."""

    kind = ""
    _parent: Any

    def __init__(
        self,
        name: str,
        unit: str,
        labels: Sequence[str],
        help: str,
        *,
        values: Mapping[str, Sequence[str]] | Sequence[Mapping[str, Sequence[str]]] | None = None,
    ) -> None:
        self.name = name
        self.unit = unit
        self.labels = tuple(labels)
        self.help = help
        self.values: Sequence[Mapping[str, Sequence[str]]] = (
            () if values is None else (values,) if isinstance(values, Mapping) else values
        )
        """What labels may be (those that `Known` has need not be named): with all that go together in one of these it
        stands at 0 from the start. Empty: it stands nowhere before it was counted, but where `Known.together` says."""

        DECLARED.append(self)

    def zeros(self, known: Known) -> Iterable[tuple[str, ...]]:
        """The values of labels under which it stands from the start, where `known` says what else there is."""
        for together in self.values:
            yield from product(*({**known.values, **together}.get(label, ()) for label in self.labels))
        yield from known.together.get(self.labels, ())

    def reset(self) -> None:
        """Forget the children: what was counted in memory is gone, what was counted in files is read anew."""
        raise NotImplementedError

    def forget(self, is_gone: Callable[[Mapping[str, str]], bool]) -> None:
        """Let go of the children with such labels."""
        for label_values in [one for one in list(self._kept()) if is_gone(dict(zip(self.labels, one, strict=True)))]:
            self._kept().pop(label_values, None)
            with self._parent._lock:
                self._parent._metrics.pop(label_values, None)

    def _kept(self) -> dict[tuple[str, ...], Any]:
        """The children, by the values of their labels."""
        raise NotImplementedError


class Counter(Metric):
    """A sum that only grows."""

    kind = "counter"

    def reset(self) -> None:
        self._values: dict[tuple[str, ...], Value] = {}
        self._parent = prometheus_client.Counter(self.name, self.help, self.labels, registry=None)

    def _kept(self) -> dict[tuple[str, ...], Any]:
        return self._values

    def add(self, amount: float, *label_values: str) -> None:
        """Count `amount`, at least 0."""
        value = self._values.get(label_values)
        (value if value is not None else self._new(label_values)).inc(amount)

    def value(self, *label_values: str) -> float:
        return _number(self._child(label_values))

    def _new(self, label_values: tuple[str, ...]) -> Value:
        value: Value = self._child(_NAMES.now(self.labels, label_values))._value
        return self._values.setdefault(label_values, value)

    def _child(self, label_values: tuple[str, ...]) -> prometheus_client.Counter:
        child: prometheus_client.Counter = self._parent.labels(*label_values) if self.labels else self._parent
        return child


class Gauge(Metric):
    """A state: summed over living processes, or with `latest` whatever any of them set last."""

    kind = "gauge"

    def __init__(self, name: str, unit: str, labels: Sequence[str], help: str, *, latest: bool = False) -> None:
        self._latest = latest
        super().__init__(name, unit, labels, help)

    def reset(self) -> None:
        self._children: dict[tuple[str, ...], prometheus_client.Gauge] = {}
        self._parent = prometheus_client.Gauge(
            self.name,
            self.help,
            self.labels,
            registry=None,
            multiprocess_mode="mostrecent" if self._latest else "livesum",
        )

    def _kept(self) -> dict[tuple[str, ...], Any]:
        return self._children

    def set(self, value: float, *label_values: str) -> None:
        if not self._is_gone(label_values):
            self._child(label_values).set(value)

    def add(self, amount: float, *label_values: str) -> None:
        """Change by `amount`, which may be negative. Not for a gauge of the latest value. Nothing for a name that is
        gone and stood at zero."""
        if not self._is_gone(label_values):
            value: Value = self._child(label_values)._value
            value.inc(amount)

    def _is_gone(self, label_values: tuple[str, ...]) -> bool:
        return label_values not in self._children and _NAMES.now(self.labels, label_values) != label_values

    def value(self, *label_values: str) -> float:
        return _number(self._child(label_values))

    def _child(self, label_values: tuple[str, ...]) -> prometheus_client.Gauge:
        child = self._children.get(label_values)
        if child is None:
            child = self._parent.labels(*label_values) if self.labels else self._parent
            self._children[label_values] = child
        return child


class Histogram(Metric):
    """How often which duration occurred, in seconds."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        unit: str,
        labels: Sequence[str],
        help: str,
        *,
        values: Mapping[str, Sequence[str]] | None = None,
        buckets_seconds: Sequence[float] = LATENCY_BUCKETS_SECONDS,
    ) -> None:
        self.buckets_seconds = tuple(buckets_seconds)
        super().__init__(name, unit, labels, help, values=values)

    def reset(self) -> None:
        self._values: dict[tuple[str, ...], tuple[Value, Sequence[Value]]] = {}
        self._parent = prometheus_client.Histogram(
            self.name, self.help, self.labels, registry=None, buckets=self.buckets_seconds
        )

    def _kept(self) -> dict[tuple[str, ...], Any]:
        return self._values

    def observe(self, seconds: float, *label_values: str) -> None:
        """Count one event that took `seconds`."""
        total, buckets = self._of(label_values)
        total.inc(seconds)
        buckets[bisect_left(self.buckets_seconds, seconds)].inc(1)

    def add(self, counts: Sequence[int], total_seconds: float, *label_values: str) -> None:
        """Count as many events as `counts` says of each of its buckets, and behind them all."""
        total, buckets = self._of(label_values)
        total.inc(total_seconds)
        for bucket, count in zip(buckets, counts, strict=True):
            if count:
                bucket.inc(count)

    def _of(self, label_values: tuple[str, ...]) -> tuple[Value, Sequence[Value]]:
        values = self._values.get(label_values)
        if values is None:
            now = _NAMES.now(self.labels, label_values)
            child = self._parent.labels(*now) if self.labels else self._parent
            values = self._values.setdefault(label_values, (child._sum, child._buckets))
        return values


NOT_EXPORTED = Counter(
    "forebay_metric_values_not_exported_total",
    "values",
    (),
    "Numbers of other metrics that a process counts in its own memory, and that are missing here: the memory that the "
    "gateway's processes share had no room for them.",
)


def room_bytes(slots: int) -> int:
    """What the files of one process take at most where so many slots are used."""
    return len(_KINDS) * GROWTH_BYTES + slots * _BYTES_OF_SLOT


def _number(child: prometheus_client.Counter | prometheus_client.Gauge) -> float:
    return next(iter(child.collect())).samples[0].value


def reset() -> None:
    """Begin every metric anew: in memory at zero, in shared files where the slot's file stands."""
    _NAMES.kept = None
    for metric in DECLARED:
        metric.reset()


def share(directory: Path, slot: str) -> None:
    """From here on this process counts into the files of `slot` in `directory`.

    `slot` is unique among living processes, and free of `_`, which separates the parts of a file's name.
    Raises OSError when the files cannot be made whole.
    """
    for kind in _KINDS:  # a full disk is best met here, when the files are made
        set_aside(directory / f"{kind}_{slot}.db", GROWTH_BYTES)
    unshare()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    lost = _Lost()
    values.ValueClass = SharedValues(directory, slot, lost)
    reset()
    lost.count()


class _Lost:
    """Tells of numbers that are not exported: the first in the log, all in a metric, once that has its place."""

    def __init__(self) -> None:
        self._uncounted = 0
        self._is_told = self._is_counting = False

    def __call__(self, error: OSError) -> None:
        if not self._is_told:
            self._is_told = True
            _log.error("some metrics of this process are not exported: there is no room for them", error=str(error))
        if self._is_counting:
            NOT_EXPORTED.add(1)
        else:
            self._uncounted += 1

    def count(self) -> None:
        """From now on in the metric."""
        self._is_counting = True
        NOT_EXPORTED.add(self._uncounted)


def keep_names(
    slots: Iterable[str],
    credentials: Iterable[str],
    classes: Iterable[str],
    buckets: Iterable[str] = (),
    users: Iterable[str] = (),
) -> None:
    """Only these have numbers of their own from now on. What others have counted is summed up under GONE; their gauges
    are dropped, but for those of callers who run or wait still. So names that come and go cost nothing that lasts.

    Event loop only. Where the memory that processes share has no room for it, that is told, and done the next time.
    """
    of_slots = {*slots, "none", GONE}
    of_credentials = {*credentials, "none", GONE}
    of_classes = {*classes, GONE}
    of_buckets = {*buckets, UNTOLD_BUCKETS, GONE}
    of_users = {*users, GONE}
    known_of = {"slot": of_slots, "credential": of_credentials, "bucket": of_buckets, "used_by": of_users}

    def kept(labels: Mapping[str, str]) -> Mapping[str, str]:
        found = {}
        for label, known in known_of.items():
            if label in labels and labels[label] not in known:
                found[label] = GONE
        scope = labels.get("scope")
        if scope is not None and labels["name"] not in (of_classes if scope == "class" else of_credentials):
            found["name"] = GONE
        return {**labels, **found} if found else labels

    shared = values.ValueClass
    if not isinstance(shared, SharedValues):
        return
    gauges = [metric for metric in DECLARED if isinstance(metric, Gauge)]
    dropped = {gauge.name for gauge in gauges}
    used = {
        (gauge.name, *sorted(zip(gauge.labels, label_values, strict=True)))
        for gauge in gauges
        if "scope" in gauge.labels
        for label_values in list(gauge._kept())
        if gauge.value(*label_values)
    }

    def renamed(name: str, labels: Mapping[str, str]) -> Mapping[str, str] | None:
        becomes = kept(labels)
        if becomes == labels or (name, *sorted(labels.items())) in used:
            return labels
        return None if name in dropped else becomes

    _NAMES.kept = kept
    for metric in DECLARED:
        if {*known_of, "scope"} & set(metric.labels):
            metric.forget(lambda labels, name=metric.name: renamed(name, labels) != labels)  # type: ignore[misc]
            if not isinstance(metric, Gauge):
                metric._kept().clear()  # a name that was gone may be back
    try:
        shared.fold(renamed)
    except OSError as error:
        _log.warning("metrics still have the names of slots and callers that are gone", error=str(error))


def unshare() -> None:
    """Count in memory again, from zero."""
    os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
    shared, values.ValueClass = values.ValueClass, values.MutexValue
    reset()
    if isinstance(shared, SharedValues):
        shared.close()


def forget_process(directory: Path, slot: str) -> None:
    """Take what a dead process left in its gauges (requests in flight, say) out of the sums. Its counters stay."""
    mark_process_dead(slot, str(directory))  # type: ignore[no-untyped-call]

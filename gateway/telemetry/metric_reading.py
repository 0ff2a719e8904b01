"""Read the numbers of all processes from the files that they count in (metric_kinds.py). Call it in a thread.

Files grow and are seldom replaced. So keys are read once, and later readings take only numbers: with 1,000 slots, each
process's files have some 100,000.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from struct import Struct
from sys import intern
from threading import Lock
from typing import NamedTuple

import orjson
from prometheus_client.utils import floatToGoString

from gateway.telemetry.metric_kinds import DECLARED, Histogram, Known, Metric

_DIRECTORIES_MAX = 4
_HEADER = Struct("ii")
_LENGTH_BYTES = 4
_LATEST = "gauge_mostrecent"
_SUM = ""
"""Stands for a bound at the place of a histogram's sum."""

_ANY_SLOT = "\0"
"""Stands for a slot's name in lines that are made once for all slots."""

_Values = tuple[str, ...]
"""Label values in the order of their labels' names, without `le`."""


class _Line(NamedTuple):
    """The place of a counter's or gauge's number, and the text before it."""

    text: str
    number: int


class _Family:
    """A metric's numbers. `labels` are sorted names."""

    def __init__(self, kind: str, labels: Sequence[str]) -> None:
        self.kind, self.labels = kind, tuple(labels)
        self.lines: dict[_Values, _Line] = {}
        self.buckets: dict[_Values, dict[str, int]] = {}
        """The places of a histogram's numbers: of each bucket by its written upper bound, and of the sum."""


@dataclass(slots=True)
class _File:
    """A file that was read up to `used`: `cells` are the places of its `numbers`, in cells of 8 bytes."""

    identity: tuple[int, int]
    used: int = 8
    numbers: array[int] = field(default_factory=lambda: array("I"))
    cells: array[int] = field(default_factory=lambda: array("I"))


class _Kind:
    """The files of all processes for one kind of metric."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._forget()

    def _forget(self) -> None:
        """Forget the keys, so that the next reading begins anew."""
        self.families: dict[str, _Family] = {}
        self._files: dict[Path, _File] = {}
        self._count = 0

    def read(self, paths: Sequence[Path]) -> list[float | None]:
        """Return all numbers; None for those that no process has set."""
        if not self._files.keys() <= set(paths):
            self._forget()
        try:
            return self._numbers(paths)
        except _Replaced:
            self._forget()
            return self._numbers(paths)

    def _numbers(self, paths: Sequence[Path]) -> list[float | None]:
        sums, times = list[float](), list[float]()
        learnt = dict[bytes, int]()
        for path in paths:
            read = _content(path)
            if read is None:
                continue
            identity, content = read
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = _File(identity)
            elif not identity[1] or file.identity != identity or file.used > len(content):
                raise _Replaced
            self._learn(file, content, learnt)
            cells = memoryview(content)[: len(content) & ~7].cast("d")
            sums.extend([0.0] * (self._count - len(sums)))
            if self._name != _LATEST:
                for number, cell in zip(file.numbers, file.cells, strict=True):
                    sums[number] += cells[cell]
                continue
            times.extend([0.0] * (self._count - len(times)))
            for number, cell in zip(file.numbers, file.cells, strict=True):
                if cells[cell + 1] > times[number]:
                    sums[number], times[number] = cells[cell], cells[cell + 1]
        return [value if at else None for value, at in zip(sums, times, strict=True)] if times else [*sums]

    def _learn(self, file: _File, content: bytes, learnt: dict[bytes, int]) -> None:
        """Read the new keys of a file: length, key, padding, number, time, repeated. `learnt` has those of others."""
        lengths, position = memoryview(content)[: len(content) & ~3].cast("i"), file.used
        end = len(content)
        while position + _LENGTH_BYTES < end:
            start, length = position + _LENGTH_BYTES, lengths[position // _LENGTH_BYTES]
            value = start + length + 8 - (length + _LENGTH_BYTES) % 8
            if length <= 0 or value + 16 > end:
                break
            key = content[start : start + length]
            number = learnt.get(key)
            if number is None:
                number = learnt[key] = self._number(*orjson.loads(key)[:3])
            file.numbers.append(number)
            file.cells.append(value // 8)
            position = value + 16
        file.used = position

    def _number(self, metric: str, name: str, labels: dict[str, str]) -> int:
        """Return the place of a number, which may be a new one."""
        bound = labels.pop("le", _SUM)
        family = self.families.get(metric)
        if family is None:
            family = self.families[metric] = _Family(self._name.partition("_")[0], sorted(labels))
        values = tuple([intern(labels[label]) for label in family.labels])
        if family.kind != "histogram":
            line = family.lines.get(values)
            if line is None:
                line = family.lines[values] = _Line(f"{name}{_braces(family.labels, values)} ", self._next())
            return line.number
        places = family.buckets.setdefault(values, {})
        if bound not in places:
            places[bound] = self._next()
        return places[bound]

    def _next(self) -> int:
        self._count += 1
        return self._count - 1


class _Replaced(Exception):
    """Another file has the name of a known one."""


def _content(path: Path) -> tuple[tuple[int, int], bytes] | None:
    """Return a file's identity and its used content; None for a file that is gone or not yet made."""
    try:
        with path.open("rb") as file:
            content = file.read(65536)
            if len(content) < _HEADER.size:
                return None
            used, stamp = _HEADER.unpack_from(content)
            content = content[:used] if used <= len(content) else content + file.read(used - len(content))
            return (path.stat().st_ino, stamp), content
    except FileNotFoundError:
        return None


class _Files:
    """The files of one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kinds: dict[str, _Kind] = {}
        self.lock = Lock()

    def read(self) -> Iterator[tuple[str, _Family, list[float | None]]]:
        """Yield every metric's name, its family and all numbers of its kind. The caller holds the lock."""
        paths: dict[str, list[Path]] = {kind: [] for kind in self._kinds}
        for path in sorted(self._directory.glob("*.db")):
            paths.setdefault(path.stem.rpartition("_")[0], []).append(path)
        for name, of_kind in paths.items():
            kind = self._kinds.setdefault(name, _Kind(name))
            numbers = kind.read(of_kind)
            for metric, family in kind.families.items():
                yield metric, family, numbers


@lru_cache(_DIRECTORIES_MAX)
def _files(directory: Path) -> _Files:
    return _Files(directory)


class MetricReading:
    """The sums over all processes at one moment."""

    def __init__(self, directory: Path) -> None:
        files = _files(directory)
        self._sums: dict[str, tuple[tuple[str, ...], dict[_Values, float]]] = {}
        self._buckets: dict[str, tuple[tuple[str, ...], dict[_Values, dict[float, float]]]] = {}
        with files.lock:
            for metric, family, numbers in files.read():
                if family.kind == "histogram":
                    sums, counts = dict[_Values, float](), dict[_Values, dict[float, float]]()
                    for values, places in family.buckets.items():
                        counts[values] = {float(one): numbers[at] or 0.0 for one, at in places.items() if one != _SUM}
                        if _SUM in places:
                            sums[values] = numbers[places[_SUM]] or 0.0
                    self._sums[metric], self._buckets[metric] = (family.labels, sums), (family.labels, counts)
                else:
                    found = ((values, numbers[line.number]) for values, line in family.lines.items())
                    self._sums[metric] = family.labels, {key: one for key, one in found if one is not None}

    def by_labels(self, labels: Sequence[str], metric: Metric) -> dict[tuple[str, ...], float]:
        """Return sums, of a histogram those of its observations, by the values of some of the metric's labels."""
        names, counted = self._sums.get(metric.name.removesuffix("_total"), ((), {}))
        sums: dict[tuple[str, ...], float] = {}
        if not counted or any(label not in names for label in labels):
            return sums
        places = [names.index(label) for label in labels]
        for values, number in counted.items():
            key = tuple([values[place] for place in places])
            sums[key] = sums.get(key, 0.0) + number
        return sums

    def total(self, metric: Metric, **labels: str) -> float:
        """Return the sum of the numbers with these label values."""
        return self.by_labels(tuple(labels), metric).get(tuple(labels.values()), 0.0)

    def buckets(self, histogram: Histogram, label: str, counts: Callable[[str], bool]) -> list[int]:
        """Return the events in each bucket, the last one unbounded, for label values that `counts` accepts."""
        names, counted = self._buckets.get(histogram.name, ((), {}))
        found = dict.fromkeys((*histogram.buckets_seconds, float("inf")), 0.0)
        for values, buckets in counted.items():
            if counts(values[names.index(label)]):
                for bound, count in buckets.items():
                    found[bound] = found.get(bound, 0.0) + count
        return [int(count) for count in found.values()]


def by_label(read: Path | MetricReading, label: str, *metrics: Metric) -> list[dict[str, float]]:
    """Return each metric's sums by the values of one label."""
    reading = read if isinstance(read, MetricReading) else MetricReading(read)
    return [{key[0]: value for key, value in reading.by_labels((label,), one).items()} for one in metrics]


def exposition_parts(directory: Path, known: Known | None = None) -> list[bytes]:
    """Return all numbers in Prometheus' text format, a part for each metric.

    Counters of what is `known` are 0 before their first event: `increase()` and `rate()` do not see the event by which
    a counter appears.
    """
    files = _files(directory)
    texts: dict[str, bytes] = {}
    declared = {metric.name.removesuffix("_total"): metric for metric in DECLARED}
    with files.lock:
        for name, family, numbers in files.read():
            lines = [*_lines(name, family, numbers)]
            if known is not None and name in declared:
                lines += _zeros(declared[name], family, known)
            texts[name] = _family_text(name, family.kind, declared.get(name), lines)
    for name, metric in declared.items():
        if known is not None and name not in texts:
            lines = [*_zeros(metric, _Family(metric.kind, ()), known)]
            if lines:
                texts[name] = _family_text(name, metric.kind, metric, lines)
    in_order = [texts.pop(name) for name in declared if name in texts]
    return [*in_order, *texts.values()]


def _family_text(name: str, kind: str, metric: Metric | None, lines: Iterable[str]) -> bytes:
    told = f"{name}_total" if kind == "counter" else name
    explained = metric.help.replace("\\", r"\\").replace("\n", r"\n") if metric is not None else ""
    return f"# HELP {told} {explained}\n# TYPE {told} {kind}\n{''.join(lines)}".encode()


def _lines(name: str, family: _Family, numbers: Sequence[float | None]) -> Iterator[str]:
    for text, number in family.lines.values():
        value = numbers[number]
        if value is not None:
            yield f"{text}{_number_text(value)}\n"
    for values, places in family.buckets.items():
        counted = {bound: numbers[number] or 0.0 for bound, number in places.items()}
        total = counted.pop(_SUM, 0.0)
        yield _histogram_text(name, family.labels, values, counted, total)


def _zeros(metric: Metric, family: _Family, known: Known) -> Iterator[str]:
    """Yield the lines of known counters without an event."""
    labels = tuple(sorted(metric.labels))
    order = [metric.labels.index(label) for label in labels]
    counted = family.buckets or family.lines
    place = labels.index("slot") if "slot" in labels else None
    of_any_slot = list[_Values]()
    for one in metric.zeros(known if place is None else known.with_slots([_ANY_SLOT])):
        values = tuple([one[index] for index in order])
        if place is not None and values[place] == _ANY_SLOT:
            of_any_slot.append(values)
        elif values not in counted:
            yield _zero_text(metric, labels, values)
    if place is None:
        return
    counted_slots = {values[place] for values in counted}
    alike = "".join([_zero_text(metric, labels, values) for values in of_any_slot])
    around = [(values[:place], values[place + 1 :]) for values in of_any_slot]
    for slot in known.values.get("slot", ()):
        if slot not in counted_slots:
            yield alike.replace(_ANY_SLOT, _escaped(slot))
            continue
        for before, behind in around:
            values = (*before, slot, *behind)
            if values not in counted:
                yield _zero_text(metric, labels, values)


def _zero_text(metric: Metric, labels: Sequence[str], values: _Values) -> str:
    if not isinstance(metric, Histogram):
        return f"{metric.name}{_braces(labels, values)} 0.0\n"
    bounds = [floatToGoString(bound) for bound in (*metric.buckets_seconds, float("inf"))]  # type: ignore[no-untyped-call]
    return _histogram_text(metric.name, labels, values, dict.fromkeys(bounds, 0.0), 0.0)


def _histogram_text(
    name: str, labels: Sequence[str], values: _Values, counted: Mapping[str, float], total_seconds: float
) -> str:
    """Return a histogram's lines. `counted` has the events of each bucket by its upper bound, not summed up."""
    with_bound = sorted((*labels, "le"))
    place = with_bound.index("le")
    texts, up_to = list[str](), 0.0
    for bound in sorted(counted, key=float):
        up_to += counted[bound]
        braces = _braces(with_bound, (*values[:place], bound, *values[place:]))
        texts.append(f"{name}_bucket{braces} {_number_text(up_to)}\n")
    braces = _braces(labels, values)
    texts.append(f"{name}_count{braces} {_number_text(up_to)}\n{name}_sum{braces} {_number_text(total_seconds)}\n")
    return "".join(texts)


def _number_text(value: float) -> str:
    if 0 <= value < 1e6:
        return repr(value)
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


def _braces(labels: Iterable[str], values: Iterable[str]) -> str:
    pairs = ",".join([f'{label}="{_escaped(value)}"' for label, value in zip(labels, values, strict=True)])
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

"""A slot with guarantees beside greedy ones of more weight, and slots that leave the link and come back.

    python -m loadtests.guarantees [--rounds 5] [--scale 1] [--record]

A link of 100 MB/s each way, four workers. Slots `a` and `b`, of weights 8 and 4, want everything; slot `c` of weight 1
is guaranteed 30 MB/s each way, where its weight gives it less than 8. First `c` and the others read what is not cached,
eight readers each; then `c` leaves, comes back, has the link to itself, and has to share it again. A return is judged
by what the slot lacks, in seconds of its share, five seconds after its readers began. Objects are small, so that
whoever leaves is gone soon. In the next part checkpoints are flushed, that of `c` the sooner: when the origin has
it, the others have the whole link. The link's use is what passes it in the worst of all spans of five seconds
and of one, comings and goings included.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from gateway.origin.client import Direction
from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.content import BUCKET, Family
from loadtests.harness.gateway import Gateway, gateway
from loadtests.harness.intervals import mean_of
from loadtests.harness.link import (
    LOOK_SECONDS,
    WINDOW_SECONDS,
    Readers,
    Sample,
    Watch,
    at_work,
    between,
    counted,
    farthest,
    least_used,
    passed_by_all,
    rate,
    rates,
)
from loadtests.harness.origin import LoadOrigin
from loadtests.harness.report import Measured, Report, Verdict, at_least, at_most
from loadtests.harness.saver import Part, Saver, at_once
from loadtests.harness.server_process import ServerProcess
from loadtests.harness.sink import SinkOrigin
from loadtests.writeback_parts import WRITES_BACK

_LINK = 100e6
_GUARANTEE = 30e6
_WEIGHTS = {"a": 8, "b": 4, "c": 1}
_SETTLING_SECONDS = 2.0
_PHASE_SECONDS = WINDOW_SECONDS + 2.0
_RETURN_SECONDS = 5.0
_READERS = 8
_OBJECT_BYTES = 4 * 1024**2
_OBJECTS = 1_500
"""More than are read."""

_PART_BYTES = 8 * 1024**2
_PARTS = {"a": 96, "b": 48, "c": 32}
"""Of eight MiB: `c` has 9 s to flush at its guarantee, and what is left of the others takes 7 s and more."""

_SPARED_SECONDS = 1.5
"""Of the flush's end: what is left is in flight."""

_HELD = 1e6
_FLUSHED_SECONDS_MAX = 300.0
_DUE = {"a": (_LINK - _GUARANTEE) * 8 / 12, "b": (_LINK - _GUARANTEE) * 4 / 12, "c": _GUARANTEE}
"""While all want everything."""

_NONE = 1e-3
"""In place of nothing, of which there is no geometric mean."""

_Series = dict[str, list[float]]


@dataclass(slots=True)
class _Found:
    """By round."""

    shares: _Series = field(default_factory=lambda: defaultdict(list))
    used: _Series = field(default_factory=lambda: defaultdict(list))
    lacking_seconds: _Series = field(default_factory=lambda: defaultdict(list))

    def note_shares(self, direction: str, samples: Sequence[Sample]) -> None:
        """All slots have wanted everything."""
        spans = rates(samples)
        for slot, due in _DUE.items():
            self.shares[f"{direction}, {slot}"].append(farthest([one[slot] / due for one in spans]))

    def note_used(self, what: str, samples: Sequence[Sample]) -> None:
        for window_seconds, of in ((WINDOW_SECONDS, "5 s"), (1.0, "second")):
            self.used[f"{what}: of the link, in the worst {of}"].append(least_used(samples, _LINK, window_seconds))

    def note_return(self, slots: Iterable[str], samples: Sequence[Sample], back: float) -> None:
        """Readers of these slots began beside those of the others."""
        seen = between(samples, back, back + _RETURN_SECONDS)
        got = rate(seen[0], seen[-1])
        for slot in slots:
            lacking = (seen[0].at - back) + (1 - got[slot] / _DUE[slot]) * (seen[-1].at - seen[0].at)
            self.lacking_seconds[f"read, {slot}"].append(max(lacking, _NONE))


def _slots(**more: object) -> list[dict[str, object]]:
    guaranteed = f"{_GUARANTEE / 1e6:g}MB/s"
    guarantees = {"c": {"read_guarantee": guaranteed, "write_guarantee": guaranteed}}
    return [
        {"name": name, "prefix": f"s3://{BUCKET}/{name}/", "weight": weight, **guarantees.get(name, {}), **more}
        for name, weight in _WEIGHTS.items()
    ]


def _gateway(origin: ServerProcess, **slot: object) -> AbstractContextManager[Gateway]:
    return gateway(
        origin,
        link={"read_bandwidth": f"{_LINK / 1e6:g}MB/s", "write_bandwidth": f"{_LINK / 1e6:g}MB/s"},
        server={"workers": 4},
        cores=machine.all_cores(),
        cache={"persistent": True},
        slot=slot,
        more_slots=_slots(**slot),
    )


def _watch(of: Gateway, direction: Direction) -> Watch:
    """Of each slot what was counted, and of the link what has passed: of reads, what waits before it is counted."""
    return Watch({"slots": partial(counted, of, direction), "link": passed_by_all(of, direction)})


def _read(found: _Found) -> None:
    families = [Family(f"{name}/", _OBJECTS, _OBJECT_BYTES) for name in _WEIGHTS]
    with LoadOrigin(families) as origin, _gateway(origin, consistency="immutable") as ours:
        *greedy, guaranteed = (Readers(ours, one, _READERS) for one in families)
        with _watch(ours, "read") as watch:
            samples, link = watch.samples["slots"], watch.samples["link"]
            with at_work(*greedy):
                progress("reading: all want everything")
                with at_work(guaranteed):
                    began = _passed(_SETTLING_SECONDS, _PHASE_SECONDS)
                    found.note_shares("read", between(samples, began, began + _PHASE_SECONDS))
                progress("reading: the guaranteed slot has left, and comes back")
                _passed(0, _RETURN_SECONDS)
                back = time.monotonic()
                with at_work(guaranteed):
                    _passed(0, _RETURN_SECONDS)
                    found.note_return(["c"], samples, back)
                    found.note_used("read, the guaranteed slot leaves and comes back", _since(link, began))
            progress("reading: the guaranteed slot alone, and the others come back")
            with at_work(guaranteed):
                began = _passed(1.0, _RETURN_SECONDS)
                back = time.monotonic()
                with at_work(*greedy):
                    _passed(0, _RETURN_SECONDS)
                    found.note_return(["a", "b"], samples, back)
                    found.note_used("read, the others are away and come back", _since(link, began))


def _flush(found: _Found, part: Part) -> None:
    with SinkOrigin() as sink, _gateway(sink, **{**WRITES_BACK, "buffer": "2GiB"}) as ours:
        savers = {name: Saver(ours.address, part) for name in _WEIGHTS}
        savers["a"].put("first", b"x")  # the first write to a bucket goes through
        progress("saving checkpoints")
        sink.pace(_HELD)
        at_once([partial(saver.save, f"{name}/large", _PARTS[name]) for name, saver in savers.items()])
        for saver in savers.values():
            saver.close()
        sink.pace(0)
        progress("flushing: all want everything, then the guaranteed slot has nothing left")
        with _watch(ours, "write") as watch:
            samples, link = watch.samples["slots"], watch.samples["link"]
            began = _passed(_SETTLING_SECONDS, WINDOW_SECONDS + 0.5)
            found.note_shares("flush", between(samples, began, time.monotonic()))
            ends = sum(_PARTS.values()) * _PART_BYTES
            while sum(samples[-1].moved.values()) < ends - _LINK * _SPARED_SECONDS:
                time.sleep(LOOK_SECONDS)
            found.note_used("flush, until little is left", _since(link, began))
        sink.until_it_has(1 + len(_WEIGHTS), _FLUSHED_SECONDS_MAX)


def _passed(settling_seconds: float, seconds: float) -> float:
    """Wait; when the second of both spans began."""
    time.sleep(settling_seconds)
    began = time.monotonic()
    time.sleep(seconds)
    return began


def _since(samples: Sequence[Sample], began: float) -> Sequence[Sample]:
    return between(samples, began, time.monotonic())


def test(options: Options) -> Report:
    title = "A slot with a guarantee of 30 MB/s beside greedy ones, on a link of 100 MB/s"
    report = Report("guarantees", title, options.command("guarantees"))
    found, part = _Found(), Part.of(os.urandom(_PART_BYTES))
    for number in range(options.rounds):
        progress(f"round {number + 1}")
        _read(found)
        _flush(found, part)
    for name, values in found.shares.items():
        off = mean_of([max(abs(value - 1), _NONE) for value in values])
        report.verdicts.append(Verdict(f"{name}: off what it is due, in the worst 5 s", off, at_most(0.05)))
    for name, values in found.lacking_seconds.items():
        what = f"{name} comes back: what it lacks after 5 s, in seconds of its share"
        report.verdicts.append(Verdict(what, mean_of(values), at_most(1.0)))
    for name, values in found.used.items():
        report.verdicts.append(Verdict(name, mean_of(values), at_least(0.95)))
    report.tables = [
        Measured("in the worst 5 s, of what is due", "1", found.shares),
        Measured("lacking 5 s after its return", "s of its share", found.lacking_seconds),
        Measured("used", "1", found.used),
    ]
    return report


if __name__ == "__main__":
    command.main(test, __doc__)

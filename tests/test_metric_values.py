"""The numbers behind the metrics: in files that outlive their process, and never lost to another thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict

from gateway import metric_kinds
from gateway.metric_kinds import LATENCY_BUCKETS_SECONDS
from gateway.metric_values import SharedValue, SharedValues


@pytest.fixture
def values(tmp_path: Path) -> Iterator[SharedValues]:
    made = SharedValues(tmp_path, "worker0")
    yield made
    made.close()


def value(of: SharedValues, label: str, typ: str = "counter", mode: str = "") -> SharedValue:
    return of(typ, "name", "name", ["label"], [label], "Help.", multiprocess_mode=mode)


def on_disk(path: Path) -> dict[str, tuple[float, float]]:
    """Label -> value and time, as the admin port reads them."""
    read = MmapedDict.read_all_values_from_file(str(path))  # type: ignore[no-untyped-call]
    return {key.split('"label": "')[1].split('"')[0]: (number, at) for key, number, at, _ in read}


def test_additions_are_in_the_file_at_once(tmp_path: Path, values: SharedValues) -> None:
    """A killed process has lost nothing of what it counted."""
    for number in range(2000):  # the file is mapped anew, larger, meanwhile
        value(values, f"l{number}").inc(number)
    first = value(values, "l7")
    first.inc(1)
    assert first.get() == 8
    assert on_disk(tmp_path / "counter_worker0.db") == {f"l{n}": (n + (n == 7), 0.0) for n in range(2000)}


def test_who_comes_after_goes_on_counting(tmp_path: Path, values: SharedValues) -> None:
    """The slot's next process begins where the last one stopped."""
    value(values, "a").inc(5)
    values.close()
    again = SharedValues(tmp_path, "worker0")
    value(again, "a").inc(2)
    again.close()
    assert on_disk(tmp_path / "counter_worker0.db") == {"a": (7, 0)}


def test_a_gauge_has_its_time_and_a_file_of_its_kind(tmp_path: Path, values: SharedValues) -> None:
    """Of several processes' latest values the last one counts."""
    value(values, "a", "gauge", "mostrecent").set(3.5, 99.0)
    assert on_disk(tmp_path / "gauge_mostrecent_worker0.db") == {"a": (3.5, 99.0)}


def test_no_addition_is_lost_to_another_thread(tmp_path: Path, values: SharedValues) -> None:
    """Whoever counts, wherever it runs."""
    one = value(values, "a")

    def count() -> None:
        for _ in range(20_000):
            one.inc(1)

    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(count)
    assert one.get() == 80_000
    assert on_disk(tmp_path / "counter_worker0.db") == {"a": (80_000, 0)}


@pytest.mark.parametrize("seconds", [0.0, *LATENCY_BUCKETS_SECONDS, 0.0011, 61.0])
def test_a_duration_falls_into_the_bucket_that_prometheus_gives_it(seconds: float) -> None:
    """The first whose bound it does not exceed."""
    one = metric_kinds.Histogram("forebay_test_seconds", "seconds", (), "Help.")
    other = metric_kinds.Histogram("forebay_other_seconds", "seconds", (), "Help.")
    metric_kinds.DECLARED.remove(one)
    metric_kinds.DECLARED.remove(other)
    one.reset()
    other.reset()
    one.observe(seconds)
    other._parent.observe(seconds)
    ours, theirs = ([sample[2] for sample in metric._parent._child_samples()] for metric in (one, other))
    assert ours[:-1] == theirs[:-1]

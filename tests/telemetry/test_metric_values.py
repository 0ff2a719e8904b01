"""The numbers behind the metrics: in files that outlive their process, and never lost to another thread."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from gateway.telemetry import metric_kinds, metric_reading, metrics
from gateway.telemetry.metric_kinds import LATENCY_BUCKETS_SECONDS, Histogram, SharedValue, SharedValues
from tests.support.counting import exposition
from tests.support.disks import small_disk


@pytest.fixture
def values(tmp_path: Path) -> Iterator[SharedValues]:
    made = SharedValues(tmp_path, "worker0")
    yield made
    made.close()


def value(of: SharedValues, label: str, kind: str = "counter") -> SharedValue:
    made = of.value(kind, mmap_key("name", "name", ["label"], [label], ""))
    assert isinstance(made, SharedValue)
    return made


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
    value(values, "a", "gauge_mostrecent").set(3.5, 99.0)
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
    one = metric_kinds.Histogram("forebay_test_seconds seconds", "Help.")
    metric_kinds.DECLARED.remove(one)
    other = prometheus_client.Histogram("other_seconds", "Help.", registry=None, buckets=LATENCY_BUCKETS_SECONDS)
    one.observe(seconds)
    other.observe(seconds)
    total, buckets = one.kept()[()]
    assert [bucket.get() for bucket in buckets] == [bucket.get() for bucket in other._buckets]
    assert total.get() == other._sum.get() == seconds


@pytest.mark.root
def test_a_number_that_finds_no_room_is_counted_in_the_process_and_harms_nobody(tmp_path: Path) -> None:
    """The file system is full: a page that it cannot back would kill the process. The others go on, and one says so."""
    with small_disk(tmp_path / "memory", 4 * 2**18) as memory:
        counted = _in_a_process_of_its_own(_COUNTING, memory)
    assert counted.count("not exported: there is no room") == 1
    assert counted.endswith("5000.0 of 5000 values, some not exported: True\n")


_COUNTING = """
import sys
from pathlib import Path
from gateway.telemetry import metric_kinds
from gateway.telemetry import metric_reading
from gateway.telemetry import metrics
directory = Path(sys.argv[1])
metric_kinds.share(directory, "worker0")
for number in range(5000):
    metrics.SENT_BYTES.add(1, "GetObject", f"slot-{number}")
total = sum(metrics.SENT_BYTES.value("GetObject", f"slot-{number}") for number in range(5000))
[exported] = metric_reading.by_label(directory, "slot", metrics.SENT_BYTES)
missing = metric_kinds.NOT_EXPORTED.value()
assert len(exported) == sum(exported.values()) == 5000 - missing, (len(exported), missing)
assert f"{metric_kinds.NOT_EXPORTED.name} {missing}" in b"".join(metric_reading.exposition_parts(directory)).decode()
print(f"{total} of 5000 values, some not exported: {0 < missing < 5000}")
"""


def _in_a_process_of_its_own(code: str, directory: Path) -> str:
    command = [sys.executable, "-c", code, str(directory)]
    repository = Path(__file__).resolve().parents[2]
    return subprocess.run(command, cwd=repository, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_room_is_reckoned_with_for_every_slot(tmp_path: Path) -> None:
    """Of each metric that has the label, a number, and of requests those of many kinds, take less than is kept free."""
    made = SharedValues(tmp_path, "worker0")
    name_of_slot = "team-0001-dataset"
    labels = {"operation": "CompleteMultipartUpload", "slot": name_of_slot, "status": "200", "cache": "absorbed"}
    for metric in metrics.DECLARED:
        if "slot" in metric.labels:
            bounds = [str(bound) for bound in metric.buckets_seconds] if isinstance(metric, Histogram) else []
            for number in range(8 if metric is metrics.REQUESTS else 1):
                labelled = [f"{labels.get(name, 'value')}{number}" for name in metric.labels]
                made.value(metric.file, mmap_key(metric.name, metric.name, list(metric.labels), labelled, ""))
                for bound in bounds:
                    name, named = f"{metric.name}_bucket", [*metric.labels, "le"]
                    made.value(metric.file, mmap_key(metric.name, name, named, [*labelled, bound], ""))
    made.close()
    used_bytes = 0
    for path in tmp_path.glob("*.db"):
        file = MmapedDict(str(path))  # type: ignore[no-untyped-call]
        used_bytes += file._used
        file.close()  # type: ignore[no-untyped-call]
    assert used_bytes < metric_kinds.room_bytes(1) - metric_kinds.room_bytes(0)


def test_metrics_are_told_where_the_files_are_gone(tmp_path: Path) -> None:
    """Somebody has removed the directory: there are none, and nobody who asks is answered with an error."""
    assert exposition(tmp_path / "gone") == b""
    assert metric_reading.by_label(tmp_path / "gone", "slot", metrics.SENT_BYTES) == [{}]


def test_a_number_is_counted_where_the_directory_is_gone(tmp_path: Path) -> None:
    """As the one of restarts, which the supervisor counts first when a worker has died."""
    lost: list[OSError] = []
    one = SharedValues(tmp_path / "gone", "supervisor", lost.append).value("counter", "key")
    one.inc(1)
    assert one.get() == 1
    assert len(lost) == 1

"""Metrics: declared once, summed over processes, kept over restarts."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry import metric_kinds, metrics
from gateway.telemetry.metric_reading import by_label
from gateway.telemetry.metrics import DECLARED
from tests.support.counting import exposition


def samples(directory: Path) -> dict[str, float]:
    """`name{label="value"}` -> value of everything exposed."""
    found = {}
    for family in text_string_to_metric_families(exposition(directory).decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_every_metric_has_a_name_of_its_own_by_prometheus_rules() -> None:
    """Prefix, unit and `_total` where they belong (prometheus.io/docs/practices/naming)."""
    names = [one.name for one in DECLARED]
    assert len(set(names)) == len(names)
    for one in DECLARED:
        assert re.fullmatch(r"forebay_[a-z_]+", one.name)
        assert (one.kind == "counter") == one.name.endswith("_total"), one.name
        assert one.unit != "bytes" or "_bytes" in one.name, one.name
        assert one.kind != "histogram" or one.name.endswith("_seconds"), one.name
        assert one.help.endswith("."), one.name


COUNT = """
import sys
import threading
from pathlib import Path
from gateway.telemetry import metric_kinds
from gateway.telemetry import metrics
metric_kinds.share(Path(sys.argv[1]), sys.argv[2])
metrics.CACHE_HIT_BYTES.add(int(sys.argv[3]), "a")
metrics.REQUESTS_IN_FLIGHT.add(1)
metrics.REQUEST_SECONDS.observe(0.2, "GetObject")
metrics.CACHE_USAGE_BYTES.set(int(sys.argv[3]), "a")
"""


def count_in_a_process(directory: Path, slot: str, amount: int) -> None:
    subprocess.run([sys.executable, "-c", COUNT, str(directory), slot, str(amount)], check=True, timeout=60)


@pytest.mark.slow
def test_processes_are_summed_and_a_restarted_one_goes_on_counting(tmp_path: Path) -> None:
    """Counters belong to the worker's place, not to its process; gauges to the living only."""
    count_in_a_process(tmp_path, "worker0", 1)
    assert samples(tmp_path)["forebay_requests_in_flight"] == 1
    metric_kinds.forget_process(tmp_path, "worker0")
    assert samples(tmp_path).get("forebay_requests_in_flight", 0) == 0, "nobody is left to count them down"
    count_in_a_process(tmp_path, "worker1", 10)
    count_in_a_process(tmp_path, "worker0", 100)
    found = samples(tmp_path)
    assert found["forebay_cache_hit_bytes_total{slot=a}"] == 111
    assert found["forebay_requests_in_flight"] == 2
    assert found["forebay_request_duration_seconds_count{operation=GetObject}"] == 3
    assert found["forebay_cache_usage_bytes{slot=a}"] == 100


def test_the_room_of_shared_files_is_set_aside_when_they_are_made(tmp_path: Path) -> None:
    """A page without a place on disk would kill the process at some later addition."""
    metric_kinds.share(tmp_path, "worker0")
    files = list(tmp_path.iterdir())
    assert len(files) == 4
    for file in files:
        assert file.stat().st_blocks * 512 >= file.stat().st_size
        assert file.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_names_that_come_and_go_cost_nothing_that_lasts_and_sums_stay(tmp_path: Path) -> None:
    """Slots, credentials and classes: files, children and what the admin port tells are as large after 300 names as
    after ten, and no sum over all names has fallen."""
    metric_kinds.share(tmp_path, "worker0")
    sizes = []
    for number in range(300):
        name = f"job-{number}"
        if number == 150:  # killed, and another one goes on in its place
            metric_kinds.share(tmp_path, "worker0")
        metric_kinds.keep_names({"default", name}, {"gateway", name}, {name}, {name})
        metrics.REQUESTS.add(1, "GetObject", name, "200", "hit")
        metrics.CACHE_USAGE_BYTES.set(7, name)
        metrics.CALLER_REQUESTS.add(1, name)
        metrics.CALLER_WAITS.add(1, "class", name, "rate")
        metrics.CALLER_RUNNING.add(1, "credential", name)
        metrics.ORIGIN_REQUEST_RATE.set(5, name, "read")
        metrics.REQUESTS.add(1, "GetObject", "default", "200", "hit")
        metric_kinds.keep_names({"default"}, {"gateway"}, ())
        running = by_label(tmp_path, "name", metrics.CALLER_RUNNING)[0] if number % 50 == 0 else {}
        assert running.get(name, 1) == 1  # one that ends later
        metrics.CALLER_RUNNING.add(-1, "credential", name)
        metrics.CALLER_RUNNING.add(0, "credential", f"late-{name}")
        metrics.CACHE_USAGE_BYTES.set(0, name)  # who counts late brings no name back
        metrics.CACHE_FILLED_BYTES.add(1, name)
        if number % 100 == 9:
            children = sum(len(metric.kept()) for metric in DECLARED)
            read = exposition(tmp_path)
            sizes.append((children, len(read.splitlines()), sum(file.stat().st_size for file in tmp_path.iterdir())))
    requests = by_label(tmp_path, "slot", metrics.REQUESTS)[0]
    assert requests == {"default": 300, metric_kinds.GONE: 300}
    assert by_label(tmp_path, "credential", metrics.CALLER_REQUESTS)[0] == {metric_kinds.GONE: 300}
    assert by_label(tmp_path, "name", metrics.CALLER_WAITS)[0] == {metric_kinds.GONE: 300}
    assert by_label(tmp_path, "slot", metrics.CACHE_USAGE_BYTES)[0] == {}
    assert by_label(tmp_path, "bucket", metrics.ORIGIN_REQUEST_RATE)[0] == {}
    metric_kinds.keep_names({"default"}, {"gateway"}, ())
    assert by_label(tmp_path, "name", metrics.CALLER_RUNNING)[0] == {}
    assert len(set(sizes[1:])) == 1, sizes


def test_numbers_are_the_same_for_who_reads_while_names_go(tmp_path: Path) -> None:
    """Another thread counts and reads on: it finds the sums of before or of after."""
    metric_kinds.share(tmp_path, "worker0")
    metrics.REQUESTS.add(1, "GetObject", "kept", "200", "hit")
    over = threading.Event()

    def count() -> int:
        done = 0
        while not over.is_set():
            metrics.REQUESTS.add(1, "GetObject", "kept", "200", "hit")
            done += 1
        return done

    def read() -> bool:
        last, rises = 0.0, True
        while not over.is_set():
            sums = by_label(tmp_path, "slot", metrics.REQUESTS)[0]
            rises, last = rises and sum(sums.values()) >= last, sum(sums.values())
        return rises

    with ThreadPoolExecutor(2) as threads:
        counted, rising = threads.submit(count), threads.submit(read)
        for number in range(100):
            metrics.REQUESTS.add(1, "GetObject", f"job-{number}", "200", "hit")
            metric_kinds.keep_names({"kept"}, (), ())
        over.set()
        expected = {"kept": 1 + counted.result(), metric_kinds.GONE: 100}
        sums = by_label(tmp_path, "slot", metrics.REQUESTS)[0]
        assert rising.result()
        assert sums == expected


def test_names_stay_where_there_is_no_room_to_write_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, and they go the next time."""
    metric_kinds.share(tmp_path, "worker0")
    metrics.REQUESTS.add(1, "GetObject", "job", "200", "hit")
    with monkeypatch.context() as full:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(metric_kinds, "set_aside", refuse)
        metric_kinds.keep_names((), (), ())
    assert by_label(tmp_path, "slot", metrics.REQUESTS)[0] == {"job": 1}
    metric_kinds.keep_names((), (), ())
    assert by_label(tmp_path, "slot", metrics.REQUESTS)[0] == {metric_kinds.GONE: 1}


@pytest.mark.parametrize("metric", DECLARED, ids=lambda one: one.name)
def test_what_stands_at_zero_is_of_the_metric_and_told_once(metric: metric_kinds.Metric) -> None:
    """A label that it does not have, or a number told twice, would have Prometheus refuse all of them."""
    known = {"slot": ["a", "b"], "origin": ["s3.example"], "process": ["worker0"], "credential": ["AK"]}
    zeros = list(metric.zeros(metric_kinds.Known(known)))
    assert len(set(zeros)) == len(zeros)
    for together in metric.values:
        assert set(together) <= set(metric.labels)
        assert set(together) | set(known) >= set(metric.labels)


def test_requests_stand_at_zero_before_the_first_of_them() -> None:
    """Those that alerts and rates are about, for each slot and origin."""
    known = metric_kinds.Known({"slot": ["a"], "origin": ["s3.example"]})
    requests, origin = (set(metric.zeros(known)) for metric in (metrics.REQUESTS, metrics.ORIGIN_REQUESTS))
    for operation in ("GetObject", "HeadObject", "ListObjectsV2", "PutObject", "CompleteMultipartUpload"):
        assert (operation, "a", "503", "none") in requests
    assert ("PutObject", "a", "200", "absorbed") in requests
    assert ("GET", "unreachable", "live", "a", "s3.example") in origin
    assert ("PUT", "unreachable", "flush", "a", "s3.example") in origin

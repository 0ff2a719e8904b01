"""What the admin port reads of all processes' numbers: as prometheus_client does, at little cost, whatever files do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from gateway.telemetry import metric_kinds, metric_reading, metrics
from gateway.telemetry.metric_kinds import Known
from gateway.telemetry.metric_reading import MetricReading, by_label
from tests.support.counting import exposition
from tests.support.growth import python_steps


def lines(text: bytes) -> list[str]:
    """Of numbers, in any order."""
    return sorted(line for line in text.decode().splitlines() if not line.startswith("#"))


def hits(directory: Path) -> dict[str, float]:
    """Bytes by slot."""
    return by_label(directory, "slot", metrics.CACHE_HIT_BYTES)[0]


def test_numbers_are_those_that_prometheus_client_reads(tmp_path: Path) -> None:
    """Of counters, gauges and histograms, with the strangest names, over processes, read once and again."""
    for process in ("worker0", "worker1", "supervisor"):
        metric_kinds.share(tmp_path, process)
        for slot in ("a", 'of "Åsa"', "back\\slash", "two\nlines", "{}=,"):
            metrics.REQUESTS.add(3, "GetObject", slot, "200", "hit")
            metrics.SENT_BYTES.add(123_456_789_012, "GetObject", slot)
            metrics.BANDWIDTH_WAIT_SECONDS.add(0.1, "link", "read", slot)
            metrics.CACHE_USAGE_BYTES.set(len(process), slot)
            for seconds in (0.0005, 0.3, 0.3, 100_000.0):
                metrics.WRITEBACK_FLUSH_SECONDS.observe(seconds, slot)
        metrics.CACHE_DISK_STATE.add(1, "well")
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]
        assert lines(exposition(tmp_path)) == lines(generate_latest(registry))


def test_a_later_reading_takes_numbers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are read once, of all processes together, and where there is something new that only."""
    parsed: list[bytes] = []

    def loads(key: bytes) -> Any:
        parsed.append(key)
        return json.loads(key)

    monkeypatch.setattr(orjson, "loads", loads)
    for process in ("worker0", "worker1"):
        metric_kinds.share(tmp_path, process)
        for number in range(200):
            metrics.REQUESTS.add(1, "GetObject", f"slot{number}", "200", "hit")
    assert sum(by_label(tmp_path, "slot", metrics.REQUESTS)[0].values()) == 400
    assert len(parsed) == len(set(parsed)) > 200
    parsed.clear()
    metrics.REQUESTS.add(1, "GetObject", "new", "200", "hit")
    assert sum(by_label(tmp_path, "slot", metrics.REQUESTS)[0].values()) == 401
    assert len(parsed) == 1
    exposition(tmp_path)
    assert len(parsed) == 1


def test_what_is_at_zero_costs_little(tmp_path: Path) -> None:
    """A slot of which nothing was counted takes its name only: there may be a thousand, with 190 lines each."""

    def steps(slots: int) -> int:
        known = Known({"slot": [f"slot{number}" for number in range(slots)], "origin": ["s3.example"]})
        return python_steps(lambda _: exposition(tmp_path, known), b"")

    of_one = exposition(tmp_path, Known({"slot": ["a"], "origin": ["s3.example"]})).count(b'slot="a"')
    assert of_one > 150
    assert (steps(120) - steps(20)) / 100 < 4 * of_one


def test_a_file_in_place_of_another_is_read_anew(tmp_path: Path) -> None:
    """However it came there: with the numbers of names that are gone under another one, or after a dead process."""
    metric_kinds.share(tmp_path, "worker0")
    for number in range(20):
        metric_kinds.keep_names({f"job-{number}"}, (), ())
        metrics.CACHE_HIT_BYTES.add(number, f"job-{number}")
        assert hits(tmp_path)[f"job-{number}"] == number
    assert hits(tmp_path) == {"job-19": 19, metric_kinds.GONE: sum(range(19))}
    metrics.REQUESTS_IN_FLIGHT.add(1)
    assert "forebay_requests_in_flight 1.0" in lines(exposition(tmp_path))
    metric_kinds.forget_process(tmp_path, "worker0")
    assert not any("in_flight" in line for line in lines(exposition(tmp_path)))
    for path in tmp_path.glob("*.db"):
        path.unlink()
    metric_kinds.share(tmp_path, "worker0")
    metrics.CACHE_HIT_BYTES.add(7, "other")
    assert hits(tmp_path) == {"other": 7}


def test_a_file_that_has_the_number_of_one_that_is_gone_is_not_taken_for_it(tmp_path: Path) -> None:
    """File systems give it again: what stands in the file tells them apart."""
    path, of_one = tmp_path / "counter_worker0.db", {}
    for slot in ("a", "b"):
        other = tmp_path / slot
        other.mkdir()
        metric_kinds.share(other, "worker0")
        metrics.CACHE_HIT_BYTES.add(5, slot)
        of_one[slot] = (other / path.name).read_bytes()
    path.write_bytes(of_one["a"])
    assert hits(tmp_path) == {"a": 5}
    with path.open("r+b") as file:  # in place
        file.write(of_one["b"])
    assert hits(tmp_path) == {"b": 5}


@pytest.mark.parametrize("cut", [0, 4, 7, 8, 12, 100, -1])
def test_a_file_that_ends_too_soon_gives_what_it_has(tmp_path: Path, cut: int) -> None:
    """Nobody who asks is answered with an error; the others' numbers are told."""
    for process in ("worker0", "worker1"):
        metric_kinds.share(tmp_path, process)
        metrics.CACHE_HIT_BYTES.add(1, "a")
    file = MmapedDict(str(tmp_path / "counter_worker0.db"))  # type: ignore[no-untyped-call]
    used = file._used
    file.close()  # type: ignore[no-untyped-call]
    os.truncate(tmp_path / "counter_worker0.db", cut if cut >= 0 else used + cut)
    assert hits(tmp_path)["a"] in (1, 2)
    assert b'forebay_cache_hit_bytes_total{slot="a"}' in exposition(tmp_path)


def test_directories_that_were_read_are_not_remembered_for_ever(tmp_path: Path) -> None:
    """One process reads one."""
    for number in range(10):
        MetricReading(tmp_path / str(number))
    assert metric_reading._files.cache_info().currsize <= 4

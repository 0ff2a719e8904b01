"""What slots move over a link, and how much of what they are due that is."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from loadtests.harness.content import Family
from loadtests.harness.gateway import gateway
from loadtests.harness.link import (
    ALL,
    Readers,
    Sample,
    Watch,
    at_work,
    between,
    counted,
    farthest,
    least_used,
    passed,
    passed_by_all,
    rates,
)
from loadtests.harness.origin import LoadOrigin

MIB = 1024**2


def samples_of(**bytes_per_second: float) -> list[Sample]:
    """Twenty, half a second apart."""
    return [
        Sample(100 + number / 2, Counter({slot: int(rate * number / 2) for slot, rate in bytes_per_second.items()}))
        for number in range(20)
    ]


def test_rates_are_those_of_every_span() -> None:
    """Spans are at least as long as they are to be, and all there are."""
    found = rates(samples_of(a=1000, b=500), 5.0)
    assert found == [{"a": 1000, "b": 500}] * 10
    assert rates(samples_of(a=1000)[:8], 5.0) == []


def test_the_worst_second_counts() -> None:
    """Of all slots together; of shares the one farthest from what is due, above or below."""
    samples = samples_of(a=600, b=300)
    samples[10:] = [Sample(one.at, one.moved - Counter({"a": 300})) for one in samples[10:]]
    assert least_used(samples, 1000, 1.0) == pytest.approx(0.6)
    assert least_used(between(samples, 106, 109), 1000, 1.0) == pytest.approx(0.9)
    assert farthest([1.02, 0.97, 1.01]) == 0.97


def test_what_a_watch_fails_with_is_raised() -> None:
    """On the thread that waits for it."""
    with pytest.raises(ZeroDivisionError), Watch({"": lambda: Counter({"a": 1 // 0})}):
        time.sleep(0.3)


def slots(**more: Any) -> list[dict[str, Any]]:
    return [{"name": name, "prefix": f"s3://load/{name}/", "consistency": "immutable", **more} for name in "ab"]


@pytest.mark.slow
def test_what_a_gateway_moves_is_counted_and_what_passes_is_seen_in_its_memory() -> None:
    """The bytes that its readers have had, by slot; those that passed while somebody waited, and no more."""
    families = [Family(f"{name}/", 40, MIB) for name in "ab"]
    with LoadOrigin(families) as origin, gateway(origin, link={"read_bandwidth": "16MiB/s"}, more_slots=slots()) as one:
        readers = [Readers(one, family, 2) for family in families]
        look, of_all = passed(one, "read"), passed_by_all(one, "read")
        assert not +look()
        assert not +of_all()
        with at_work(*readers):
            time.sleep(1.5)
        moved, through = counted(one, "read"), look()
        assert moved["a"] % MIB == moved["b"] % MIB == 0
        assert moved["a"] >= 4 * MIB
        for slot in "ab":
            assert 0 < through[slot] <= moved[slot]
        assert of_all() == {ALL: moved["a"] + moved["b"]}
        assert not +counted(one, "write")


@pytest.mark.slow
def test_readers_say_when_there_is_nothing_left() -> None:
    """So that no load test measures readers that have ended."""
    with LoadOrigin([Family("a/", 1, 1000)]) as origin, gateway(origin) as one:
        readers = Readers(one, Family("a/", 1, 1000), 1)
        with pytest.raises(RuntimeError, match="have been read"), readers.at_work():
            time.sleep(1.0)

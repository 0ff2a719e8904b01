"""What stands in another server's place uses as much of the CPU as it is told to; and clients that write in bursts."""

from __future__ import annotations

import time

import pytest

from loadtests.harness.burner import Burner, Fuel
from loadtests.harness.bursts import Bursts
from loadtests.harness.sink import SinkOrigin
from tests.support.waiting import eventually


def wait_for_cpu(burner: Burner, more: float, before: float) -> None:
    eventually(lambda: burner.cpu_seconds() - before >= more)


@pytest.mark.slow
def test_it_uses_what_it_is_told_to() -> None:
    """And no more, whoever asks; nobody waits for it."""
    with Burner() as burner, Fuel(burner.address) as one, Fuel(burner.address) as other:
        before = burner.cpu_seconds()
        for fuel in (one, other, one):
            fuel.burn(0.2)
        assert burner.cpu_seconds() - before < 0.6
        wait_for_cpu(burner, 0.55, before)
        time.sleep(0.3)
        assert burner.cpu_seconds() - before < 0.75


@pytest.mark.slow
def test_it_goes_on_steadily_until_it_is_left() -> None:
    """At a part of each second."""
    with Burner() as burner:
        before, began = burner.cpu_seconds(), time.monotonic()
        with Fuel(burner.address) as fuel:
            fuel.burn_steadily(0.25)
            wait_for_cpu(burner, 0.3, before)
            assert time.monotonic() - began > 0.8
        time.sleep(0.2)
        after = burner.cpu_seconds()
        time.sleep(0.3)
        assert burner.cpu_seconds() - after < 0.05


@pytest.mark.slow
def test_bursts_write_at_a_rate_and_burn_for_each_object() -> None:
    """All clients at the same moment, once in a period; with what they are told to burn for each."""
    with SinkOrigin() as sink, Burner() as burner:
        before = burner.cpu_seconds()
        bursts = Bursts(sink.address, "a/", 4, bytes(10_000), period_seconds=0.5, fuel=(burner.address, 0.02))
        began = time.monotonic()
        with bursts:
            eventually(lambda: bursts.taken >= 12)
            assert time.monotonic() - began > 0.9  # the third burst is a second after the first
        assert bursts.taken == sink.objects()
        wait_for_cpu(burner, 12 * 0.02 - 0.02, before)

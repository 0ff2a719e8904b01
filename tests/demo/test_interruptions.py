"""A signal ends the demo even where what it interrupts swallows the exception."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from gateway.demo.report import Narrator
from gateway.demo.stack import Interrupted, Interruptions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_a_finalizer_swallows_ends_the_demo_before_the_next_step(number: signal.Signals) -> None:
    interruptions, steps = Interruptions(), []
    narrator = Narrator(check=interruptions.check)

    def run() -> None:
        with interruptions.installed():
            for name in ("one", "two"):
                with narrator.step(name):
                    steps.append(name)
                    with suppress(Interrupted):  # as the interpreter does around __del__
                        signal.raise_signal(number)

    with pytest.raises(Interrupted) as raised:
        run()
    assert (raised.value.signal_number, steps) == (number, ["one"])


def test_a_signal_that_is_swallowed_in_the_last_step_is_told_at_the_end() -> None:
    interruptions = Interruptions()
    with pytest.raises(Interrupted), interruptions.installed(), suppress(Interrupted):
        signal.raise_signal(signal.SIGTERM)


def test_without_a_signal_nothing_happens() -> None:
    interruptions = Interruptions()
    with interruptions.installed(), interruptions.held():
        interruptions.check()

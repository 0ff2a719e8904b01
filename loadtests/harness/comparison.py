"""Rounds in turn: A, B, C, A, B, C, ... so that every contender meets the same machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

from loadtests.harness.tools import Missing

T = TypeVar("T")
Series = dict[str, list[T]]


class Contender(Protocol):
    """Something that serves the objects."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def address(self) -> tuple[str, int]: ...
    def cpu_seconds(self) -> float: ...


def in_turns(measures: Mapping[str, Callable[[], float]], rounds: int) -> Series[float]:
    """`rounds` values by name; every other round goes the other way, so that no one is always first."""
    series: Series[float] = {name: [] for name in measures}
    for number in range(rounds):
        for name in measures if number % 2 == 0 else reversed(measures):
            series[name].append(measures[name]())
    return series


@contextmanager
def those_installed(makers: Sequence[Callable[[], object]]) -> Iterator[tuple[list[Contender], list[str]]]:
    """The peers that can be started here, started; and what is to be said of the others."""
    notes: list[str] = []
    with ExitStack() as stack:
        started = []
        for make in makers:
            try:
                peer = make()
            except Missing as error:
                if str(error) not in notes:
                    notes.append(str(error))
                continue
            started.append(stack.enter_context(peer))  # type: ignore[arg-type]
        yield started, notes  # type: ignore[misc]

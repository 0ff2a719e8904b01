"""Rounds in turn: A, B, C, C, B, A, A, B, ... so that every contender meets the same machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

from loadtests.harness.server_process import ServerProcess
from loadtests.harness.tools import Missing

T = TypeVar("T")


class Contender(Protocol):
    """Something that serves the objects."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def address(self) -> tuple[str, int]: ...
    def cpu_seconds(self) -> float: ...


def turn(contenders: Sequence[T], number: int) -> list[T]:
    """The order of round `number`, from 0 on: every other round goes the other way, so that no one is always first."""
    return list(contenders if number % 2 == 0 else reversed(contenders))


def in_turns(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """`rounds` values by name, measured in turns."""
    series: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds):
        for name in turn(list(measures), number):
            series[name].append(measures[name]())
    return series


@contextmanager
def those_installed(makers: Sequence[Callable[[], ServerProcess]]) -> Iterator[tuple[list[Contender], list[str]]]:
    """The peers that can be started here, started; and what is to be said of the others, once each."""
    notes: list[str] = []
    with ExitStack() as stack:
        started: list[Contender] = []
        for make in makers:
            try:
                peer = make()
            except Missing as error:
                notes.append(str(error))
            else:
                started.append(stack.enter_context(peer))
        yield started, list(dict.fromkeys(notes))

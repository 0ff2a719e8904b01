"""Tests of cold reads touch memory before each round, and tell the workers' CPU time by thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtests.harness import machine
from loadtests.harness.gateway import Gateway
from loadtests.harness.report import Measured


@dataclass(slots=True)
class Memory:
    """Touched before each round: half as much again as the round's bytes."""

    was_enough: bool = True

    def touch(self, round_bytes: int) -> None:
        self.was_enough &= machine.touch_memory(round_bytes * 3 // 2)

    def __str__(self) -> str:
        return "memory touched" if self.was_enough else "memory touched in part"

    def of(self, what: str) -> str:
        """The name of a cold figure."""
        return f"{what} ({self})"

    def note(self) -> str:
        return (
            f"{str(self).capitalize()}: before each cold round, half as much again as the round's bytes, and let go "
            "of. On virtual machines that give free memory back to their host, a page that is not touched costs 4 to "
            "11 µs more, which a cold read would pay."
        )


@dataclass(slots=True)
class WorkerThreads:
    """The CPU time of a gateway's workers, round by round."""

    of: Gateway
    rounds: list[dict[str, float]] = field(default_factory=list)
    _pids: Sequence[int] = ()
    _before: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._pids = [pid for pid in self.of.process.worker_pids() if pid is not None]

    def begin(self) -> None:
        self._before = self._read()

    def end(self, unit: float) -> None:
        """Note what the round has used, in `unit` seconds."""
        used = self._read()
        used.subtract(self._before)
        self.rounds.append({name: nanoseconds / 1e9 / unit for name, nanoseconds in used.items()})

    def totals(self) -> list[float]:
        return [sum(used.values()) for used in self.rounds]

    def of_thread(self, name: str) -> list[float]:
        return [used.get(name, 0.0) for used in self.rounds]

    def table(self, what: str, unit: str) -> Measured:
        """All threads together, and each that has worked in every round, the busiest first."""
        by_name = {name: self.of_thread(name) for used in self.rounds for name in used}
        busy = sorted(
            (name for name, values in by_name.items() if min(values) > 0), key=lambda name: -sum(by_name[name])
        )
        return Measured(what, unit, {"all threads": self.totals()} | {name: by_name[name] for name in busy})

    def _read(self) -> Counter[str]:
        return sum((machine.cpu_nanoseconds_by_thread(pid) for pid in self._pids), Counter())

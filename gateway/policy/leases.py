"""Who may use how much of a ceiling, for how long: pure rules, the time is an argument.

The background process keeps the book; every other process (a holder) asks it again and again, and what it is told holds
for a while. The parts in use at any moment never sum up to more than the ceiling: a holder's part grows only into what
others have given up or let run out, and one that begins is content with its floor. Who gets no answer goes on with its
static share, once the leases of all others must have run out too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ASK_SECONDS = 0.1
"""How often a holder asks."""

LEASE_SECONDS = 0.5
"""How long the book counts on a part that it has given out. The holder stops one asking sooner: it may notice late."""

_FLOOR = 0.05
"""Share of a ceiling that is never moved: each holder keeps its part of it, and so can begin at once."""

_ROUND_SECONDS = ASK_SECONDS / 2


def static_shares(ceilings: Sequence[float], holders: int) -> list[float]:
    """What each of `holders` may use while nobody deals out anything."""
    return [ceiling / holders for ceiling in ceilings]


def floors(ceilings: Sequence[float], holders: int) -> list[float]:
    """What each of `holders` may use without asking. One that is alone has everything."""
    return [share * (_FLOOR if holders > 1 else 1.0) for share in static_shares(ceilings, holders)]


def max_min(capacity: float, demands: Sequence[float]) -> list[float]:
    """Max-min fair parts: no demand gets more by making a smaller part smaller; what nobody wants is spread evenly."""
    parts, left = [0.0] * len(demands), capacity
    order = sorted(range(len(demands)), key=demands.__getitem__)
    for position, i in enumerate(order):
        parts[i] = min(demands[i], left / (len(order) - position))
        left -= parts[i]
    return [part + max(0.0, left) / len(parts) for part in parts]


@dataclass(slots=True)
class _Holding:
    """What the book knows of one holder; `rates` count as out until `until`."""

    demands: Sequence[float]
    rates: list[float]
    until: float


class LeaseBook:
    """The book of one gateway. Begun anew, it deals out nothing until all that its predecessor gave has run out."""

    def __init__(self, ceilings: Sequence[float], holders: Sequence[str], now: float) -> None:
        self._ceilings = ceilings
        self._static = static_shares(ceilings, len(holders))
        self._floors = floors(ceilings, len(holders))
        nothing = [0.0] * len(ceilings)
        self._holdings = {name: _Holding(nothing, list(self._floors), now) for name in holders}
        self._dealing_from = now + LEASE_SECONDS
        self._asked_at = now
        self._targets: dict[str, list[float]] = {}
        self._totals: list[float] = []
        self._next_round_at = now

    def ask(self, holder: str, demands: Sequence[float], now: float) -> list[float] | None:
        """The holder's parts from now on, for LEASE_SECONDS; None: no answer yet, it keeps to its static shares.

        Where nobody has asked for so long that every lease has run out, all are on static shares: that is a beginning.
        """
        if now - self._asked_at > LEASE_SECONDS:
            self._dealing_from = now + LEASE_SECONDS
        self._asked_at = now
        holding = self._holdings[holder]
        holding.demands = demands
        holding.until = now + LEASE_SECONDS
        if now < self._dealing_from:
            holding.rates, self._next_round_at = list(self._static), now
            return None
        if now >= self._next_round_at or holder not in self._targets:
            self._begin_round(now)
        self._deal(holding, self._targets[holder])
        return list(holding.rates)

    def _begin_round(self, now: float) -> None:
        """Who is silent has given up its parts; what is right for the others is worked out, once for them all."""
        self._next_round_at = now + _ROUND_SECONDS
        for holding in self._holdings.values():
            if holding.until <= now:
                holding.rates = list(self._floors)
        self._totals = [sum(column) for column in zip(*(one.rates for one in self._holdings.values()), strict=True)]
        present = {name: one for name, one in self._holdings.items() if one.until > now}
        absent = len(self._holdings) - len(present)
        columns = [
            max_min(ceiling - absent * floor, [max(one.demands[i], floor) for one in present.values()])
            for i, (ceiling, floor) in enumerate(zip(self._ceilings, self._floors, strict=True))
        ]
        self._targets = {name: [column[row] for column in columns] for row, name in enumerate(present)}

    def _deal(self, holding: _Holding, targets: Sequence[float]) -> None:
        """As much of what is right for it as is not out elsewhere."""
        for i, target in enumerate(targets):
            elsewhere = self._totals[i] - holding.rates[i]
            holding.rates[i] = max(self._floors[i], min(target, self._ceilings[i] - elsewhere))
            self._totals[i] = elsewhere + holding.rates[i]


class Lessee:
    """A holder's side: what it may use at any time, whatever it was told or not told. Begins at `now`, at its floor."""

    def __init__(self, ceilings: Sequence[float], holders: int, now: float) -> None:
        self._static = static_shares(ceilings, holders)
        self._last: Sequence[float] = floors(ceilings, holders)
        self._last_at = now
        self._leased_until = now

    def granted(self, rates: Sequence[float], asked_at: float) -> None:
        """The answer to what was asked at `asked_at`."""
        if asked_at > self._last_at:
            self._last, self._last_at = rates, asked_at
            self._leased_until = asked_at + LEASE_SECONDS - ASK_SECONDS

    def leased(self, now: float) -> bool:
        """Whether the last answer still holds."""
        return now < self._leased_until

    def rates(self, now: float) -> Sequence[float]:
        """The lease; behind its end the static shares, but no more than the lease until all others have ended too."""
        if self.leased(now):
            return self._last
        if now - self._last_at < 2 * LEASE_SECONDS:
            return [min(pair) for pair in zip(self._last, self._static, strict=True)]
        return self._static

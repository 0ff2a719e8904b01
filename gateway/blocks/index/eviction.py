"""Which slot gives up bytes when room is needed. Pure; which of its files go, keeping/ says.

A slot at its limit makes room by itself. Otherwise those that hold more than their guarantee have borrowed, and the one
that has borrowed most gives back first, whoever asks: so a slot always gets what it is guaranteed, no scan pushes
others out of more than it is entitled to, and slots without guarantees end up with equal parts. For instance with room
for 100, where a is guaranteed 40 and holds 10, b holds 60 and c holds 30: when a asks for 20, b gives 20.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(slots=True)
class Holding:
    """What a slot has taken, fills in progress and what is being asked for included, and what it may."""

    taken_bytes: int
    guaranteed_bytes: int
    limit_bytes: int

    @property
    def borrowed_bytes(self) -> int:
        return self.taken_bytes - self.guaranteed_bytes


def yielding(holdings: Mapping[S, Holding], capacity_bytes: int, unowned_bytes: int = 0) -> list[S]:
    """The slots that must give up bytes, the first to be asked first; none when everything fits.

    `unowned_bytes` are on disk too, and nobody's to give up.
    """
    over = [slot for slot, holding in holdings.items() if holding.taken_bytes > holding.limit_bytes]
    if over:
        return over
    taken_bytes = unowned_bytes + sum(holding.taken_bytes for holding in holdings.values())
    if taken_bytes <= capacity_bytes:
        return []
    borrowers = [slot for slot, holding in holdings.items() if holding.borrowed_bytes > 0]
    return sorted(borrowers, key=lambda slot: -holdings[slot].borrowed_bytes)

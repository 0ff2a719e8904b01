"""Which blocks make room. Pure: candidates in, victims out.

Least recently used, for instance with 10 bytes needed and the blocks a (4 bytes, used long ago), b (8 bytes) and
c (8 bytes, used just now): a and b go, c stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """A block that may go."""

    @property
    def disk_bytes(self) -> int:
        """What unlinking it gives back."""


C = TypeVar("C", bound=Candidate)


def least_recently_used(oldest_first: Iterable[C], needed_bytes: int, blocks_max: int) -> list[C]:
    """The fewest of the oldest that give `needed_bytes`, at most `blocks_max` of them."""
    victims: list[C] = []
    if needed_bytes <= 0:
        return victims
    for candidate in oldest_first:
        victims.append(candidate)
        needed_bytes -= candidate.disk_bytes
        if needed_bytes <= 0 or len(victims) == blocks_max:
            break
    return victims

"""Which nodes look after a block: those that rank first and second in a rendezvous hash of names and block.

A node that comes or goes changes the owners of the blocks that it owns, and of no other. The second is the node that
becomes first when the first goes. All nodes compute the same from the same names and weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from gateway.core.model import ObjectKey

ANSWERS_REMEMBERED = 4096


class Node(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def weight(self) -> int: ...


N = TypeVar("N", bound=Node)


class Placement(Generic[N]):
    """The ranks of nodes. A node owns blocks in proportion to its weight."""

    def __init__(self, nodes: Iterable[N]) -> None:
        by_weight: dict[int, list[N]] = {}
        for one in nodes:
            by_weight.setdefault(one.weight, []).append(one)
        self._alike = [
            (weight, alike, [xxh3_64_intdigest(one.name.encode()) for one in alike])
            for weight, alike in by_weight.items()
        ]
        # A hash for each of 1,000 nodes takes 0.1 ms.
        self.owners = lru_cache(ANSWERS_REMEMBERED)(self._owners)

    def _owners(self, key: ObjectKey, number: int) -> tuple[N, ...]:
        """Return the first and the second for a block; fewer if there are fewer."""
        block = f"{key.bucket}\0{key.key}\0{number}".encode("utf-8", "surrogateescape")
        best: list[tuple[tuple[float, int], N]] = []
        for weight, alike, seeds in self._alike:
            # Among nodes of one weight the highest hash has the highest score: only two of them need one.
            hashes = [xxh3_64_intdigest(block, seed) for seed in seeds]
            for _ in range(min(2, len(hashes))):
                highest = max(hashes)
                place = hashes.index(highest)
                hashes[place] = -1
                best.append(((_score(weight, highest), highest), alike[place]))
        best.sort(key=itemgetter(0), reverse=True)
        return tuple(node for _, node in best[:2])


def _score(weight: int, hashed: int) -> float:
    """Return `-weight / ln(u)`, where u is the hash as a number above 0 and below 1."""
    return -weight / math.log(((hashed >> 12) + 0.5) / 2**52)

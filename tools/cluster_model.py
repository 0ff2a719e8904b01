"""What placement and the rules between nodes give for a thousand of them, computed by the code that places blocks.

    python -m tools.cluster_model [--nodes 1000] [--blocks 2000000]

Storms are simulated: each node sends at 25 Gb/s, which what it sends at the same time shares.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from gateway.cluster.members import Member
from gateway.cluster.placement import Placement
from gateway.core.model import ObjectKey
from gateway.operations.handouts import SENT_AT_ONCE, TAKERS_NAMED_MAX

BLOCK_BYTES = 8 * 2**20
LINK_BYTES_PER_SECOND = 25e9 / 8
HOP_SECONDS = 0.0005
BUCKET_SECONDS = 0.05
BLOCKS_PER_OBJECT = 100


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table: what was computed, and whether it is as good as it must be."""

    what: str
    found: str
    must: str
    holds: bool


def members(count: int) -> list[Member]:
    return [Member(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}:9002", "") for i in range(count)]


def blocks(count: int) -> Iterator[tuple[ObjectKey, int]]:
    for i in range(count):
        yield ObjectKey("train", f"imagenet/shard-{i // BLOCKS_PER_OBJECT:06}.tar"), i % BLOCKS_PER_OBJECT


def placed(nodes: int, count: int, dying: int) -> Iterator[Figure]:
    """How evenly blocks lie, what a join and a leave move, and who takes over when many die at once."""
    all_members, new = members(nodes), members(nodes + 1)[-1]
    placement = Placement(all_members)
    beside = {one.name: Placement([one, new]) for one in all_members}
    dead = {one.name for one in random.Random(1).sample(all_members, dying)}
    owned, after, moved, orphans = Counter[str](), Counter[str](), 0, 0
    for key, number in blocks(count):
        first, second = placement._owners(key, number)
        owned[first.name] += 1
        moved += beside[first.name]._owners(key, number)[0] is new  # the order of the others stays
        if first.name not in dead:
            after[first.name] += 1
        elif second.name not in dead:
            after[second.name] += 1
        else:
            orphans += 1
    began, sample = time.process_time(), min(count, 5_000)
    for key, number in blocks(sample):
        placement._owners(key, number)
    seconds = (time.process_time() - began) / sample
    load = max(owned.values()) / count * nodes
    taken_over = max(after.values()) / (count / (nodes - dying))
    joined = moved / count * (nodes + 1)
    size, dead_share = f"{nodes:,} nodes, {count:,} blocks", (dying / nodes) ** 2
    yield Figure(f"{size}: busiest node / mean", f"{load:.3f}", "<= 1.11", load <= 1.11)
    yield Figure(f"{size}: a join moves", f"{joined:.3f} / N", "<= 1.1 / N", joined <= 1.1)
    yield Figure(f"{size}: the busiest node leaves, and moves", f"{load:.3f} / N", "<= 1.1 / N", load <= 1.1)
    what = f"{dying} of {nodes:,} die at once: busiest survivor / mean"
    yield Figure(what, f"{taken_over:.3f}", "<= 1.3", taken_over <= 1.3)
    what = f"{dying} of {nodes:,} die at once: blocks without a living owner"
    yield Figure(what, f"{orphans / count:.2%}", f"about {dead_share:.2%}", orphans / count <= 2 * dead_share)
    what = f"choosing among {nodes:,} nodes"
    yield Figure(what, f"{seconds * 1e6:.0f} us CPU", "<= 200 us", seconds <= 200e-6)


def grown(count: int) -> Iterator[Figure]:
    """Two nodes become four."""
    before, after = Placement(members(2)), Placement(members(4))
    moved = sum(before.owners(*one)[0].name != after.owners(*one)[0].name for one in blocks(count))
    share = moved / count
    yield Figure("2 -> 4 nodes: blocks that change their owner", f"{share:.2%}", "50 +- 2 %", abs(share - 0.5) <= 0.02)


@dataclass(eq=False, slots=True)
class Source:
    """A node that has the block: whom it sends it to now, who has got it, and who waits for somebody to have got it."""

    depth: int = 0
    progress_bytes: float = 0.0
    at: float = 0.0
    sending: deque[tuple[float, int]] = field(default_factory=deque)
    takers: deque[int] = field(default_factory=lambda: deque(maxlen=TAKERS_NAMED_MAX))
    waiting: list[int] = field(default_factory=list)

    def move_to(self, now: float) -> None:
        if self.sending:
            self.progress_bytes += (now - self.at) * LINK_BYTES_PER_SECOND / len(self.sending)
        self.at = now


class Storm:
    """All nodes want one block at once, and have nothing of it; node 0 owns it, and fetches it once.

    A source that sends to SENT_AT_ONCE names others that it has sent the block to. `patient`: until it has
    TAKERS_NAMED_MAX of them it lets askers wait, and those whom an asker is sent to name others, too. Otherwise a
    source that knows nobody to name sends the block, and so does one that an asker was sent to.
    """

    def __init__(self, nodes: int, *, patient: bool) -> None:
        self.patient = patient
        self.sources: dict[int, Source] = {0: Source()}
        self.random = random.Random(2)
        self.questions = Counter[int]()
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        for asker in range(1, nodes):
            self._question(BUCKET_SECONDS + HOP_SECONDS, asker, 0)

    def run(self) -> float:
        """Return the seconds from the moment at which the owner has the block until all have it."""
        now = 0.0
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return now - BUCKET_SECONDS

    @property
    def rounds(self) -> int:
        return max(one.depth for one in self.sources.values())

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _question(self, when: float, asker: int, place: int) -> None:
        self.questions[asker] += 1
        self._at(when, lambda now: self._ask(now, asker, place))

    def _ask(self, now: float, asker: int, place: int) -> None:
        source = self.sources[place]
        may_name = place == 0 or self.patient
        if len(source.sending) < SENT_AT_ONCE or not may_name or not (source.takers or self.patient):
            self._send(now, asker, place)
        elif len(source.takers) < TAKERS_NAMED_MAX and self.patient:
            source.waiting.append(asker)
        else:
            self._question(now + 2 * HOP_SECONDS, asker, self.random.choice(source.takers))

    def _send(self, now: float, asker: int, place: int) -> None:
        source = self.sources[place]
        source.move_to(now)
        source.sending.append((source.progress_bytes + BLOCK_BYTES, asker))
        self._look(now, place)

    def _look(self, now: float, place: int) -> None:
        """Look again when the first of what is sent has arrived, if nothing else happens."""
        source = self.sources[place]
        if source.sending:
            left_bytes = source.sending[0][0] - source.progress_bytes
            seconds = max(0.0, left_bytes) * len(source.sending) / LINK_BYTES_PER_SECOND
            first = source.sending[0]
            self._at(now + seconds, lambda then: self._arrived(then, place, first))

    def _arrived(self, now: float, place: int, sent: tuple[float, int]) -> None:
        source = self.sources[place]
        source.move_to(now)
        if not source.sending or source.sending[0] is not sent or sent[0] - source.progress_bytes > 1:
            return  # it shares the link with more by now
        _, taker = source.sending.popleft()
        self.sources[taker] = Source(source.depth + 1, at=now)
        source.takers.append(taker)
        waiting, source.waiting = source.waiting, []
        for asker in waiting:
            self._ask(now, asker, place)
        self._look(now, place)


def storm(nodes: int) -> Iterator[Figure]:
    for patient in (True, False):
        one = Storm(nodes, patient=patient)
        seconds = one.run()
        how = "askers wait for three to name" if patient else "who has nobody to name sends"
        holds = one.rounds <= 6 and seconds <= 0.15 and len(one.sources) == nodes
        found = f"{one.rounds} rounds, {seconds * 1e3:.0f} ms, {max(one.questions.values())} questions at most"
        must = "<= 6 rounds, <= 150 ms" if patient else "(for comparison)"
        yield Figure(f"{nodes:,} nodes read a cold block at once; {how}", found, must, holds or not patient)


def restarted(nodes: int, count: int, seconds: float = 1.0, ration: int = 16) -> Iterator[Figure]:
    """All nodes restart within some seconds, and read 50 blocks a second each. A tenth of the blocks is missing."""
    chance, owners = random.Random(3), Placement(members(nodes))
    places = {one.name: i for i, one in enumerate(members(nodes))}
    up_at = [chance.uniform(0, seconds) for _ in range(nodes)]
    of_block = [[places[one.name] for one in owners.owners(*block)] for block in blocks(count)]
    missing = {i for i in range(count) if chance.random() < 0.1}
    held = [set[int]() for _ in range(nodes)]
    for i, (first, _) in enumerate(of_block):
        if i not in missing:
            held[first].add(i)
    reads = [(start + k / 50, node) for node, start in enumerate(up_at) for k in range(count // 20)]
    requests = Counter[str]()
    for now, node in sorted(reads):
        block = chance.randrange(count)
        if block in held[node]:
            continue
        asked = next((one for one in of_block[block] if up_at[one] <= now), None)
        if asked is None or block not in held[asked]:
            requests["by an owner" if asked is not None else "by ration"] += 1
            held[node if asked is None else asked].add(block)
        held[node].add(block)
    total, most = requests.total(), len(missing) + nodes * ration
    found = f"{total:,} requests to the bucket, {requests['by ration']:,} of them by ration"
    yield Figure(f"{nodes} nodes restart within {seconds:g} s", found, f"<= {most:,}: missing + ration", total <= most)


def figures(nodes: int, count: int, small: int, of_storm: int) -> list[Figure]:
    return [*placed(nodes, count, nodes // 10), *grown(small), *storm(of_storm), *restarted(100, small)]


def table(rows: Sequence[Figure]) -> str:
    lines = [(one.what, one.found, one.must, "" if one.holds else "NO") for one in rows]
    cells = [("", "found", "must be", ""), *lines]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in cells)
    return "".join("  ".join(row).rstrip() + "\n" for row in padded)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=2_000_000)
    options = parser.parse_args()
    found = figures(options.nodes, options.blocks, 20_000, options.nodes)
    sys.stdout.write(table(found))
    return 0 if all(one.holds for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())

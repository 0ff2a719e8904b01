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

from gateway.cluster.cluster_origin import FOLLOWED_MAX
from gateway.cluster.members import Member
from gateway.cluster.placement import Placement
from gateway.core.model import ByteRange, ObjectKey, ObjectVersion
from gateway.operations.handouts import WAIT_SECONDS_MAX, Handouts

BLOCK_BYTES = 8 * 2**20
LINK_BYTES_PER_SECOND = 25e9 / 8
HOP_SECONDS = 0.0005
BUCKET_SECONDS = 0.05
BLOCKS_PER_OBJECT = 100
BLOCK = ObjectVersion(ObjectKey("train", "model"), '"1"', BLOCK_BYTES), ByteRange(0, BLOCK_BYTES - 1)


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
    """A node that has the block, by the rules of the code: whom it sends it to now, and who waits for its turn."""

    since: float = 0.0
    depth: int = 0
    progress_bytes: float = 0.0
    at: float = 0.0
    handouts: Handouts = field(default_factory=Handouts)
    sending: deque[tuple[float, int]] = field(default_factory=deque)
    waiting: list[tuple[float, Asker]] = field(default_factory=list)
    """With until when."""

    def move_to(self, now: float) -> None:
        if self.sending:
            self.progress_bytes += (now - self.at) * LINK_BYTES_PER_SECOND / len(self.sending)
        self.at = now


@dataclass(eq=False, slots=True)
class Asker:
    """A node that wants the block. `followed` are those that it has asked because they were named."""

    number: int
    followed: set[int] = field(default_factory=set)
    questions: int = 0
    is_last: bool = False


class Storm:
    """All nodes want one block at once, and have nothing of it; node 0 owns it, and fetches it once."""

    def __init__(self, nodes: int) -> None:
        self.sources: dict[int, Source] = {0: Source()}
        self.random = random.Random(2)
        self.askers = [Asker(number) for number in range(1, nodes)]
        self.sent_by_owner = 0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        for asker in self.askers:
            self._question(BUCKET_SECONDS + HOP_SECONDS, asker, 0)

    def run(self) -> float:
        """Return the seconds from the moment at which the owner has the block until all have it."""
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return max(one.since for one in self.sources.values()) - BUCKET_SECONDS

    @property
    def rounds(self) -> int:
        return max(one.depth for one in self.sources.values())

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _question(self, when: float, asker: Asker, place: int) -> None:
        asker.questions += 1
        self._at(when, lambda now: self._ask(now, asker, place, now + WAIT_SECONDS_MAX))

    def _ask(self, now: float, asker: Asker, place: int, until: float) -> None:
        source = self.sources[place]
        others = () if asker.is_last else source.handouts.others(BLOCK, str(asker.number))
        if others is None and now < until:
            source.waiting.append((until, asker))
            self._at(until, lambda then: self._look_again(then, place))
        elif others:
            self._follow(now, asker, {int(one) for one in others} - asker.followed)
        else:
            self._send(now, asker, place)

    def _follow(self, now: float, asker: Asker, named: set[int]) -> None:
        asker.is_last = not named or len(asker.followed) == FOLLOWED_MAX
        place = 0 if asker.is_last else self.random.choice(sorted(named))
        asker.followed.add(place)
        self._question(now + 2 * HOP_SECONDS, asker, place)

    def _send(self, now: float, asker: Asker, place: int) -> None:
        source = self.sources[place]
        self.sent_by_owner += place == 0
        source.handouts.begin(BLOCK)
        source.move_to(now)
        source.sending.append((source.progress_bytes + BLOCK_BYTES, asker.number))
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
        self.sources[taker] = Source(now, source.depth + 1, at=now)
        source.handouts.end(BLOCK, str(taker))
        self._look_again(now, place)
        self._look(now, place)

    def _look_again(self, now: float, place: int) -> None:
        waiting, self.sources[place].waiting = self.sources[place].waiting, []
        for until, asker in waiting:
            self._ask(now, asker, place, until)


def storm(nodes: int) -> Iterator[Figure]:
    one = Storm(nodes)
    seconds = one.run()
    most = max(asker.questions for asker in one.askers)
    found = f"{one.rounds} rounds, {seconds * 1e3:.0f} ms, {most} questions at most, {one.sent_by_owner} by the owner"
    holds = one.rounds <= FOLLOWED_MAX and seconds <= 0.15 and len(one.sources) == nodes
    yield Figure(f"{nodes:,} nodes read a cold block at once", found, "<= 6 rounds, <= 150 ms", holds)


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

"""The plan of one read: which blocks it reads, whole or in part, and how far ahead of the reader they are fetched.

Inside its range a reader is known to go on: its window begins small and grows with every byte that it reads. Behind the
range the window is as long as the run before it: the blocks in a row that are in the index or being filled, for any
reader. So clients that read an object in parts have the next ones on their way, and random reads cause none.

Readers that touch an object here and there are given small parts of large blocks, sub-blocks: blocks of a finer grid. A
block is fetched as a whole when a read wants much of it and skips no more than that, when the reads before came just
before, and when many of its sub-blocks are cached; their bytes are then fetched once more, a quarter of a block at
most.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from gateway.blocks import layout
from gateway.blocks.dependencies import CacheDependencies
from gateway.blocks.index import BlockIndex, BlockState
from gateway.blocks.layout import Block, BlockIds, Extent
from gateway.blocks.origin_gets import UnpinnedResponse
from gateway.blocks.single_flight import SingleFlight
from gateway.core.errors import StoreUnavailable
from gateway.core.model import ByteRange, MissReason, ObjectKey, ObjectVersion
from gateway.origin.client import Purpose
from gateway.origin.peer_protocol import COPY, Roles

Outcome: TypeAlias = Literal["hit", "partial", "miss", "peer"]
"""How a read was answered; `peer`: other nodes gave what is not here, and the origin nothing."""

BLOCKS_LOOKED_UP_MAX = 1024
"""Limit of a range's looked-up blocks: a 5 TiB object must not hold up the event loop."""

FIRST_WINDOW_BYTES = 32 * 1024 * 1024
"""Cost limit of a reader that asks for a large object and goes away at once."""

GROWTH = 32
"""Bytes by which the window grows for each byte read."""

RUN_MIN_BLOCKS = 2
"""One neighbour may be chance, and a range that is long is no sign of one that follows."""

_SHARE_OF_SLOT = 4

SUB_BLOCK_BYTES = 128 * 1024
"""Two chunks: what a read of a few KiB costs the origin, and a 64 KiB read that lies across a boundary."""

MUCH = 8
"""A reader of an eighth of a block gets the whole block, unless it would wait for more than it wants."""

MANY = 4
"""A quarter of a block in sub-blocks is no random touch any more."""

PEER_PARTS_BYTES_MAX = 1024 * 1024
"""Longer ranges that another node reads are fetched as parts of whole blocks."""

_RUN_SUB_BLOCKS = 2
_MARKS_MAX = 4096


def window_blocks_max(readahead_bytes: int, block_size_bytes: int, obtainable_bytes: int) -> int:
    """Return the longest window in blocks; at least 1, unless `readahead_bytes` is 0."""
    if readahead_bytes == 0:
        return 0
    return max(1, min(readahead_bytes, obtainable_bytes // _SHARE_OF_SLOT) // block_size_bytes)


def are_used(block_size_bytes: int) -> bool:
    """Return True if blocks of this size are large enough to have sub-blocks."""
    return block_size_bytes >= MUCH * SUB_BLOCK_BYTES and block_size_bytes % SUB_BLOCK_BYTES == 0


@lru_cache(maxsize=256)
def first_fetched(first: int, last: int | None, block_size_bytes: int) -> ByteRange:
    """Return the first range that a read of `first` to `last` (None: the end) of an unknown object fetches."""
    skipped, request = first % block_size_bytes, block_size_bytes if last is None else last - first + 1
    whole = not are_used(block_size_bytes) or is_much(
        skipped, min(request, block_size_bytes - skipped), block_size_bytes
    )
    size = block_size_bytes if whole else SUB_BLOCK_BYTES
    return ByteRange(first // size * size, first // size * size + size - 1)


def is_much(skipped_bytes: int, wanted_bytes: int, block_bytes: int) -> bool:
    """Return True if a read of so many bytes, behind the skipped ones, is reason enough to fill the block."""
    return wanted_bytes * MUCH >= block_bytes and skipped_bytes <= wanted_bytes


def state_of(index: BlockIndex, block: Block, position: int, block_size_bytes: int, ids: BlockIds) -> BlockState:
    """Return the state of a missing block; "evicted" also if the sub-block at a position was cached."""
    [state] = index.states([block.id])
    if state == "unknown" and block.version.size_bytes > SUB_BLOCK_BYTES and are_used(block_size_bytes):
        sub_block = layout.block_at(block.version, position // SUB_BLOCK_BYTES, SUB_BLOCK_BYTES, ids)
        if index.states([sub_block.id]) == ["evicted"]:
            return "evicted"
    return state


def mark_ahead(marks: OrderedDict[bytes, None], block_id: bytes) -> None:
    """Remember that a block was fetched ahead, and no reader has come to it."""
    marks[block_id] = None
    if len(marks) > _MARKS_MAX:
        marks.popitem(last=False)


def why_block_missing(
    dependencies: CacheDependencies, size_bytes: int, before: ObjectVersion | None, block: Block, state: BlockState
) -> MissReason:
    """Return why a block was missing that was in this state before it was asked for."""
    version = block.version
    if state != "unknown":
        return "evicted"  # a cached block was found damaged
    if block.id in dependencies.fetches.refused:  # a small one, whose bytes had left before that was known
        return "not-kept"
    if before is not None and before != version:
        return "changed"
    index, object_id = dependencies.directory.index, layout.object_id(version.key)
    try:
        if version.size_bytes > size_bytes or not index.has_others(object_id, ()):
            return "first-read"  # a larger object would need the ids of all its blocks
        ids = layout.BlockIds(version)
        own = [layout.block_at(version, 0, size_bytes, ids).id]
        if version.size_bytes > SUB_BLOCK_BYTES and are_used(size_bytes):
            count = -(-version.size_bytes // SUB_BLOCK_BYTES)
            own += [layout.block_at(version, number, SUB_BLOCK_BYTES, ids).id for number in range(count)]
        return "changed" if index.has_others(object_id, own) else "first-read"
    except StoreUnavailable:
        return "not-kept"


class Step(NamedTuple):
    """The block to read next, or a sub-block in its place. A reader fetches it if `extent` is None."""

    block: Block
    extent: Extent | None
    is_sub_block: bool = False


@dataclass(slots=True, eq=False)
class ReadPlan:
    """The plan of a range of one version, for one reader; fetches know the reader by it.

    `headers` go along with its requests to the origin; with those of its role (`headers_of`), if `roles` are given.
    `answer` is the origin's earlier answer, if the version was
    unknown before. `fetched` are the blocks that were fetched ahead for this reader: they are no hits of its.
    `is_for_peer`: another node reads, which itself decides what is fetched ahead, and counts its readers' bytes.
    """

    numbers: range = field(init=False)
    """Numbers of the range's blocks."""
    dependencies: CacheDependencies
    version: ObjectVersion
    range: ByteRange
    slot: str
    headers: Mapping[str, str]
    purpose: Purpose = Purpose.LIVE
    answer: UnpinnedResponse | None = None
    roles: Roles | None = None
    is_for_peer: bool = False
    fetched: set[bytes] = field(default_factory=set)
    missing: tuple[Block, BlockState] | None = None
    """The first block that was missing, and how it stood before it was asked for: after that it is here."""
    _judged: bytes = b""
    _fills_whole: bool = False
    _window_max: int | None = None
    _goes_beyond: bool = False
    _done: int = -1
    _refused: int = -1
    _run_before: int | None = None
    block_size_bytes: int = field(init=False)
    is_kept: bool = field(init=False)
    _ids: BlockIds = field(init=False)
    _uses_sub_blocks: bool = field(init=False)
    _index: BlockIndex = field(init=False)
    _fetches: SingleFlight = field(init=False)

    def __post_init__(self) -> None:
        settings = self.dependencies.settings
        self.headers = dict(self.headers)
        self.block_size_bytes = settings.block_size_of(self.slot)
        self.is_kept = settings.keeps(self.slot, self.version.size_bytes)
        self.numbers = layout.block_numbers(self.range, self.block_size_bytes)
        self._ids = BlockIds(self.version)
        # Another node asks for few bytes if it reads a sub-block, whatever for, and for many if it reads the block.
        is_in_parts = self.range.length <= PEER_PARTS_BYTES_MAX if self.is_for_peer else self.purpose is Purpose.LIVE
        self._uses_sub_blocks = is_in_parts and are_used(self.block_size_bytes) and self.is_kept
        self._index, self._fetches = self.dependencies.directory.index, self.dependencies.fetches

    def block(self, number: int) -> Block:
        return layout.block_at(self.version, number, self.block_size_bytes, self._ids)

    def headers_of(self, block: Block) -> Mapping[str, str]:
        """Return the headers for requests for bytes of a block: with COPY if another node looks after it."""
        if self.roles is None or not self.is_kept:
            return self.headers
        return self.roles.headers(self.version.key, block.offset // self.block_size_bytes, self.headers, self.slot)

    def is_of_others(self) -> bool:
        """Return True if other nodes look after all of the range's blocks that are not here."""
        blocks = [self.block(number) for number in self.numbers[:BLOCKS_LOOKED_UP_MAX]]
        return all(COPY in self.headers_of(block) or self._index.lookup(block.id) is not None for block in blocks)

    def past_the_cache(self, position: int, last: int) -> tuple[ByteRange, ByteRange, Mapping[str, str]]:
        """Return what to read past the cache of the bytes up to `last`, and the range and headers to ask for it with.

        Where other nodes look after blocks, these are whole chunks of one block: they come with their checksums.
        """
        if self.roles is None or not self.is_kept:
            rest = ByteRange(position, last)
            return rest, rest, self.headers
        block = self.block(position // self.block_size_bytes)
        rest = ByteRange(position, min(last, block.range.last))
        stop = -(-rest.stop // layout.CHUNK_BYTES) * layout.CHUNK_BYTES
        asked = ByteRange(position // layout.CHUNK_BYTES * layout.CHUNK_BYTES, min(stop, block.range.stop) - 1)
        return rest, asked, self.headers_of(block)

    def part_in(self, block: Block) -> ByteRange:
        return ByteRange(max(self.range.first, block.offset), min(self.range.last, block.range.last))

    # Everything below raises StoreUnavailable as the index does.

    def look_up(self) -> Outcome:
        """Return how much of the range is cached."""
        blocks = [self.block(number) for number in self.numbers[:BLOCKS_LOOKED_UP_MAX]]
        present = self._index.present(block.id for block in blocks)
        here = [indexed or self._has_arrived(block) for block, indexed in zip(blocks, present, strict=True)]
        if all(here):
            return "hit"
        first = blocks[here.index(False)]
        self._note_missing(first, max(first.offset, self.range.first))
        return "partial" if any(here) else "miss"

    def plan(self, position: int) -> Step:
        """Return the block to read at a position, or a part of it; begin fetches of its other parts in the range."""
        block = self.block(position // self.block_size_bytes)
        extent = self._index.lookup(block.id)
        if extent is not None:
            return Step(block, extent)
        sub_block = self._sub_block_of(block, position) if self._uses_sub_blocks else None
        if sub_block is not None:
            extent = self._index.lookup(sub_block.id)
        if extent is None:
            self._note_missing(block, position)
        return Step(block, None) if sub_block is None else Step(sub_block, extent, is_sub_block=True)

    def last_missing(self, position: int) -> int:
        """Return the last byte of the range before the next block behind `position` that is in the index."""
        first = position // self.block_size_bytes + 1
        for number in range(first, self.numbers.stop)[:BLOCKS_LOOKED_UP_MAX]:
            if self._index.lookup(self.block(number).id) is not None:
                return number * self.block_size_bytes - 1
        return self.range.last

    def _note_missing(self, block: Block, position: int) -> None:
        if self.missing is None and self.purpose is Purpose.LIVE:
            self.missing = block, state_of(self._index, block, position, self.block_size_bytes, self._ids)

    def _has_arrived(self, block: Block) -> bool:
        """Return True if a fetch has every byte of a block, or if sub-blocks hold the range's part of it."""
        if self._fetches.all_arrived(block, self.headers_of(block)):
            return True
        asked = self.part_in(block)
        if not self._uses_sub_blocks or asked == block.range:
            return False
        return all(self._present(layout.block_numbers(asked, SUB_BLOCK_BYTES)))

    # Whole or in part

    def _sub_block_of(self, block: Block, position: int) -> Block | None:
        """Return the sub-block to read instead of a missing block; None: read the block."""
        if self._fetches.has(block, self.headers_of(block)):
            return None
        sub_block = self._sub_block(position // SUB_BLOCK_BYTES)
        if self._is_coming(sub_block):
            return sub_block
        if self._judged != block.id:
            self._judged, self._fills_whole = block.id, self._is_worth_filling(block)
        if self._fills_whole:
            return None
        for number in layout.block_numbers(self.part_in(block), SUB_BLOCK_BYTES):
            other = self._sub_block(number)
            if other.offset > sub_block.offset and self._index.lookup(other.id) is None:
                self.fetched.add(other.id)
                self._fetches.start_ahead(other, self.slot, self.headers_of(other), self)
        return sub_block

    def _is_worth_filling(self, block: Block) -> bool:
        asked, answer = self.part_in(block), self.answer
        if answer is not None and asked.first == self.range.first:
            return answer.range.first == block.offset and answer.range.stop >= block.range.stop
        skipped = asked.first - block.offset
        if block.length <= 2 * SUB_BLOCK_BYTES or is_much(skipped, asked.length, block.length):
            return True
        present = self._present(layout.block_numbers(block.range, SUB_BLOCK_BYTES))
        at = skipped // SUB_BLOCK_BYTES
        if at == 0 and block.offset and self._is_coming(self.block(block.offset // self.block_size_bytes - 1)):
            return True
        if at >= _RUN_SUB_BLOCKS and all(present[at - _RUN_SUB_BLOCKS : at]):
            return True
        return sum(present) * MANY >= len(present)

    def _present(self, numbers: Iterable[int]) -> list[bool]:
        return self._index.present(self._sub_block(number).id for number in numbers)

    def _is_coming(self, block: Block, *, anywhere: bool = False) -> bool:
        is_fetched = self._fetches.is_anywhere if anywhere else self._fetches.has
        return self._index.lookup(block.id) is not None or is_fetched(block, self.headers_of(block))

    def _sub_block(self, number: int) -> Block:
        return layout.block_at(self.version, number, SUB_BLOCK_BYTES, self._ids)

    # How far ahead

    def keep_ahead(self, position: int, *, beyond: bool) -> None:
        """Keep the next blocks on their way while one is read; in a run, from now on those `beyond` the range, too."""
        # Blocks beyond it are marked: a reader that comes to one goes on.
        if self.is_for_peer or not self.is_kept or not self.dependencies.isolation.writable:
            return
        if self._window_max is None:
            directory, settings = self.dependencies.directory, self.dependencies.settings
            obtainable_bytes = directory.capacity.obtainable_bytes(self.slot)
            self._window_max = window_blocks_max(settings.readahead_bytes, self.block_size_bytes, obtainable_bytes)
        if beyond and self.purpose is Purpose.LIVE:
            self._goes_beyond = True
        number = position // self.block_size_bytes
        if number == self._refused:
            return
        self._done = max(self._done, number)
        stop = self._stop_after(number, position - self.range.first, self._window_max)
        while self._done + 1 < stop:
            if not self._fetch_ahead(self._done + 1):
                self._refused = number
                return
            self._done += 1

    def _fetch_ahead(self, number: int) -> bool:
        dependencies, block = self.dependencies, self.block(number)
        headers = self.headers_of(block)
        if self._index.lookup(block.id) is not None:
            return True
        if dependencies.unpinned_gets.pending(block.version.key, block.offset, headers):
            return True
        if not self._fetches.start_ahead(block, self.slot, headers, self):
            return False
        if number < self.numbers.stop:
            self.fetched.add(block.id)
        else:
            mark_ahead(dependencies.ahead_marks, block.id)
        return True

    def _stop_after(self, number: int, read_bytes: int, window_max: int) -> int:
        window = (FIRST_WINDOW_BYTES + GROWTH * read_bytes) // self.block_size_bytes
        stop, end = number + 1 + min(max(1, window), window_max), self.numbers.stop
        if stop <= end:
            return stop
        blocks_of_object = -(-self.version.size_bytes // self.block_size_bytes)
        if not self._goes_beyond or end == blocks_of_object:
            return end
        run = self._length_of_run(window_max)
        beyond = min(run + number - self.numbers.start, window_max) if run >= RUN_MIN_BLOCKS else 0
        return max(end, min(blocks_of_object, number + 1 + beyond))

    def _length_of_run(self, window_max: int) -> int:
        """Return the number of consecutive blocks before the range that are cached or on their way, up to the limit."""
        if self._run_before is None:
            first, length = self.numbers.start, 0
            while length < min(first, window_max) and self._is_coming(self.block(first - length - 1), anywhere=True):
                length += 1
            self._run_before = length
        return self._run_before


BLOCKS_EXPLAINED_MAX = 100_000
"""Limit of blocks of one object that are looked at: that takes a second."""

_AT_ONCE = 1000
"""Looked up in one transaction: long ones keep the index from using its pages again."""

MISSING_SHOWN = 20

OWNERS_LOOKED_AT = 256
"""Blocks of one object whose owners are computed: of 1,000 nodes that takes 30 ms."""


class Presence(NamedTuple):
    """Cached parts of one version.

    `looked_at` of its `blocks` were looked at: `here` are complete, `partly` have smaller pieces, `evicted` were
    cached. `missing` are the first runs of bytes of blocks that are not complete.
    """

    blocks: int
    looked_at: int
    here: int
    partly: int
    evicted: int
    here_bytes: int
    missing: list[ByteRange]


class Explanation(NamedTuple):
    """`here` of the version that is known; None: none is. `why_not_kept` None: it is kept."""

    here: Presence | None
    holding: Holding
    why_not_kept: str | None
    owners: Sequence[BlockOwner] = ()
    """Empty without a cluster, and of an object that is not kept."""


class Holding(NamedTuple):
    """Cached blocks and pieces of blocks of an object, of any version."""

    blocks: int
    size_bytes: int


class BlockOwner(NamedTuple):
    """One node's part of a version: how many of the first OWNERS_LOOKED_AT blocks it owns."""

    address: str
    is_this_node: bool
    first: int
    second: int


def owners(dependencies: CacheDependencies, version: ObjectVersion, slot: str) -> list[BlockOwner]:
    """Return the owners of a version's blocks, those of most blocks first."""
    roles, settings = dependencies.roles, dependencies.settings
    if roles is None or not settings.keeps(slot, version.size_bytes):
        return []
    blocks = min(-(-version.size_bytes // settings.block_size_of(slot)), OWNERS_LOOKED_AT)
    counts = Counter[tuple[tuple[str, bool], int]]()
    for number in range(blocks):
        counts.update((one, rank) for rank, one in enumerate(roles.owners(version.key, number)))
    nodes = {node for node, _ in counts}
    found = [BlockOwner(*node, counts[node, 0], counts[node, 1]) for node in nodes]
    return sorted(found, key=lambda one: (-one.first, -one.second, one.address))


def why_not_kept(dependencies: CacheDependencies, size_bytes: int | None, slot: str) -> str | None:
    """In words; None: it is kept. `size_bytes`: None where it is not known."""
    if not dependencies.isolation.writable:
        return f"the cache directory takes nothing: {dependencies.isolation.state}"
    if size_bytes is not None and not dependencies.settings.keeps(slot, size_bytes):
        return "it is larger than the objects that its slot keeps (max_cached_object_size)"
    return None


def presence(dependencies: CacheDependencies, version: ObjectVersion, slot: str) -> Presence:
    """Blocks; StoreUnavailable."""
    size_bytes, index, ids = (
        dependencies.settings.block_size_of(slot),
        dependencies.directory.index,
        layout.BlockIds(version),
    )
    blocks = -(-version.size_bytes // size_bytes)
    looked_at = min(blocks, BLOCKS_EXPLAINED_MAX)
    counts, here_bytes, missing = Counter[str](), 0, list[ByteRange]()
    pieces_left = BLOCKS_EXPLAINED_MAX if are_used(size_bytes) and version.size_bytes > SUB_BLOCK_BYTES else 0
    for first in range(0, looked_at, _AT_ONCE):
        some = [
            layout.block_at(version, number, size_bytes, ids)
            for number in range(first, min(first + _AT_ONCE, looked_at))
        ]
        for block, state in zip(some, index.states([block.id for block in some]), strict=True):
            if state == "here":
                counts["here"] += 1
                here_bytes += block.length
                continue
            numbers = layout.block_numbers(block.range, SUB_BLOCK_BYTES)
            pieces = [layout.block_at(version, number, SUB_BLOCK_BYTES, ids) for number in numbers[:pieces_left]]
            pieces_left -= len(pieces)
            states = index.states([piece.id for piece in pieces])
            found = [piece.length for piece, one in zip(pieces, states, strict=True) if one == "here"]
            here_bytes += sum(found)
            counts["partly"] += bool(found)
            counts["evicted"] += not found and "evicted" in (state, *states)
            if missing and missing[-1].stop == block.offset:
                missing[-1] = ByteRange(missing[-1].first, block.range.last)
            elif len(missing) < MISSING_SHOWN:
                missing.append(block.range)
    return Presence(blocks, looked_at, counts["here"], counts["partly"], counts["evicted"], here_bytes, missing)


def holding(dependencies: CacheDependencies, key: ObjectKey) -> Holding:
    """Blocks; StoreUnavailable."""
    return Holding(*dependencies.directory.index.held_of(layout.object_id(key), BLOCKS_EXPLAINED_MAX))

"""The eviction policies. Pure: they see and change a slot's book (book.py), in a transaction or in a simulation.

`lru`      The file that was used longest ago goes.
`s3-fifo`  New files stand in a small queue, and pass to the main one when they were used more than once there; what
           left the small queue and comes back soon passes at once (Yang et al., "FIFO queues are all you need for cache
           eviction", SOSP 2023). One-time scans go through the small queue and leave the main one alone.
`epoch`    As lru, but what was used since the oldest last use among the blocks that come back (returns.py) is about to
           come back too, and stays: new files pass through a small queue instead, each pushing out the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from gateway.blocks.index.keeping.book import Book, Eviction, Queue
from gateway.blocks.index.records import FileRecord

FREQUENCY_MAX = 3

SMALL_PART = 10
"""s3-fifo's small queue is kept at this part of the slot."""

PASSING_PART = 64
"""epoch's small queue is kept at this part of the slot: what it does not hit."""

REQUEUED_MAX = 32
"""Files that one search for a victim gives another chance: it happens within a transaction."""


class Policy(Protocol):
    """What happens to a slot, in the order in which it happens."""

    def entering(self, book: Book, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        """A new file, whose blocks were asked for and not there, as it is to be put into the book; its tick is new."""

    def growing(self, book: Book, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        """The same for a file to which blocks of so many bytes were added."""

    def used(self, book: Book, file: FileRecord, size_bytes: int) -> None:
        """So many bytes of a file were read."""

    def victim(self, book: Book) -> FileRecord | None:
        """The file that is to go next; None when there is none."""

    def leaving(self, book: Book, file: FileRecord, blocks: Sequence[bytes]) -> None:
        """A victim goes now, with these blocks; not told of what was dropped or deleted."""


class Lru:
    """Used longest ago."""

    def entering(self, book: Book, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        return replace(file, queue=_unless_pinned(file, Queue.MAIN))

    def growing(self, book: Book, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        return replace(file, tick=book.next_tick())

    def used(self, book: Book, file: FileRecord, size_bytes: int) -> None:
        book.change(replace(file, queue=_unless_pinned(file, Queue.MAIN), tick=book.next_tick()))

    def victim(self, book: Book) -> FileRecord | None:
        heads = [head for queue in (Queue.MAIN, Queue.SMALL) if (head := book.head(queue)) is not None]
        return min(heads, key=lambda head: head.tick, default=None)

    def leaving(self, book: Book, file: FileRecord, blocks: Sequence[bytes]) -> None:
        pass


class S3Fifo:
    """Used more than once."""

    def entering(self, book: Book, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        state = book.state
        marks = [mark for block in blocks if (mark := book.recall(block)) is not None]
        proven = [mark for mark in marks if state.position - mark < state.queue_bytes[Queue.MAIN]]
        return replace(file, queue=_unless_pinned(file, Queue.MAIN if 2 * len(proven) > len(blocks) else Queue.SMALL))

    def growing(self, book: Book, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        return file

    def used(self, book: Book, file: FileRecord, size_bytes: int) -> None:
        if file.frequency < FREQUENCY_MAX:
            book.change(replace(file, frequency=file.frequency + 1))

    def victim(self, book: Book) -> FileRecord | None:
        for _ in range(REQUEUED_MAX):
            found = self._next(book)
            if found is None or found.frequency <= (found.queue == Queue.SMALL):
                return found
            frequency = 0 if found.queue == Queue.SMALL else found.frequency - 1
            book.change(replace(found, queue=Queue.MAIN, tick=book.next_tick(), frequency=frequency))
        return self._next(book)

    def leaving(self, book: Book, file: FileRecord, blocks: Sequence[bytes]) -> None:
        if file.queue == Queue.SMALL:
            book.state.position += file.disk_bytes
            for block in blocks:
                book.remember(block, book.state.position)

    def _next(self, book: Book) -> FileRecord | None:
        state = book.state
        queues = (Queue.MAIN, Queue.SMALL)
        if SMALL_PART * state.queue_bytes[Queue.SMALL] >= state.evictable_bytes:
            queues = (Queue.SMALL, Queue.MAIN)
        return book.head(queues[0]) or book.head(queues[1])


class Epoch:
    """Not about to come back."""

    def entering(self, book: Book, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        self._settle_one(book)
        return replace(self.growing(book, file, blocks, size_bytes), queue=_unless_pinned(file, Queue.SMALL))

    def growing(self, book: Book, file: FileRecord, blocks: Sequence[bytes], size_bytes: int) -> FileRecord:
        book.state.position += size_bytes
        for block in blocks:
            self._may_return(book, book.recall(block))
        return replace(file, used_at=book.state.position)

    def used(self, book: Book, file: FileRecord, size_bytes: int) -> None:
        state = book.state
        state.position += size_bytes
        self._may_return(book, file.used_at)
        tick = file.tick if file.queue == Queue.SMALL else book.next_tick()
        book.change(replace(file, tick=tick, frequency=1, used_at=state.position))

    def victim(self, book: Book) -> FileRecord | None:
        oldest = book.head(Queue.MAIN)
        if oldest is None:
            return self._passing(book)
        kept_since = book.state.returns.kept_since(book.state.position)
        if kept_since is None or oldest.used_at < kept_since:
            return oldest
        return self._passing(book) or oldest

    def leaving(self, book: Book, file: FileRecord, blocks: Sequence[bytes]) -> None:
        for block in blocks:
            book.remember(block, file.used_at)

    def _may_return(self, book: Book, used_at: int | None) -> None:
        """What comes back very soon is the next piece of one read, or is kept by the small queue."""
        state = book.state
        if used_at is not None and PASSING_PART // 2 * (state.position - used_at) >= state.evictable_bytes:
            state.returns.add(state.position, used_at)

    def _settle_one(self, book: Book) -> None:
        """Nothing had to go for it, or something old went: it stays."""
        state = book.state
        if PASSING_PART * state.queue_bytes[Queue.SMALL] > state.evictable_bytes:
            settled = book.head(Queue.SMALL)
            if settled is not None:
                book.change(replace(settled, queue=Queue.MAIN))

    def _passing(self, book: Book) -> FileRecord | None:
        """The first of the small queue that was not used since it stood there first."""
        for _ in range(REQUEUED_MAX):
            found = book.head(Queue.SMALL)
            if found is None or not found.frequency:
                return found
            book.change(replace(found, tick=book.next_tick(), frequency=0))
        return book.head(Queue.SMALL)


def _unless_pinned(file: FileRecord, queue: Queue) -> int:
    return file.queue if file.queue == Queue.PINNED else queue


POLICIES: Mapping[Eviction, Policy] = {Eviction.LRU: Lru(), Eviction.S3_FIFO: S3Fifo(), Eviction.EPOCH: Epoch()}

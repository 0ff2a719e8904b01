"""Prefixes whose blocks stay: never evicted, whatever their slot's policy.

The file PINS says which prefixes are pinned; it is replaced as a whole and synced, under the lock of a write
transaction, and the index has a copy that fills look into. A file under a pin stands in a queue of its own, with the
pin's number; numbers are never used twice, so what a removed pin has left is known and let go of in steps.
All of this blocks and belongs on the index thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from gateway.blocks.index.eviction import Capacity
from gateway.blocks.index.index import BlockIndex
from gateway.blocks.index.policies import Queue
from gateway.blocks.index.transaction import IndexTransaction
from gateway.durable import write_durably
from gateway.errors import PinRefused, StoreUnavailable
from gateway.objects import ObjectKey
from gateway.policy.slots import Prefix

PINS_MAX = 1000
FILES_PER_STEP = 64
"""A transaction of about a millisecond: others wait for it."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PinList:
    """What the file says: the number of every pinned prefix, and the number that the next one gets."""

    numbers: dict[str, int]
    next_number: int = 1

    def pack(self) -> bytes:
        document = {"format": _FORMAT, "next": self.next_number, "pins": self.numbers}
        return orjson.dumps(document, option=orjson.OPT_INDENT_2)

    @classmethod
    def unpack(cls, content: bytes) -> PinList:
        """StoreUnavailable when nobody of this version has written it."""
        try:
            document = orjson.loads(content)
            if document["format"] != _FORMAT:
                raise ValueError(document["format"])
            return cls({str(prefix): int(number) for prefix, number in document["pins"].items()}, document["next"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreUnavailable(f"the file of pins cannot be understood: {error}") from error


class PinnedPrefixes:
    """Finds the pin that a key is under, in a time that hardly depends on how many there are.

    No prefix in it begins with another, so that only the last that is not behind a key can be a prefix of it.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._prefixes: list[str] = []
        self._numbers: list[int] = []
        for prefix, number in sorted((_whole(Prefix.parse(text)), number) for text, number in numbers.items()):
            if not (self._prefixes and prefix.startswith(self._prefixes[-1])):
                self._prefixes.append(prefix)
                self._numbers.append(number)

    def __bool__(self) -> bool:
        return bool(self._prefixes)

    def number_of(self, key: ObjectKey) -> int:
        """The number of the pin that an object is under, or 0."""
        whole = f"{key.bucket}/{key.key}"
        position = bisect_right(self._prefixes, whole) - 1
        return self._numbers[position] if position >= 0 and whole.startswith(self._prefixes[position]) else 0


def _whole(prefix: Prefix) -> str:
    return f"{prefix.bucket}/{prefix.key_prefix}"


class Pins:
    """The pins of one cache directory."""

    def __init__(self, index: BlockIndex, path: Path) -> None:
        self._index = index
        self._path = path
        self._known: tuple[bytes | None, PinnedPrefixes] = (None, PinnedPrefixes({}))

    def of(self, key: ObjectKey) -> int:
        """The number of the pin that an object is under, or 0."""
        return self.of_each([key])[0]

    def of_each(self, keys: Iterable[ObjectKey]) -> list[int]:
        """The same for several objects."""
        with self._index.reading() as transaction:
            prefixes = self.prefixes(transaction)
        return [prefixes.number_of(key) for key in keys]

    def prefixes(self, transaction: IndexTransaction) -> PinnedPrefixes:
        """All that is pinned: read from the index where that has changed."""
        version, known = transaction.pins_version(), self._known
        if version != known[0]:
            known = self._known = version, PinnedPrefixes(transaction.pins())
        return known[1]

    def all(self) -> dict[str, int]:
        """The number of every pinned prefix."""
        with self._index.reading() as transaction:
            return dict(sorted(transaction.pins().items()))

    def recover(self) -> None:
        """Have the index know what the file says, whatever became of the index."""
        with self._index.writing() as transaction:
            known = self._read()
            if transaction.pins() != known.numbers:
                transaction.set_pins(known.numbers)

    def add(self, prefix: str) -> int:
        """Pin a prefix, if it is not pinned yet; its number. PinRefused when a pin overlaps it, or there are many."""
        with self._index.writing() as transaction:
            known = self._read()
            if prefix in known.numbers:
                return known.numbers[prefix]
            _check_new(known, prefix)
            number = known.next_number
            self._replace(transaction, PinList(known.numbers | {prefix: number}, number + 1))
            return number

    def remove(self, prefix: str) -> bool:
        """Unpin; whether it was pinned. `let_go` does the rest."""
        with self._index.writing() as transaction:
            known = self._read()
            left = {name: number for name, number in known.numbers.items() if name != prefix}
            if len(left) == len(known.numbers):
                return False
            self._replace(transaction, PinList(left, known.next_number))
            return True

    def let_go(self) -> Iterator[None]:
        """Have files evicted again whose pin is gone, a step at a time."""
        with self._index.reading() as transaction:
            slots = list(transaction.slots().values())
        for slot in slots:
            after: bytes | None = b""
            while after is not None:
                after = self._let_go_some(slot, after)
                yield

    def hold(self, block_ids: Sequence[bytes], number: int, capacity: Capacity) -> None:
        """Put the files of blocks under a pin, where there are such. PinRefused when the slot may not pin so much."""
        for position in range(0, len(block_ids), FILES_PER_STEP):
            with self._index.writing() as transaction:
                for block_id in block_ids[position : position + FILES_PER_STEP]:
                    self._hold(transaction, block_id, number, capacity)

    def _hold(self, transaction: IndexTransaction, block_id: bytes, number: int, capacity: Capacity) -> None:
        found = transaction.block(block_id)
        if found is None or found[1].pin == number:
            return
        file = found[1]
        if not file.pin and not self._index.pins_fit(transaction, file.slot, file.disk_bytes, capacity):
            raise PinRefused("the cache has no room for more that is pinned")
        transaction.hold(file, number)

    def _let_go_some(self, slot: int, after: bytes) -> bytes | None:
        with self._index.writing() as transaction:
            found = transaction.queued(slot, Queue.PINNED, after, FILES_PER_STEP)
            for _, file in found:
                if not transaction.has_pin(file.pin):
                    transaction.hold(file, 0)
            return found[-1][0] if found else None

    def _read(self) -> PinList:
        try:
            return PinList.unpack(self._path.read_bytes())
        except FileNotFoundError:
            return PinList({})
        except OSError as error:
            raise StoreUnavailable(f"the file of pins cannot be read: {error}") from error

    def _replace(self, transaction: IndexTransaction, pins: PinList) -> None:
        try:
            write_durably(self._path, pins.pack())
        except OSError as error:
            raise StoreUnavailable(f"the file of pins cannot be written: {error}") from error
        transaction.set_pins(pins.numbers)


def _check_new(known: PinList, prefix: str) -> None:
    if len(known.numbers) >= PINS_MAX:
        raise PinRefused(f"{PINS_MAX} prefixes are pinned: unpin one first")
    for other in known.numbers:
        if prefix.startswith(other):
            raise PinRefused(f"{prefix} lies within {other}, which is pinned")
        if other.startswith(prefix):
            raise PinRefused(f"{other} lies within {prefix} and is pinned: unpin it first")

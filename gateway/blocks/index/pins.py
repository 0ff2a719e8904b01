"""Prefixes whose blocks stay: never evicted, whatever their slot's policy.

The file PINS says which prefixes are pinned; it is replaced as a whole and synced, under the lock of a write
transaction, and the index has a copy that fills look into. A file under a pin stands in a queue of its own, with the
pin's number; numbers are never used twice, so what a removed pin has left is known and let go of in steps.
All of this blocks and belongs on the index thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from gateway.blocks.index import records, tables
from gateway.blocks.index.index import BlockIndex
from gateway.blocks.index.ledger import Ledger
from gateway.blocks.index.room import pins_fit
from gateway.blocks.index.shares import Capacity
from gateway.durable import write_durably
from gateway.errors import PinRefused, StoreUnavailable
from gateway.objects import ObjectKey
from gateway.policy.prefixes import Prefix

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


class Pins:
    """The pins of one cache directory."""

    def __init__(self, index: BlockIndex, path: Path) -> None:
        self._index = index
        self._path = path

    def of(self, key: ObjectKey) -> int:
        """The number of the pin that an object is under, or 0."""
        with self._index.reading() as ledger:
            return number_of(ledger.pins(), key)

    def all(self) -> dict[str, int]:
        """The number of every pinned prefix."""
        with self._index.reading() as ledger:
            return ledger.pins()

    def recover(self) -> None:
        """Have the index know what the file says, whatever became of the index."""
        with self._index.writing() as ledger:
            known = self._read()
            if ledger.pins() != known.numbers:
                _enter(ledger, known)

    def add(self, prefix: str) -> int:
        """Pin a prefix, if it is not pinned yet; its number. PinRefused when a pin overlaps it, or there are many."""
        with self._index.writing() as ledger:
            known = self._read()
            if prefix in known.numbers:
                return known.numbers[prefix]
            _check_new(known, prefix)
            number = known.next_number
            self._replace(ledger, PinList(known.numbers | {prefix: number}, number + 1))
            return number

    def remove(self, prefix: str) -> bool:
        """Unpin; whether it was pinned. `let_go` does the rest."""
        with self._index.writing() as ledger:
            known = self._read()
            left = {name: number for name, number in known.numbers.items() if name != prefix}
            if len(left) == len(known.numbers):
                return False
            self._replace(ledger, PinList(left, known.next_number))
            return True

    def let_go(self) -> Iterator[None]:
        """Have files evicted again whose pin is gone, a step at a time."""
        with self._index.reading() as ledger:
            slots = list(ledger.slots().values())
        for slot in slots:
            after: bytes | None = b""
            while after is not None:
                after = self._let_go_some(slot, after)
                yield

    def hold(self, block_ids: Sequence[bytes], number: int, capacity: Capacity) -> None:
        """Put the files of blocks under a pin, where there are such. PinRefused when the slot may not pin so much."""
        for position in range(0, len(block_ids), FILES_PER_STEP):
            with self._index.writing() as ledger:
                for block_id in block_ids[position : position + FILES_PER_STEP]:
                    _hold(ledger, block_id, number, capacity)

    def _let_go_some(self, slot: int, after: bytes) -> bytes | None:
        with self._index.writing() as ledger:
            keys = ledger.held(slot, after, FILES_PER_STEP)
            numbers = set(ledger.pins().values())
            for key in keys:
                file = ledger.file(records.file_of_access_key(key))
                if file is not None and file.pin not in numbers:
                    ledger.hold(file, 0)
            return keys[-1] if keys else None

    def _read(self) -> PinList:
        try:
            return PinList.unpack(self._path.read_bytes())
        except FileNotFoundError:
            return PinList({})
        except OSError as error:
            raise StoreUnavailable(f"the file of pins cannot be read: {error}") from error

    def _replace(self, ledger: Ledger, pins: PinList) -> None:
        try:
            write_durably(self._path, pins.pack())
        except OSError as error:
            raise StoreUnavailable(f"the file of pins cannot be written: {error}") from error
        _enter(ledger, pins)


def _enter(ledger: Ledger, pins: PinList) -> None:
    tables.clear_prefix(ledger.transaction, ledger.tables.pins, b"")
    for prefix, number in pins.numbers.items():
        encoded = prefix.encode("utf-8", "surrogatepass")
        ledger.transaction.put(encoded, records.pack_counter(number), db=ledger.tables.pins)


def _check_new(known: PinList, prefix: str) -> None:
    if len(known.numbers) >= PINS_MAX:
        raise PinRefused(f"{PINS_MAX} prefixes are pinned: unpin one first")
    for other in known.numbers:
        if prefix.startswith(other):
            raise PinRefused(f"{prefix} lies within {other}, which is pinned")
        if other.startswith(prefix):
            raise PinRefused(f"{other} lies within {prefix} and is pinned: unpin it first")


def _hold(ledger: Ledger, block_id: bytes, number: int, capacity: Capacity) -> None:
    block = ledger.block(block_id)
    file = ledger.file(block.extent.file) if block is not None else None
    if file is None or file.pin == number:
        return
    if not file.pin and not pins_fit(ledger, capacity, file.slot, file.disk_bytes):
        raise PinRefused("the cache has no room for more that is pinned")
    ledger.hold(file, number)


def number_of(pins: dict[str, int], key: ObjectKey) -> int:
    """The number of the pin that an object is under, or 0."""
    for prefix, number in pins.items():
        pinned = Prefix.parse(prefix)
        if key.bucket == pinned.bucket and key.key.startswith(pinned.key_prefix):
            return number
    return 0

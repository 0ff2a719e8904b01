"""Pinned prefixes: their blocks are never evicted, whatever their slot's policy.

The file PINS lists them; it is replaced as a whole and synced, under the lock of a write transaction, and the index has
a copy that fills look into. A file under a pin stands in a queue of its own, with the pin's number; numbers are never
used twice, so the files of a removed pin are known and released in steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from gateway.blocks.eviction import Capacity
from gateway.blocks.index import OF_CLUSTER, BlockIndex, is_of_cluster
from gateway.blocks.policies import Queue
from gateway.blocks.transaction import IndexTransaction
from gateway.core.errors import PinRefused, StoreUnavailable
from gateway.disk.atomic_write import write_durably

PINS_MAX = 1000
"""Limit of pins that users ask for."""

KEPT_FROM = 2**31
"""Their numbers have this bit: what they have left is the first to leave."""

KEPT_MAX = 1000
"""Limit of pins that `keep_last` of slots asks for."""

FILES_PER_STEP = 64
"""A transaction of about a millisecond: others wait for it."""

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PinList:
    """Content of the file: the number of every pinned prefix, and the next number."""

    numbers: dict[str, int]
    next_number: int = 1
    kept: frozenset[str] = frozenset()
    """Pins that no user named: the newest checkpoints (`keep_last` of a slot)."""

    def pack(self) -> bytes:
        document: dict[str, object] = {"format": _FORMAT, "next": self.next_number, "pins": self.numbers}
        if self.kept:
            document["kept"] = sorted(self.kept)
        return orjson.dumps(document, option=orjson.OPT_INDENT_2)

    def without(self, gone: Collection[str]) -> PinList:
        left = {prefix: number for prefix, number in self.numbers.items() if prefix not in gone}
        return PinList(left, self.next_number, self.kept.difference(gone))

    @classmethod
    def unpack(cls, content: bytes) -> PinList:
        """Raise StoreUnavailable unless this version has written the file."""
        try:
            document = orjson.loads(content)
            if document["format"] != _FORMAT:
                raise ValueError(document["format"])
            numbers = {str(prefix): int(number) for prefix, number in document["pins"].items()}
            return cls(numbers, document["next"], frozenset(map(str, document.get("kept", ()))) & numbers.keys())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreUnavailable(f"the file of pins is not valid: {error}") from error


class Pins:
    def __init__(self, index: BlockIndex, path: Path) -> None:
        self._index = index
        self._path = path

    def all(self) -> dict[str, int]:
        kept = self._read().kept
        with self._index.reading() as transaction:
            return {prefix: number for prefix, number in sorted(transaction.pins().items()) if prefix not in kept}

    def recover(self) -> None:
        """Bring the index in line with the file."""
        with self._index.writing() as transaction:
            known = self._read()
            if transaction.pins() != known.numbers:
                transaction.set_pins(known.numbers)

    def add(self, prefix: str, *, cluster: bool = False) -> int:
        """Pin a prefix, if it is not pinned yet; its number. PinRefused when a pin overlaps it, or there are many.

        `cluster`: only the blocks that this node looks after, unless all are pinned already.
        """
        with self._index.writing() as transaction:
            known = self._read()
            if prefix in known.numbers:
                if is_of_cluster(known.numbers[prefix]) and not cluster:
                    raise PinRefused(f"{prefix} is pinned over the cluster: unpin it first")
                self._replace(transaction, replace(known, kept=known.kept - {prefix}))
                return known.numbers[prefix]
            covered = {one for one in known.kept if one.startswith(prefix)}  # they give way: they stay all the same
            known = known.without(covered)
            around = next((one for one in known.kept if prefix.startswith(one)), None)
            if around is not None:
                raise PinRefused(f"{prefix} lies within {around}, which is kept: it stays already")
            if len(known.numbers) - len(known.kept) >= PINS_MAX:
                raise PinRefused(f"{PINS_MAX} prefixes are pinned: unpin one first")
            for other in known.numbers:
                if prefix.startswith(other):
                    raise PinRefused(f"{prefix} lies within {other}, which is pinned")
                if other.startswith(prefix):
                    raise PinRefused(f"{other} lies within {prefix} and is pinned: unpin it first")
            number = known.next_number | (OF_CLUSTER if cluster else 0)
            self._replace(transaction, PinList(known.numbers | {prefix: number}, known.next_number + 1, known.kept))
            return number

    def apply_settings(self, wanted: Sequence[str]) -> tuple[dict[str, int], dict[str, str], bool]:
        """Keep these prefixes for `keep_last`, and no others, besides users' pins.

        Return each one's pin number, the reasons for those without one, and whether any pin ended: then call `let_go`.
        """
        with self._index.writing() as transaction:
            known = self._read()
            gone = known.kept.difference(wanted)
            left = known.without(gone)
            numbers, kept, number = left.numbers, left.kept, left.next_number
            found, refused = dict[str, int](), dict[str, str]()
            for prefix in wanted:
                if prefix in numbers:
                    found[prefix] = numbers[prefix]
                    continue
                around = next((one for one in numbers if prefix.startswith(one)), None)
                within = next((one for one in numbers if one.startswith(prefix)), None)
                if around is not None:
                    found[prefix] = numbers[around]
                elif within is not None:
                    refused[prefix] = f"{within}, which lies within it, is pinned"
                elif len(kept) >= KEPT_MAX:
                    refused[prefix] = f"{KEPT_MAX} checkpoints are kept"
                else:
                    found[prefix] = numbers[prefix] = KEPT_FROM | number
                    kept, number = kept | {prefix}, number + 1
            followed = PinList(numbers, number, kept)
            if followed != known:
                self._replace(transaction, followed)
            return found, refused, bool(gone)

    def hold_object(self, object_id: bytes, number: int, capacity: Capacity) -> int:
        """Pin an object's blocks and return the bytes that are there. Raises PinRefused if the slot may pin less."""
        with self._index.reading() as transaction:
            block_ids = transaction.blocks_of_object(object_id)
        self.hold(block_ids, number, capacity)
        with self._index.reading() as transaction:
            found = [transaction.block(block_id) for block_id in block_ids]
        return sum(one[0].extent.length for one in found if one is not None)

    def remove(self, prefix: str, *, cluster: bool = False) -> bool:
        """Unpin; whether it was pinned (`cluster`: over the cluster). `let_go` does the rest."""
        with self._index.writing() as transaction:
            known = self._read()
            if prefix not in known.numbers or prefix in known.kept:
                return False
            if cluster and not is_of_cluster(known.numbers[prefix]):
                return False
            self._replace(transaction, known.without({prefix}))
            return True

    def let_go(self) -> Iterator[None]:
        """Unpin the files of ended pins, a step at a time."""
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
                    found = transaction.block(block_id)
                    if found is None or found[1].pin == number:
                        continue
                    file = found[1]
                    if not file.pin and not self._index.pins_fit(transaction, file.slot, file.disk_bytes, capacity):
                        raise PinRefused("the cache has no room for more pinned blocks")
                    transaction.hold(file, number)

    def _let_go_some(self, slot: int, after: bytes) -> bytes | None:
        with self._index.writing() as transaction:
            found = transaction.queued(slot, Queue.PINNED, after, FILES_PER_STEP)
            for _, file in found:
                if transaction.has_pin(file.pin):
                    continue
                if file.pin >= KEPT_FROM:
                    transaction.let_go_first(file)
                else:
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

"""The registry of the cluster as one process asks it, in Redis: `gateway.operations.registry.Registry`.

An answer counts if it comes from the run that this node believes, while it does, and if that has kept all stamps that
this node has not outlived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from gateway.cluster.belief import Belief
from gateway.cluster.members import View
from gateway.cluster.redis_link import RedisLink
from gateway.cluster.scripts import ROWS_MAX, Entry, Word, key_bytes, question, rows_question
from gateway.core.clock import Clock
from gateway.core.errors import RegistryAway
from gateway.core.model import Claim, Known, ObjectKey
from gateway.core.prefixes import Prefix
from gateway.policy.slots import Slot

SEQUENCE_BITS: Final = 40
"""A number is the run's 24 bits, and then so many of the sequence."""

_OWN_KINDS: Final = frozenset({"ttl", "immutable"})


class RedisRegistry:
    """Event loop only."""

    def __init__(self, link: RedisLink, belief: Callable[[], Belief], view: Callable[[], View], clock: Clock) -> None:
        self._link = link
        self._belief = belief
        self._view = view
        self._clock = clock
        self._asked: tuple[View | None, dict[tuple[Prefix, bool], bool]] = (None, {})

    def asks(self, slot: Slot) -> bool:
        """Return whether any node writes there and remembers: this one by its slot, others by what they publish."""
        if slot.mode != "read-write":
            return False
        view = self._view()
        if self._asked[0] is not view:
            self._asked = (view, {})
        own, known = asks_by_itself(slot), self._asked[1]
        found = known.get((slot.prefix, own))
        if found is None:
            published = (Prefix.parse(one) for member in view.members for one in member.prefixes)
            found = known[slot.prefix, own] = own or any(overlap(slot.prefix, one) for one in published)
        return found

    async def look(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        return await self._ask_about("look", keys, [key_bytes(one.key) for one in keys])

    async def begin(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        return await self._ask_about("stamp", keys, [key_bytes(one.key) for one in keys])

    async def end(self, keys: Sequence[ObjectKey]) -> None:
        await self.begin(keys)

    async def claim(self, claims: Sequence[Claim]) -> Sequence[Known]:
        if not self._believed().is_known:
            raise RegistryAway("not all nodes know yet what this one writes")
        words: list[Word] = [word for one in claims for word in (key_bytes(one.key.key), one.token)]
        return await self._ask_about("claim", [one.key for one in claims], words)

    async def rows(self, bucket: str, start: bytes, stop: bytes | None) -> Sequence[tuple[bytes, Known]]:
        found: list[tuple[bytes, Known]] = []
        while True:
            run, (keys, values) = await self._ask(rows_question(bucket, start, stop))
            found += [(key, self._known(run, value)) for key, value in zip(keys, values, strict=True)]
            if len(keys) < ROWS_MAX:
                return found
            start = keys[-1] + b"\0"

    def is_of_this_run(self, sequence: int) -> bool:
        run = self._belief().run
        return bool(run) and sequence >> SEQUENCE_BITS == _number_of(run)

    async def _ask_about(self, verb: str, keys: Sequence[ObjectKey], words: Sequence[Word]) -> Sequence[Known]:
        if not keys:
            return []
        run, values = await self._ask(question(verb, keys[0].bucket, words))
        return [self._known(run, value) for value in values]

    async def _ask(self, asked: Sequence[Word]) -> tuple[int, Any]:
        """Return the number of the run, and the answer."""
        self._believed()
        answer = await self._link.ask(asked)
        belief = self._believed()
        if answer.run != belief.run:
            self._link.renew()
            raise RegistryAway("this process asks another run of Redis than this node believes")
        if answer.floor > belief.horizon:
            raise RegistryAway("Redis has forgotten changes that this node has not applied")
        return _number_of(belief.run), answer.value

    def _believed(self) -> Belief:
        belief = self._belief()
        if self._clock.monotonic() >= belief.until:
            raise RegistryAway("this node does not believe Redis now: forebay cluster status says why")
        return belief

    def _known(self, run: int, value: bytes | None) -> Known:
        stamp, claim, _, store = Entry.read(value)
        numbers = [run << SEQUENCE_BITS | one if one else 0 for one in (claim, stamp)]
        other = store.decode()
        return Known(other if other not in ("", self._link.store) else None, *numbers)


def asks_by_itself(slot: Slot) -> bool:
    """Return whether a slot's own settings make it ask: it writes, and holds back or remembers what it knows."""
    return slot.mode == "read-write" and (slot.is_buffered or slot.consistency in _OWN_KINDS)


def overlap(one: Prefix, other: Prefix) -> bool:
    return one.covers(other.bucket, other.key_prefix) or other.covers(one.bucket, one.key_prefix)


def _number_of(run: str) -> int:
    return int(run[:6], 16)

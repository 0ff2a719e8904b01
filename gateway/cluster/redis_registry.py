"""The registry of the cluster in Redis, as one process asks it.

An answer counts if it comes from the run that this node believes, while it does, and if that has kept all stamps that
this node has not outlived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from gateway.cluster.belief import Belief
from gateway.cluster.members import View
from gateway.cluster.redis_link import OTHER_RUN, RedisLink
from gateway.cluster.scripts import ROWS_MAX, Entry, Word, holders_question, key_bytes, question, rows_question
from gateway.core.clock import Clock
from gateway.core.errors import RegistryAway
from gateway.core.model import Claim, Known, ObjectKey
from gateway.core.prefixes import Prefix
from gateway.policy.registry import SEQUENCE_BITS, KnownKeys
from gateway.policy.slots import Slot

CONFIRM_SECONDS_MAX: Final = 5.0
PAUSE_SECONDS: Final = 0.05

CLAIM_SECONDS_MAX: Final = 30.0
"""Seconds after which a claim is made again: its write may have seemed to be no more than a claim."""


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
        if slot.mode != "read-write" or slot.own_writes != "cluster":
            return False
        view = self._view()
        if self._asked[0] is not view:
            self._asked = (view, {})
        own, known = slot.asks_other_nodes, self._asked[1]
        found = known.get((slot.prefix, own))
        if found is None:
            published = (Prefix.parse(one) for member in view.members for one in member.prefixes)
            found = known[slot.prefix, own] = own or any(overlap(slot.prefix, one) for one in published)
        return found

    async def look(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        return await self._ask_about("look", keys)

    async def begin(self, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        return await self._ask_about("stamp", keys)

    async def end(self, keys: Sequence[ObjectKey]) -> None:
        await self.begin(keys)

    @property
    def can_claim(self) -> bool:
        belief = self._belief()
        return belief.is_known and self._clock.monotonic() < belief.until

    async def claim(self, claim: Claim) -> Known:
        if not self._believed().is_known:
            raise RegistryAway("not all nodes know yet what this one writes")
        run, values = await self._ask(question("claim", claim.key.bucket, _words(claim)))
        return self._known(run, values[0])

    async def confirm(self, claim: Claim, known: Known, claimed_at: float) -> bool:
        run, now = self._belief().run, self._clock.monotonic()
        is_of_this_run = bool(run) and known.claim >> SEQUENCE_BITS == _number_of(run)
        if is_of_this_run and now <= claimed_at + CLAIM_SECONDS_MAX:
            return False
        while True:  # others may believe a run that does not know of the write
            try:
                await self._ask(question("above", "", [known.order]))
                if (await self.claim(claim)).store is not None:
                    raise RegistryAway("another node has claimed the key meanwhile")
                return True
            except RegistryAway:
                if self._clock.monotonic() >= now + CONFIRM_SECONDS_MAX:
                    raise
                await self._clock.sleep(PAUSE_SECONDS)

    async def release(self, claim: Claim) -> None:
        with suppress(RegistryAway):  # the background process finds it
            await self._ask(question("settle", claim.key.bucket, _words(claim)))

    async def rows(self, bucket: str, start: bytes, stop: bytes) -> KnownKeys:
        run, (keys, values) = await self._ask(rows_question(bucket, start, stop))
        found = [(key, self._known(run, value)) for key, value in zip(keys, values, strict=True)]
        return KnownKeys(found, keys[-1] + b"\0" if len(keys) == ROWS_MAX else None)

    async def holders(self, bucket: str, start: bytes, stop: bytes) -> Sequence[str]:
        _, found = await self._ask(holders_question(bucket, start, stop))
        return [store.decode() for store in found]

    async def _ask_about(self, verb: str, keys: Sequence[ObjectKey]) -> Sequence[Known]:
        known: dict[ObjectKey, Known] = {}
        for bucket in {key.bucket: None for key in keys}:
            of_bucket = [key for key in keys if key.bucket == bucket]
            run, values = await self._ask(question(verb, bucket, [key_bytes(key.key) for key in of_bucket]))
            known |= {key: self._known(run, value) for key, value in zip(of_bucket, values, strict=True)}
        return [known[key] for key in keys]

    async def _ask(self, asked: Sequence[Word]) -> tuple[int, Any]:
        """Return the number of the run, and the answer."""
        belief = self._believed()
        if self._link.run_of_connection not in ("", belief.run):  # it was not used since another run is believed
            self._link.renew()
        answer = await self._link.ask(asked, belief.run)
        belief = self._believed()
        if answer.run != belief.run:
            self._link.renew()
            raise RegistryAway(OTHER_RUN)
        if answer.floor > belief.horizon:
            raise RegistryAway("Redis has forgotten changes that this node has not applied")
        return _number_of(belief.run), answer.value

    def _believed(self) -> Belief:
        belief = self._belief()
        if self._clock.monotonic() >= belief.until:
            raise RegistryAway("this node does not believe Redis now: forebay cluster status says why")
        return belief

    def _known(self, run: int, value: bytes | None) -> Known:
        stamp, claim, tokens, store = Entry.read(value)
        claim, stamp = (run << SEQUENCE_BITS | one if one else 0 for one in (claim, stamp))
        other, order = store.decode(), tokens.rpartition(b"#")[2]
        is_other = other not in ("", self._link.store)
        return Known(other if is_other else None, claim, stamp, int(order) if order.isdigit() and not is_other else 0)


def _words(claim: Claim) -> list[Word]:
    return [key_bytes(claim.key.key), claim.token]


def overlap(one: Prefix, other: Prefix) -> bool:
    return one.covers(other.bucket, other.key_prefix) or other.covers(one.bucket, one.key_prefix)


def _number_of(run: str) -> int:
    return int(run[:6], 16)

"""The origin's answers about callers' own rights, remembered for a while by one process.

A right is what one key pair may do to one object, or with one listing: never more than was asked. So a policy that
allows one key and denies the next is kept, whatever it depends on. The memory is bounded, and shared out: the caller
that has most of it loses some, so that no caller forces another's rights out again and again.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from hashlib import blake2b
from typing import Literal, NamedTuple

from gateway.core.clock import Clock
from gateway.core.errors import OriginAnswered

RIGHTS_MAX = 131_072
"""The most rights of all callers of a process together: some 250 bytes each."""

REFUSALS_MAX = 1024
REFUSAL_SECONDS = 1.0
"""Seconds, after which a right that was just given works."""

_DOCUMENT_BYTES_MAX = 4096

RightTo = Literal["metadata", "bytes", "listing", "uploads"]
"""An object's metadata, and its bytes, which may be encrypted with a key that the caller may not use; the keys under a
prefix, and the uploads there."""


class Right(NamedTuple):
    """One right of one access key. `scope` is a digest, so that long keys take little room."""

    access_key_id: str
    scope: bytes


class RememberedRights:
    """Event loop only. Times are monotonic."""

    def __init__(self, clock: Clock, rights_max: int = RIGHTS_MAX) -> None:
        self._clock = clock
        self._rights_max = rights_max
        self._secret = os.urandom(16)
        self._until: dict[str, OrderedDict[bytes, float]] = {}
        self._count = 0
        self._refusals: OrderedDict[Right, tuple[float, OriginAnswered]] = OrderedDict()
        self.generation = 0
        """The number of settings so far: answers to questions under earlier ones are not remembered."""

    def right(self, access_key_id: str, right_to: RightTo, *scope: str | None) -> Right:
        """Return the right of an access key to what `scope` names, which must be all that a policy may depend on."""
        digest = blake2b(repr((right_to, scope)).encode(), digest_size=16, key=self._secret)
        return Right(access_key_id, digest.digest())

    def holds(self, right: Right) -> bool:
        of_caller = self._until.get(right.access_key_id)
        until = of_caller.get(right.scope) if of_caller is not None else None
        return until is not None and self._clock.monotonic() < until

    def grant(self, right: Right, until: float, generation: int) -> None:
        """Remember a right that the origin has granted to a question asked in `generation`."""
        if generation != self.generation or until <= self._clock.monotonic():
            return
        self._refusals.pop(right, None)
        self.revoke(right)
        if self._count >= self._rights_max:
            self._make_room()
        self._until.setdefault(right.access_key_id, OrderedDict())[right.scope] = until
        self._count += 1

    def revoke(self, right: Right) -> None:
        """Forget a right that the origin has not granted again."""
        of_caller = self._until.get(right.access_key_id)
        if of_caller is not None and of_caller.pop(right.scope, None) is not None:
            self._count -= 1

    def refuse(self, right: Right, answer: OriginAnswered, generation: int) -> None:
        """Remember a refusal for a second, if the answer is short."""
        self.revoke(right)
        if generation != self.generation or len(answer.body) > _DOCUMENT_BYTES_MAX:
            return
        self._refusals[right] = self._clock.monotonic() + REFUSAL_SECONDS, answer
        self._refusals.move_to_end(right)
        if len(self._refusals) > REFUSALS_MAX:
            self._refusals.popitem(last=False)

    def refusal(self, right: Right) -> OriginAnswered | None:
        """Return the origin's refusal, if it is recent."""
        found = self._refusals.get(right)
        if found is None:
            return None
        until, answer = found
        if self._clock.monotonic() >= until:
            del self._refusals[right]
            return None
        return OriginAnswered(answer.status, answer.headers, answer.body)

    def forget(self) -> None:
        """Forget everything: slots or credentials were changed."""
        self._until.clear()
        self._refusals.clear()
        self._count = 0
        self.generation += 1

    def _make_room(self) -> None:
        """Drop the oldest right of the caller that has most."""
        name, most = max(self._until.items(), key=lambda item: len(item[1]))
        most.popitem(last=False)
        self._count -= 1
        if not most:
            del self._until[name]

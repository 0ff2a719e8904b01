"""What the origin has said of callers' own rights, remembered for a while by one process.

A right is what one key pair may do to one object, or with one listing: never more than what was asked. So a policy
that allows one key and denies the next is kept to, whatever it goes by. The memory is bounded, and shared out: who has
most of it gives room, so one caller cannot have another's rights asked for again and again.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from hashlib import blake2b
from typing import Literal, NamedTuple

from gateway.core.clock import Clock
from gateway.core.errors import OriginAnswered

RIGHTS_MAX = 131_072
"""Of all callers of a process together: some 250 bytes each."""

REFUSALS_MAX = 1024
REFUSAL_SECONDS = 1.0
"""A right that was just given works as soon as that."""

_DOCUMENT_BYTES_MAX = 4096

RightTo = Literal["metadata", "bytes", "listing", "uploads"]
"""An object's metadata, and its bytes, which may be encrypted with a key that the caller may not use; the keys under a
prefix, and the uploads there."""


class Right(NamedTuple):
    """What one access key may do. `scope` is a digest: what is kept of long keys is short."""

    access_key_id: str
    scope: bytes


class RememberedRights:
    """Event loop only. Times are the monotonic clock's."""

    def __init__(self, clock: Clock, rights_max: int = RIGHTS_MAX) -> None:
        self._clock = clock
        self._rights_max = rights_max
        self._secret = os.urandom(16)
        self._until: dict[str, OrderedDict[bytes, float]] = {}
        self._count = 0
        self._refusals: OrderedDict[Right, tuple[float, OriginAnswered]] = OrderedDict()
        self.generation = 0
        """Of settings: what was asked under others is not remembered."""

    def right(self, access_key_id: str, right_to: RightTo, *scope: str | None) -> Right:
        """The right of an access key to what `scope` names: all that a policy may go by."""
        digest = blake2b(repr((right_to, scope)).encode(), digest_size=16, key=self._secret)
        return Right(access_key_id, digest.digest())

    def holds(self, right: Right) -> bool:
        of_caller = self._until.get(right.access_key_id)
        until = of_caller.get(right.scope) if of_caller is not None else None
        return until is not None and self._clock.monotonic() < until

    def grant(self, right: Right, until: float, generation: int) -> None:
        """The origin has granted it, to a question that was asked in `generation`."""
        if generation != self.generation or until <= self._clock.monotonic():
            return
        self._refusals.pop(right, None)
        self.revoke(right)
        if self._count >= self._rights_max:
            self._make_room()
        self._until.setdefault(right.access_key_id, OrderedDict())[right.scope] = until
        self._count += 1

    def revoke(self, right: Right) -> None:
        """The origin has not granted it when it was asked again."""
        of_caller = self._until.get(right.access_key_id)
        if of_caller is not None and of_caller.pop(right.scope, None) is not None:
            self._count -= 1

    def refuse(self, right: Right, answer: OriginAnswered, generation: int) -> None:
        """The origin has refused it; remembered for a second where the answer is short."""
        self.revoke(right)
        if generation != self.generation or len(answer.body) > _DOCUMENT_BYTES_MAX:
            return
        self._refusals[right] = self._clock.monotonic() + REFUSAL_SECONDS, answer
        self._refusals.move_to_end(right)
        if len(self._refusals) > REFUSALS_MAX:
            self._refusals.popitem(last=False)

    def refusal(self, right: Right) -> OriginAnswered | None:
        """The origin's refusal, where it has refused it just now."""
        found = self._refusals.get(right)
        if found is None:
            return None
        until, answer = found
        if self._clock.monotonic() >= until:
            del self._refusals[right]
            return None
        return OriginAnswered(answer.status, answer.headers, answer.body)

    def forget(self) -> None:
        """Slots or credentials were changed: everything is asked anew."""
        self._until.clear()
        self._refusals.clear()
        self._count = 0
        self.generation += 1

    def _make_room(self) -> None:
        """Let go of the oldest of who has most."""
        name, most = max(self._until.items(), key=lambda item: len(item[1]))
        most.popitem(last=False)
        self._count -= 1
        if not most:
            del self._until[name]

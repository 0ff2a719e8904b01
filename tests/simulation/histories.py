"""What has become of keys, as clients and others know it."""

from __future__ import annotations

from dataclasses import dataclass, field

Value = bytes | None
"""Of a key; None: no object."""


@dataclass(eq=False)
class Attempt:
    """A write that a client of the node has asked for. `ended` None: it still is."""

    value: Value
    begun: float
    ended: float | None = None
    acknowledged: bool = False
    etag: str | None = None
    absorbed: bool = False


@dataclass
class KeyHistory:
    """Of one key. `arrived`: what of this node's writes has been at the origin, and since when.

    `open_uploads`: how many clients have begun, and not ended. `is_spoiled`: the origin has made something else of what
    this node had acknowledged.
    """

    attempts: list[Attempt] = field(default_factory=list)
    others: list[tuple[float, Value]] = field(default_factory=list)
    arrived: list[tuple[float, Value]] = field(default_factory=list)
    open_uploads: int = 0
    is_spoiled: bool = False

    def begin(self, value: Value, now: float) -> Attempt:
        attempt = Attempt(value, now)
        self.attempts.append(attempt)
        return attempt

    def last_acknowledged(self) -> Attempt | None:
        return next((one for one in reversed(self.attempts) if one.acknowledged), None)

    def may_be(self) -> set[Value]:
        """What may be read: the last acknowledged, whatever was tried since, what others have written meanwhile."""
        last = self.last_acknowledged()
        since = last.begun if last is not None else -1.0
        tried = self.attempts[self.attempts.index(last) :] if last is not None else self.attempts
        found: set[Value] = {one.value for one in tried} | {value for at, value in self.others if at >= since}
        if last is None:
            before = [value for at, value in self.others if at < since]
            found.add(before[-1] if before else None)
        return found

    def may_have_been(self, since: float) -> set[Value]:
        """What may have been read at some moment since then, whatever has taken its place."""
        written = {one.value for one in self.attempts if one.begun >= since}
        return self.may_be() | written | {value for at, value in self.others if at >= since}

    def may_conflict(self, found: Value, unclear_seconds: float) -> bool:
        """Whether a write of this node may take what is at the origin for others'. So it may what one without an answer
        has put there, so long before it at most."""
        if self.others or self.is_spoiled:
            return True
        unclear = [one for one in self.attempts if not one.acknowledged and one.value == found]
        return any(
            one is not later and one.begun <= later.begun <= (one.ended or 0.0) + unclear_seconds
            for one in unclear
            for later in self.attempts
        )

    def written_by_others_since(self, moment: float) -> bool:
        return any(at >= moment for at, _ in self.others)

    def is_gone(self, moment: float) -> bool:
        """Whether its deletion had been acknowledged by then, and nobody has been about it since."""
        last = self.attempts[-1] if self.attempts and not self.open_uploads else None
        return last is not None and last.acknowledged and last.value is None and (last.ended or 0.0) <= moment

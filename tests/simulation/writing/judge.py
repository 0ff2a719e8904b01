"""What must hold where several nodes write: by what clients were answered, and by what bucket and registry have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from tests.simulation.cluster.redis_model import Content
from tests.simulation.histories import Attempt, KeyHistory, Value
from tests.simulation.invariants import Judge
from tests.simulation.origins import OTHERS, Change, SimulatedOrigin

WRITING_RULES = (
    "answered writes are read",
    "what was seen stays",
    "nothing is lost",
    "nothing comes back",
    "others are kept",
    "conflicts are with others",
    "created once",
    "markers come last",
    "who is believed knows",
    "nothing is left",
    "all is well in quiet",
    "nobody waits for long",
    "requests do not fail inside",
)

DOUBT_SECONDS = 30.0
"""So long after its end a write without an answer may still be carried out, where its process has let go of it."""

REMEMBERED_SECONDS = 60.0
"""The `metadata_ttl` of the slots: so long others may show what was there before a write that got no answer (12.14)."""

WAITS_SECONDS_MAX = 90.0
"""The longest wait: another node's flush, peers that say nothing, and a bucket that does not either."""


@dataclass(eq=False)
class Try(Attempt):
    """A write, and through which node. `is_blind`: that did not always believe the registry, or reach the bucket.

    Then it cannot tell what another node has left at the bucket seconds before from others' writes (6.2, 12.14).
    """

    node: str = ""
    is_blind: bool = False
    seen_at: float = math.inf
    """When a reader had been answered with it first."""

    suspects: list[Suspect] = field(default_factory=list)

    @property
    def over(self) -> float:
        """From then on it does nothing any more."""
        if self.ended is None:
            return math.inf
        return self.ended if self.acknowledged else self.ended + DOUBT_SECONDS


@dataclass(frozen=True)
class Suspect:
    """A read that has shown what was there before a write, after others had shown the write.

    `has_learned`: its node has asked the bucket since the write began, and before the bucket had it. Until a write that
    goes through is answered, a node may show what it has learned so (12.14).
    """

    text: str
    has_learned: bool

    def is_wrong(self, one: Try) -> bool:
        return one.absorbed or not self.has_learned


@dataclass(frozen=True)
class Question:
    """A read that the bucket has answered to a node. It began `at` that moment."""

    at: float
    key: str
    """Or what the listed keys begin with."""

    is_list: bool = False

    def is_about(self, key: str) -> bool:
        return key.startswith(self.key) if self.is_list else key == self.key


@dataclass
class SharedHistory(KeyHistory):
    """Of a key that several write at once."""

    def tries(self) -> list[Try]:
        return [one for one in self.attempts if isinstance(one, Try)]

    def allowed(self, value: Value, begun: float) -> bool:
        """Whether a read that has begun then may show this: no write that had been answered by then came behind it."""
        tries = self.tries()
        made = [one.over for one in tries if one.value == value] + [-1.0] * (value is None)
        made += [at for at, of_others in self.others if of_others == value]
        answered = [one.begun for one in tries if one.acknowledged and one.ended is not None and one.ended <= begun]
        latest = max(answered, default=-math.inf)
        return any(over >= latest for over in made)

    def may_be(self) -> set[Value]:
        values = {one.value for one in self.attempts} | {value for _, value in self.others} | {None}
        return {one for one in values if self.allowed(one, math.inf)}

    def may_conflict(self, found: Value, unclear_seconds: float) -> bool:
        if super().may_conflict(found, unclear_seconds):
            return True
        pairs = permutations(self.tries(), 2)
        return any(self._may_meet(one, other, unclear_seconds) for one, other in pairs)

    def _may_meet(self, one: Try, other: Try, unclear_seconds: float) -> bool:
        """Whether the second, pending, may find at the bucket what it takes for others': what the first has sent there
        past a buffer meanwhile, or in doubt, or unseen, also long after its answer.
        """
        if one.is_blind or other.is_blind or not one.acknowledged:
            sent = max((at for at, value in self.arrived if value == one.value), default=one.over)
            last = max(sent, one.over) + unclear_seconds
            return one.begun <= other.over + unclear_seconds and other.begun <= last
        return not one.absorbed and one.begun <= other.over and other.begun <= one.over


class WritingJudge(Judge):
    """Of one history of several nodes."""

    def __init__(self, origin: SimulatedOrigin, only: Iterable[str] = ()) -> None:
        super().__init__(origin)
        self.only = frozenset(WRITING_RULES).intersection(only or WRITING_RULES) or frozenset({"none"})
        self.store_of: Callable[[str], str] = lambda _: ""
        self.questions_of: Callable[[str], Sequence[Question]] = lambda _: ()
        self.unflushed: dict[tuple[str, str], Try] = {}
        """What was answered last, and has not been at the bucket."""

    def of(self, bucket: str, key: str) -> SharedHistory:
        found = self.keys.setdefault((bucket, key), SharedHistory())
        assert isinstance(found, SharedHistory)
        return found

    # Clients

    def shown(self, bucket: str, key: str, value: Value, node: str, begun: float, what: str) -> None:
        """A client was answered that this is the object."""
        history, now = self.of(bucket, key), self.origin.clock.monotonic()
        where = f"{what} of {key} at {node} shows {_short(value)}"
        if not history.allowed(value, begun):
            self.violated("answered writes are read", where)
        tries = history.tries()
        made = [one for one in tries if one.value == value]
        for one in tries:
            is_behind = one.seen_at <= begun and one.value != value and all(other.over < one.begun for other in made)
            if not is_behind or history.others:
                continue
            suspect = Suspect(f"{where}, after {_short(one.value)}", self._has_learned(node, key, history, one))
            if one.acknowledged and suspect.is_wrong(one):
                self.violated("what was seen stays", suspect.text)
            elif one.ended is None:  # if it gets no answer, others may show the version before (12.14)
                one.suspects.append(suspect)
        for one in made if value is not None else ():  # whose absence it was, nobody can tell
            one.seen_at = min(one.seen_at, now)

    def _has_learned(self, node: str, key: str, history: SharedHistory, one: Try) -> bool:
        arrived = min((at for at, value in history.arrived if value == one.value), default=math.inf)
        if one.seen_at < arrived:  # where it is pending
            return False
        return any(one.begun <= asked.at <= arrived for asked in self.questions_of(node) if asked.is_about(key))

    def answered_write(self, bucket: str, key: str, one: Try) -> None:
        """A client has its 200."""
        for suspect in one.suspects:
            if suspect.is_wrong(one):
                self.violated("what was seen stays", suspect.text)
        if (
            one.absorbed
            and one.value is not None
            and not any(value == one.value for _, value in self.of(bucket, key).arrived)
        ):
            self.unflushed[bucket, key] = one
        else:
            self.unflushed.pop((bucket, key), None)

    # The registry

    def check_belief(self, node: str, run: str, content: Content) -> None:
        """A node believes this: all that was answered and is pending is in there, but what a later write is about."""
        for (bucket, key), one in self.unflushed.items():
            others = self.of(bucket, key).tries()
            if any(other is not one and other.over > one.begun for other in others):
                continue
            entry = content.entries.get(bucket.encode(), {}).get(key.encode())
            if entry is None or entry[3].decode() != self.store_of(one.node):
                self.violated(
                    "who is believed knows", f"{node} believes {run}, which lacks {key}, pending at {one.node}"
                )
                return

    # The bucket

    def changed(self, bucket: str, change: Change) -> None:
        super().changed(bucket, change)
        if change.by == OTHERS or change.key.startswith(".forebay/"):
            return
        history = self.of(bucket, change.key)
        value = None if change.after is None else change.after.content.read(0, change.after.size_bytes)
        unflushed = self.unflushed.get((bucket, change.key))
        if unflushed is not None and unflushed.value == value:
            del self.unflushed[bucket, change.key]
        tries = history.tries()
        made = [one.over for one in tries if one.value == value]
        # What is answered and has been at the bucket is not undone by what had ended before that was begun.
        later = [one for one in tries if one.acknowledged and made and one.begun > max(made)]
        there = {arrived for _, arrived in history.arrived[:-1]}
        for one in later:
            if one.value in there:
                self.violated(
                    "nothing comes back", f"{change.by} makes {change.key} {_short(value)}, behind {_short(one.value)}"
                )
                break


def _short(value: Value) -> str:
    return "nothing" if value is None else repr(value[:24])

"""What must hold in a cluster, judged by what clients are answered and by what the bucket has had and has sent."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import md5

from gateway.cluster.members import SETTLED_SECONDS
from gateway.config import SlotSettings
from gateway.core.model import ByteRange
from tests.simulation.invariants import Violation
from tests.support.asgi import Answer

CLUSTER_RULES = (
    "no wrong byte",
    "reads are as young as promised",
    "own writes are read",
    "what the bucket has is answered",
    "nobody waits for long",
    "each byte once",
    "each question once",
    "peers tell versions only where nobody writes",
    "who is asked asks nobody to ask",
    "who is silent is asked no more",
    "no request counts twice",
    "nothing is held in quiet",
)

WAITS_SECONDS_MAX = 30.0
"""The longest wait of a request whose own node is well: two owners that hang, one that is busy, and the bucket."""

CALM_SECONDS = 45.0
"""So long after the last trouble views agree, and nobody is left out."""

QUEUED_SECONDS = 1.0
"""So long after a node knows of an object, it may ask for those who had asked before."""

CHUNK = 64 * 1024
ANSWERED_LATE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Made:
    """What became of a key, by whom; `data` None: it was deleted."""

    at: float
    data: bytes | None
    by: str

    @property
    def etag(self) -> str | None:
        return None if self.data is None else f'"{md5(self.data, usedforsecurity=False).hexdigest()}"'


@dataclass
class Asked:
    """A request of a client."""

    node: str
    method: str
    key: str
    slot: SlotSettings
    first: int | None
    last: int | None
    begun: float
    own_write: float = -math.inf
    """When what this node had written last, and answered, had reached the bucket."""


@dataclass
class ClusterJudge:
    only: frozenset[str] = frozenset()
    violations: list[Violation] = field(default_factory=list)
    made: dict[str, list[Made]] = field(default_factory=lambda: defaultdict(lambda: [Made(-math.inf, None, "")]))
    period: int = 0
    """Ends with each trouble but that nodes have come or gone."""

    period_ends_at: float = math.inf

    calm_at: float = math.inf
    sent: Counter[tuple[int, str, str, int]] = field(default_factory=Counter)
    """How often the bucket has sent a chunk of a version, by period."""

    known: dict[tuple[int, str, str], tuple[float, float]] = field(default_factory=dict)
    """Since when and until when a node need not ask about an object again, by period."""

    asked_at: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a node has asked the bucket about an object the last time."""

    answered: Counter[str] = field(default_factory=Counter)
    """How many answers were judged, by their kind."""

    def violated(self, rule: str, text: str) -> None:
        if not self.only or rule in self.only:
            self.violations.append(Violation(rule, text))

    # The bucket

    def bucket_sent(self, key: str, etag: str, sent: ByteRange, now: float) -> None:
        if now >= self.period_ends_at:
            self._end_period()
        if now < self.calm_at:
            return
        for chunk in range(sent.first // CHUNK, sent.last // CHUNK + 1):
            place = (self.period, key, etag, chunk)
            self.sent[place] += 1
            if self.sent[place] == 2:
                calm = now - self.calm_at
                self.violated("each byte once", f"chunk {chunk} of {key} {etag}, {calm:.0f} s after calm began")

    def bucket_told(self, node: str, key: str, begun: float, now: float, seconds: float) -> None:
        """The bucket has told a node of an object, which need not ask again for so long.

        If it has found another version than the one before, it may ask once more.
        """
        place, last = (self.period, node, key), self.asked_at.get((node, key), -math.inf)
        self.asked_at[node, key] = begun
        known_at, known_until = self.known.get(place, (math.inf, 0.0))
        if begun >= max(self.calm_at, known_at + QUEUED_SECONDS) and now < known_until:
            self.violated("each question once", f"{node} asks about {key}, {known_until - begun:.1f} s early")
        if all(one.at < last for one in self.made[key]):
            self.known[place] = now, begun + seconds

    def trouble(self, until: float) -> None:
        """Something has changed that lets bytes be asked for again; `until`: when that has been overcome."""
        self._end_period()
        self.calm_at = until

    def moved(self, until: float) -> None:
        """Nodes have come or gone: what others have comes from them, for as long as these are asked."""
        self.period_ends_at = until - CALM_SECONDS + SETTLED_SECONDS
        self.calm_at = until

    def _end_period(self) -> None:
        self.period += 1
        self.period_ends_at = math.inf

    # Clients

    def judge(self, asked: Asked, answer: Answer, now: float, *, is_excused: bool) -> None:
        made, what = self.made[asked.key], f"{asked.method} {asked.key} at {asked.node}"
        seconds = now - asked.begun
        if seconds > WAITS_SECONDS_MAX and not is_excused:
            self.violated("nobody waits for long", f"{what}: {answer.status} after {seconds:.1f} s")
        self.answered[str(answer.status)] += 1
        if answer.status >= 500:
            if not is_excused:
                self.violated("what the bucket has is answered", f"{what}: {answer.status} {answer.body[:200]!r}")
            return
        absent = answer.status == 404
        if absent:
            found = [one for one in range(len(made)) if made[one].data is None]
        else:
            found = self._versions(asked, answer, made, what)
        if not found:
            if not absent and answer.status in (200, 206):
                return  # it is told already
            self.violated("no wrong byte", f"{what}: {answer.status} {dict(answer.headers)}")
            return
        self._judge_age(asked, made, found, now, what, absent=absent)
        is_whole = asked.method == "HEAD" or answer.complete
        changes = [one.at for one in made if one.at > asked.begun - self._bound(asked.slot, absent=False) - 1.0]
        if not is_whole and not changes and not is_excused:
            self.violated("what the bucket has is answered", f"{what}: broken off after {len(answer.body)} bytes")

    def _versions(self, asked: Asked, answer: Answer, made: list[Made], what: str) -> list[int]:
        """Which versions the answer may be of."""
        if answer.status == 416:
            return [
                number
                for number, one in enumerate(made)
                if one.data is not None and asked.first is not None and asked.first >= len(one.data)
            ]
        etag = answer.headers.get("etag")
        found = [number for number, one in enumerate(made) if one.data is not None and one.etag == etag]
        data = made[found[0]].data if found else None
        if data is None:
            self.violated("no wrong byte", f"{what}: {answer.status} of an ETag that never was: {etag}")
            return []
        expected, told = data, answer.headers.get("content-length")
        if asked.first is not None:
            stop = None if asked.last is None else asked.last + 1
            expected = data[asked.first : stop]
        if told is not None and int(told) != len(expected):
            self.violated("no wrong byte", f"{what}: {told} bytes told of {len(expected)}")
            return []
        is_right = answer.body == expected if answer.complete else expected.startswith(answer.body)
        if asked.method != "HEAD" and not is_right:
            self.violated("no wrong byte", f"{what}: {len(answer.body)} bytes that are not the {len(expected)} of it")
            return []
        return found

    def _judge_age(
        self, asked: Asked, made: list[Made], found: Iterable[int], now: float, what: str, *, absent: bool
    ) -> None:
        bound, is_young, is_own = self._bound(asked.slot, absent=absent), False, False
        for number in found:
            ended = made[number + 1].at if number + 1 < len(made) else math.inf
            is_young |= ended >= asked.begun - bound and made[number].at <= now
            is_own |= ended > asked.own_write
        if not is_young:
            changed = asked.begun - max(one.at for one in made if one.at <= asked.begun)
            self.violated("reads are as young as promised", f"{what}: what was replaced at least {changed:.1f} s ago")
        elif not is_own:
            self.violated("own writes are read", f"{what}: what was there before its own write")

    @staticmethod
    def _bound(slot: SlotSettings, *, absent: bool) -> float:
        if slot.consistency == "strict":
            return 0.0
        if absent:
            return slot.negative_ttl_seconds + ANSWERED_LATE_SECONDS
        return math.inf if slot.consistency == "immutable" else slot.metadata_ttl_seconds + ANSWERED_LATE_SECONDS

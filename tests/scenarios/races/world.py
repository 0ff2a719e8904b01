"""What all racers share: the keys' histories, the values there are, and the verdict on every answer."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from tests.scenarios.races.caller import Answer, Broken
from tests.scenarios.races.contents import Value, described
from tests.scenarios.races.history import Bounds, History, State, Write
from tests.support.cache_label import cache_label

SIZES_BYTES = ((0, 0), (1, 200), (200, 65_536), (65_536, 300_000), (65_536, 300_000))
"""With blocks of 64 KiB: nothing, part of a block, up to five of them."""

ByteRange = tuple[int, int]


class WrongAnswer(AssertionError):
    """An answer that nobody should have got, and what was going on around it."""


@dataclass
class World:
    """One bucket. `keys` → how late the writes of others may be seen there; `own` ones are written by clients.

    `breaks_allowed`: processes are being killed, so connections may end; nothing else is excused by that.
    """

    bucket: str
    keys: Mapping[str, Bounds]
    own: Sequence[str]
    breaks_allowed: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    values: dict[str, Value] = field(default_factory=dict)
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.histories = {key: History(key, bounds) for key, bounds in self.keys.items()}
        self._numbers = count(1)

    def target(self, key: str) -> str:
        return f"/{self.bucket}/{key}"

    def new_value(self, rng: random.Random) -> Value:
        """Something that nobody has stored before."""
        value = Value(next(self._numbers), rng.randint(*rng.choice(SIZES_BYTES)))
        self.values[value.etag] = self.values[value.etag_of_one_part] = value
        return value

    @contextmanager
    def reading(self, key: str) -> Iterator[float]:
        """While it lasts, what a read sent now may see is remembered; gives when that is."""
        reads, sent = self.histories[key].reads_sent, self.now()
        reads.append(sent)
        try:
            yield sent
        finally:
            reads.remove(sent)

    def begin(self, key: str, state: State, *, own: bool = True) -> Write:
        write = self.histories[key].begin(state, self.now(), own=own)
        self._note(key, f"{'own' if own else 'outside'} write of {self._name(state)} begins", write.sent)
        return write

    def end(self, key: str, write: Write) -> None:
        self.histories[key].end(write, self.now())
        self._note(key, f"write of {self._name(write.state)} is over", write.sent)

    def take_back(self, key: str, write: Write) -> None:
        self.histories[key].take_back(write)
        self._note(key, f"write of {self._name(write.state)} was refused", write.sent)

    def saw(self, key: str, sent: float, state: State, what: str, *, bounds: Bounds | None = None) -> None:
        """A read answered just now says that this is there."""
        self._saw(key, sent, lambda candidate: candidate == state, f"{what} says {self._name(state)}", bounds)

    def saw_object(self, key: str, sent: float, answer: Answer, asked: ByteRange | None = None) -> None:
        """The answer to a GET, of a range where one was asked, status, headers and bytes."""
        what = f"GET {asked or ''} [{answer.headers.get('x-forebay-cache', 'no word of the cache')}]"
        self.counts[f"cache {cache_label(answer)}"] += 1
        if answer.status == 416 and asked is not None:
            self._saw(key, sent, lambda state: self._ends_before(state, asked[0]), f"{what} says it is shorter")
        elif answer.status == 404:
            self.saw(key, sent, None, what)
        elif answer.status in (200, 206):
            self._compare(key, answer, asked)
            self.saw(key, sent, answer.etag, what)
        elif answer.status == 500 and self.breaks_allowed:
            # A fill whose leader was killed, of a version that was replaced before the first byte had left.
            self.broke(key, sent, Broken("an internal error"), must_change=True)
        else:
            self.unexpected(key, what, answer)

    def saw_head(self, key: str, sent: float, answer: Answer) -> None:
        """The answer to a HEAD: a version and its length, or nothing there."""
        self.counts[f"head {cache_label(answer)}"] += 1
        if answer.status not in (200, 404):
            self.unexpected(key, "HEAD", answer)
        state = answer.etag if answer.status == 200 else None
        if state is not None and answer.headers.get("content-length") != str(self._value(key, state).size_bytes):
            self.wrong(key, f"HEAD gives another length than {self._name(state)} has: {dict(answer.headers)}")
        self.saw(key, sent, state, "HEAD")

    def broke(
        self, key: str, sent: float, broken: Broken, asked: ByteRange | None = None, *, must_change: bool = False
    ) -> None:
        """A read ended early: what had come must be right, and something must have changed (1.1) or been killed."""
        self.counts["broken reads"] += 1
        answer = broken.answer
        if answer is not None and answer.status in (200, 206) and answer.etag is not None:
            content = self._part(self._value(key, answer.etag), asked if answer.status == 206 else None)
            if not content.startswith(answer.body):
                self.wrong(key, f"a broken GET of {self._name(answer.etag)} gave {described(answer.body, 0)}")
        if (must_change or not self.breaks_allowed) and not self.histories[key].changing(sent, self.now()):
            self.wrong(key, f"a read broke though nothing changed: {broken}")

    def unexpected(self, key: str, what: str, answer: Answer) -> None:
        self.wrong(key, f"{what} was answered {answer.status} {dict(answer.headers)} {answer.body[:300]!r}")

    def wrong(self, key: str, what: str) -> None:
        events = "\n  ".join(self.histories[key].events)
        raise WrongAnswer(f"{key}: {what}\nat {self.now():.4f}; what happened to the key before:\n  {events}")

    def _saw(
        self, key: str, sent: float, matches: Callable[[State], bool], what: str, bounds: Bounds | None = None
    ) -> None:
        self._note(key, what, sent)
        self.counts["judged"] += 1
        if not self.histories[key].explains(matches, sent, self.now(), bounds):
            self.wrong(key, f"a read sent at {sent:.4f} can not see this: {what}")

    def _compare(self, key: str, answer: Answer, asked: ByteRange | None) -> None:
        value = self._value(key, answer.etag)
        part = asked if answer.status == 206 else None
        expected = self._part(value, part)
        if answer.body != expected or answer.headers.get("content-length") != str(len(expected)):
            came = described(answer.body, part[0] if part else 0)
            where = f"wrong within {_differing(answer.body, expected)}"
            self.wrong(key, f"bytes {part or 'all'} of {self._name(answer.etag)} came as {came}; {where}")
        if part and answer.headers.get("content-range") != _content_range(part, value.size_bytes):
            self.wrong(key, f"bytes {part} of {self._name(answer.etag)} came as {answer.headers.get('content-range')}")

    def _value(self, key: str, etag: State) -> Value:
        value = self.values.get(etag or "")
        if value is None:
            self.wrong(key, f"nobody ever stored {etag}")
        assert value is not None
        return value

    def _part(self, value: Value, asked: ByteRange | None) -> bytes:
        return value.content if asked is None else value.content[asked[0] : asked[1] + 1]

    def _ends_before(self, state: State, first: int) -> bool:
        return state is not None and self.values[state].size_bytes <= first

    def _name(self, state: State) -> str:
        if state is None:
            return "nothing"
        value = self.values.get(state)
        return f"value {value.number} ({value.size_bytes} bytes, {state})" if value else f"unknown {state}"

    def _note(self, key: str, what: str, sent: float) -> None:
        self.histories[key].events.append(f"{sent:.4f}-{self.now():.4f} {what}")


def _content_range(asked: ByteRange, size_bytes: int) -> str:
    return f"bytes {asked[0]}-{min(asked[1], size_bytes - 1)}/{size_bytes}"


def _differing(one: bytes, other: bytes) -> ByteRange:
    """The first and the last position at which two bodies differ."""
    positions = [at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right]
    ends = sorted((len(one), len(other)))
    positions += [ends[0], ends[1] - 1] if ends[0] != ends[1] else []
    return min(positions, default=0), max(positions, default=0)

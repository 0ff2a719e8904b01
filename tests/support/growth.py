"""How the cost of reading an input grows with the input, and whether a pattern may backtrack over what it has taken."""

from __future__ import annotations

import gc
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from re import _compiler as compiler  # type: ignore[attr-defined]
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as patterns  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

Parse = Callable[[bytes], object]

SIZES = (256, 1024, 4096, 16 * 1024, 64 * 1024)
"""Each four times as large as the one before: what is linear costs four times as much, what is quadratic sixteen."""

GROWTH_MAX = 8.0

TRACED_SIZES = (2048, 8192)
WORK_MIN = 15_000
"""Steps below which nothing is judged: constant costs are most of them."""

SECONDS_MIN = 0.004
TRIES = 5


def repeated(begin: bytes, unit: bytes, end: bytes, size_bytes: int) -> bytes:
    """An input of about this size. `%d` in the unit is the number of the repetition."""
    count = max(1, (size_bytes - len(begin) - len(end)) // len(unit))
    middle = b"".join(unit.replace(b"%d", b"%d" % number) for number in range(count)) if b"%d" in unit else unit * count
    return begin + middle + end


def python_steps(parse: Parse, data: bytes, *, counts_searched: bool = False) -> int:
    """Lines that run, and the lengths of what they make: text and collections in local variables that were not there.

    So a loop that joins to a text shows, though the joining itself is done in C. `counts_searched`: the lengths of
    texts whose methods are called, too, as these may look at all of it; and of what a pattern may be looked for in.
    """
    steps = 0

    def on_call(frame: FrameType, event: str, function: Any) -> None:
        nonlocal steps
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        if isinstance(owner, (str, bytes, bytearray)):
            steps += len(owner) // 8
        elif isinstance(owner, re.Pattern):
            steps += max((len(value) for value in frame.f_locals.values() if type(value) in _TEXTS), default=0) // 8

    known: dict[int, dict[str, int]] = {}

    def on_event(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal steps
        steps += 1
        if event == "call":  # what a function is given, others have made
            known[id(frame)] = {name: id(value) for name, value in frame.f_locals.items()}
            return on_event
        seen = known.get(id(frame), {})
        for name, value in frame.f_locals.items():
            if type(value) in _SIZED and seen.get(name) != id(value):
                seen[name] = id(value)
                steps += len(value) // 8
        if event == "return":
            known.pop(id(frame), None)
        return on_event

    before, profile_before = sys.gettrace(), sys.getprofile()
    if counts_searched:
        sys.setprofile(on_call)
    sys.settrace(on_event)
    try:
        parse(data)
    finally:
        sys.settrace(before)
        sys.setprofile(profile_before)
    return steps


_TEXTS = frozenset({str, bytes, bytearray})
_SIZED = frozenset({str, bytes, bytearray, list, tuple, dict, set, frozenset})


def cpu_seconds(parse: Parse, data: bytes) -> float:
    """Time that this thread has computed: what is done in C can be counted in no other way on every machine."""
    gc.disable()
    try:
        begun = time.thread_time()
        parse(data)
        return time.thread_time() - begun
    finally:
        gc.enable()


@dataclass(frozen=True)
class Growth:
    """Four times the input cost more than `GROWTH_MAX` times as much."""

    size_bytes: int
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.before:g} → {self.after:g} when the input grew four times, to {self.size_bytes} bytes"


def grows_too_fast(parse: Parse, begin: bytes, unit: bytes, end: bytes) -> Growth | None:
    """None: the cost is linear as far as can be seen. Begins with small inputs, so that a bad parser fails soon."""
    steps = [python_steps(parse, repeated(begin, unit, end, size)) for size in TRACED_SIZES]
    for size, (before, after) in zip(TRACED_SIZES[1:], itertools.pairwise(steps), strict=True):
        if after > WORK_MIN and after > GROWTH_MAX * before:
            return Growth(size, before, after)
    return _computes_too_long(parse, begin, unit, end)


def grows_in_pieces(reader: Callable[[], Parse], begin: bytes, unit: bytes) -> Growth | None:
    """As `grows_too_fast`, of one who is fed single bytes: those cost the same whatever has come before them.

    `reader` makes what takes the next bytes. Counts steps and bytes only, no time.
    """

    def parse(data: bytes) -> None:
        feed = reader()
        for position in range(len(data)):
            feed(data[position : position + 1])

    small, large = (
        python_steps(parse, repeated(begin, unit, b"", size), counts_searched=True) for size in TRACED_SIZES
    )
    if large > WORK_MIN and large > GROWTH_MAX * small:
        return Growth(TRACED_SIZES[-1], small, large)
    return None


def _computes_too_long(parse: Parse, begin: bytes, unit: bytes, end: bytes) -> Growth | None:
    seconds_before = 0.0
    for number, size in enumerate(SIZES):
        data = repeated(begin, unit, end, size)
        seconds = cpu_seconds(parse, data)
        if number and seconds > SECONDS_MIN and seconds > GROWTH_MAX * seconds_before:
            small = repeated(begin, unit, end, SIZES[number - 1])
            tries = 1 if seconds > 1 else TRIES  # a machine that does much else: the least of several counts
            seconds = min(seconds, *(cpu_seconds(parse, data) for _ in range(tries)))
            seconds_before = max(seconds_before, *(cpu_seconds(parse, small) for _ in range(tries)))
            if seconds > SECONDS_MIN and seconds > GROWTH_MAX * seconds_before:
                return Growth(size, seconds_before, seconds)
        seconds_before = seconds
    return None


# --- patterns ---------------------------------------------------------------------------------------------------------

Characters = frozenset[int]

_ALL: Characters = frozenset(range(256))
_REPEATS_MAX = 1024
"""A repeat with fewer is a constant."""

_ALTERNATIVES_MAX = 512


@dataclass(frozen=True)
class _Item:
    """What a pattern takes in one place: characters, how many at least, and whether so many as there are."""

    characters: Characters
    least: int
    is_unbounded: bool
    may_give_back: bool


def backtracking(pattern: re.Pattern[str] | re.Pattern[bytes], *, searches: bool) -> str | None:
    """Why `pattern` may cost more than linear time; None where it cannot.

    `searches`: it is looked for everywhere in a text, and not only where the text begins.
    """
    tree = patterns.parse(pattern.pattern, pattern.flags)
    for items in itertools.islice(_sequences(tree, pattern.flags), _ALTERNATIVES_MAX):
        for number, item in enumerate(items):
            if item.is_unbounded and item.may_give_back and _overlaps(item, items[number + 1 :]):
                return "two repeats can share what they take"
        if searches and _is_restarted(items):
            return "it is looked for from every place, and each look may go far before it fails"
    return None


def _overlaps(repeat: _Item, following: Sequence[_Item]) -> bool:
    for item in following:
        if item.is_unbounded and item.characters & repeat.characters:
            return True
        if item.least and not item.characters & repeat.characters:
            return False
    return False


def _is_restarted(items: Sequence[_Item]) -> bool:
    """Whether the beginning of a match can be found again within a repeat behind which the match may fail."""
    for number, item in enumerate(items):
        can_fail = any(one.least for one in items[number + 1 :])
        if item.is_unbounded and can_fail and all(one.characters & item.characters for one in items[:number]):
            return True
    return False


def _sequences(tree: Any, flags: int) -> Iterator[list[_Item]]:
    """Every way through the pattern, as items one after the other; what is repeated comes twice."""
    choices: list[list[list[_Item]]] = [list(_choices(code, argument, flags)) for code, argument in tree]
    for chosen in itertools.product(*choices):
        yield list(itertools.chain.from_iterable(chosen))


def _choices(code: Any, argument: Any, flags: int) -> Iterator[list[_Item]]:
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        yield from _repeated(argument, flags, may_give_back=code is not codes.POSSESSIVE_REPEAT)
    elif code is codes.SUBPATTERN:
        yield from _sequences(argument[3], flags)
    elif code is codes.ATOMIC_GROUP:
        for items in _sequences(argument, flags):
            yield [_Item(one.characters, one.least, one.is_unbounded, False) for one in items]
    elif code is codes.BRANCH:
        for branch in argument[1]:
            yield from _sequences(branch, flags)
    elif code in (codes.ASSERT, codes.ASSERT_NOT):
        yield []
    elif code is codes.AT:
        yield [_Item(frozenset(), 1, False, False)] if argument is not codes.AT_BEGINNING else []
    else:
        yield [_Item(_characters([(code, argument)], flags), 1, False, False)]


def _repeated(argument: Any, flags: int, *, may_give_back: bool) -> Iterator[list[_Item]]:
    least, most, body = argument
    is_unbounded = most is codes.MAXREPEAT or most > _REPEATS_MAX
    if len(body) == 1 and body[0][0] in (codes.IN, codes.LITERAL, codes.NOT_LITERAL, codes.ANY):
        yield [_Item(_characters(body, flags), min(least, 1), is_unbounded, may_give_back)]
        return
    if least == 0:
        yield []
    for items in _sequences(body, flags):
        if not may_give_back:
            items = [_Item(one.characters, one.least, one.is_unbounded, False) for one in items]
        yield items * 2 if is_unbounded else items


def _characters(body: Any, flags: int) -> Characters:
    """Those of latin-1 that one element of a pattern takes."""
    one = patterns.SubPattern(patterns.State(), body)
    one.state.flags = flags
    compiled = _compiled(one, flags)
    return frozenset(number for number in _ALL if compiled.match(chr(number)))


def _compiled(tree: Any, flags: int) -> re.Pattern[str]:
    tree.state.str = ""
    compiled: re.Pattern[str] = compiler.compile(tree, flags | re.UNICODE if not flags & re.ASCII else flags)
    return compiled

"""Patterns that say which keys of a bucket make one checkpoint: the setting `checkpoints` of a slot. Pure.

    runs/*/step-{step}/                     a directory, with all that lies under it
    runs/*/step-{step}/**/rank_{rank}.pt    the same; where a rank's number stands in the names of its files
    models/*/epoch-{step}.pt                one object

A pattern is held against the whole key, part by part. It is matched in time that grows with the key's length, times
the number of parts behind its first `**`, whatever the key holds: `too_many` bounds that for all patterns of a slot.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

BUILT_IN = "built-in"
"""Stands in a list of patterns for the layouts that are known anyway (`writeback.checkpoints.layouts`)."""

PATTERN_LENGTH_MAX = 1024
"""No key is longer."""

PATTERNS_MAX = 64
"""Limit for one slot."""

SOUGHT_PARTS_MAX = 64
"""Parts of a slot's patterns that are looked for at each place of a key; a key has 512 at most."""

_ANY_PARTS = "**"
_STEP, _RANK = "{step}", "{rank}"
_TOKEN = re.compile(r"(\*|\{step\}|\{rank\})")
_DIGITS = frozenset("0123456789")
_DIGITS_MAX = 18
"""Numbers that SQLite can hold."""


class FoundName(NamedTuple):
    """A pattern's findings in a key: the checkpoint's prefix, its step, and the rank that wrote the object."""

    prefix: str
    step: int | None
    rank: int | None


class Numbers(NamedTuple):
    """The numbers in a text at `{step}` and `{rank}`."""

    step: int | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PartPattern:
    """The pattern between two slashes: texts and numbers before the `*`, and behind it, if there is one."""

    before: tuple[str, ...]
    behind: tuple[str, ...] | None

    def match(self, text: str) -> Numbers | None:
        """None where the text is another. Each character is looked at once or twice, whatever they are."""
        start, stop, numbers = 0, len(text), Numbers()
        for token in self.before:
            if token not in (_STEP, _RANK):
                if not text.startswith(token, start):
                    return None
                start += len(token)
                continue
            end = start
            while end < stop and text[end] in _DIGITS:
                end += 1
            if not 0 < end - start <= _DIGITS_MAX:
                return None
            numbers, start = _with(numbers, token, text[start:end]), end
        for token in reversed(self.behind or ()):
            if token not in (_STEP, _RANK):
                if not text.endswith(token, start, stop):
                    return None
                stop -= len(token)
                continue
            begin = stop
            while begin > start and text[begin - 1] in _DIGITS:
                begin -= 1
            if not 0 < stop - begin <= _DIGITS_MAX:
                return None
            numbers, stop = _with(numbers, token, text[begin:stop]), begin
        return numbers if self.behind is not None or start == stop else None


def _with(numbers: Numbers, token: str, digits: str) -> Numbers:
    return numbers._replace(step=int(digits)) if token == _STEP else numbers._replace(rank=int(digits))


@dataclass(frozen=True, slots=True)
class CheckpointPattern:
    """`head` is matched to find the checkpoint, `tail` behind it to find the rank: None stands for `**`."""

    head: Sequence[PartPattern | None]
    tail: Sequence[PartPattern | None]
    is_directory: bool

    def find(self, key: str) -> FoundName | None:
        """None where the key belongs to no checkpoint of this pattern."""
        parts = key.split("/")
        whole = None if self.is_directory else len(parts)
        found = _match(self.head, parts, whole)
        if found is None or (self.is_directory and found.parts_count == len(parts)):
            return None
        prefix = "/".join(parts[: found.parts_count]) + ("/" if self.is_directory else "")
        rest = parts[found.parts_count :]
        behind = _match(self.tail, rest, len(rest)) if self.tail else None
        return FoundName(prefix, found.step, None if behind is None else behind.rank)


class _Matched(NamedTuple):
    parts_count: int
    step: int | None
    rank: int | None


def _match(patterns: Sequence[PartPattern | None], parts: Sequence[str], count: int | None) -> _Matched | None:
    if None not in patterns:
        return _match_at(patterns, (), parts, 0, count)
    at = patterns.index(None)
    before, after = patterns[:at], patterns[at + 1 :]
    if count is not None:
        skipped = count - len(before) - len(after)
        return _match_at(before, after, parts, skipped, count) if skipped >= 0 else None
    if len(parts) < len(before) or not _match_at(before, (), parts, 0, len(before)):
        return None
    return next(
        (
            found
            for skipped in _places(after, parts[len(before) :])
            if (found := _match_at(before, after, parts, skipped, None)) is not None
        ),
        None,
    )


def _places(patterns: Sequence[PartPattern | None], parts: Sequence[str]) -> Iterator[int]:
    """Yield the numbers of parts to skip before these patterns: where they match or a number is too long."""
    text, start, skipped = "/".join(parts), 0, 0
    sought = _sought(tuple(one for one in patterns if one is not None))
    while (found := sought.search(text, start)) is not None:
        skipped += text.count("/", start, found.start())
        yield skipped
        start = found.start() + 1
        skipped += text.count("/", found.start(), start)


@lru_cache(1024)
def _sought(patterns: tuple[PartPattern, ...]) -> re.Pattern[str]:
    """Compile a search for parts one behind another, also for ones with more digits than the parts take."""
    parts = ["".join([*map(_expression, one.before), *_behind(one)]) for one in patterns]
    return re.compile(rf"(?<![^/]){'/'.join(parts)}(?![^/])")


def _behind(pattern: PartPattern) -> Sequence[str]:
    return () if pattern.behind is None else ("[^/]*", *map(_expression, pattern.behind))


def _expression(token: str) -> str:
    return "[0-9]++" if token in (_STEP, _RANK) else re.escape(token)


def _match_at(
    before: Sequence[PartPattern | None],
    after: Sequence[PartPattern | None],
    parts: Sequence[str],
    skipped: int,
    count: int | None,
) -> _Matched | None:
    taken = len(before) + skipped + len(after)
    if taken > len(parts) or count not in (None, taken):
        return None
    step = rank = None
    places = [*range(len(before)), *range(len(before) + skipped, taken)]
    for place, pattern in zip(places, (*before, *after), strict=True):
        found = pattern.match(parts[place]) if pattern is not None else None
        if found is None:
            return None
        step, rank = found.step if step is None else step, found.rank if rank is None else rank
    return _Matched(taken, step, rank)


def too_many(patterns: Sequence[str]) -> str | None:
    """Why so many patterns are not taken for one slot: each key that is written is held against all of them."""
    if len(patterns) > PATTERNS_MAX:
        return f"{len(patterns)} patterns: a slot has {PATTERNS_MAX} at most"
    parsed = [parse_pattern(one) for one in patterns if one != BUILT_IN]
    sought = sum(len(one.head) - 1 - one.head.index(None) for one in parsed if None in one.head)
    if sought > SOUGHT_PARTS_MAX:
        return (
            f"{sought} parts stand between a ** and the checkpoint's own, which counts, too: {SOUGHT_PARTS_MAX} at "
            "most, those of all patterns of the slot together, as they are looked for everywhere in each key"
        )
    return None


@lru_cache(256)
def parse_pattern(text: str) -> CheckpointPattern:
    """ValueError says what is wrong with a pattern."""
    if not 0 < len(text) <= PATTERN_LENGTH_MAX:
        raise ValueError(f"a pattern has 1 to {PATTERN_LENGTH_MAX} characters")
    if text.startswith(("s3://", "/")):
        raise ValueError(f"{text!r}: a pattern is held against the key, without s3://, bucket and leading slash")
    is_directory = text.endswith("/")
    parts = text.removesuffix("/").split("/")
    if not all(parts):
        raise ValueError(f"{text!r}: a part between two slashes is empty")
    for name in (_STEP, _RANK):
        if text.count(name) > 1:
            raise ValueError(f"{text!r}: {name} may stand in it once")
    step_at = next((at for at, part in enumerate(parts) if _STEP in part), None)
    rank_at = next((at for at, part in enumerate(parts) if _RANK in part), None)
    if rank_at is not None and rank_at <= (0 if step_at is None else step_at):
        raise ValueError(f"{text!r}: {_RANK} belongs behind the checkpoint's own directory, in a part of its own")
    if parts[-1] == _ANY_PARTS:
        raise ValueError(f"{text!r}: it may not end with **: a directory ends with /")
    head_count = len(parts)
    if step_at is not None:
        head_count = step_at + 1
    elif rank_at is not None:
        head_count = rank_at
    head, tail = parts[:head_count], parts[head_count:]
    if head[-1] == _ANY_PARTS:
        raise ValueError(f"{text!r}: ** may not stand right before the part with {_RANK}, unless {_STEP} comes before")
    return CheckpointPattern(_compiled(text, head), _compiled(text, tail), is_directory or bool(tail))


def _compiled(text: str, parts: Sequence[str]) -> Sequence[PartPattern | None]:
    if parts.count(_ANY_PARTS) > 1:
        raise ValueError(f"{text!r}: ** may stand once before the checkpoint's directory, and once behind it")
    return tuple(None if part == _ANY_PARTS else _compiled_part(text, part) for part in parts)


def _compiled_part(text: str, part: str) -> PartPattern:
    tokens = [token for token in _TOKEN.split(part) if token]
    if tokens.count("*") > 1:
        raise ValueError(f"{text!r}: * may stand once between two slashes, and ** alone between them")
    for piece, following in pairwise(tokens):
        if following in (_STEP, _RANK) and (piece == "*" or piece[-1] in _DIGITS):
            raise ValueError(f"{text!r}: neither * nor a digit may stand right before a number: where does it begin?")
        if piece in (_STEP, _RANK) and following[0] in _DIGITS:
            raise ValueError(f"{text!r}: no digit may stand right behind a number: where does it end?")
    if any("{" in token or "}" in token for token in tokens if token not in (_STEP, _RANK)):
        raise ValueError(f"{text!r}: braces stand around step and rank only")
    if "*" not in tokens:
        return PartPattern(tuple(tokens), None)
    at = tokens.index("*")
    return PartPattern(tuple(tokens[:at]), tuple(tokens[at + 1 :]))

"""Patterns that say which keys of a bucket make one checkpoint: the setting `checkpoints` of a slot. Pure.

    runs/*/step-{step}/                     a directory, with all that lies under it
    runs/*/step-{step}/**/rank_{rank}.pt    the same; where a rank's number stands in the names of its files
    models/*/epoch-{step}.pt                one object

A pattern is held against the whole key, part by part. It is matched in time that grows with the key's length, times
the pattern's, whatever the key holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

BUILT_IN = "built-in"
"""Stands in a list of patterns for the layouts that are known anyway (`writeback.checkpoints.layouts`)."""

PATTERN_LENGTH_MAX = 1024
"""No key is longer."""

_ANY_PARTS = "**"
_STEP, _RANK = "{step}", "{rank}"
_TOKEN = re.compile(r"\*|\{step\}|\{rank\}")
_DIGITS = {_STEP: r"(?P<step>[0-9]{1,18})(?![0-9])", _RANK: r"(?P<rank>[0-9]{1,18})(?![0-9])", "*": r"[^/]*"}


class Found(NamedTuple):
    """What a pattern has found in a key: the checkpoint's prefix, its step, and the rank that wrote the object."""

    prefix: str
    step: int | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class CheckpointPattern:
    """`head` is matched to find the checkpoint, `tail` behind it to find the rank: None stands for `**`."""

    head: Sequence[re.Pattern[str] | None]
    tail: Sequence[re.Pattern[str] | None]
    is_directory: bool

    def find(self, key: str) -> Found | None:
        """None where the key belongs to no checkpoint of this pattern."""
        parts = key.split("/")
        whole = None if self.is_directory else len(parts)
        found = _match(self.head, parts, whole)
        if found is None or (self.is_directory and found.parts_count == len(parts)):
            return None
        prefix = "/".join(parts[: found.parts_count]) + ("/" if self.is_directory else "")
        rest = parts[found.parts_count :]
        behind = _match(self.tail, rest, len(rest)) if self.tail else None
        return Found(prefix, found.step, None if behind is None else behind.rank)


class _Matched(NamedTuple):
    parts_count: int
    step: int | None
    rank: int | None


def _match(patterns: Sequence[re.Pattern[str] | None], parts: Sequence[str], count: int | None) -> _Matched | None:
    """How many parts it takes, as few as can be; exactly `count`, where that is said."""
    if None not in patterns:
        return _match_at(patterns, (), parts, 0, count)
    at = patterns.index(None)
    before, after = patterns[:at], patterns[at + 1 :]
    skipped_max = len(parts) - len(before) - len(after)
    for skipped in range(skipped_max + 1) if count is None else [count - len(before) - len(after)]:
        if skipped >= 0 and (found := _match_at(before, after, parts, skipped, count)) is not None:
            return found
    return None


def _match_at(
    before: Sequence[re.Pattern[str] | None],
    after: Sequence[re.Pattern[str] | None],
    parts: Sequence[str],
    skipped: int,
    count: int | None,
) -> _Matched | None:
    taken = len(before) + skipped + len(after)
    if taken > len(parts) or count not in (None, taken):
        return None
    numbers: dict[str, int] = {}
    places = [*range(len(before)), *range(len(before) + skipped, taken)]
    for place, pattern in zip(places, (*before, *after), strict=True):
        match = pattern.fullmatch(parts[place]) if pattern is not None else None
        if match is None:
            return None
        numbers |= {name: int(digits) for name, digits in match.groupdict().items()}
    return _Matched(taken, numbers.get("step"), numbers.get("rank"))


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


def _compiled(text: str, parts: Sequence[str]) -> Sequence[re.Pattern[str] | None]:
    if parts.count(_ANY_PARTS) > 1:
        raise ValueError(f"{text!r}: ** may stand once before the checkpoint's directory, and once behind it")
    return tuple(None if part == _ANY_PARTS else _compiled_part(text, part) for part in parts)


def _compiled_part(text: str, part: str) -> re.Pattern[str]:
    """One `*` at most: with more, time would grow with the square of the key's length."""
    if part.count("*") > 1:
        raise ValueError(f"{text!r}: * may stand once between two slashes, and ** alone between them")
    if re.search(r"\*\{(step|rank)\}", part):
        raise ValueError(f"{text!r}: * may not stand right before a number, it would take its digits")
    literals = _TOKEN.split(part)
    if any("{" in literal or "}" in literal for literal in literals):
        raise ValueError(f"{text!r}: braces stand around step and rank only")
    tokens = [*_TOKEN.findall(part), ""]
    pairs = zip(literals, tokens, strict=True)
    return re.compile("".join(re.escape(literal) + _DIGITS.get(token, "") for literal, token in pairs))

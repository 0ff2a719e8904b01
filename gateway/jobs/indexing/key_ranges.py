"""Which parts of the key space a slot's index is about, and where in it a listing can begin. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from gateway.metadata.listing.pages import END, prefix_end
from gateway.policy.slots import Prefix, Slots

LISTED = ("ttl", "immutable")
"""The kinds of consistency in which the listing index answers."""

_GREATEST = "\U0010ffff"
_KEY_BYTES_MAX = 1024


@dataclass(frozen=True, slots=True, order=True)
class KeyRange:
    """[start, stop)."""

    start: bytes
    stop: bytes


def ranges_of(slots: Slots, prefix: Prefix, indexed: Collection[str]) -> list[KeyRange]:
    """Return the key ranges under `prefix` that a slot's index keeps, in order.

    Inner slots are left out if they are strict, or if they have an index of their own (`indexed`: the names of those).
    """
    start, stop = prefix.key_prefix.encode(), stop_of(prefix)
    within = [(one.prefix.key_prefix.encode(), one) for one in slots.of_bucket(prefix.bucket) if one.prefix != prefix]
    within = [(begin, one) for begin, one in within if begin.startswith(start) and one.prefix.bucket]
    edges = sorted({start, stop, *(begin for begin, _ in within), *(prefix_end(begin) for begin, _ in within)})
    kept: list[KeyRange] = []
    for first, end in pairwise(edges):
        inner = next((one for begin, one in within if first.startswith(begin)), None)
        if inner is None or (inner.consistency in LISTED and inner.name not in indexed):
            kept.append(KeyRange(kept.pop().start if kept and kept[-1].stop == first else first, end))
    return kept


def stop_of(prefix: Prefix) -> bytes:
    """Return the first key behind all keys of a prefix."""
    return prefix_end(prefix.key_prefix.encode()) if prefix.key_prefix else END


def gaps(parts: Iterable[KeyRange], known: Iterable[KeyRange]) -> list[KeyRange]:
    """Return the parts of `parts` that are in none of `known`. Both are in order."""
    left, known = [], list(known)
    for part in parts:
        start = part.start
        for one in known:
            if one.stop <= start or one.start >= part.stop:
                continue
            if one.start > start:
                left.append(KeyRange(start, one.start))
            start = max(start, one.stop)
        if start < part.stop:
            left.append(KeyRange(start, part.stop))
    return left


def key_before(start: bytes, key_prefix: str) -> str:
    """Return a key behind which a prefix's listing finds all from `start` on; empty: its beginning will do.

    A listing begins behind a key (`start-after`), and places are behind keys, or behind all keys of a prefix: the
    greatest character after that prefix lies behind nearly all of it.
    """
    if start <= key_prefix.encode():
        return ""
    if start.endswith(b"\0"):
        return start[:-1].decode()
    whole = (start[:-1] + bytes([start[-1] - 1])).decode("utf-8", "ignore")
    if len(whole.encode()) == len(start) and len(start) + len(_GREATEST.encode()) <= _KEY_BYTES_MAX:
        return whole + _GREATEST
    return start.decode("utf-8", "ignore")[:-1]

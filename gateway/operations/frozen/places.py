"""Which parts of a bucket's keys are frozen, and by which slot. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from gateway.metadata.listing.pages import END, prefix_end
from gateway.policy.slots import Slot, Slots

_GREATEST = "\U0010ffff".encode()
_KEY_BYTES_MAX = 1024


class Part(NamedTuple):
    """The places [start, stop); `slot` is the one that freezes them, None where none does."""

    start: bytes
    stop: bytes
    slot: Slot | None


def parts(slots: Slots, bucket: str, start: bytes, stop: bytes) -> list[Part]:
    """[start, stop) of a bucket in order, neighbours that nothing freezes in one."""
    found: list[Part] = []
    for part in _pieces(slots, bucket, start, stop):
        if found and part.slot is None and found[-1].slot is None:
            part = Part(found.pop().start, part.stop, None)
        found.append(part)
    return found


def _pieces(slots: Slots, bucket: str, start: bytes, stop: bytes) -> Iterator[Part]:
    prefixes = [(slot.prefix.key_prefix.encode(), slot) for slot in slots.of_bucket(bucket)]
    edges = {b"", END, *(prefix for prefix, _ in prefixes), *(prefix_end(prefix) for prefix, _ in prefixes)}
    inner = sorted({start, stop, *(edge for edge in edges if start < edge < stop)})
    for first, last in pairwise(inner):
        slot = next((slot for prefix, slot in prefixes if _holds(prefix, first)), None)
        yield Part(first, last, slot if slot is not None and slot.consistency == "snapshot" else None)


def _holds(prefix: bytes, place: bytes) -> bool:
    """Whether what lies behind `place`, up to the next edge, begins with the prefix."""
    return prefix <= place < prefix_end(prefix) if prefix else True


def before(place: bytes) -> str:
    """What to ask the origin to `start-after` so that it lists `place` and all behind; it may list a little more."""
    if place.endswith(b"\0"):
        return place[:-1].decode("utf-8", "ignore")
    for text in (place[:-1] + bytes([place[-1] - 1]) + _GREATEST if place else b"", place[:-1]):
        if len(text) <= _KEY_BYTES_MAX and _is_text(text):
            return text.decode()
    return place[:-1].decode("utf-8", "ignore")


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True

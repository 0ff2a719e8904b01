"""S3's listing as simply as it can be said, and keys that are hard to list: what the real thing is held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import strategies as st

from gateway.metadata.listing.pages import ListRequest, Page

_PIECES = [
    "a",
    "b",
    "/",
    "//",
    "-",
    ".",
    "é",
    "e\u0301",
    "€",
    "😀",
    "\U0010ffff",
    "\x01",
    "\x7f",
    " ",
    "+",
    "%2F",
    "&<>",
]

TEXT = st.lists(st.sampled_from(_PIECES), min_size=0, max_size=5).map("".join)
"""Prefixes, delimiters and markers: empty ones, and ones of many bytes or several characters."""

KEY = st.lists(st.sampled_from(_PIECES), min_size=1, max_size=6).map("".join)
KEYS = st.sets(KEY, max_size=40)


@dataclass(frozen=True)
class Entry:
    """What counts as one in a page."""

    name: bytes
    is_prefix: bool


def entries(keys: Iterable[bytes], wanted: ListRequest) -> list[Entry]:
    """All that is to be listed behind the place, without a limit, in order."""
    found: dict[bytes, Entry] = {}
    for key in sorted(keys):
        if key.startswith(wanted.prefix):
            rolled_up = _rolled_up(key, wanted)
            name = key if rolled_up is None else rolled_up
            found[name] = Entry(name, rolled_up is not None)
    return [found[name] for name in sorted(found) if _is_behind(name, wanted)]


def page(keys: Iterable[bytes], wanted: ListRequest) -> tuple[list[bytes], list[bytes], bool]:
    """Keys, common prefixes, and whether there is more."""
    listed = entries(keys, wanted)
    taken = listed[: wanted.limit]
    return (
        [entry.name for entry in taken if not entry.is_prefix],
        [entry.name for entry in taken if entry.is_prefix],
        len(listed) > len(taken) > 0,
    )


def said(found: Page) -> tuple[list[bytes], list[bytes], bool]:
    """The same of a page."""
    return [key for key, _ in found.keys], found.prefixes, found.is_truncated


def following(wanted: ListRequest, found: Page) -> ListRequest:
    """What the next page is asked of."""
    return ListRequest(wanted.prefix, wanted.delimiter, wanted.limit, found.last, found.last_is_prefix)


def _rolled_up(key: bytes, wanted: ListRequest) -> bytes | None:
    if not wanted.delimiter or wanted.delimiter not in key[len(wanted.prefix) :]:
        return None
    return key[: key.index(wanted.delimiter, len(wanted.prefix)) + len(wanted.delimiter)]


def _is_behind(name: bytes, wanted: ListRequest) -> bool:
    return name > wanted.after and not (wanted.skip and name.startswith(wanted.after))

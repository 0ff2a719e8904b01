"""Listings of which a part is frozen, against a model: the frozen keys and the origin's others, as if in one bucket."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.metadata.listing.pages import END, Listed, ListRequest, Page, SortedKeys, key_successor, prefix_end
from gateway.operations.frozen.mixing import Mixing
from gateway.operations.frozen.places import before, parts
from gateway.policy.prefixes import Prefix
from gateway.policy.slots import Slot, Slots
from gateway.s3.list_result import EntryForm, ListedEntry, ListedPage
from tests.support import listing_model as model

WANTED = st.builds(
    ListRequest,
    prefix=model.TEXT.map(str.encode),
    delimiter=model.TEXT.map(str.encode),
    limit=st.integers(0, 8),
    after=model.TEXT.map(str.encode),
)
KEYS = model.KEYS.map(lambda keys: {key.encode() for key in keys})
SLOTS = st.dictionaries(model.TEXT, st.booleans(), max_size=3)
FORM = EntryForm("", "", "")


def slots_of(prefixes: dict[str, bool]) -> Slots:
    """A slot for each prefix of keys, frozen or not."""
    return Slots(
        Slot(f"s{number}", Prefix("bucket", prefix), "read-only", "snapshot" if frozen else "strict")
        for number, (prefix, frozen) in enumerate(prefixes.items())
    )


def is_frozen(slots: Slots, key: bytes) -> bool:
    return slots.find("bucket", key.decode()).consistency == "snapshot"


def s3_page(keys: set[bytes], place: bytes, wanted: ListRequest) -> ListedPage:
    """As S3 answers who asks with `start-after`, less what lies before the place."""
    asked = replace(wanted, after=before(place).encode() if place > wanted.prefix else b"")
    listed, prefixes, truncated = model.page(keys, asked)
    entries = [ListedEntry(key, "", "", 0, FORM) for key in listed if key >= place]
    token = "more" if truncated else None
    last = max([*listed, *prefixes], default=b"")
    if truncated and last < place:
        return s3_page({key for key in keys if key > last and not key.startswith(last)}, place, wanted)
    return ListedPage(entries, [prefix for prefix in prefixes if prefix >= place], token)


def mixed(slots: Slots, origin: set[bytes], frozen: set[bytes], wanted: ListRequest) -> Page:
    """The page as the gateway makes it. A record says where a key is from."""
    keys = SortedKeys([(key, b"frozen") for key in sorted(frozen)])

    async def ask(place: bytes, asked: ListRequest) -> ListedPage:
        return s3_page(origin, place, asked)

    def numbered(entry: ListedEntry) -> Listed:
        return entry.key, b"origin"

    async def fill() -> Page:
        readers = {slot.name: keys.read for slot in slots}
        found = parts(slots, "bucket", wanted.start, max(wanted.start, wanted.stop))
        return await Mixing(wanted, ask, readers, numbered).fill(found)

    return asyncio.run(fill())


@settings(max_examples=150, deadline=None)
@given(SLOTS, KEYS, KEYS, WANTED)
@example({"a/b": True}, {b"a/c"}, set(), ListRequest(b"", b"/"))
@example({"a/b": True}, {b"a/b"}, set(), ListRequest(b"", b"/"))
@example({"a/b": True}, set(), {b"a/b"}, ListRequest(b"", b"/"))
@example({"a/b": True, "a/bb": False}, {b"a/bb/", b"a/ba"}, {b"a/b/", b"a/bb"}, ListRequest(b"a/", b"/"))
def test_every_page_is_as_if_all_lay_in_one_bucket(
    prefixes: dict[str, bool], origin: set[bytes], frozen: set[bytes], wanted: ListRequest
) -> None:
    """Keys and common prefixes, limits and truncation, on all pages; each key from where it belongs."""
    slots = slots_of(prefixes)
    keys = {key for key in origin if not is_frozen(slots, key)} | {key for key in frozen if is_frozen(slots, key)}
    seen: list[bytes] = []
    everything = [entry.name for entry in model.entries(keys, wanted)]
    while True:
        found = mixed(slots, origin, frozen, wanted)
        assert model.said(found) == model.page(keys, wanted)
        assert all(record == (b"frozen" if is_frozen(slots, key) else b"origin") for key, record in found.keys)
        seen += sorted([key for key, _ in found.keys] + found.prefixes)
        if not found.is_truncated:
            break
        wanted = model.following(wanted, found)
    assert wanted.limit == 0 or seen == everything


@settings(max_examples=150)
@given(SLOTS, model.KEY.map(str.encode))
def test_every_place_belongs_to_the_part_of_its_slot(prefixes: dict[str, bool], key: bytes) -> None:
    """The parts follow each other without a gap, and say of each key what the slots say."""
    slots = slots_of(prefixes)
    found = parts(slots, "bucket", b"", END)
    assert (found[0].start, found[-1].stop) == (b"", END)
    assert all(one.stop == other.start for one, other in pairwise(found))
    part = next(part for part in found if part.start <= key < part.stop)
    slot = slots.find("bucket", key.decode())
    assert part.slot == (slot if slot.consistency == "snapshot" else None)


@settings(max_examples=150)
@given(model.KEY.map(str.encode), st.sampled_from([key_successor, prefix_end, bytes]))
def test_the_origin_is_asked_from_before_a_place(key: bytes, place_of: object) -> None:
    """Never from behind it, which would leave something out; and from the key itself where the place is behind one."""
    place = place_of(key)  # type: ignore[operator]
    assert before(place).encode() < place
    assert before(key_successor(key)) == key.decode()
    assert before(prefix_end(key)).encode() >= key


@pytest.mark.parametrize("place", [b"a" * 1024, b"a" * 1023 + b"\xc3\xa9", b"\xc4\x80", b"\x00"])
def test_places_at_the_edge(place: bytes) -> None:
    """Keys of the greatest length, and characters whose last byte cannot be made less."""
    asked = before(place).encode()
    assert asked < place
    assert len(asked) <= 1024

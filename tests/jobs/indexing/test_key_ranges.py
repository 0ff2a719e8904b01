"""Which parts of the key space an index is about, and where a listing begins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.jobs.indexing.key_ranges import KeyRange, gaps, key_before, ranges_of
from gateway.metadata.listing.pages import END, key_successor, prefix_end
from gateway.policy.slots import Prefix, Slots
from tests.support.listing_model import KEY
from tests.support.slots import Slot

PLACES = st.integers(0, 12).map(lambda number: b"%02d" % number)
PARTS = st.lists(st.tuples(PLACES, PLACES), max_size=5)


def slot(name: str, prefix: str, consistency: str = "ttl") -> Slot:
    return Slot(name, Prefix.parse(prefix), consistency=consistency)


def test_a_slot_alone_is_its_prefix() -> None:
    """The whole bucket, or what begins with the prefix."""
    whole, part = slot("whole", "s3://b/"), slot("part", "s3://b/data/")
    assert ranges_of(Slots([whole]), whole.prefix, {"whole"}) == [KeyRange(b"", END)]
    assert ranges_of(Slots([part, slot("other", "s3://c/data/x/", "strict")]), part.prefix, {"part"}) == [
        KeyRange(b"data/", b"data0")
    ]


def test_strict_slots_and_other_indexes_within_are_left_out() -> None:
    """Nothing is kept of the one; the other looks after itself. A slot of any other kind is listed along."""
    slots = Slots(
        [
            slot("outer", "s3://b/"),
            slot("strict", "s3://b/m/", "strict"),
            slot("own", "s3://b/p/"),
            slot("plain", "s3://b/q/"),
            slot("again", "s3://b/m/a/"),
        ]
    )
    outer = next(iter(slots))
    assert ranges_of(slots, outer.prefix, {"outer", "own"}) == [
        KeyRange(b"", b"m/"),
        KeyRange(b"m/a/", b"m/a0"),
        KeyRange(b"m0", b"p/"),
        KeyRange(b"p0", END),
    ]


def ordered(parts: list[tuple[bytes, bytes]]) -> list[KeyRange]:
    """Those that are not empty and overlap none before."""
    kept: list[KeyRange] = []
    for start, stop in sorted(parts):
        if start < stop and (not kept or kept[-1].stop <= start):
            kept.append(KeyRange(start, stop))
    return kept


@given(PARTS.map(ordered), PARTS.map(ordered))
def test_gaps_are_what_is_in_none(parts: list[KeyRange], known: list[KeyRange]) -> None:
    """Place by place."""

    def within(place: bytes, among: list[KeyRange]) -> bool:
        return any(part.start <= place < part.stop for part in among)

    found = gaps(parts, known)
    for number in range(13):
        place = b"%02d" % number
        assert within(place, found) == (within(place, parts) and not within(place, known))


@given(KEY, KEY, KEY)
def test_a_listing_from_a_place_misses_nothing(prefix: str, key: str, other: str) -> None:
    """Whether the place is behind a key or behind all keys of a prefix: what lies there on is listed."""
    for start in (prefix.encode(), key_successor((prefix + key).encode()), prefix_end((prefix + key).encode())):
        after = key_before(start, prefix)
        whole = prefix + other
        if whole.encode() >= start and start < prefix_end(prefix.encode()):
            assert whole.encode() > after.encode()

"""Pages of a listing, against a model that says what S3 lists in the simplest way."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.metadata.listing.dirty_keys import WRITTEN_MAX, Overlaid, Written
from gateway.metadata.listing.pages import END, ListRequest, SortedKeys, key_successor, prefix_end, take
from gateway.metadata.listing.ranges import covered_ranges
from tests.support import listing_model as model

WANTED = st.builds(
    ListRequest,
    prefix=model.TEXT.map(str.encode),
    delimiter=model.TEXT.map(str.encode),
    limit=st.integers(0, 8),
    after=model.TEXT.map(str.encode),
)
KEYS = model.KEYS.map(lambda keys: {key.encode() for key in keys})


def keys_of(keys: Iterable[bytes]) -> SortedKeys:
    return SortedKeys([(key, b"r") for key in sorted(keys)])


@pytest.mark.slow
@settings(max_examples=100)
@given(KEYS, WANTED)
def test_every_page_is_what_s3_lists(keys: set[bytes], wanted: ListRequest) -> None:
    """Order, limit, common prefixes, truncation, on the first page and on all that follow, with nothing twice."""
    seen: list[bytes] = []
    everything = [entry.name for entry in model.entries(keys, wanted)]
    while True:
        found = take(keys_of(keys), wanted, END)
        assert found is not None
        assert model.said(found) == model.page(keys, wanted)
        seen += sorted([key for key, _ in found.keys] + found.prefixes)
        if not found.is_truncated:
            break
        wanted = model.following(wanted, found)
    assert wanted.limit == 0 or seen == everything


@settings(max_examples=100)
@given(KEYS, WANTED, model.KEY.map(str.encode))
def test_what_is_not_known_is_never_guessed(keys: set[bytes], wanted: ListRequest, known_until: bytes) -> None:
    """A page of which a part lies where nothing is known is none; one that is given is right whatever lies there."""
    known = {key for key in keys if key < known_until}
    found = take(keys_of(known), wanted, known_until)
    if found is not None and wanted.limit:
        assert model.said(found) == model.page(keys, wanted)


@pytest.mark.slow
@settings(max_examples=100)
@given(KEYS, KEYS, KEYS, WANTED)
def test_written_keys_are_merged_before_the_page_is_cut(
    known: set[bytes], written: set[bytes], there: set[bytes], wanted: ListRequest
) -> None:
    """With the truth of each written key, asked for until none is missing, the page is that of the keys there are."""
    truth = (known - written) | (there & written)
    truths: dict[bytes, bytes | None] = {}
    for _ in range(len(written) + 1):
        keys = Overlaid(keys_of(known), among(written), truths)
        found = take(keys, wanted, END)
        assert found is not None
        needed = keys.needed(wanted, found)
        if not needed:
            assert model.said(found) == model.page(truth, wanted)
            return
        assert truths.keys().isdisjoint(needed)
        truths |= {key: b"t" if key in there else None for key in needed}
    raise AssertionError("asks for ever")


@pytest.mark.slow
@settings(max_examples=100)
@given(KEYS, WANTED.filter(lambda wanted: wanted.limit > 0))
def test_a_page_tells_everything_about_the_parts_it_is_said_to(keys: set[bytes], wanted: ListRequest) -> None:
    """In what is learned of an answer lies no key that was not in it; and without delimiter, nothing is left out."""
    found = take(keys_of(keys), wanted, END)
    assert found is not None
    listed = [key for key, _ in found.keys]
    parts = covered_ranges(wanted, listed, found.prefixes, is_last=not found.is_truncated)
    for start, stop in parts:
        assert start < stop
        assert {key for key in keys if start <= key < stop} <= set(listed)
    assert all(any(start <= key < stop for start, stop in parts) for key in listed)
    if not wanted.delimiter and wanted.start < wanted.stop:
        assert parts == [(wanted.start, key_successor(found.last) if found.is_truncated else wanted.stop)]


@given(model.TEXT.map(str.encode), model.KEY.map(str.encode))
def test_behind_all_is_behind_what_begins_so(prefix: bytes, key: bytes) -> None:
    """And before everything else that is greater."""
    assert (key < prefix_end(prefix)) == (key < prefix or key.startswith(prefix))
    assert prefix + b"\xf4\x8f\xbf\xbf" * 3 < prefix_end(prefix) <= END


def among(written: Iterable[bytes]) -> Written:
    """As the marks give them."""

    def found(start: bytes, stop: bytes, count: int) -> list[bytes]:
        return sorted(key for key in written if start <= key < stop)[:count]

    return found


def test_too_many_written_keys_in_a_row_are_not_known() -> None:
    """Looking at all of them would take for ever."""
    keys = Overlaid(keys_of([b"z"]), among([b"%06d" % number for number in range(WRITTEN_MAX)]), {})
    assert take(keys, ListRequest(), END) is not None
    assert keys.is_unknown
    fewer = Overlaid(keys_of([b"z"]), among([b"%06d" % number for number in range(WRITTEN_MAX - 1)]), {})
    assert take(fewer, ListRequest(), END) is not None
    assert not fewer.is_unknown


class Counted:
    """Keys that count what is read of them."""

    def __init__(self, keys: SortedKeys) -> None:
        self.keys, self.rows = keys, 0

    def read(self, start: bytes, stop: bytes, count: int) -> list[tuple[bytes, bytes]]:
        found = self.keys.read(start, stop, count)
        self.rows += len(found)
        return found


def test_nothing_under_a_common_prefix_is_scanned() -> None:
    """A thousand prefixes of a hundred keys each cost about a thousand rows, not a hundred thousand."""
    keys = Counted(keys_of(b"d%04d/%02d" % (one, two) for one in range(1001) for two in range(100)))
    found = take(keys, ListRequest(delimiter=b"/"), END)
    assert found is not None
    assert (len(found.prefixes), found.is_truncated) == (1000, True)
    assert keys.rows < 1100


def test_a_flat_directory_is_read_in_large_pieces() -> None:
    """With a delimiter that occurs in no key, a page takes few reads."""
    reads = 0

    class Counting(Counted):
        def read(self, start: bytes, stop: bytes, count: int) -> list[tuple[bytes, bytes]]:
            nonlocal reads
            reads += 1
            return super().read(start, stop, count)

    found = take(Counting(keys_of(b"%05d" % number for number in range(5000))), ListRequest(delimiter=b"/"), END)
    assert found is not None
    assert len(found.keys) == 1000
    assert reads < 12


@pytest.mark.parametrize(
    ("after", "skip", "expected"),
    [(b"a/b", False, []), (b"a/", False, []), (b"a", False, [b"a/"]), (b"a/", True, []), (b"", False, [b"a/"])],
)
def test_a_common_prefix_must_be_greater_than_the_place(after: bytes, skip: bool, expected: list[bytes]) -> None:
    """S3 leaves `a/` out behind `a/b` although `a/c` is there."""
    found = take(keys_of([b"a/b", b"a/c"]), ListRequest(delimiter=b"/", after=after, skip=skip), END)
    assert found is not None
    assert found.prefixes == expected

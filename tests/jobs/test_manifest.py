"""Manifests: whatever way the bytes come, the same objects; what names no object is refused by its line."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.jobs.worklist import LINE_BYTES_MAX, BadManifest, ManifestLines

KEYS = st.text(st.characters(blacklist_characters="\r\n", codec="utf-8"), min_size=1, max_size=30)


@given(st.lists(KEYS, max_size=20), st.lists(st.integers(1, 9), max_size=30), st.booleans(), st.booleans())
def test_pieces_may_be_cut_anywhere(keys: list[str], cuts: list[int], crlf: bool, ends: bool) -> None:
    """Line feeds or CRLF, with or without one at the end, in pieces of any size."""
    feed = "\r\n" if crlf else "\n"
    text = feed.join(f"s3://b/{key}" for key in keys) + (feed if ends else "")
    rest, lines = text.encode(), ManifestLines()
    found = []
    for cut in cuts:
        piece, rest = rest[:cut], rest[cut:]
        found += list(lines.feed(piece))
    found += [*lines.feed(rest), *lines.end()]
    assert found == [("b", key) for key in keys]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"b/key", "line 3: 'b/key' does not begin with s3://"),
        (b"s3://bucket", "line 3 names no key"),
        (b"s3://bucket/", "line 3 names no key"),
        (b"s3://b/\xff", "line 3"),
        (b"x" * (LINE_BYTES_MAX + 1), "line 3 is longer"),
    ],
)
def test_a_bad_line_is_named(line: bytes, said: str) -> None:
    """The message says which and why."""
    lines = ManifestLines()
    assert list(lines.feed(b"s3://b/a\n\n")) == [("b", "a")]
    with pytest.raises(BadManifest, match=said):
        list(chain(lines.feed(line), lines.end()))

"""Snapshots as JSON lines: what goes out comes in again, and nothing comes in that is not what it should be."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.metadata.snapshots.ndjson import (
    LINE_BYTES_MAX,
    BadLine,
    LineReader,
    header_line,
    object_lines,
)
from gateway.metadata.snapshots.object_file import Layout, ObjectFileExtent
from gateway.metadata.snapshots.store import Manifest
from gateway.s3.list_result import EntryTemplate, ListedEntry
from tests.support import listing_model as model
from tests.support.snapshots import DATE, TEMPLATE, entry

LAYOUT = Layout(0, ObjectFileExtent(0, 0, 0), ObjectFileExtent(0, 0, 0))
MANIFEST = Manifest("1" * 32, "v1", "s3://bucket/", "https://origin", 1.5, 2.5, 0, 0, "d" * 64, LAYOUT)
OWNED = EntryTemplate(
    "<ChecksumAlgorithm>CRC32</ChecksumAlgorithm>",
    "<Owner><ID>a&amp;b</ID></Owner>",
    "<StorageClass>GLACIER</StorageClass><RestoreStatus><IsRestoreInProgress>true</IsRestoreInProgress></RestoreStatus>",
)
PLAIN = EntryTemplate("", "", "")
ENTRIES = st.lists(
    st.builds(
        lambda key, etag, size_bytes, template: ListedEntry(key.encode(), DATE, etag, size_bytes, template),
        model.KEY,
        st.sampled_from(
            ['"d41d8cd98f00b204e9800998ecf8427e"', '"d41d8cd98f00b204e9800998ecf8427e-12"', 'W/"x"', "bare"]
        ),
        st.integers(0, 2**48 - 1),
        st.sampled_from([TEMPLATE, OWNED, PLAIN]),
    ),
    max_size=6,
)


def read(*pieces: bytes) -> list[ListedEntry]:
    reader = LineReader()
    found = [one for piece in pieces for _, one in reader.feed(piece)]
    return found + [one for _, one in reader.end()]


@pytest.mark.slow
@settings(max_examples=200)
@given(ENTRIES, st.integers(1, 300))
def test_what_goes_out_comes_in(entries: list[ListedEntry], piece_bytes: int) -> None:
    """To the letter, whatever way the pieces cut it."""
    templates = [OWNED, TEMPLATE, PLAIN]
    content = header_line(MANIFEST, templates) + object_lines(entries, templates)
    assert read(*(content[at : at + piece_bytes] for at in range(0, len(content), piece_bytes))) == entries
    assert read(content.rstrip(b"\n")) == entries


def test_the_first_line_says_what_it_is() -> None:
    """Prefix, origin, times, and what is to be compared."""
    reader = LineReader()
    assert list(reader.feed(header_line(MANIFEST, [TEMPLATE]))) == []
    header = reader.header
    assert header is not None
    assert (str(header.prefix), header.origin, header.started_at, header.ended_at) == (
        "s3://bucket/",
        "https://origin",
        1.5,
        2.5,
    )
    assert (header.objects, header.digest) == (0, "d" * 64)


def test_lines_can_be_written_by_hand() -> None:
    """Key, ETag and size are enough, and a prefix; empty lines do no harm."""
    content = (
        b'{"snapshot": 1, "prefix": "s3://b/p", "ended_at": 86400}\n\n{"key": "p1", "etag": "\\"e\\"", "size": 3}\n'
    )
    (found,) = read(content)
    assert found == ListedEntry(b"p1", "1970-01-02T00:00:00.000Z", '"e"', 3, TEMPLATE)


HEADER = b'{"snapshot": 1, "prefix": "s3://bucket/p"}\n'
GOOD = {"key": "p1", "etag": '"e"', "size": 3, "last_modified": DATE}


def line(**changes: object) -> bytes:
    return HEADER + orjson.dumps(GOOD) + b"\n" + orjson.dumps(GOOD | changes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "line 1: there must be a first line"),
        (b"\n\n", "line 1: there must be a first line"),
        (b"[]", "line 1: not a JSON object"),
        (b"{", "line 1: "),
        (b'{"prefix": "s3://b/"}', 'line 1: the first line must have "snapshot": 1'),
        (b'{"snapshot": 2, "prefix": "s3://b/"}', 'line 1: the first line must have "snapshot": 1'),
        (b'{"snapshot": 1}', 'line 1: "prefix"'),
        (b'{"snapshot": 1, "prefix": "s3://"}', "must name a bucket"),
        (b'{"snapshot": 1, "prefix": "bucket"}', "does not begin with s3://"),
        (b'{"snapshot": 1, "prefix": "s3://b/", "objects": "1"}', "'objects' has a value of the wrong kind"),
        (b'{"snapshot": 1, "prefix": "s3://b/", "objects": true}', "'objects' has a value of the wrong kind"),
        (b'{"snapshot": 1, "prefix": "s3://b/", "wrong": 1}', "unknown: 'wrong'"),
        (b'{"snapshot": 1, "prefix": "s3://b/", "forms": [["", ""]]}', "three texts"),
        (b'{"snapshot": 1, "prefix": "s3://b/", "forms": [["", "", "</Contents>"]]}', "XML elements"),
        (b'{"snapshot": 1, "prefix": "s3://b/", "forms": [["", "", "<Key>x</Key>"]]}', "XML elements"),
        (b'{"snapshot": 1, "prefix": "s3://b/", "forms": [["", "", "text"]]}', "XML elements"),
        (b'{"snapshot": 1, "prefix": "s3://b/", "forms": [["<Owner/>", "", ""]]}', "XML elements"),
        (HEADER + b"{\n", "line 2: "),
        (HEADER + b"\xff\n", "line 2: "),
        (line(key=""), 'line 3: "key"'),
        (line(key="p" * 1025), 'line 3: "key"'),
        (line(key=7), 'line 3: "key"'),
        (line(key="other"), "line 3: the key 'other' does not begin with 'p'"),
        (line(etag=""), 'line 3: "etag"'),
        (line(etag="a\nb"), 'line 3: "etag"'),
        (line(etag="\u20ac"), 'line 3: "etag"'),
        (line(size=-1), 'line 3: "size"'),
        (line(size=2**48), 'line 3: "size"'),
        (line(size=True), 'line 3: "size"'),
        (line(size=1.5), 'line 3: "size"'),
        (line(last_modified="yesterday"), 'line 3: "last_modified"'),
        (line(last_modified="2026-01-02T03:04:05"), 'line 3: "last_modified"'),
        (line(form=1), 'line 3: "form"'),
        (line(more=1), "line 3: unknown: 'more'"),
    ],
)
def test_a_wrong_line_is_named(content: bytes, said: str) -> None:
    """By its number, with what is wrong with it."""
    with pytest.raises(BadLine) as refused:
        read(content)
    assert said in str(refused.value)


def test_a_line_without_end_takes_no_memory() -> None:
    """It is refused as soon as it is too long."""
    with pytest.raises(BadLine, match="line 2: longer than"):
        read(HEADER, *[b"x" * (LINE_BYTES_MAX // 4)] * 5)


def test_an_object_of_a_form_out_of_the_ordinary_is_told_as_it_was() -> None:
    """Only the first form goes without saying."""
    lines = object_lines([entry("a"), entry("b", template=OWNED)], [TEMPLATE, OWNED]).splitlines()
    assert "form" not in orjson.loads(lines[0])
    assert orjson.loads(lines[1])["form"] == 1

"""Objects on their way into order: told of as they were listed."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from gateway.metadata.listing.pages import END
from gateway.metadata.listing.records import etag_and_size, modified_of, pack, unpack
from gateway.metadata.snapshots.staging import TEMPLATES_MAX, ObjectTable
from gateway.s3.list_result import EntryTemplate, ListedEntry
from tests.support.snapshots import entry

DATES = st.sampled_from(["2026-01-02T03:04:05.000Z", "2026-01-02T03:04:05.678Z", "2026-01-02T03:04:05Z", "yesterday"])
HEX = st.binary(min_size=16, max_size=16).map(bytes.hex)
ETAGS = st.one_of(
    HEX.map(lambda text: f'"{text}"'),
    st.tuples(HEX, st.integers(1, 10_000)).map(lambda parts: f'"{parts[0]}-{parts[1]}"'),
    st.sampled_from(['"opaque"', 'W/"weak"', "bare", '""']),
)


@given(DATES, ETAGS, st.integers(0, 2**48 - 1), st.integers(0, TEMPLATES_MAX - 1))
def test_version_and_date_come_out_of_a_record_without_the_rest(
    modified: str, etag: str, size_bytes: int, template: int
) -> None:
    """As they were listed, however they were written."""
    record = pack(ListedEntry(b"key", modified, etag, size_bytes, EntryTemplate("", "", "")), template)
    assert etag_and_size(record) == (etag, size_bytes)
    assert modified_of(record) == modified


def test_objects_keep_their_forms(tmp_path: Path) -> None:
    """Those that came with the first page, and those that came later, or were there before a restart."""
    templates = [EntryTemplate("", f"<Owner><ID>{number}</ID></Owner>", "") for number in range(3)]
    entries = [entry(f"{number}", template=template) for number, template in enumerate(templates)]
    for one in entries:
        table = ObjectTable(tmp_path / "table")
        table.append([one])
        table.close()
    table = ObjectTable(tmp_path / "table")
    assert [unpack(*row, table.templates) for row in table.read(b"", END, 10)] == entries
    assert [key for key, _ in table.read(b"1", b"2", 10)] == [b"1"]
    assert [key for key, _ in table.read(b"", END, 1)] == [b"0"]
    assert table.read(b"3", END, 10) == []
    table.close()

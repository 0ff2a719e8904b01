"""Records of the listing index: what was listed is listed again to the letter, page by page as entry by entry."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError
from gateway.metadata.listing.pages import END
from gateway.metadata.listing.records import (
    FIXED,
    contents_xml,
    date_text,
    numbered,
    pack,
    pack_template,
    packed_page,
    unpack,
    unpack_template,
)
from gateway.s3.list_result import EntryTemplate, ListedEntry, parse_listed_page
from gateway.s3.xml_writer import encode_list_key
from tests.support import listing_model as model
from tests.support.listing_model import KEY, KEYS

DATES = st.one_of(
    st.builds(lambda at, ms: f"{date_text(at)}.{ms:03}Z", st.integers(0, 2**32 - 1), st.integers(0, 999)),
    st.sampled_from(
        [
            "",
            "2026-01-01T00:00:00Z",
            "2026-02-30T00:00:00.000Z",
            "2026-01-01T24:00:00.000Z",
            "2026-01-01T00:00:00.0000Z",
            "2026-01-01T00:00:00.000+00:00",
            "1969-12-31T23:59:59.999Z",
            "2107-01-01T00:00:00.000Z",
            "yesterday & today",
        ]
    ),
)
DIGEST = st.binary(min_size=16, max_size=16).map(bytes.hex)
ETAGS = st.one_of(
    DIGEST.map(lambda digest: f'"{digest}"'),
    st.builds(lambda digest, parts: f'"{digest}-{parts}"', DIGEST, st.integers(1, 10_000)),
    DIGEST,
    DIGEST.map(lambda digest: f'"{digest.upper()}"'),
    DIGEST.map(lambda digest: f'W/"{digest}"'),
    st.sampled_from(["", '""', '"<&>"', f'"{"0" * 32}-0"', f'"{"0" * 32}-01"', f'"{"0" * 32}-10001"', f'"{"0" * 33}"']),
)
CHECKSUM = "<ChecksumAlgorithm>CRC32</ChecksumAlgorithm>"
TEMPLATES = st.builds(
    EntryTemplate,
    st.sampled_from(["", CHECKSUM]),
    st.sampled_from(["", "<Owner><ID>a&amp;b</ID></Owner>"]),
    st.sampled_from(["", "<StorageClass>STANDARD</StorageClass>", "<StorageClass>GLACIER</StorageClass><X>é</X>"]),
)
SIZES = st.integers(0, 2**48 - 1)
ENTRIES = st.lists(
    st.builds(ListedEntry, model.KEY.map(str.encode), DATES, ETAGS, SIZES, TEMPLATES),
    max_size=8,
    unique_by=lambda entry: entry.key,
).map(lambda entries: sorted(entries, key=lambda entry: entry.key))


@given(ENTRIES)
def test_what_is_listed_from_records_is_what_was_packed(entries: list[ListedEntry]) -> None:
    """Read from the gateway's own answer by whoever reads the origin's: every field, to the letter."""
    listed, templates = numbered(entries)
    contents = contents_xml(listed, templates, url=True, owner=True)
    fields = "<EncodingType>url</EncodingType><IsTruncated>false</IsTruncated>"
    document = f"<ListBucketResult>{fields}{contents}</ListBucketResult>"
    assert parse_listed_page(document.encode(), with_owner=True).entries == entries
    assert [unpack(key, record, templates) for key, record in listed] == entries


@pytest.mark.slow
@given(ENTRIES)
def test_owners_are_shown_to_those_who_asked(entries: list[ListedEntry]) -> None:
    """And to nobody else."""
    listed, templates = numbered(entries)
    assert "<Owner>" not in contents_xml(listed, templates, url=True, owner=False)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (b"plain/key-_.~", "plain/key-_.~"),
        (b"a&b<c>\"d'", "a&amp;b&lt;c&gt;&quot;d'"),
        ("é€😀".encode(), "é€😀"),
        (b"line\nfeed", "line\nfeed"),
        (b"return\r", "return&#13;"),
        (b"\x01", "&#x1;"),
    ],
)
def test_keys_are_escaped_where_they_are_not_encoded(key: bytes, text: str) -> None:
    """Alone, and among others that need none."""
    template = EntryTemplate("", None, "")
    for keys in ([key], [b"0", key], [key, b"z"]):
        listed = [(one, pack(ListedEntry(one, "", "", 0, template), 0)) for one in keys]
        assert f"<Key>{text}</Key>" in contents_xml(listed, [template], url=False, owner=False)
        assert contents_xml(listed, [template], url=False, owner=False).count("<Key>") == len(keys)


def test_most_records_are_as_short_as_they_can_be() -> None:
    """32 bytes, single parts and several, so that ten million keys take about a gigabyte."""
    for etag in (f'"{"a" * 32}"', f'"{"a" * 32}-10000"'):
        entry = ListedEntry(b"k", "2026-01-01T00:00:00.123Z", etag, 5 * 2**40, EntryTemplate("", None, ""))
        assert len(pack(entry, 7)) == FIXED.size == 32


@given(st.builds(EntryTemplate, st.text(), st.none() | st.text(), st.text()))
def test_forms_survive(template: EntryTemplate) -> None:
    """What everybody may say of an object, and whether the owner was asked for."""
    assert unpack_template(pack_template(template)) == template


@pytest.mark.parametrize("packed", [b"", b"{}", b"[1]", b"null"])
def test_what_is_no_form_is_refused(packed: bytes) -> None:
    """A damaged index is a miss."""
    with pytest.raises(ValueError):
        unpack_template(packed)


HEX = "0123456789abcdef0123456789abcdef"
WRITTEN_ETAGS = st.sampled_from(
    [
        f"&quot;{HEX}&quot;",
        f'"{HEX}"',
        f"&#34;{HEX}-7&#34;",
        f"&quot;{HEX}-10000&quot;",
        '"odd"',
        "",
    ]
)
WRITTEN_DATES = st.sampled_from(
    ["2026-11-21T00:00:00.000Z", "1970-01-01T00:00:59.999Z", "2026-11-21T00:00:00Z", "2026-13-21T00:00:00.000Z", "soon"]
)
EXTRAS = st.sampled_from(
    [
        ("", "<StorageClass>STANDARD</StorageClass>"),
        ("<ChecksumAlgorithm>CRC32</ChecksumAlgorithm>", "<StorageClass>GLACIER</StorageClass>"),
        ("", "<Owner><ID>me</ID></Owner>"),
        ("", "<RestoreStatus><IsRestoreInProgress>false</IsRestoreInProgress></RestoreStatus>"),
    ]
)
DETAILS = st.lists(st.tuples(WRITTEN_DATES, WRITTEN_ETAGS, st.integers(0, 10**14), EXTRAS), min_size=1, max_size=4)
BETWEEN = st.sampled_from(["", "\n  "])


def document(
    keys: list[str], details: list[tuple[str, str, int, tuple[str, str]]], between: str, token: str, *, url: bool = True
) -> bytes:
    entries = []
    for number, key in enumerate(keys):
        date, etag, size, (before, after) = details[number % len(details)]
        entries.append(
            f"<Contents><Key>{encode_list_key(key, url)}</Key><LastModified>{date}</LastModified><ETag>{etag}</ETag>"
            f"{before}<Size>{size}</Size>{after}</Contents>"
        )
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    more += "<EncodingType>url</EncodingType>" if url else ""
    return f"<ListBucketResult><Name>b</Name>{more}{between.join(entries)}</ListBucketResult>".encode()


@pytest.mark.slow
@given(
    KEYS, DETAILS, BETWEEN, st.sampled_from(["", "next"]), st.one_of(KEY.map(str.encode), st.just(END)), st.booleans()
)
@example({"a&b", "a+c", "a%20"}, [("2026-11-21T00:00:00.000Z", f'"{HEX}"', 1, ("", ""))], "", "", b"a&a", False)
def test_a_page_packed_at_once_is_the_same(
    keys: set[str],
    details: list[tuple[str, str, int, tuple[str, str]]],
    between: str,
    token: str,
    stop: bytes,
    url: bool,
) -> None:
    """However it is written, and wherever it is cut."""
    assume(url or all(key.isprintable() for key in keys))
    body = document(sorted(keys, key=str.encode), details, between, token, url=url)
    page = parse_listed_page(body, with_owner=True)
    before = [entry for entry in page.entries if entry.key < stop]
    found = packed_page(body, stop)
    assert (found.listed, list(found.templates)) == numbered(before)
    assert (found.next_token, found.is_cut) == (page.next_token, len(before) < len(page.entries))


@pytest.mark.parametrize("keys", [["b", "a"], ["a", "a"]])
def test_keys_out_of_order_are_refused(keys: list[str]) -> None:
    """As in a page for a client: what lies between them would be taken for known."""
    details = [("2026-11-21T00:00:00.000Z", f"&quot;{HEX}&quot;", 1, ("", ""))]
    with pytest.raises(OriginBodyError, match="order"):
        packed_page(document(keys, details, "", ""))


def test_what_is_no_listing_is_refused() -> None:
    """An error document, for one."""
    with pytest.raises(OriginBodyError):
        packed_page(b"<Error><Code>SlowDown</Code></Error>")

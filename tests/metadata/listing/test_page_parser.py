"""Pages packed at once are what entry by entry comes to."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError
from gateway.metadata.listing.pages import END
from gateway.metadata.listing.records import numbered, packed_page
from gateway.s3.list_result import parse_listed_page
from gateway.s3.xml_writer import encode_list_key
from tests.support.listing_model import KEY, KEYS

DIGEST = "0123456789abcdef0123456789abcdef"
ETAGS = st.sampled_from(
    [f"&quot;{DIGEST}&quot;", f'"{DIGEST}"', f"&#34;{DIGEST}-7&#34;", f"&quot;{DIGEST}-10000&quot;", '"odd"', ""]
)
DATES = st.sampled_from(
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
DETAILS = st.lists(st.tuples(DATES, ETAGS, st.integers(0, 10**14), EXTRAS), min_size=1, max_size=4)
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


@given(
    KEYS, DETAILS, BETWEEN, st.sampled_from(["", "next"]), st.one_of(KEY.map(str.encode), st.just(END)), st.booleans()
)
@example({"a&b", "a+c", "a%20"}, [("2026-11-21T00:00:00.000Z", f'"{DIGEST}"', 1, ("", ""))], "", "", b"a&a", False)
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
    details = [("2026-11-21T00:00:00.000Z", f"&quot;{DIGEST}&quot;", 1, ("", ""))]
    with pytest.raises(OriginBodyError, match="order"):
        packed_page(document(keys, details, "", ""))


def test_what_is_no_listing_is_refused() -> None:
    """An error document, for one."""
    with pytest.raises(OriginBodyError):
        packed_page(b"<Error><Code>SlowDown</Code></Error>")

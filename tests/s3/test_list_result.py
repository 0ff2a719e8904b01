"""Reading pages of ListObjectsV2."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError
from gateway.s3.list_result import EMPTY_PAGES_MAX, EntryTemplate, ListedEntry, PageChain, parse_listed_page
from gateway.s3.xml_writer import encode_list_key, escape

PAGE = (
    '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    "<Name>b</Name>{encoding}<IsTruncated>{truncated}</IsTruncated>{more}</ListBucketResult>"
)
DATE = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
TAIL = "<StorageClass>GLACIER</StorageClass>"
CONTENTS = f"<Contents><Key>a+b%2Fc%26</Key>{DATE}<ETag>&quot;e&quot;</ETag><Size>5</Size>{TAIL}</Contents>"
ENTRY = ListedEntry(b"a b/c&", "2026-01-01T00:00:00.000Z", '"e"', 5, EntryTemplate("", None, TAIL))


def page(truncated: str = "false", more: str = CONTENTS, encoding: str = "<EncodingType>url</EncodingType>") -> bytes:
    return PAGE.format(truncated=truncated, more=more, encoding=encoding).encode()


OTHER_WAYS = [
    CONTENTS,
    CONTENTS.replace("&quot;", "&#34;"),
    CONTENTS.replace("&quot;", '"'),
    CONTENTS.replace("><", "> <"),
    f"<Contents>{TAIL}<Size>5</Size><ETag>&quot;e&quot;</ETag>{DATE}<Key>a%20b/c%26</Key></Contents>",
    CONTENTS.replace("Contents>", "Contents>\n"),
    CONTENTS.replace("<Contents>", '<Contents a="b">'),
    CONTENTS.replace("%26", "&amp;"),
]


@pytest.mark.parametrize("contents", OTHER_WAYS)
def test_an_entry_is_read_however_it_is_written(contents: str) -> None:
    """Quickly where it is written as most servers write it, by the XML parser otherwise: with the same result."""
    assert parse_listed_page(page(more=contents), with_owner=False).entries == [ENTRY]


def test_what_else_is_said_of_an_object_is_kept() -> None:
    """Checksums, owner, storage class, and what nobody has heard of."""
    checksum = "<ChecksumAlgorithm>CRC32</ChecksumAlgorithm><ChecksumType>FULL_OBJECT</ChecksumType>"
    owner, more = "<Owner><ID>i</ID><DisplayName>a&amp;b</DisplayName></Owner>", "<New><Of>x</Of></New>"
    entry = f"<Contents><Key>k</Key>{DATE}<ETag>e</ETag>{checksum}<Size>1</Size>{owner}{TAIL}{more}</Contents>"
    for with_owner in (False, True):
        (found,) = parse_listed_page(page(more=entry), with_owner=with_owner).entries
        assert found.template == EntryTemplate(checksum, owner, TAIL + more)
    assert parse_listed_page(page(), with_owner=True).entries[0].template.owner == "", "asked, and none given"


KEY = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=8)


@given(st.sets(PRINTABLE, max_size=8), st.sets(PRINTABLE, max_size=4), st.booleans())
@example({"a+b.txt", "a%20b", "ä.txt", "a&b", "%"}, {"c+d/"}, True)
def test_a_key_that_is_not_encoded_is_taken_as_it_stands(keys: set[str], prefixes: set[str], is_quick: bool) -> None:
    """An origin that knows no `encoding-type` says so by not naming it, and its keys are not decoded."""
    tag = "Contents" if is_quick else 'Contents a="b"'
    ordered, rolled = sorted(key.encode() for key in keys), sorted(prefix.encode() for prefix in prefixes)
    more = "".join(
        f"<{tag}><Key>{escape(key.decode())}</Key>{DATE}<ETag>e</ETag><Size>1</Size></Contents>" for key in ordered
    )
    more += "".join(f"<CommonPrefixes><Prefix>{escape(one.decode())}</Prefix></CommonPrefixes>" for one in rolled)
    found = parse_listed_page(page(more=more, encoding=""), with_owner=False)
    assert ([one.key for one in found.entries], found.prefixes) == (ordered, rolled)


@given(st.sets(KEY, max_size=8), st.sets(KEY, max_size=4), st.booleans())
def test_every_key_comes_decoded(keys: set[str], prefixes: set[str], is_quick: bool) -> None:
    """Whatever characters it is made of, on both ways."""
    ordered = sorted(key.encode() for key in keys)
    tag = "Contents" if is_quick else 'Contents a="b"'
    more = "".join(
        f"<{tag}><Key>{encode_list_key(key.decode(), True)}</Key>{DATE}<ETag>e</ETag><Size>1</Size></Contents>"
        for key in ordered
    )
    rolled = sorted(prefix.encode() for prefix in prefixes)
    more += "".join(
        f"<CommonPrefixes><Prefix>{encode_list_key(prefix.decode(), True)}</Prefix></CommonPrefixes>"
        for prefix in rolled
    )
    found = parse_listed_page(page(more=more), with_owner=False)
    assert ([one.key for one in found.entries], found.prefixes) == (ordered, rolled)


def test_a_truncated_page_names_the_next() -> None:
    """And one that does not cannot be gone on from."""
    token = "<NextContinuationToken>t=</NextContinuationToken>"
    assert parse_listed_page(page("true", token), with_owner=False).next_token == "t="
    assert parse_listed_page(page("false", token), with_owner=False).next_token is None
    without_flag = page("x", token).replace(b"<IsTruncated>x</IsTruncated>", b"")
    assert parse_listed_page(without_flag, with_owner=False).next_token == "t=", "it names a next page"
    with pytest.raises(OriginBodyError, match="NextContinuationToken"):
        parse_listed_page(page("true"), with_owner=False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<Error/>",
        b"<ListBucketResult/>",
        b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>",
        page(more="<Contents><Key></Key><Size>1</Size></Contents>"),
        page(more="<Contents><Key>k</Key><Size>-1</Size></Contents>"),
        page(more=CONTENTS.replace("a+b", "%FF")),
        page(more=CONTENTS + CONTENTS),
        page(more=CONTENTS.replace("a+b", "b") + CONTENTS),
        page(more=CONTENTS.replace("<Size>5</Size>", "")),
        page(more=CONTENTS + "<Contents><Key>z</Key>"),
        page()[:-20],
    ],
)
def test_what_is_no_page_is_refused(body: bytes) -> None:
    """Half a listing must not pass for a whole one, nor one out of order for a place to go on from."""
    with pytest.raises(OriginBodyError):
        parse_listed_page(body, with_owner=False)


@given(st.integers(0, 40), st.integers(1, 40))
def test_pages_that_lead_back_are_found_out(before: int, circle: int) -> None:
    """However long the way into the circle, and the circle, are: within three times as many pages as both have."""
    chain, pages_max = PageChain(), 3 * (before + circle) + 1

    def follow_all() -> None:
        for number in range(pages_max):
            place = number if number < before else before + (number - before) % circle
            chain.follow([b"%d" % place], str(place))

    with pytest.raises(OriginBodyError):
        follow_all()


def test_pages_that_lead_on_are_followed() -> None:
    """However many; empty ones as long as they are not too many in a row, whatever their tokens."""
    chain = PageChain()
    for number in range(10_000):
        chain.follow([b"%08d" % number], f"token {number}")
    for _ in range(3):
        for number in range(EMPTY_PAGES_MAX - 1):
            chain.follow([], f"empty {number}")
        chain.follow([b"key"], "the same token")
        chain.follow([b"other key"], "the same token")
    for number in range(EMPTY_PAGES_MAX - 1):
        chain.follow([], f"more {number}")
    with pytest.raises(OriginBodyError):
        chain.follow([], "one too many")

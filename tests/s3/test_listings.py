"""Listings: continuation tokens, and pages of ListObjectsV2 and ListMultipartUploads."""

from __future__ import annotations

import base64
import string
from contextlib import suppress

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError, S3Error
from gateway.s3.list_result import EMPTY_PAGES_MAX, EntryTemplate, ListedEntry, PageChain, parse_listed_page
from gateway.s3.listings import (
    ListedUpload,
    ListPlace,
    UploadPlace,
    UploadsPage,
    UploadsQuery,
    decode_token,
    encode_place,
    encode_token,
    is_place,
    parse_uploads_page,
    uploads_document,
)
from gateway.s3.xml_writer import encode_list_key, escape

PLACE = st.builds(ListPlace, st.text(max_size=256).map(lambda text: text.encode("utf-8", "replace")), st.booleans())


@given(PLACE)
def test_a_token_gives_back_its_place(place: ListPlace) -> None:
    """And needs no escaping in a URL, nor in XML."""
    token = encode_token(place)
    assert decode_token(token) == place
    assert set(token) <= set(string.ascii_letters + string.digits + "-_")


@given(PLACE, st.data())
def test_a_changed_token_is_refused(place: ListPlace, data: st.DataObject) -> None:
    """One character other than it was, one missing, one too many."""
    token = encode_token(place)
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.sampled_from(string.ascii_letters + string.digits + "-_=+/ é"))
    for changed in (token[:at] + other + token[at + 1 :], token[:at] + token[at + 1 :], token + other):
        # Padding, and the bits of the last character that stand for nothing, may differ.
        assert decoded(changed) in ("InvalidArgument", place)


@given(st.binary(max_size=64))
def test_a_forged_token_is_refused_or_names_a_key(place: bytes) -> None:
    """Anybody can make one that is whole: keys are UTF-8, and nothing else goes on from here."""
    try:
        place.decode()
    except UnicodeDecodeError:
        assert decoded(encode_token(ListPlace(place))) == "InvalidArgument"
    else:
        assert decoded(encode_token(ListPlace(place))) == ListPlace(place)


def decoded(token: str) -> ListPlace | str:
    """The place, or the error's code."""
    try:
        return decode_token(token)
    except S3Error as error:
        return error.code


@pytest.mark.parametrize("token", ["1", "2AAAAAGs", "!!!", "1" + "A" * 5000, "1AAAAAAA", "é", "1 "])
def test_what_is_no_token_is_refused(token: str) -> None:
    """Those of origins among them."""
    with pytest.raises(S3Error, match="InvalidArgument"):
        decode_token(token)


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


@given(st.sets(KEY, max_size=8), st.sets(KEY, max_size=4), st.booleans(), st.booleans())
@example({"a+b.txt", "a%20b", "ä.txt", "a&b", "%"}, {"c+d/"}, True, False)
def test_every_key_comes_decoded(keys: set[str], prefixes: set[str], is_quick: bool, is_encoded: bool) -> None:
    """Whatever characters it is made of, on both ways. Keys of an origin that names no encoding stay as they are."""
    tag = "Contents" if is_quick else 'Contents a="b"'
    if not is_encoded:
        keys, prefixes = ({one for one in names if one.isprintable()} for names in (keys, prefixes))
    ordered, rolled = sorted(key.encode() for key in keys), sorted(prefix.encode() for prefix in prefixes)

    def written(name: bytes) -> str:
        return encode_list_key(name.decode(), True) if is_encoded else escape(name.decode())

    more = "".join(f"<{tag}><Key>{written(key)}</Key>{DATE}<ETag>e</ETag><Size>1</Size></Contents>" for key in ordered)
    more += "".join(f"<CommonPrefixes><Prefix>{written(one)}</Prefix></CommonPrefixes>" for one in rolled)
    body = page(more=more) if is_encoded else page(more=more, encoding="")
    found = parse_listed_page(body, with_owner=False)
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


PLACES = st.builds(
    UploadPlace, st.text(max_size=20), st.none() | st.tuples(st.floats(0, 2e9), st.text("abc_-", max_size=43))
)
KEYS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(str.strip)


def query(*, marker: str = "", url: bool = True) -> UploadsQuery:
    return UploadsQuery("p", "/", "k", marker, 7, url)


@given(PLACES)
def test_a_marker_is_the_place_that_it_was_made_for(place: UploadPlace) -> None:
    """On every worker: it holds all there is to know."""
    marker = encode_place(place)
    assert is_place(marker)
    assert query(marker=marker).place == place


def test_other_markers_are_ids_of_the_origin() -> None:
    """A damaged one of ours is refused; without a key marker, none counts."""
    assert query(marker="2~abc").place == UploadPlace("2~abc")
    assert query().place is None
    assert UploadsQuery("", "", "", "2~abc", 7, is_url_encoded=True).place is None
    for damaged in ("fb1.", "fb1.!", "fb1.AAAA", "fb1.WyJhIl0"):
        with pytest.raises(S3Error):
            _ = query(marker=damaged).place


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(_JSON | st.tuples(st.text(max_size=3), _JSON))
def test_a_forged_marker_is_refused_or_a_place(document: object) -> None:
    """Whatever is inside the base64: anybody can write it."""
    marker = "fb1." + base64.urlsafe_b64encode(orjson.dumps(document)).decode().rstrip("=")
    with suppress(S3Error):
        assert isinstance(query(marker=marker).place, UploadPlace)


@given(st.lists(st.tuples(KEYS, st.text("ab12", min_size=1, max_size=5)), max_size=4), st.lists(KEYS, max_size=3))
def test_what_is_written_is_read(uploads: list[tuple[str, str]], prefixes: list[str]) -> None:
    """Keys of any characters, percent-encoded; dates, owners and what else there is stay as they are."""
    rest = "<Initiated>2009-10-12T17:50:30.000Z</Initiated><Owner><ID>a&amp;b</ID></Owner>"
    listed = [ListedUpload(key, upload_id, 1255369830.0, rest) for key, upload_id in uploads]
    document = uploads_document("bucket", query(), listed, prefixes, ("ké", "2"))
    assert parse_uploads_page(document) == UploadsPage(listed, prefixes, ("ké", "2"))
    assert parse_uploads_page(uploads_document("bucket", query(), [], [], None)) == UploadsPage([], [], None)


def test_a_page_that_does_not_say_that_it_is_encoded_is_not() -> None:
    """Some servers ignore `encoding-type`."""
    upload = ListedUpload("a%20b+c", "1", 0.0, "")
    page = parse_uploads_page(uploads_document("bucket", query(url=False), [upload], [], None))
    assert page.uploads == [upload]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<Other/>",
        b"<ListMultipartUploadsResult/>",
        b"<ListMultipartUploadsResult><Bucket>b</Bucket><Upload/></ListMultipartUploadsResult>",
    ],
)
def test_what_is_no_page_of_uploads_is_refused(body: bytes) -> None:
    """An answer that is not understood is not passed on as an empty one."""
    with pytest.raises(OriginBodyError):
        parse_uploads_page(body)

"""Pages of ListMultipartUploads."""

from __future__ import annotations

import base64
from contextlib import suppress

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import OriginBodyError, S3Error
from gateway.s3.upload_list import (
    ListedUpload,
    UploadPlace,
    UploadsPage,
    UploadsQuery,
    encode_place,
    is_place,
    parse_uploads_page,
    uploads_document,
)

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
def test_what_is_no_page_is_refused(body: bytes) -> None:
    """An answer that is not understood is not passed on as an empty one."""
    with pytest.raises(OriginBodyError):
        parse_uploads_page(body)

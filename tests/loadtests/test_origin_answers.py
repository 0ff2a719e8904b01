from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.harness.content import Family, family, load_object
from loadtests.harness.origin_answers import Listing, object_answer

OBJECT = load_object("/load/one", 1000)
XMLNS = "{http://s3.amazonaws.com/doc/2006-03-01/}"
keys = st.text(alphabet="ab/", min_size=1, max_size=5)


def request(*lines: str) -> bytes:
    return "\r\n".join(["GET /load/one HTTP/1.1", "Host: load", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("line", "status", "first", "end"),
    [
        ("Accept: */*", "200", 0, 1000),
        ("Range: bytes=0-0", "206", 0, 1),
        ("range: bytes=990-2000", "206", 990, 1000),
        ("Range: bytes=400-", "206", 400, 1000),
        ("Range: bytes=-10", "206", 990, 1000),
        ("Range: bytes=-2000", "206", 0, 1000),
    ],
)
def test_ranges_are_answered_as_by_s3(line: str, status: str, first: int, end: int) -> None:
    """One range of bytes gets 206 with its Content-Range and length (RFC 9110, 14)."""
    answer = object_answer(OBJECT, "GET", request(line))
    assert answer.head.startswith(f"HTTP/1.1 {status} ".encode())
    assert f"\r\nContent-Length: {end - first}\r\n".encode() in answer.head
    assert (f"\r\nContent-Range: bytes {first}-{end - 1}/1000\r\n".encode() in answer.head) == (status == "206")
    assert (answer.of, answer.first, answer.end) == (OBJECT, first, end)


def test_what_is_not_there_or_not_the_same_is_refused() -> None:
    """404 for no object, 412 for another version, 416 for a range behind the end; a HEAD has no body."""
    assert object_answer(None, "GET", request()).head.startswith(b"HTTP/1.1 404 ")
    assert object_answer(OBJECT, "GET", request('If-Match: "other"')).head.startswith(b"HTTP/1.1 412 ")
    assert object_answer(OBJECT, "GET", request(f"If-Match: {OBJECT.etag}")).head.startswith(b"HTTP/1.1 200 ")
    assert object_answer(OBJECT, "GET", request("Range: bytes=1000-")).head.startswith(b"HTTP/1.1 416 ")
    head = object_answer(OBJECT, "HEAD", request())
    assert (head.of, head.body) == (None, b"")
    assert b"\r\nContent-Length: 1000\r\n" in head.head


@given(st.sets(keys, min_size=1), keys | st.just(""), st.sampled_from(["", "/"]), st.integers(1, 4))
def test_pages_of_a_listing_add_up(found: set[str], prefix: str, delimiter: str, page: int) -> None:
    """Page by page, each key or common prefix once and in order, as one pass over the sorted keys gives them."""
    listing = Listing("load", [load_object(f"/load/{key}", 7) for key in found])
    expected = dict.fromkeys(_shown(key, prefix, delimiter) for key in sorted(found) if key.startswith(prefix))
    seen: list[str] = []
    token = ""
    for _ in range(len(found) + 1):
        query = f"list-type=2&max-keys={page}&prefix={prefix}&delimiter={delimiter}&continuation-token={token}"
        answer = ElementTree.fromstring(listing.answer(query))
        keys_here = [element.text or "" for element in answer.iter(f"{XMLNS}Key")]
        folders = [element.text or "" for element in answer.findall(f"{XMLNS}CommonPrefixes/{XMLNS}Prefix")]
        assert len(keys_here) + len(folders) <= page
        seen += sorted(keys_here + folders)
        token = answer.findtext(f"{XMLNS}NextContinuationToken", "")
        if answer.findtext(f"{XMLNS}IsTruncated") == "false":
            break
    assert seen == list(expected)


def _shown(key: str, prefix: str, delimiter: str) -> str:
    inside = key[len(prefix) :]
    return prefix + re.split(f"(?<={delimiter})", inside, maxsplit=1)[0] if delimiter and delimiter in inside else key


@given(st.integers(0, 20_000_000), st.integers(1, 300_000), st.integers(1, 300_000))
def test_any_piece_continues_the_one_before_it(offset: int, length: int, more: int) -> None:
    """An object's bytes do not depend on how they are asked for."""
    whole = bytes(OBJECT.piece(offset, length + more))
    assert whole == bytes(OBJECT.piece(offset, length)) + bytes(OBJECT.piece(offset + length, more))


def test_objects_and_their_parts_differ() -> None:
    """A block of another object or at another offset is no match."""
    other = load_object("/load/two", 1000)
    assert other.etag != OBJECT.etag
    starts = [bytes(one.piece(mebibyte << 20, 64)) for one in (OBJECT, other) for mebibyte in range(64)]
    assert len(set(starts)) == len(starts)


def test_a_family_survives_the_command_line() -> None:
    """Objects are named to the origin's process in words."""
    one = Family("train/", 3, 100)
    assert family(str(one)) == one
    assert one.paths() == ["/load/train/000000.bin", "/load/train/000001.bin", "/load/train/000002.bin"]

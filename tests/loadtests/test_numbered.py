"""The origin of numbered keys: its listings are those of a bucket that holds them."""

from __future__ import annotations

from urllib.parse import quote

from gateway.s3.list_result import parse_listed_page
from loadtests.harness.numbered_server import PREFIX, Pages, key_of


def test_every_key_is_listed_once_in_order() -> None:
    """Page by page, with tokens; 55 bytes each, as the load test says."""
    pages, keys, token = Pages(20_345), list[bytes](), ""
    while token is not None:
        query = f"list-type=2&prefix={PREFIX}" + (f"&continuation-token={quote(token)}" if token else "")
        page = parse_listed_page(pages.page(query), with_owner=True)
        keys += [entry.key for entry in page.entries]
        token = page.next_token  # type: ignore[assignment]
    assert keys == [key_of(number).encode() for number in range(20_345)] == sorted(keys)
    assert {len(key) for key in keys} == {55}


def test_a_page_can_begin_anywhere() -> None:
    """Behind a key, and behind what is none; what is cut out of blocks is what was made up at once."""
    pages = Pages(20_345)
    for after, first in ((key_of(10_016), 10_017), (PREFIX + "class-000002", 20_000), (PREFIX + "z", 20_345)):
        page = parse_listed_page(pages.page(f"list-type=2&max-keys=120&start-after={quote(after)}"), with_owner=True)
        there = range(first, min(first + 120, 20_345))
        assert [entry.key.decode() for entry in page.entries] == [key_of(number) for number in there]
        assert (page.next_token is None) == (there.stop == 20_345 or not there)

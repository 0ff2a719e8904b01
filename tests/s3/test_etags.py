from __future__ import annotations

import hashlib

import pytest

from gateway.s3.headers import is_md5_etag, multipart_etag, plain_etag, quote, strong_etag, unquote

MIB = 1024 * 1024


def test_quotes_are_put_on_and_taken_off_once() -> None:
    """Clients send both forms."""
    assert quote("abc") == quote('"abc"') == '"abc"'
    assert unquote('"abc"') == unquote("abc") == unquote(' "abc" ') == "abc"
    assert unquote('"') == '"'


def test_the_etag_of_parts_is_s3s() -> None:
    """Three parts of 5 MiB of A, B, C, against the published value."""
    parts = [hashlib.md5(letter * 5 * MIB).hexdigest() for letter in (b"A", b"B", b"C")]
    assert multipart_etag(parts) == '"b2add96cc9702bbf4efb0ccdfc6b7747-3"'
    assert multipart_etag([quote(part) for part in parts]) == '"b2add96cc9702bbf4efb0ccdfc6b7747-3"'


@pytest.mark.parametrize("parts", [[], ["0" * 32, "not-an-md5"], ["0" * 32 + "-2"]])
def test_etags_that_are_no_md5_foretell_nothing(parts: list[str]) -> None:
    """Encrypted parts have ETags of their own kind."""
    assert multipart_etag(parts) is None


def test_only_32_hex_digits_look_like_an_md5() -> None:
    """A part count gives a multipart object away."""
    assert is_md5_etag('"d41d8cd98f00b204e9800998ecf8427e"')
    assert is_md5_etag("d41d8cd98f00b204e9800998ecf8427e")
    assert not is_md5_etag('"d41d8cd98f00b204e9800998ecf8427e-1"')
    assert not is_md5_etag("")


@pytest.mark.parametrize("written", ["{}", '"{}"', '""{}""', 'W/"{}"', ' "{}" '])
def test_etags_compare_however_they_are_written(written: str) -> None:
    """Digits of an MD5 in capitals, too; of other ETags, capitals count."""
    for etag in ("d41d8cd98f00b204e9800998ecf8427e", "d41d8cd98f00b204e9800998ecf8427e-12"):
        assert plain_etag(written.format(etag)) == plain_etag(written.format(etag.upper())) == etag
        assert strong_etag(written.format(etag)) == f'"{etag}"'
    assert plain_etag(written.format("CIDu8ME=")) == "CIDu8ME="

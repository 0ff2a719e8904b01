"""Continuation tokens."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import S3Error
from gateway.s3.list_objects import ListPlace, decode_token, encode_token

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

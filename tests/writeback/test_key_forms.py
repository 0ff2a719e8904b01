"""What a bucket that has refused a key is asked about again."""

from __future__ import annotations

import pytest

from gateway.writeback.key_forms import forms_of, refused_forms


@pytest.mark.parametrize(
    ("refused", "like", "unlike"),
    [
        ("a//b", "c//d/e", "a/b"),
        ("a/b/", "c/", "a/b"),
        ("/a", "b//c", "a"),
        ("a/../b", "c/./d", "a/b"),
        ("a/" + "x" * 256, "y" * 300, "a/" + "x" * 255),
        ("a\nb", "c\td", "ab"),
        ("a/ü", "ö", "a/u"),
        ("a:b", "c?d", "ab"),
        ("a\\b", "c|d", "ab"),
        ("a/file/b", "a/file/c/d", "other/c"),
        ("a/b", "a/c", "b/c"),
    ],
)
def test_the_next_one_like_it_is_asked_about(refused: str, like: str, unlike: str) -> None:
    """By what is unusual about it, or by where it lies; until the bucket takes one that shares the form."""
    found = refused_forms(refused, "InvalidArgument")
    assert not found.isdisjoint(forms_of(refused))
    assert not found.isdisjoint(forms_of(like))
    left = found - forms_of(unlike)  # the bucket has taken it: what both have in common was not the reason
    assert left.isdisjoint(forms_of(unlike))
    assert not left.isdisjoint(forms_of(like))


def test_where_there_is_no_bucket_every_key_is_asked_about() -> None:
    """Nothing about the key is to blame."""
    assert not refused_forms("a//b", "NoSuchBucket").isdisjoint(forms_of("c"))

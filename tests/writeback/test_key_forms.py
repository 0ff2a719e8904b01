"""What a bucket that has refused a key is asked about again."""

from __future__ import annotations

import pytest

from gateway.writeback.journal.buckets import FORMS_MAX, bounded, forms_of, refused_forms


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


def test_a_key_of_many_directories_takes_nothing_from_others() -> None:
    """The bound leaves what is unusual, and the directories at the top; a success clears its own forms alone."""
    before = refused_forms("a//b", "InvalidArgument") | refused_forms("d/file", "InvalidArgument")
    deep = "deep/" + "/".join(map(str, range(2 * FORMS_MAX)))
    kept = bounded(before | refused_forms(deep, "InvalidArgument"))
    assert len(kept) == FORMS_MAX
    left = kept - forms_of("other")
    for like in ("x//y", "d/other", "deep/other", f"{deep}/other"):
        assert not left.isdisjoint(forms_of(like))
    assert left.isdisjoint(forms_of("another/one"))

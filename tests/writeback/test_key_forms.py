"""What a bucket that has refused a key is asked about again."""

from __future__ import annotations

import pytest

from gateway.writeback.journal.buckets import FORMS_MAX, bounded, forms_of, refused_forms, without_forms_of


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
    found = refused_forms(refused, "InvalidArgument", {})
    assert not found.isdisjoint(forms_of(refused, {}))
    assert not found.isdisjoint(forms_of(like, {}))
    left = without_forms_of(found, unlike)  # the bucket has taken it: what both have in common was not the reason
    assert left.isdisjoint(forms_of(unlike, {}))
    assert not left.isdisjoint(forms_of(like, {}))


def test_where_there_is_no_bucket_every_key_is_asked_about() -> None:
    """Nothing about the key is to blame."""
    assert not refused_forms("a//b", "NoSuchBucket", {}).isdisjoint(forms_of("c", {}))


def test_a_key_of_many_directories_takes_nothing_from_others() -> None:
    """The bound leaves what is unusual, and the directories at the top; a success clears its own forms alone."""
    before = refused_forms("a//b", "InvalidArgument", {}) | refused_forms("d/file", "InvalidArgument", {})
    deep = "deep/" + "/".join(map(str, range(2 * FORMS_MAX)))
    kept = bounded(before | refused_forms(deep, "InvalidArgument", {}))
    assert len(kept) == FORMS_MAX
    left = without_forms_of(kept, "other")
    for like in ("x//y", "d/other", "deep/other", f"{deep}/other"):
        assert not left.isdisjoint(forms_of(like, {}))
    assert left.isdisjoint(forms_of("another/one", {}))


ACL, CLASS = {"x-amz-acl": "private"}, {"x-amz-storage-class": "STANDARD_IA"}


@pytest.mark.parametrize("key", ["a//b", "a/b"])
def test_a_refusal_that_the_acl_or_the_class_may_explain_is_about_writes_that_have_them(key: str) -> None:
    """And about no other of the same key; until the bucket takes one that shares the form of the key."""
    found = refused_forms(key, "InvalidArgument", {**ACL, **CLASS, "content-type": "a/b"})
    assert not found.isdisjoint(forms_of(key, {**CLASS, **ACL}))
    for headers in ({}, ACL, CLASS, {**ACL, "x-amz-storage-class": "ONEZONE_IA"}):
        assert found.isdisjoint(forms_of(key, headers))
    assert not refused_forms(key, "InvalidArgument", {}).isdisjoint(forms_of(key, ACL))
    assert without_forms_of(found, key) == frozenset()
    assert not refused_forms(key, "NoSuchBucket", ACL).isdisjoint(forms_of("c", {}))

"""What is different between two sets of objects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.metadata.snapshots.diff import differences
from gateway.s3.list_result import ListedEntry
from tests.support import listing_model as model
from tests.support.snapshots import entry

OBJECTS = st.dictionaries(model.KEY, st.sampled_from([b"", b"1", b"2", b"22"]), max_size=12)


async def pages(objects: Mapping[str, bytes], count: int) -> AsyncGenerator[list[ListedEntry], None]:
    """In order, so many at a time, with an empty page in between."""
    entries = [entry(key, content) for key, content in sorted(objects.items(), key=lambda one: one[0].encode())]
    for start in range(0, len(entries), count):
        yield entries[start : start + count]
        yield []


def compared(before: Mapping[str, bytes], after: Mapping[str, bytes], count: int = 3) -> list[dict[str, Any]]:
    async def all_of_them() -> list[dict[str, Any]]:
        return [one async for one in differences(pages(before, count), pages(after, count))]

    return asyncio.run(all_of_them())


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(OBJECTS, OBJECTS, st.integers(1, 5))
def test_every_difference_is_told_once_in_order(before: dict[str, bytes], after: dict[str, bytes], count: int) -> None:
    """What there is of one side only, what has another content, and how much of all that at the end."""
    *changes, counts = compared(before, after, count)
    expected = {
        **dict.fromkeys(after.keys() - before.keys(), "added"),
        **dict.fromkeys(before.keys() - after.keys(), "removed"),
        **{key: "changed" for key in before.keys() & after.keys() if before[key] != after[key]},
    }
    assert {one["key"]: one["change"] for one in changes} == expected
    assert [one["key"] for one in changes] == sorted(expected, key=str.encode)
    same = sum(before[key] == after[key] for key in before.keys() & after.keys())
    kinds = list(expected.values())
    assert counts == {kind: kinds.count(kind) for kind in ("added", "removed", "changed")} | {"same": same}


def test_both_versions_are_told() -> None:
    """With ETag and size, as far as there is one."""
    (added, changed, removed, _) = compared({"b": b"1", "c": b"1"}, {"a": b"1", "b": b"22"})
    assert added["after"]["size"] == 1
    assert "before" not in added
    assert (changed["before"]["size"], changed["after"]["size"]) == (1, 2)
    assert "after" not in removed

"""The list of objects that a job is about: written ahead, read behind, found again; and manifests, cut anywhere."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.model import ObjectKey
from gateway.jobs.worklist import LINE_BYTES_MAX, BadManifest, ManifestLines, Worklist


async def test_entries_come_in_order_as_they_are_written(tmp_path: Path) -> None:
    """A reader that has come to the end waits for more, until the list is complete."""
    worklist = Worklist(tmp_path / "l")
    seen: list[str] = []

    async def apply_settings() -> None:
        seen.extend([entry.key.key async for entry in worklist.entries(0)])

    following = asyncio.create_task(apply_settings())
    for batch in (["a", "b"], [], ["c\n\"d'"], ["ü" * 200] * 2000):
        worklist.add([("bucket", key, '"e"', 5) for key in batch])
        worklist.grown()
        await asyncio.sleep(0)
    worklist.finish()
    await asyncio.wait_for(following, 30)
    assert seen == ["a", "b", "c\n\"d'", *["ü" * 200] * 2000]


async def test_reading_goes_on_from_a_place(tmp_path: Path) -> None:
    """What lies before it is not read again."""
    worklist = Worklist(tmp_path / "l")
    worklist.add([("bucket", key) for key in "abc"])
    worklist.finish()
    entries = [entry async for entry in worklist.entries(0)]
    assert [(e.key, e.etag, e.size_bytes) for e in entries[:1]] == [(ObjectKey("bucket", "a"), None, 0)]
    rest = [entry async for entry in worklist.entries(entries[0].next_offset)]
    assert rest == entries[1:]


def test_a_torn_last_line_is_removed(tmp_path: Path) -> None:
    """A process killed while it wrote leaves a list that can be written on."""
    worklist = Worklist(tmp_path / "l")
    worklist.add([("bucket", "a", '"e"', 5), ("bucket", "b", '"e"', 7)])
    whole = worklist.path.read_bytes()
    first = whole.index(b"\n") + 1
    worklist.path.write_bytes(whole + b'["bucket","c","\\"e')
    found = worklist.recover(first)
    assert found.last is not None
    assert (found.last.key.key, found.objects, found.size_bytes) == ("b", 2, 12)
    assert (found.objects_before, found.bytes_before) == (1, 5)
    assert worklist.path.read_bytes() == whole


def test_zeros_end_a_list(tmp_path: Path) -> None:
    """A power cut leaves them where lines had not reached the disk; lines behind them are not believed."""
    worklist = Worklist(tmp_path / "l")
    worklist.add([("bucket", key, '"e"', 5) for key in "abc"])
    whole = worklist.path.read_bytes()
    first = whole.index(b"\n") + 1
    worklist.path.write_bytes(whole[:first] + b"\0" * 20 + b"\n" + whole[first:])
    found = worklist.recover(2 * first)
    assert found.last is not None
    assert (found.last.key.key, found.objects, found.objects_before) == ("a", 1, 1)
    assert worklist.path.read_bytes() == whole[:first]


KEYS = st.text(st.characters(blacklist_characters="\r\n", codec="utf-8"), min_size=1, max_size=30)


@pytest.mark.slow
@given(st.lists(KEYS, max_size=20), st.lists(st.integers(1, 9), max_size=30), st.booleans(), st.booleans())
def test_pieces_may_be_cut_anywhere(keys: list[str], cuts: list[int], crlf: bool, ends: bool) -> None:
    """Line feeds or CRLF, with or without one at the end, in pieces of any size."""
    feed = "\r\n" if crlf else "\n"
    text = feed.join(f"s3://b/{key}" for key in keys) + (feed if ends else "")
    rest, lines = text.encode(), ManifestLines()
    found = []
    for cut in cuts:
        piece, rest = rest[:cut], rest[cut:]
        found += list(lines.feed(piece))
    found += [*lines.feed(rest), *lines.end()]
    assert found == [("b", key) for key in keys]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"b/key", "line 3: 'b/key' does not begin with s3://"),
        (b"s3://bucket", "line 3 names no key"),
        (b"s3://bucket/", "line 3 names no key"),
        (b"s3://b/\xff", "line 3"),
        (b"x" * (LINE_BYTES_MAX + 1), "line 3 is longer"),
    ],
)
def test_a_bad_line_is_named(line: bytes, said: str) -> None:
    """The message says which and why."""
    lines = ManifestLines()
    assert list(lines.feed(b"s3://b/a\n\n")) == [("b", "a")]
    with pytest.raises(BadManifest, match=said):
        list(chain(lines.feed(line), lines.end()))

"""The list of objects that a job is about: written ahead, read behind, found again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.core.model import ObjectKey
from gateway.jobs.worklist import Worklist


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

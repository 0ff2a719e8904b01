"""Pending objects are read byte for byte, any range over any parts; what is damaged or gone is said so."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.clock import Moment
from gateway.core.errors import BufferDamaged
from gateway.core.model import ByteRange
from gateway.writeback.journal.journal import Journal
from gateway.writeback.journal.records import Part, Run, Write
from gateway.writeback.pending_reader import PARTS_AT_ONCE, PIECE_BYTES, FileGone, part_range, pending_pieces
from gateway.writeback.staged_file import BufferThreads, Staging
from tests.support.descriptors import open_descriptors
from tests.support.writeback import key, md5, pending


class Area:
    """Staged parts, the journal that has them, and a reader of them."""

    def __init__(self, directory: Path) -> None:
        self.staging = Staging(directory, 0)
        self.staging.prepare()
        self.threads = BufferThreads(1)
        self.journal = Journal(directory, lambda _: None)

    def close(self) -> None:
        self.threads.shut_down()
        self.journal.close()

    def stage(self, contents: list[bytes], step: int = 3) -> Write:
        parts = []
        for number, content in enumerate(contents, 1):
            writer = self.staging.create()
            writer.write(memoryview(content))
            parts.append(Part(step * number, self.staging.seal(writer, md5(content)), 1.0))
        new = replace(pending(key("k"), parts=parts), multipart=True)
        return asyncio.run(self.journal.change(lambda tx: tx.writes.acknowledge(new)))

    async def read(self, pending: Write, first: int, last: int) -> bytes:
        return b"".join([bytes(piece) async for piece in self.pieces(pending, ByteRange(first, last))])

    def pieces(self, pending: Write, byte_range: ByteRange) -> AsyncGenerator[memoryview, None]:
        return pending_pieces(self.journal, self.staging, self.threads, pending, byte_range)


@pytest.fixture
def area(tmp_path: Path) -> Iterator[Area]:
    with closing(Area(tmp_path)) as area:
        yield area


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_range_of_any_parts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """As if the parts lay in one file; parts without bytes are no obstacle."""
    sizes = data.draw(st.lists(st.sampled_from([0, 1, 65_536, 70_001, PIECE_BYTES + 3]), min_size=1, max_size=5))
    sizes = data.draw(st.sampled_from([1, PARTS_AT_ONCE + 3])) * sizes[:1] + sizes[1:]
    step = data.draw(st.sampled_from([1, 3]))
    contents = [random.Random(number).randbytes(size) for number, size in enumerate(sizes)]
    whole = b"".join(contents)
    if not whole:
        return
    first = data.draw(st.integers(0, len(whole) - 1))
    last = data.draw(st.integers(first, len(whole) - 1))
    with closing(Area(tmp_path_factory.mktemp("area"))) as area:
        assert asyncio.run(area.read(area.stage(contents, step), first, last)) == whole[first : last + 1]


def test_parts_have_their_places(area: Area) -> None:
    """Counted in the order of the object, whatever numbers the client gave them."""
    pending = area.stage([b"abc", b"", b"de"])
    assert [part_range(pending, number) for number in (1, 2, 3)] == [ByteRange(0, 2), None, ByteRange(3, 4)]
    with pytest.raises(IndexError):
        part_range(pending, 4)


def test_ten_thousand_parts_are_said_in_few_words(area: Area) -> None:
    """Where a part lies is told without looking at those before it; numbers that are left out begin another run."""
    same = [Run(1, 9_999, 8 * 2**20), Run(10_000, 1, 5)]
    pending = replace(area.stage([b"x"]), runs=same)
    assert part_range(pending, 9_999) == ByteRange(9_998 * 8 * 2**20, 9_999 * 8 * 2**20 - 1)
    assert part_range(pending, 10_000) == ByteRange(9_999 * 8 * 2**20, 9_999 * 8 * 2**20 + 4)
    assert area.stage([b"ab", b"cd", b"ef", b"g"], step=1).runs == (Run(1, 3, 2), Run(4, 1, 1))
    assert area.stage([b"ab", b"cd"], step=2).runs == (Run(2, 1, 2), Run(4, 1, 2))


def test_a_range_has_only_its_own_parts_looked_up(area: Area, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some at a time, and none before or behind it: a look happens on the event loop."""
    pending = area.stage([b"%03d" % number for number in range(100)], step=1)
    looks: list[int] = []
    read = area.journal.read

    def counting(look: Any) -> Any:
        found = read(look)
        looks.append(len(found))
        return found

    monkeypatch.setattr(area.journal, "read", counting)
    assert asyncio.run(area.read(pending, 30, 35)) == b"010011"
    assert looks == [2]
    looks.clear()
    assert len(asyncio.run(area.read(pending, 0, 299))) == 300
    assert max(looks) == PARTS_AT_ONCE
    assert sum(looks) == 100


def test_what_is_over_is_said_so(area: Area) -> None:
    """Its rows went since it was looked up: as with its files."""
    pending = area.stage([bytes(100)])
    asyncio.run(area.journal.change(lambda tx: tx.writes.settle(pending.id, None, Moment(2.0))))
    with pytest.raises(FileGone) as gone:
        asyncio.run(area.read(pending, 0, 99))
    assert gone.value.read_bytes == 0


def test_a_file_that_goes_is_said_so(area: Area) -> None:
    """With how far it was read: who has the bytes elsewhere goes on from there."""
    pending = area.stage([bytes(100), bytes(100)])
    area.staging.remove(pending.parts[1].file.name)
    assert asyncio.run(area.read(pending, 0, 99)) == bytes(100)
    with pytest.raises(FileGone) as gone:
        asyncio.run(area.read(pending, 10, 150))
    assert gone.value.read_bytes == 90


def test_damage_is_never_served(area: Area) -> None:
    """No byte of a damaged chunk comes out."""
    pending = area.stage([os.urandom(200_000)])
    with area.staging.path(pending.parts[0].file).open("r+b") as raw:
        raw.seek(150_000)
        raw.write(b"\0\1\2\3\4\5\6\7")
    with pytest.raises(BufferDamaged):
        asyncio.run(area.read(pending, 0, 199_999))


def test_a_reader_that_leaves_lets_go(area: Area) -> None:
    """No descriptor stays open behind a client that takes only the beginning."""
    pending = area.stage([bytes(3 * PIECE_BYTES)])

    async def leave() -> int:
        before = len(open_descriptors())
        pieces = area.pieces(pending, ByteRange(0, 3 * PIECE_BYTES - 1))
        await anext(pieces)
        await pieces.aclose()
        return len(open_descriptors()) - before

    assert asyncio.run(leave()) == 0


@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_reader_that_leaves_has_nobody_elses_file_read(
    area: Area, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """What a thread still does for it, it does with the staged file, which is closed in the end."""
    pending = area.stage([b"x" * 100_000])
    seen: list[int] = []
    begun, resume, made = threading.Event(), threading.Event(), getattr(os, call)

    def held(first: Any, *rest: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            resume.wait(30)
            if call == "pread":
                seen.append(os.fstat(first).st_ino)
        return made(first, *rest)

    monkeypatch.setattr(os, call, held)

    async def scenario() -> None:
        left = asyncio.create_task(area.read(pending, 0, 99_999))
        await asyncio.to_thread(begun.wait, 30)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
        resume.set()
        await area.threads.run(int)
        for other in others:
            os.close(other)

    before = len(open_descriptors())
    asyncio.run(scenario())
    gc.collect()
    assert set(seen) <= {area.staging.path(pending.parts[0].file).stat().st_ino}
    assert len(open_descriptors()) == before

"""What counts as intact is what was written, whatever becomes of its pages and whoever brings them back."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from awscrt import checksums
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.blocks import block_file, page_cache
from gateway.blocks.block_file import (
    BlockFile,
    ChunkChecksums,
    ChunkMarks,
    RecordMarks,
    chunk_aligned,
    fingerprint,
    read_verified,
)
from gateway.blocks.layout import CHUNK_BYTES, Extent, chunk_count
from gateway.blocks.page_cache import PAGE_BYTES, MappedPages, Residency, is_supported
from gateway.core.errors import BlockDamaged
from tests.support.blocks import MIB, drop_page_cache
from tests.support.disks import fill_up, small_disk
from tests.support.page_cache import drop_unmapped, page_out

LENGTH = 5 * CHUNK_BYTES + 777
START = 4096
UNCHANGED = (0, 0, 1 << 20, 0, 0)


def extent_of(content: bytes, offset: int) -> Extent:
    checksums = ChunkChecksums(len(content))
    checksums.update(content)
    return Extent("f", offset, len(content), bytes(checksums.packed))


def evict(file: BlockFile) -> None:
    """Have the kernel take every page of a file, as it does when memory is short."""
    os.fdatasync(file.descriptor)
    pages, size_bytes = file._pages, os.fstat(file.descriptor).st_size
    for _ in range(100):  # pages on their way through the kernel's lists stay when asked once
        if pages is not None:
            page_out(pages._address, size_bytes // PAGE_BYTES * PAGE_BYTES)
        drop_unmapped(file.descriptor, 0, 0)
        if not Residency()._cached_pages(file.descriptor, 0, size_bytes):
            break


def pages_in_memory(file: BlockFile, offset: int, count: int) -> int:
    """Of a part of a file; nothing is read to find out."""
    found = Residency()._cached_pages(file.descriptor, offset, count)
    assert found is not None
    return found


class Bench:
    """A block in an open file."""

    def __init__(self, path: Path) -> None:
        self.content = random.Random(1).randbytes(LENGTH)
        path.write_bytes(bytes(START) + self.content)
        self.extent = extent_of(self.content, START)
        self.file = BlockFile(os.open(path, os.O_RDWR))
        self.file.begin_lease()

    def intact(self, position: int, count: int) -> bool:
        return self.file.intact(self.extent, position, count)

    def flip(self, position: int) -> None:
        """What the device gives from now on."""
        [byte] = os.pread(self.file.descriptor, 1, START + position)
        os.pwrite(self.file.descriptor, bytes([byte ^ 1]), START + position)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    assert is_supported(tmp_path)
    made = Bench(tmp_path / "f")
    yield made
    made.file.end_lease()


def test_what_was_verified_is_intact(bench: Bench) -> None:
    """And nothing else, by whole chunks."""
    assert not bench.intact(0, 1)
    bench.file.verify(bench.extent, CHUNK_BYTES + 5, CHUNK_BYTES)
    assert bench.intact(CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert not bench.intact(0, CHUNK_BYTES)
    assert not bench.intact(3 * CHUNK_BYTES, 1)
    bench.file.verify(bench.extent, 0, LENGTH)
    assert bench.intact(0, LENGTH)


def test_what_has_left_memory_is_not_intact_whoever_brings_it_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.4 A reader in another process, a hint, a backup: the page is in memory again, and wrong."""
    monkeypatch.setattr(block_file, "fingerprint", lambda _: UNCHANGED)  # the device changes behind the file's times
    bench.file.verify(bench.extent, 0, LENGTH)
    assert bench.intact(0, LENGTH)
    evict(bench.file)
    assert not bench.intact(2 * CHUNK_BYTES, 1)
    bench.flip(2 * CHUNK_BYTES + 7)
    os.pread(bench.file.descriptor, LENGTH, START)
    assert not bench.intact(2 * CHUNK_BYTES, 1)
    with pytest.raises(BlockDamaged):
        bench.file.verify(bench.extent, 0, LENGTH)
    assert not bench.intact(2 * CHUNK_BYTES, 1)


def test_what_is_read_ahead_for_a_reader_that_ends_here_ends_here(bench: Bench) -> None:
    """A few bytes in the middle of a block cost the device those bytes and no more."""
    os.posix_fadvise(bench.file.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    bench.file.verify(bench.extent, 0, LENGTH)
    evict(bench.file)
    bench.file.verify_unread(bench.extent, CHUNK_BYTES, CHUNK_BYTES, reads_on=False)
    assert bench.intact(CHUNK_BYTES, CHUNK_BYTES)
    behind = START + 2 * CHUNK_BYTES + PAGE_BYTES
    assert pages_in_memory(bench.file, behind, LENGTH // PAGE_BYTES * PAGE_BYTES - behind) == 0


def test_one_that_reads_on_changes_nothing_for_those_that_do_not(bench: Bench) -> None:
    """The kernel reads ahead for it as long as it is at work, and no longer."""
    evict(bench.file)
    bench.file.verify_unread(bench.extent, 0, LENGTH, reads_on=True)
    assert bench.intact(0, LENGTH)
    evict(bench.file)
    for page in range(3):  # what looks like a sequence
        os.pread(bench.file.descriptor, PAGE_BYTES, START + page * PAGE_BYTES)
    assert pages_in_memory(bench.file, START, LENGTH // PAGE_BYTES * PAGE_BYTES - START) == 3


def test_1_4_a_file_that_a_thread_finds_changed_meanwhile_is_not_intact(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new state is known by then, and what was checked of the old one has been forgotten."""
    bench.file.verify(bench.extent, 0, LENGTH)
    bench.flip(5)
    left = ["once"]

    def meanwhile(descriptor: int) -> block_file.Fingerprint:
        if left:
            left.clear()
            with pytest.raises(BlockDamaged):
                bench.file.verify(bench.extent, 0, LENGTH)
        return fingerprint(descriptor)

    monkeypatch.setattr(block_file, "fingerprint", meanwhile)
    assert not bench.intact(0, 10)
    assert not left


def test_few_bytes_that_are_in_memory_are_verified_at_once(bench: Bench) -> None:
    """Nobody is waited for, and no device."""
    assert bench.file.verify_at_once(bench.extent, CHUNK_BYTES + 5, 10)
    assert bench.intact(CHUNK_BYTES, CHUNK_BYTES)
    assert not bench.intact(0, CHUNK_BYTES)


def test_what_is_on_its_way_from_the_device_is_not_in_memory(tmp_path: Path) -> None:
    """The page cache has its pages already, and who reads them waits for the device: the event loop, say."""
    size_bytes, step_bytes = 32 * 1024**2, 256 * 1024
    path = tmp_path / "large"
    path.write_bytes(os.urandom(size_bytes))
    with path.open("rb") as file:
        descriptor, buffer = file.fileno(), bytearray(step_bytes)
        drop_unmapped(descriptor, 0, 0)
        pages = MappedPages(descriptor, size_bytes)
        told = 0
        for offset in range(0, size_bytes, step_bytes):
            os.posix_fadvise(descriptor, offset, step_bytes, os.POSIX_FADV_WILLNEED)
            if pages.in_memory(offset, step_bytes):
                told += 1
                assert os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT) == step_bytes
        pages.close()
        if told == size_bytes // step_bytes:
            pytest.skip("the device is as fast as memory: this shows nothing")
        again = MappedPages(descriptor, size_bytes)
        assert any(_in_memory_once_read(again, descriptor, step_bytes) for _ in range(100))
        assert not again.in_memory(5, size_bytes)
        again.close()


def _in_memory_once_read(pages: MappedPages, descriptor: int, count: int) -> bool:
    """Read a part and ask for it at once. A kernel that is short of memory may have taken a page back even so."""
    os.pread(descriptor, count, 0)
    return pages.in_memory(5, count - 5)


def test_what_the_device_has_to_give_is_not_verified_at_once(bench: Bench) -> None:
    bench.file.verify(bench.extent, 0, LENGTH)
    evict(bench.file)
    assert not bench.file.verify_at_once(bench.extent, 0, CHUNK_BYTES)
    assert pages_in_memory(bench.file, START, CHUNK_BYTES) == 0


def test_much_is_not_verified_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client would keep all others of the loop waiting."""
    monkeypatch.setattr(block_file, "VERIFIED_AT_ONCE_BYTES_MAX", 2 * CHUNK_BYTES)
    assert not bench.file.verify_at_once(bench.extent, CHUNK_BYTES - 1, CHUNK_BYTES + 2)
    assert not bench.intact(CHUNK_BYTES, 1)
    assert bench.file.verify_at_once(bench.extent, CHUNK_BYTES, 2 * CHUNK_BYTES)


def test_a_thread_that_verifies_is_not_waited_for(bench: Bench) -> None:
    with bench.file._verifying:
        assert not bench.file.verify_at_once(bench.extent, 0, 10)
    assert bench.file.verify_at_once(bench.extent, 0, 10)


def test_1_4_damage_that_is_come_upon_at_once_is_not_intact(bench: Bench) -> None:
    bench.flip(5)
    assert not bench.file.verify_at_once(bench.extent, 0, 10)
    assert not bench.intact(0, 10)
    assert bench.file.verify_at_once(bench.extent, CHUNK_BYTES, 10), "and the lock is free again"


def test_what_nobody_wants_any_more_is_not_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked before every step."""
    monkeypatch.setattr(block_file, "READ_STEP_BYTES", CHUNK_BYTES)
    answers = iter((True, True, False))
    bench.file.verify_unread(bench.extent, 0, LENGTH, reads_on=True, is_wanted=lambda: next(answers))
    assert bench.intact(0, 2 * CHUNK_BYTES)
    assert not bench.intact(2 * CHUNK_BYTES, 1)


def test_verifying_one_part_brings_no_other_part_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel maps neighbours of what it is asked for, which may be wrong by now: it is kept from that."""
    monkeypatch.setattr(block_file, "fingerprint", lambda _: UNCHANGED)
    bench.file.verify(bench.extent, 0, LENGTH)
    evict(bench.file)
    bench.flip(7)
    os.pread(bench.file.descriptor, LENGTH, START)  # all of it is in memory now, for the kernel to map
    bench.file.verify(bench.extent, CHUNK_BYTES, LENGTH - CHUNK_BYTES)
    assert bench.intact(CHUNK_BYTES, LENGTH - CHUNK_BYTES)
    assert not bench.intact(0, 1)


@pytest.mark.parametrize("harm", ["write", "truncate", "touch"])
def test_another_state_of_the_file_is_another_file(bench: Bench, harm: str) -> None:
    """Nothing that was verified before counts, though every page is still there."""
    bench.file.verify(bench.extent, 0, LENGTH)
    if harm == "write":
        bench.flip(7)
    elif harm == "truncate":
        os.ftruncate(bench.file.descriptor, START + LENGTH - 1)
    else:
        os.utime(bench.file.descriptor, ns=(1, 1))
    assert not bench.intact(0, 1)
    if harm == "touch":
        bench.file.verify(bench.extent, 0, LENGTH)
        assert bench.intact(0, LENGTH)
    else:
        with pytest.raises(BlockDamaged):
            bench.file.verify(bench.extent, 0, LENGTH)


@pytest.mark.parametrize("event", ["mapped anew", "another state"])
def test_what_is_forgotten_while_the_loop_asks_is_not_intact(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    """1.4 A thread has the pages mapped again, or learns of the file's new times, between two of the loop's looks."""
    if event == "mapped anew":
        monkeypatch.setattr(block_file, "fingerprint", lambda _: UNCHANGED)
    bench.file.verify(bench.extent, 0, LENGTH)
    present = MappedPages.present

    def present_after_event(pages: MappedPages, offset: int, count: int) -> bool:
        monkeypatch.setattr(MappedPages, "present", present)
        if event == "mapped anew":
            evict(bench.file)
            bench.flip(7)
            with pytest.raises(BlockDamaged):
                bench.file.verify(bench.extent, 0, LENGTH)
        else:
            bench.flip(7)
            bench.file.verify(bench.extent, 2 * CHUNK_BYTES, 1)
        return pages.present(offset, count)

    monkeypatch.setattr(MappedPages, "present", present_after_event)
    assert not bench.intact(0, CHUNK_BYTES)


def test_a_file_that_is_distrusted_is_verified_again(bench: Bench) -> None:
    """After bytes of it could not be sent."""
    bench.file.verify(bench.extent, 0, LENGTH)
    bench.file.distrust()
    assert not bench.intact(0, 1)
    bench.file.verify(bench.extent, 0, LENGTH)
    assert bench.intact(0, LENGTH)


def test_where_nobody_tells_what_stays_in_memory_nothing_is_intact(tmp_path: Path) -> None:
    """Then every byte is read and verified for each request; damage is found all the same."""
    bench = Bench(tmp_path / "f")
    bare = BlockFile(os.dup(bench.file.descriptor), is_mappable=False)
    bare.begin_lease()
    bare.verify(bench.extent, 0, LENGTH)
    assert not bare.intact(bench.extent, 0, 1)
    bench.flip(7)
    with pytest.raises(BlockDamaged):
        bare.verify(bench.extent, 0, 1)
    bare.end_lease()
    bench.file.end_lease()


def test_mappings_go_with_their_files(tmp_path: Path) -> None:
    """However many are opened and verified, and in however many pieces: none is left, and none is split."""
    before = mappings()
    bench = Bench(tmp_path / "f")
    order = list(range(0, LENGTH, CHUNK_BYTES))
    random.Random(3).shuffle(order)
    for position in order:
        bench.file.verify(bench.extent, position, 1)
    assert mappings() <= before + 1
    bench.file.end_lease()
    assert mappings() <= before


def mappings() -> int:
    return sum("/f" in line.split()[-1][-2:] for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.slow
def test_readers_that_verify_at_once_do_not_vouch_for_each_other(tmp_path: Path) -> None:
    """Threads that verify the same parts while pages come and go: what is intact is right, and all of it is at last."""
    bench = Bench(tmp_path / "f")
    stop, wrong = threading.Event(), []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            position = rng.randrange(LENGTH)
            bench.file.verify(bench.extent, position, min(100_000, LENGTH - position))
            if bench.intact(position, 1) and os.pread(bench.file.descriptor, 1, START + position) != bytes(
                [bench.content[position]]
            ):
                wrong.append(position)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(100):
        evict(bench.file)
    stop.set()
    for reader in readers:
        reader.join(30)
    bench.file.verify(bench.extent, 0, LENGTH)
    assert bench.intact(0, LENGTH)
    assert wrong == []
    bench.file.end_lease()


RECORDS_BYTES = 6 * CHUNK_BYTES


class PagesComeAndGo(RuleBasedStateMachine):
    """A segment of small records and a file of large blocks: pages leave memory, change on the device, come back."""

    path: Path

    @initialize(is_segment=st.booleans(), seed=st.integers(0, 1000))
    def make(self, is_segment: bool, seed: int) -> None:
        rng = random.Random(seed)
        self.truth = rng.randbytes(RECORDS_BYTES)
        self.path.write_bytes(self.truth)
        self.extents = []
        offset = 0 if is_segment else rng.choice([0, 4096, 777])
        while offset < RECORDS_BYTES:
            longest = rng.choice([300, 5_000, 100_000]) if is_segment else 3 * CHUNK_BYTES
            length = min(rng.randint(1, longest) if is_segment else longest, RECORDS_BYTES - offset)
            self.extents.append(extent_of(self.truth[offset : offset + length], offset))
            offset += -(-length // 64) * 64 if is_segment else length
        self.file = BlockFile(os.open(self.path, os.O_RDWR), is_segment=is_segment)
        self.file.begin_lease()
        self.damaged: set[int] = set()

    def teardown(self) -> None:
        if hasattr(self, "file"):
            self.file.end_lease()

    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        extent = data.draw(st.sampled_from(self.extents))
        position = data.draw(st.integers(0, extent.length - 1))
        count = data.draw(st.integers(1, extent.length - position))
        try:
            self.file.verify(extent, position, count)
        except BlockDamaged:
            assert self.damaged
        else:
            assert self.file.intact(extent, position, count)

    @rule(page=st.integers(0, RECORDS_BYTES // PAGE_BYTES - 1), count=st.integers(1, 40))
    def evict_some(self, page: int, count: int) -> None:
        pages = self.file._pages
        if isinstance(pages, MappedPages):
            count = min(count, RECORDS_BYTES // PAGE_BYTES - page)
            os.fdatasync(self.file.descriptor)
            page_out(pages._address + page * PAGE_BYTES, count * PAGE_BYTES)

    @rule(position=st.integers(0, RECORDS_BYTES - 1))
    def device_changes(self, position: int) -> None:
        """Only where the page is not mapped: what is in memory does not change by itself."""
        pages = self.file._pages
        if isinstance(pages, MappedPages) and pages.present(position, 1):
            return
        [byte] = os.pread(self.file.descriptor, 1, position)
        os.pwrite(self.file.descriptor, bytes([byte ^ 0xFF]), position)
        self.damaged ^= {position}

    @rule(position=st.integers(0, RECORDS_BYTES - 1))
    def somebody_else_reads(self, position: int) -> None:
        os.pread(self.file.descriptor, 300_000, position)

    @invariant()
    def what_is_intact_is_right(self) -> None:
        if not hasattr(self, "file"):
            return
        for extent in self.extents:
            for position in range(0, extent.length, CHUNK_BYTES):
                count = min(CHUNK_BYTES, extent.length - position)
                if self.file.intact(extent, position, count):
                    offset = extent.offset + position
                    assert os.pread(self.file.descriptor, count, offset) == self.truth[offset : offset + count]


@pytest.mark.slow
def test_pages_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1.4 Whatever is intact is what was written, in generated histories in which the file's times stand still."""
    monkeypatch.setattr(block_file, "fingerprint", lambda _: UNCHANGED)
    PagesComeAndGo.path = tmp_path / "f"
    case = PagesComeAndGo.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    case("runTest").runTest()


def test_records_side_by_side_leave_each_other_alone(tmp_path: Path) -> None:
    """Those that share a page are withdrawn when it is mapped anew, and no others: each is read once."""
    path, rng = tmp_path / "f", random.Random(5)
    content = rng.randbytes(64 * PAGE_BYTES)
    path.write_bytes(content)
    extents, offset = [], 64
    while offset < len(content) - 8000:
        length = rng.choice([1, 64, 1000, 1024, 5000])
        extents.append(extent_of(content[offset : offset + length], offset))
        offset += -(-length // 64) * 64 + 192
    file = BlockFile(os.open(path, os.O_RDWR), is_segment=True)
    file.begin_lease()
    for extent in extents:
        file.verify(extent, 0, extent.length)
    assert [extent.offset for extent in extents if not file.intact(extent, 0, extent.length)] == []
    file.end_lease()


def test_records_that_are_forgotten_while_somebody_looks_are_not_marked() -> None:
    """A thread that finds the file changed forgets them while the event loop asks."""
    marks = RecordMarks()

    class Forgotten(bytearray):
        def __len__(self) -> int:
            marks.clear()
            return super().__len__()

    marks.add(extent_of(b"x" * 100, 64), 0, 100)
    marks._begins = Forgotten(marks._begins)
    marks.covers(extent_of(b"x" * 100, 64), 0, 100)
    assert not marks.covers(extent_of(b"x" * 100, 64), 0, 100)


def test_chunks_that_begin_elsewhere_are_not_those_that_are_marked() -> None:
    """An adopted file's blocks begin anywhere; marks of the one grid say nothing of another."""
    marks, content = ChunkMarks(), bytes(2 * CHUNK_BYTES)
    one, other = extent_of(content, 777), extent_of(content, 4096)
    marks.add(one, 0, 2 * CHUNK_BYTES)
    assert marks.covers(one, 0, 2 * CHUNK_BYTES)
    assert not marks.covers(other, 0, 1)
    marks.add(other, CHUNK_BYTES, CHUNK_BYTES)
    assert not marks.covers(one, 0, 1)
    assert not marks.covers(other, 0, 1)
    assert marks.covers(other, CHUNK_BYTES, CHUNK_BYTES)


class Refusing:
    """The C library, in which a call to change rights fails: ENOMEM, where the system has no more areas to give."""

    def __init__(self, real: Any, refused: int) -> None:
        self._real = real
        self._refused = refused
        self.calls: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def mprotect(self, address: int, count: int, rights: int) -> int:
        self.calls.append(rights)
        return -1 if len(self.calls) == self._refused else int(self._real.mprotect(address, count, rights))


@pytest.mark.parametrize("refused", [1, 2], ids=["rights to map", "no rights any more"])
def test_where_rights_cannot_be_changed_nothing_is_intact(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """With rights left over, the kernel might map pages that nobody checks: such a mapping proves nothing any more."""
    library = Refusing(page_cache._libc, refused)
    monkeypatch.setattr(page_cache, "_libc", library)
    bench.file.verify(bench.extent, 0, CHUNK_BYTES)
    assert not bench.intact(0, 1)
    assert library.calls == [1, 0], "rights are given back, however little was changed"
    bench.file.verify(bench.extent, CHUNK_BYTES, CHUNK_BYTES)
    assert bench.intact(CHUNK_BYTES, 1) is (refused == 1)


def test_a_fingerprint_tells_every_change(tmp_path: Path) -> None:
    """Another inode, size or time."""
    path = tmp_path / "f"
    path.write_bytes(b"x" * 100)
    descriptor = os.open(path, os.O_RDWR)
    before = fingerprint(descriptor)
    os.utime(descriptor, ns=(1, 1))
    assert fingerprint(descriptor) != before
    os.close(descriptor)


@pytest.mark.root
def test_a_disk_that_takes_nothing_says_nothing_of_the_system(tmp_path: Path) -> None:
    """A process that is started on a full disk would read and verify every byte for as long as it lives."""
    with small_disk(tmp_path / "disk", 2**20) as disk:
        fill_up(disk)
        assert is_supported(disk)


def test_a_directory_that_is_absent_says_nothing_of_the_system(tmp_path: Path) -> None:
    """The question is asked before the directory is made."""
    assert is_supported(tmp_path / "absent")


def test_a_system_that_tells_nothing_of_pages_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Linux 5.14 the kernel knows no such advice, for no file at all."""
    monkeypatch.setattr(page_cache, "_MADV_POPULATE_READ", 9999)
    assert not is_supported(tmp_path)
    assert not is_supported(tmp_path / "absent")


def packed_checksums(content: bytes) -> bytes:
    chunks = (content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES))
    return b"".join(checksums.crc32c(chunk).to_bytes(4, "little") for chunk in chunks)


@settings(max_examples=30)
@given(st.integers(1, 300_000), st.lists(st.integers(1, 100_000), max_size=20), st.integers(0, 2**32))
def test_checksums_do_not_depend_on_how_bytes_arrive(length: int, sizes: list[int], seed: int) -> None:
    """Pieces of any size give the checksums of the 64 KiB chunks, and only whole chunks count as complete."""
    content = random.Random(seed).randbytes(length)
    sums, position = ChunkChecksums(length), 0
    for size in [*sizes, length]:
        piece = content[position : position + size]
        position += len(piece)
        sums.update(piece)
        whole_chunks = position if position == length else position // CHUNK_BYTES * CHUNK_BYTES
        assert sums.complete_bytes == whole_chunks
    assert bytes(sums.packed) == packed_checksums(content)
    assert len(sums.packed) == 4 * chunk_count(length)


def test_a_single_wrong_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    """Every read that touches a chunk with a flipped bit fails; reads of other chunks succeed."""
    rng = random.Random(7)
    content = bytearray(rng.randbytes(LENGTH))
    path = tmp_path / "f"
    extent = Extent("f", START, LENGTH, packed_checksums(bytes(content)))
    for _ in range(100):
        bit = rng.randrange(LENGTH * 8)
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(b"\0" * START + damaged)
        position = rng.randrange(LENGTH)
        count = rng.randint(1, LENGTH - position)
        first, stop = chunk_aligned(extent, position, count)
        touches = first <= bit // 8 < stop
        with path.open("rb") as file:
            if touches:
                with pytest.raises(BlockDamaged):
                    read_verified(file.fileno(), extent, position, count)
            else:
                assert read_verified(file.fileno(), extent, position, count) == content[position : position + count]


def test_a_short_file_is_damaged(tmp_path: Path) -> None:
    """A file that ends early is an error, never short bytes."""
    path = tmp_path / "f"
    content = os.urandom(LENGTH)
    path.write_bytes(b"\0" * START + content[:-1])
    with path.open("rb") as file, pytest.raises(BlockDamaged, match="shorter"):
        read_verified(file.fileno(), Extent("f", START, LENGTH, packed_checksums(content)), LENGTH - 10, 10)


@pytest.mark.parametrize("cachestat", [True, False])
def test_residency_tells_memory_from_disk(tmp_path: Path, cachestat: bool) -> None:
    """Bytes just written are in memory; after the kernel dropped them they are not; one page missing is seen."""
    path = tmp_path / "f"
    path.write_bytes(os.urandom(2 * MIB))
    residency = Residency(cachestat=cachestat)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        assert residency.resident(descriptor, 0, 2 * MIB)
        drop_page_cache(path)
        if _in_memory_after_drop(descriptor):
            pytest.skip("this file system keeps everything in memory")
        assert not residency.resident(descriptor, 0, 2 * MIB)
        os.pread(descriptor, MIB, 0)
        assert residency.resident(descriptor, 0, MIB)
        assert _page_is_missed(residency, descriptor, MIB)
    finally:
        os.close(descriptor)


def _page_is_missed(residency: Residency, descriptor: int, offset: int) -> bool:
    """Drop one page and look, again and again: to look at a page that is missing begins to read it."""
    for _ in range(100):
        os.posix_fadvise(descriptor, offset, PAGE_BYTES, os.POSIX_FADV_DONTNEED)
        if not residency.resident(descriptor, 0, offset + 1):
            return True
    return False


def _in_memory_after_drop(descriptor: int) -> bool:
    return Residency().resident(descriptor, 0, 2 * MIB)


def test_what_waits_to_be_written_has_not_come_from_the_device(tmp_path: Path) -> None:
    """Once it is written, nobody can tell any more."""
    residency, path = Residency(), tmp_path / "f"
    with path.open("wb") as file:
        file.write(os.urandom(MIB))
        file.flush()
        if not residency.unwritten(file.fileno(), 0, MIB):
            pytest.skip("this system does not tell what waits to be written")
        os.fdatasync(file.fileno())
        assert not residency.unwritten(file.fileno(), 0, MIB)
        os.pwrite(file.fileno(), bytes(MIB), 0)
        assert residency.unwritten(file.fileno(), 0, MIB)
        assert not residency.unwritten(file.fileno(), 0, MIB + 1)

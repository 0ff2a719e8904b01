"""Block numbers, names and the header that makes a block file describe itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.blocks import layout
from gateway.blocks.layout import Block
from gateway.blocks.store import DIRECTORIES, BlockStore
from gateway.core.errors import BlockDamaged, StoreUnavailable
from gateway.core.model import ByteRange, Homes, ObjectKey, ObjectVersion

KEYS = st.text(st.characters(), min_size=1, max_size=300)  # lone surrogates too: keys that are not UTF-8
ETAGS = st.text(st.characters(max_codepoint=255), min_size=1, max_size=64)
BLOCK_SIZES = st.sampled_from([64 * 1024, 128 * 1024, 8 * 1024 * 1024])


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    size, block_size = draw(st.integers(1, 2**45)), draw(BLOCK_SIZES)
    version = ObjectVersion(ObjectKey(draw(KEYS), draw(KEYS)), draw(ETAGS), size)
    return layout.block_at(version, draw(st.integers(0, (size - 1) // block_size)), block_size)


def checksums_for(block: Block) -> bytes:
    return bytes(n % 251 for n in range(4 * layout.chunk_count(block.length)))


@given(blocks())
def test_a_header_says_what_was_put_into_it(block: Block) -> None:
    """Bucket, key, ETag, size, offset, length and checksums come back exactly; the data begins at a page."""
    header = layout.pack_header(block, checksums_for(block))
    assert layout.unpack_header(header) == (block, checksums_for(block))
    assert len(header) == layout.data_offset(block) == layout.header_bytes(header[:4096])
    assert len(header) % layout.ALIGNMENT_BYTES == 0


def test_blocks_of_one_bucket_at_two_homes_are_not_one() -> None:
    """Though bucket, key, ETag and size are the same. Headers say which it is, and name the bucket all the same."""
    version = ObjectVersion(ObjectKey("bucket", "k"), '"e"', 100)
    other = ObjectVersion(ObjectKey("other", "k"), '"e"', 100)
    try:
        found = []
        for homes in (Homes("m"), Homes("m", {"bucket": "http://a"}), Homes("m", {"bucket": "http://b"})):
            layout.set_home_tags(homes, "m")
            block = layout.block_at(version, 0, 64 * 1024)
            found.append((block, layout.pack_header(block, checksums_for(block)), layout.object_id(version.key)))
            assert block.id == layout.block_id(version, 0, 64 * 1024)
            assert block.id.endswith(layout.object_id(version.key))
        assert len({block.id for block, _, _ in found}) == len({ids for _, _, ids in found}) == 3
        layout.set_home_tags(Homes("m", {"other": "http://a"}), "m")
        assert layout.block_at(version, 0, 64 * 1024) == found[0][0]
        moved = layout.block_at(other, 0, 64 * 1024)
        for main, ids in (("http://a", 1), ("http://b", 2)):  # the main home is another, wherever it was before
            layout.set_home_tags(Homes(main, {"other": "m"}), "m")
            assert layout.block_at(version, 0, 64 * 1024) == found[ids][0]
            assert layout.block_at(other, 0, 64 * 1024).id != moved.id
        for block, header, _ in found:  # whatever the homes are by now
            assert layout.unpack_header(header)[0] == block
            assert layout.header_bytes(header) == len(header)
    finally:
        layout.set_home_tags(Homes(""), "")
    assert layout.block_at(other, 0, 64 * 1024).id != moved.id


@pytest.mark.slow
@given(blocks(), st.data())
@settings(max_examples=300)
def test_no_bit_of_a_header_can_be_wrong_unseen(block: Block, data: st.DataObject) -> None:
    """A flipped bit is found out, unless it lies in the padding, where it means nothing."""
    header = bytearray(layout.pack_header(block, checksums_for(block)))
    bit = data.draw(st.integers(0, len(header) * 8 - 1))
    header[bit // 8] ^= 1 << bit % 8
    with suppress(BlockDamaged):
        assert layout.unpack_header(bytes(header)) == (block, checksums_for(block))


@given(blocks(), st.data())
def test_a_torn_header_is_found_out(block: Block, data: st.DataObject) -> None:
    """A header whose later pages never reached the disk (zeros, or nothing) is not taken for one."""
    header = layout.pack_header(block, checksums_for(block))
    used = len(header.rstrip(b"\0"))
    kept = data.draw(st.integers(0, used - 1))
    for torn in (header[:kept], header[:kept].ljust(len(header), b"\0")):
        with pytest.raises(BlockDamaged):
            layout.unpack_header(torn)


@given(st.integers(1, 2**40), st.data())
def test_the_blocks_of_a_range_cover_it_without_overlap(size: int, data: st.DataObject) -> None:
    """Blocks follow each other; the first holds the range's first byte, the last one its last, within the object."""
    block_size = data.draw(BLOCK_SIZES)
    first = data.draw(st.integers(0, size - 1))
    asked = ByteRange(first, data.draw(st.integers(first, min(size - 1, first + 20 * block_size))))
    version = ObjectVersion(ObjectKey("b", "k"), '"e"', size)
    found = list(layout.blocks_of(version, asked, block_size))
    assert found[0].offset <= asked.first < found[0].range.stop
    assert found[-1].offset <= asked.last < found[-1].range.stop <= size
    for earlier, later in pairwise(found):
        assert later.offset == earlier.range.stop
    assert all(block.offset % block_size == 0 for block in found)


@given(blocks(), blocks())
def test_blocks_share_a_name_only_if_they_are_the_same(one: Block, other: Block) -> None:
    """The id is a function of bucket, key, ETag, object size, offset and length, and of nothing else."""
    same = (one.version, one.offset, one.length) == (other.version, other.offset, other.length)
    assert (one.id == other.id) == same


def test_boundaries_between_the_parts_of_a_name_count() -> None:
    """What is a bucket's end and what a key's beginning is part of the name."""

    def name(bucket: str, key: str, etag: str) -> bytes:
        return layout.block_at(ObjectVersion(ObjectKey(bucket, key), etag, 1), 0, 65536).id

    assert len({name("ab", "c", "d"), name("a", "bc", "d"), name("a", "b", "cd"), name("abc", "", "d")}) == 4


def test_a_file_name_never_shows_the_key() -> None:
    """Names on disk are hexadecimal digits: no key becomes a path."""
    block = layout.block_at(ObjectVersion(ObjectKey("b", "../../etc/passwd\0"), '"e"', 1), 0, 65536)
    assert set(layout.file_name(block.id, "0123456789abcdef")) <= set("0123456789abcdef-")


@given(blocks(), blocks())
def test_an_id_is_the_same_however_it_is_come_by_and_says_which_object_it_is_of(one: Block, other: Block) -> None:
    """From the version at once, from its blocks one by one, from a header; its end is shared by all of the object."""
    for block in (one, other):
        header = layout.pack_header(block, checksums_for(block))
        assert layout.unpack_header(header)[0].id == block.id
        assert layout.BlockIds(block.version).at(block.offset, block.length) == block.id
        assert block.id[-layout.OBJECT_ID_BYTES :] == layout.object_id(block.version.key)
    size = 64 * 1024
    assert layout.block_id(one.version, 0, size) == layout.block_at(one.version, 0, size).id
    assert (one.id == other.id) == (one == other)


FILE = f"3f{'0' * 62}-{'0' * 16}"
SEGMENT = f"3f{'0' * 30}.segment"


def publish(store: BlockStore, scratch: Path) -> str:
    opened = store.create_partial(FILE)
    store.write(opened, b"bytes", 0)
    opened.close()
    store.publish(FILE)
    return FILE


def link(store: BlockStore, scratch: Path) -> str:
    (scratch / "elsewhere").write_bytes(b"bytes")
    store.link(scratch / "elsewhere", FILE)
    return FILE


def append(store: BlockStore, scratch: Path) -> str:
    assert store.append(SEGMENT, [b"bytes"], 0, new=True)
    return SEGMENT


@pytest.mark.parametrize("way", [publish, link, append])
def test_a_file_is_published_whether_or_not_its_directory_is_there(
    tmp_path: Path, way: Callable[[BlockStore, Path], str]
) -> None:
    store = BlockStore(tmp_path, 0)
    store.prepare()
    directory = tmp_path / "data" / "3f"
    for _ in range(2):
        file = way(store, tmp_path)
        assert (store.directories(), store.listing(0x3F), store.bytes_on_disk(0x3F)) == ([0x3F], [file], 4096)
        assert (directory / file).read_bytes() == b"bytes"
        assert directory.stat().st_mode & 0o777 == 0o700
        store.unlink(file)
        directory.rmdir()


def test_a_directory_without_a_file_is_none(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 0)
    store.prepare()
    assert list((tmp_path / "data").iterdir()) == []
    assert [store.listing(number) for number in range(DIRECTORIES)] == [[]] * DIRECTORIES
    assert store.directories() == []


def test_what_is_not_there_is_not_published(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 0)
    store.prepare()
    with pytest.raises(StoreUnavailable):
        store.publish(FILE)
    assert not store.append(SEGMENT, [b"bytes"], 5, new=False)
    assert store.listing(0x3F) == []

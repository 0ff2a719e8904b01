"""The directories of block files are made with their first file, and again where somebody has removed one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.blocks.store import DIRECTORIES, BlockStore
from gateway.core.errors import StoreUnavailable

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
        assert (store.listing(0x3F), store.bytes_on_disk(0x3F)) == ([file], 4096)
        assert (directory / file).read_bytes() == b"bytes"
        assert directory.stat().st_mode & 0o777 == 0o700
        store.unlink(file)
        directory.rmdir()


def test_a_directory_without_a_file_is_none(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 0)
    store.prepare()
    assert list((tmp_path / "data").iterdir()) == []
    assert [store.listing(number) for number in range(DIRECTORIES)] == [[]] * DIRECTORIES
    assert sum(store.bytes_on_disk(number) for number in range(DIRECTORIES)) == 0


def test_what_is_not_there_is_not_published(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, 0)
    store.prepare()
    with pytest.raises(StoreUnavailable):
        store.publish(FILE)
    assert not store.append(SEGMENT, [b"bytes"], 5, new=False)
    assert store.listing(0x3F) == []

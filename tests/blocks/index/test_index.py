"""What the index is asked on the event loop."""

from __future__ import annotations

from pathlib import Path

from gateway.blocks import layout
from gateway.blocks.index import ROWS_LOOKED_AT_MAX
from gateway.blocks.layout import BlockSettings
from gateway.blocks.opening import OpenDirectory, open_directory
from gateway.blocks.small_block_fetch import SegmentAppender
from gateway.blocks.store import SmallBlock
from gateway.core.model import ObjectKey, ObjectVersion
from tests.support.appending import append_all, calls_of
from tests.support.blocks import KIB, MIB

_KEY = ObjectKey("b", "a")


def opened_with_versions(directory: Path, count: int) -> OpenDirectory:
    """So many versions of one object."""
    opened = open_directory(BlockSettings(directory, 64 * MIB, 64 * KIB), 0)
    versions = (ObjectVersion(_KEY, f'"{number}"', 100) for number in range(count))
    blocks = [SmallBlock(layout.block_at(version, 0, 64 * KIB), memoryview(bytes(100))) for version in versions]
    append_all(SegmentAppender(opened.blocks), blocks)
    return opened


def evict_all(opened: OpenDirectory) -> None:
    """All files, whose blocks' rows stay until they are swept."""
    index = opened.blocks.index
    for file in list(index.files()):
        with index.writing() as transaction:
            transaction.evict(file)


def test_an_object_is_known_while_a_block_of_it_is_there(tmp_path: Path) -> None:
    """Not longer, although rows of it may be left; and nobody else is."""
    opened = opened_with_versions(tmp_path / "c", 3)
    index, known = opened.blocks.index, layout.object_id(_KEY)
    assert index.has_object(known)
    assert not index.has_object(layout.object_id(ObjectKey("b", "b")))
    evict_all(opened)
    assert not index.has_object(known)
    opened.close()


def test_an_object_with_many_blocks_on_their_way_out_costs_no_more(tmp_path: Path) -> None:
    """The event loop asks: what it costs has a bound, however many rows there are."""
    known, calls = layout.object_id(_KEY), []
    for count in (2 * ROWS_LOOKED_AT_MAX, 20 * ROWS_LOOKED_AT_MAX):
        opened = opened_with_versions(tmp_path / str(count), count)
        evict_all(opened)
        calls.append(calls_of(lambda index=opened.blocks.index: index.has_object(known)))  # type: ignore[misc]
        opened.close()
    assert calls[0] == calls[1]

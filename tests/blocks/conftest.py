"""What tests of reading share."""

from __future__ import annotations

import pytest

from gateway.blocks.block_file import BlockFile
from gateway.blocks.layout import Extent


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read and checked, once for each time."""
    seen: list[str] = []
    verify = BlockFile.verify

    def noting(file: BlockFile, extent: Extent, position: int, count: int) -> None:
        seen.append(extent.file)
        verify(file, extent, position, count)

    monkeypatch.setattr(BlockFile, "verify", noting)
    return seen

"""How soon a cache of many blocks can be used after an unclean boot, and how long the survey takes.

    python -m loadtests.unclean_boot [--blocks 1000000] [--directory DIRECTORY]

Makes that many block files of 4 KiB (two pages each on disk, removed at the end), forgets the index as a power cut
would, opens the directory and surveys it, in one process. The page cache is warm.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.blocks import layout
from gateway.blocks.layout import Block, BlockSettings
from gateway.blocks.opening import open_directory, rebuild
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.policy.slots import Slots

BLOCK_SIZE_BYTES = 64 * 1024
CONTENT = b"x" * 4096


@contextmanager
def timed(what: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    print(f"{what:<8} {time.perf_counter() - wall:8.2f} s, {time.process_time() - cpu:8.2f} s of CPU", flush=True)


def block(number: int) -> Block:
    key = ObjectKey("train", f"imagenet/class{number % 1000:04d}/image{number:08d}.jpg")
    return layout.block_at(ObjectVersion(key, '"d41d8cd98f00b204e9800998ecf8427e"', len(CONTENT)), 0, BLOCK_SIZE_BYTES)


def make(settings: BlockSettings, blocks: int) -> None:
    open_directory(settings, 0).close()
    for number in range(blocks):
        one = block(number)
        name = layout.file_name(one.id, f"{number:016x}")
        path = settings.directory / "data" / name[:2] / name
        path.write_bytes(layout.pack_header(one, b"\0\0\0\0") + CONTENT)
    (settings.directory / "CLEAN").unlink()
    (settings.directory / "BOOT").unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(dir=arguments.directory))
    settings = BlockSettings(root / "blocks", 1 << 50, BLOCK_SIZE_BYTES)
    try:
        with timed("make"):
            make(settings, arguments.blocks)
        with timed("open"):
            opened = open_directory(settings, 0)
        with timed("survey"):
            for _ in rebuild(opened.blocks, Slots()):
                pass
        found = opened.blocks.index.usage().blocks
        size_bytes = (settings.directory / "index" / "data.mdb").stat().st_size
        print(f"found {found} of {arguments.blocks} blocks; the index takes {size_bytes / found:.0f} bytes per block")
        opened.close()
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()

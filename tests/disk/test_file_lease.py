"""Open files that several users share: nobody reads, sends or closes a file that is not his own."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from gateway.blocks.directory import DiskThreads
from gateway.disk.file_lease import FileLease, LeaseEnded, SharedFile
from gateway.writeback.staged_file import BufferThreads


def leased(path: Path) -> FileLease[SharedFile]:
    path.touch()
    return FileLease(SharedFile(os.open(path, os.O_RDONLY)))


def is_open(descriptor: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{descriptor}")


def test_the_last_lease_closes_the_file(tmp_path: Path) -> None:
    """In whichever order they end."""
    first = leased(tmp_path / "file")
    second, descriptor = first.share(), first.descriptor
    first.close()
    assert is_open(descriptor)
    second.close()
    assert not is_open(descriptor)


def test_a_lease_that_has_ended_gives_nothing(tmp_path: Path) -> None:
    """Neither the number nor a further lease, though others still use the file."""
    lease = leased(tmp_path / "file")
    with lease.share():
        lease.close()
        for use in (lambda: lease.descriptor, lambda: lease.file, lease.share):
            with pytest.raises(LeaseEnded):
                use()


def test_ending_twice_takes_it_from_nobody(tmp_path: Path) -> None:
    """Neither from the other users of the file nor from whoever has its number by then."""
    lease = leased(tmp_path / "file")
    with lease.share() as other:
        lease.close()
        lease.close()
        assert is_open(other.descriptor)
    with leased(tmp_path / "next") as successor:
        lease.close()
        assert is_open(successor.descriptor)


def test_a_file_that_is_closed_has_no_further_leases(tmp_path: Path) -> None:
    """Whoever kept the file itself finds out that it is over."""
    lease = leased(tmp_path / "file")
    file = lease.file
    lease.close()
    with pytest.raises(LeaseEnded):
        FileLease(file)


def test_a_lease_that_is_forgotten_ends(tmp_path: Path) -> None:
    """A body that is closed before its first piece never runs its `finally`."""
    lease = leased(tmp_path / "file")
    descriptor = lease.descriptor
    del lease
    gc.collect()
    assert not is_open(descriptor)


def test_threads_that_share_and_end_close_once(tmp_path: Path) -> None:
    """However they interleave, the file is open until the last has ended, and closed then."""
    lease = leased(tmp_path / "file")
    descriptor, start = lease.descriptor, threading.Barrier(8)

    def use() -> None:
        start.wait(30)
        for _ in range(2_000):
            with lease.share() as own:
                os.fstat(own.descriptor)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert is_open(descriptor)
    lease.close()
    assert not is_open(descriptor)


@pytest.mark.parametrize("kind", [DiskThreads, BufferThreads])
def test_who_leaves_while_a_file_is_opened_leaves_it_closed(
    tmp_path: Path, kind: type[DiskThreads] | type[BufferThreads]
) -> None:
    """At once, and not when the garbage collector comes by: an evicted file keeps its room on disk until then."""
    threads, begun, resume = kind(1), threading.Event(), threading.Event()
    kept: list[FileLease[Any]] = []  # so that no collector closes it

    def open_late() -> FileLease[Any]:
        begun.set()
        resume.wait(10)
        kept.append(leased(tmp_path / "file"))
        return kept[-1]

    async def scenario() -> None:
        waiting = asyncio.create_task(threads.open(open_late))
        await asyncio.to_thread(begun.wait, 10)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        resume.set()

    asyncio.run(scenario())
    threads.shut_down()
    assert [lease.is_open for lease in kept] == [False]

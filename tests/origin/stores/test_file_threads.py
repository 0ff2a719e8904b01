"""D7: what hangs keeps its own thread, and nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.core.errors import OriginBusy, OriginUnreachable, OutcomeUnknown
from gateway.origin.stores.directory import files
from gateway.origin.stores.directory.file_threads import FileThreads
from tests.origin.origins import ask
from tests.support.directory_origin import BUCKET, DirectoryOrigin
from tests.support.waiting import until

SOON = 0.05
LONG = 60.0


@asynccontextmanager
async def threads(count: int, look: Callable[[], object] = lambda: None) -> AsyncIterator[FileThreads]:
    made = FileThreads("nas", count, look, wait_seconds_max=SOON, look_seconds_max=SOON)
    try:
        yield made
    finally:
        await made.aclose()


async def test_work_that_hangs_is_left_behind_and_counted() -> None:
    """Its caller gets an error in time; other work goes on; what it returns at last is undone."""
    hangs, undone = threading.Event(), list[int]()

    def stuck() -> int:
        hangs.wait()
        return 7

    async with threads(2) as own:
        with pytest.raises(OriginUnreachable, match="has not answered") as raised:
            await own.run(stuck, SOON, undone.append, is_write=True)
        assert raised.value.may_be_done
        assert own.left_behind == 1
        assert await own.run(lambda: 1, LONG) == 1
        hangs.set()
        await until(lambda: not own.left_behind)
        await until(lambda: undone == [7])


async def test_a_file_system_that_answers_nothing_is_not_asked_until_it_does() -> None:
    """One look finds it dead; then nothing is begun, until the look returns."""
    hangs = threading.Event()
    async with threads(4, hangs.wait) as own:
        with pytest.raises(OriginUnreachable):
            await own.run(hangs.wait, SOON)
        await until(lambda: own.is_dead)
        begun = list[int]()
        with pytest.raises(OriginUnreachable, match="does not answer") as raised:
            await own.run(lambda: begun.append(1), LONG)
        assert (begun, raised.value.may_be_done) == ([], False)
        hangs.set()
        await until(lambda: not own.is_dead)
        assert await own.run(lambda: 1, LONG) == 1


async def test_no_more_threads_than_allowed_hang() -> None:
    """With all of them left behind, requests are refused at once; with all of them busy, after a while."""
    hangs = threading.Event()
    async with threads(2) as own:
        for _ in range(2):
            with pytest.raises(OriginUnreachable):
                await own.run(hangs.wait, SOON)
        with pytest.raises(OriginUnreachable):
            await own.run(lambda: 1, LONG)
        hangs.set()
        await until(lambda: not own.left_behind)
        again = threading.Event()
        busy = [asyncio.create_task(own.run(again.wait, LONG)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(OriginBusy):
            await own.run(lambda: 1, LONG)
        again.set()
        await asyncio.gather(*busy)


async def test_the_end_waits_for_no_thread_that_hangs() -> None:
    hangs = threading.Event()
    async with threads(1, hangs.wait) as own:
        with pytest.raises(OriginUnreachable):
            await own.run(hangs.wait, SOON)
    hangs.set()


async def test_what_a_cancelled_caller_opened_is_closed() -> None:
    """Nobody else knows of it."""
    begun, goes_on, closed = threading.Event(), threading.Event(), list[str]()

    def opening() -> str:
        begun.set()
        goes_on.wait()
        return "opened"

    async with threads(1) as own:
        caller = asyncio.create_task(own.run(opening, LONG, closed.append))
        await asyncio.to_thread(begun.wait)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        goes_on.set()
        await until(lambda: bool(closed))
        assert closed == ["opened"]


async def test_what_was_opened_is_closed_on_a_thread(nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a file asks its server, which may hang: the event loop never does it."""
    nas.write("file", b"1")
    closing, close = list[int](), files.OpenFile.close

    def noted(opened: files.OpenFile) -> None:
        closing.append(threading.get_ident())
        close(opened)

    monkeypatch.setattr(files.OpenFile, "close", noted)
    assert (await ask(nas, "GET", BUCKET, "file")).status == 200
    await until(lambda: bool(closing))
    assert threading.get_ident() not in closing


async def test_a_conditional_write_that_hangs_may_have_been_carried_out(
    nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody repeats it, as the second would be refused for the first."""
    hangs = threading.Event()
    nas.files._slow_seconds = SOON
    monkeypatch.setattr(nas.files._writer, "publish", lambda *_: hangs.wait())
    with pytest.raises(OutcomeUnknown):
        await ask(nas, "PUT", BUCKET, "file", headers={"if-none-match": "*"}, body=b"1")
    hangs.set()


async def test_a_hung_file_server_is_answered_in_time(nas: DirectoryOrigin, monkeypatch: pytest.MonkeyPatch) -> None:
    """13.7 The origin gives up within the time for a first byte, and goes on with all else."""
    hangs = threading.Event()
    nas.write("file", b"1")
    nas.files._first_byte_seconds = SOON
    monkeypatch.setattr(nas.files._files, "head", lambda _: hangs.wait())
    with pytest.raises(OriginUnreachable):
        await ask(nas, "HEAD", BUCKET, "file")
    assert (await ask(nas, "GET", BUCKET, "file")).status == 200
    hangs.set()

"""What a child says about its start, and besides."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from gateway.core.errors import StartupError, StoreUnavailable
from gateway.serve.child_process import ChildProcess
from gateway.serve.children import Child


class Ended:
    """A process that is over."""

    async def wait(self) -> int:
        return 1


class Told(asyncio.WriteTransport):
    """Nobody reads it."""

    def close(self) -> None:
        """There is nothing to let go of."""


class Pipe(asyncio.ReadTransport):
    """Notes that it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def child_that_says(text: bytes) -> tuple[ChildProcess, Pipe]:
    """And nothing more. In a running event loop."""
    report, pipe = asyncio.StreamReader(), Pipe()
    report.feed_data(text)
    report.feed_eof()
    return ChildProcess("background", cast(Child, Ended()), Told(), report, pipe), pipe


def test_what_is_asked_before_a_child_is_ready_is_heard() -> None:
    """The admin port answers while the cache directory is being opened: a change of slots that comes then is no end of
    the start, and is not forgotten."""

    async def scenario() -> None:
        child, pipe = child_that_says(b"asks a\nasks b c\nready\nfollows 1\n")
        await child.wait_until_ready()
        assert not pipe.is_closed
        assert [report async for report in child.reports()] == [("asks", "a"), ("asks", "b c"), ("follows", "1")]
        assert pipe.is_closed

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("says", "error", "why"),
    [
        (b"asks a\nfailed a port is taken\n", StartupError, "background: a port is taken"),
        (b"unusable the disk fails\n", StoreUnavailable, "the disk fails"),
        (b"asks a\n", StartupError, r"ended before it was ready \(exit code 1\)"),
    ],
)
def test_a_start_that_fails_says_why(says: bytes, error: type[Exception], why: str) -> None:
    """Whatever was asked before."""

    async def scenario() -> None:
        child, pipe = child_that_says(says)
        with pytest.raises(error, match=why):
            await child.wait_until_ready()
        assert pipe.is_closed

    asyncio.run(scenario())

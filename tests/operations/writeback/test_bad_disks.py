"""A disk under the buffer that is full: nothing false is acknowledged, and what was acknowledged stays.

The file systems are real ones: what `pwrite`, `fsync` and SQLite say is what the kernel makes them say.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.writeback import bounds
from gateway.writeback.room import MARGIN_BYTES
from gateway.writeback.staged_file import StagedWriter, Staging
from tests.support.disks import fill_up, small_disk
from tests.support.slots import Slot, slot_with
from tests.support.waiting import until
from tests.support.write_back_gateway import SLOTS, Client, with_client

MIB = 1024 * 1024
DISK_BYTES = 132 * MIB
"""What is in the memory of all processes takes 36 MiB of it."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as path:
        yield path


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.operations.writeback.parts.PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("gateway.operations.writeback.parts.PATIENCE_BEFORE_THROUGH_SECONDS", 0.03)
    monkeypatch.setattr(bounds, "TROUBLE_SECONDS", 0.2)
    monkeypatch.setattr("gateway.writeback.room.DISK_LOOK_SECONDS", 0.0)


def slots(**changed: Any) -> list[Slot]:
    return [slot_with(SLOTS[0], buffer_bytes=64 * MIB, **changed)]


async def put(client: Client, name: str, content: bytes, status: int = 200) -> str:
    answer = await client.ask("PUT", f"back/{name}", content, status=status)
    return answer.headers.get("x-forebay-cache", "")


async def read(client: Client, name: str) -> bytes:
    return (await client.ask("GET", f"back/{name}")).body


def once(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, do: Callable[[], object]) -> None:
    """The next call of a method is followed by `do`; those after it are as ever."""
    real, left = getattr(owner, method), [1]

    def called(*arguments: Any) -> Any:
        result = real(*arguments)
        if left and left.pop():
            do()
        return result

    monkeypatch.setattr(owner, method, called)


@pytest.mark.root
def test_where_somebody_else_fills_the_disk_writes_go_through(disk: Path) -> None:
    """Before a byte is read: the buffer's size is a promise that the disk cannot keep now."""

    async def scenario(client: Client) -> None:
        await client.learn()
        kept = os.urandom(MIB)
        assert await put(client, "kept", kept) == "absorbed"
        others = fill_up(disk, leave_bytes=MARGIN_BYTES + 2 * MIB)
        assert await put(client, "large", bytes(4 * MIB)) == "forwarded"
        assert await put(client, "small", bytes(MIB)) == "absorbed"
        fill_up(disk, "more")
        assert await put(client, "next", b"x") == "forwarded"
        assert await read(client, "kept") == kept
        others.unlink()
        await asyncio.sleep(bounds.TROUBLE_SECONDS)
        assert await put(client, "large", bytes(4 * MIB)) == "absorbed"
        (disk / "more").unlink()
        await client.flush()
        assert client.origin.data("bucket", "back/kept") == kept
        assert client.origin.data("bucket", "back/next") == b"x"

    with_client(disk, scenario, slots())


@pytest.mark.root
def test_or_are_slowed_down(disk: Path) -> None:
    """With `when_buffer_full = "slow-down"`: the message says what is the matter."""

    async def scenario(client: Client) -> None:
        await client.learn()
        fill_up(disk)
        refused = await client.ask("PUT", "back/k", bytes(MIB), status=503)
        assert b"<Code>SlowDown</Code>" in refused.body
        assert b"disk" in refused.body
        (disk / "of somebody else").unlink()
        assert await put(client, "k", bytes(MIB)) == "absorbed"

    with_client(disk, scenario, slots(when_buffer_full="slow-down"))


@pytest.mark.root
@pytest.mark.slow
def test_the_cache_leaves_the_buffer_its_room(disk: Path) -> None:
    """Whatever is read: the whole buffer can be written afterwards, without the cache having to yield."""

    async def scenario(client: Client) -> None:
        await client.learn()
        for number in range(10):
            client.origin.put_generated("bucket", f"data/{number}", 4 * MIB, number)
        for number in range(10):
            answer = await client.ask("GET", f"data/{number}")
            assert answer.body == client.origin.data("bucket", f"data/{number}")
        cached_bytes = client.gateway.blocks.usage().used_bytes
        assert 4 * MIB <= cached_bytes <= DISK_BYTES - 64 * MIB - 2 * MARGIN_BYTES
        answers = [await put(client, f"k{number}", bytes(4 * MIB)) for number in range(16)]
        assert answers == ["absorbed"] * 16
        await client.flush()

    with_client(disk, scenario, slots())


@pytest.mark.root
def test_a_disk_that_fills_while_a_body_arrives(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 for that body, of which nothing is left; what came before is there, what comes next goes through."""

    async def scenario(client: Client) -> None:
        await client.learn()
        assert await put(client, "kept", b"kept") == "absorbed"
        once(monkeypatch, StagedWriter, "write", lambda: fill_up(disk))
        refused = await client.ask("PUT", "back/k", bytes(3 * MIB), status=503)
        assert b"No space left" in refused.body
        assert client.pending("back/k") is None
        assert len(list(client.buffer.staging.names())) == 1
        assert await put(client, "k", bytes(3 * MIB)) == "forwarded"
        assert await read(client, "kept") == b"kept"
        (disk / "of somebody else").unlink()
        await client.flush()

    # One write of a small body would be all of it: pieces come as the application is given them.
    with_client(disk, _in_pieces(scenario), slots())


def _in_pieces(scenario: Callable[[Client], Any]) -> Callable[[Client], Any]:
    async def run(client: Client) -> None:
        real = client.ask

        async def ask(method: str, target: str, body: bytes = b"", *rest: Any, **named: Any) -> Any:
            pieces: Any = [body[at : at + MIB] for at in range(0, len(body), MIB)] or body
            return await real(method, target, pieces, *rest, **named)

        client.ask = ask  # type: ignore[method-assign]
        await scenario(client)

    return run


@pytest.mark.root
def test_a_journal_without_room_acknowledges_nothing(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite has no room for the commit: 503, the body's file is gone; with room again, everything goes on."""

    async def scenario(client: Client) -> None:
        await client.learn()
        assert await put(client, "kept", b"kept") == "absorbed"
        once(monkeypatch, Staging, "seal", lambda: fill_up(disk))
        refused = await client.ask("PUT", "back/k", os.urandom(1000), status=503)
        assert b"cannot be written" in refused.body
        assert client.pending("back/k") is None
        assert len(list(client.buffer.staging.names())) == 1
        (disk / "of somebody else").unlink()
        await asyncio.sleep(bounds.TROUBLE_SECONDS)
        assert await put(client, "k2", b"x") == "absorbed"
        upload_id = await client.create("back/m")
        etag = await client.part("back/m", upload_id, 1, b"part")
        await client.complete("back/m", upload_id, {1: etag})
        await client.flush()
        assert client.origin.data("bucket", "back/kept") == b"kept"
        assert "back/k" not in client.origin.buckets["bucket"].objects

    with_client(disk, scenario, slots())


@pytest.mark.root
def test_the_flush_goes_on_when_a_full_disk_has_room_again(disk: Path) -> None:
    """What was acknowledged waits as long as the journal cannot say that it is done."""
    _flush_on_a_full_disk(disk, reserve=False)


@pytest.mark.root
def test_the_flush_goes_on_while_the_disk_is_full(disk: Path) -> None:
    """Room was set aside for saying so; it is set aside again when there is some."""
    _flush_on_a_full_disk(disk, reserve=True)


def _flush_on_a_full_disk(disk: Path, *, reserve: bool) -> None:
    """With ballast it must be over before there is room again."""

    async def scenario(client: Client) -> None:
        await client.learn()
        if reserve:
            await client.buffer.keep_reserve()
        bodies = {f"k{n}": os.urandom(20_000) for n in range(8)}
        for name, body in bodies.items():
            assert await put(client, name, body) == "absorbed"
        fill_up(disk)
        async with client.flushing():
            for name, body in bodies.items():
                assert await read(client, name) == body
            if reserve:
                await until(lambda: client.buffer.look(lambda tx: tx.counts()[0]) == 0)
                assert not (disk / "writeback" / "ballast").exists()
            (disk / "of somebody else").unlink()
            await client.flush_objects()
            if reserve:
                await client.buffer.keep_reserve()
                assert (disk / "writeback" / "ballast").stat().st_size > 0
        for name, body in bodies.items():
            assert client.origin.data("bucket", f"back/{name}") == body

    with_client(disk, scenario, slots())

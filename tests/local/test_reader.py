"""The reader of local files: right bytes or none, whatever happens to files, gateway and process."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from forebay import local as module
from forebay import s3_get
from forebay.local import Reader
from gateway.core.model import ObjectKey
from gateway.policy.slots import Prefix
from gateway.telemetry import metrics
from tests.support.asgi import call
from tests.support.gateway_app import BLOCK_SIZE_BYTES, GatewayApp, gateway_app
from tests.support.local_reads import KEYS, LocalGateway, local_gateway
from tests.support.serving import PATIENCE_SECONDS
from tests.support.slots import Slot
from tests.support.waiting import until

FIXED = Slot("data", Prefix.parse("s3://bucket/"), consistency="immutable")
SIZES = (1, 1000, BLOCK_SIZE_BYTES - 1, 2 * BLOCK_SIZE_BYTES + 5, 5 * BLOCK_SIZE_BYTES)


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZES[number % len(SIZES)])


async def filled(gateway: GatewayApp, local: LocalGateway, count: int) -> tuple[Reader, list[str]]:
    """A reader that reads these objects from files."""
    for number in range(count):
        gateway.origin.put("bucket", f"k{number}", content(number))
        await call(gateway.app, "GET", f"/bucket/k{number}")
    await gateway.blocks.settle()
    reader, keys = local.reader(), [f"bucket/k{number}" for number in range(count)]
    await local.warm(reader, *keys)
    return reader, keys


def files_of(gateway: GatewayApp) -> list[Path]:
    return [one for one in gateway.blocks._directory.store._data.rglob("*") if one.is_file()]


@pytest.mark.slow
async def test_damaged_bytes_are_never_given(tmp_path: Path) -> None:
    """15.3 Whatever byte of a block changes on disk: the reader refuses it, the gateway drops the block, and the bytes
    come by HTTP; then from files again."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        reader, keys = await filled(gateway, local, 20)
        bodies = [content(number) for number in range(20)]
        for _ in range(10):
            dropped = metrics.CACHE_DAMAGED.value("data")
            await local.warm(reader, *keys)
            for file in files_of(gateway):
                with file.open("r+b") as opened:
                    for _ in range(3):
                        at = rng.randrange(file.stat().st_size)
                        opened.seek(at)
                        old = opened.read(1)
                        opened.seek(at)
                        opened.write(bytes([old[0] ^ 1 << rng.randrange(8)]))
            before = reader.http_reads
            assert await local.read(reader, *keys) == bodies
            if reader.http_reads > before:
                assert metrics.CACHE_DAMAGED.value("data") > dropped
            await gateway.blocks.settle()


async def test_a_file_that_was_evicted_is_still_right(tmp_path: Path) -> None:
    """15.3 A descriptor that is held over an eviction shows the same bytes; nobody gets the block any more."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        reader, keys = await filled(gateway, local, 5)
        assert reader._link is not None
        held = list(reader._link.files.values())
        before = [os.pread(one.descriptor, 1 << 20, 0) for one in held]
        for number in range(5):
            await gateway.blocks.evict(ObjectKey("bucket", f"k{number}"))
        assert [os.pread(one.descriptor, 1 << 20, 0) for one in held] == before
        assert all(os.fstat(one.descriptor).st_nlink == 0 for one in held)
        http = reader.http_reads
        assert await local.read(reader, *keys) == [content(number) for number in range(5)]
        assert reader.http_reads == http + 5
        await asyncio.to_thread(reader._let_go)  # they take room, and nobody is sent to them any more
        assert not set(held) & set(reader._link.files.values())


async def test_unused_files_are_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """15.4 By the reader's own thread, however long nobody reads; the gateway knows, and hands them out again."""
    monkeypatch.setattr(module, "UNUSED_SECONDS", 0.05)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        reader, keys = await filled(gateway, local, 5)
        await until(lambda: reader._link is not None and not reader._link.files)
        await until(lambda: not any(one.held for one in local.port._all))
        http = reader.http_reads
        assert await local.read(reader, *keys) == [content(number) for number in range(5)]
        assert reader.http_reads == http


async def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    """The reader keeps the files that it used last, and the gateway gives it the others again."""
    small = Slot("data", Prefix.parse("s3://bucket/"), consistency="immutable")
    async with (
        gateway_app(tmp_path, slots=[small], block_size_bytes=2**21) as gateway,
        local_gateway(gateway) as local,
    ):
        bodies = [random.Random(number).randbytes(2**21) for number in range(6)]
        for number, body in enumerate(bodies):
            gateway.origin.put("bucket", f"k{number}", body)
            await call(gateway.app, "GET", f"/bucket/k{number}")
        await gateway.blocks.settle()
        reader, keys = local.reader(), [f"bucket/k{number}" for number in range(6)]
        await local.warm(reader, *keys)
        assert reader._link is not None
        reader._link._files_max = 2
        for _ in range(3):
            assert await local.read(reader, *keys[:3]) == bodies[:3]
            assert await local.read(reader, *keys[3:]) == bodies[3:]
            assert len(reader._link.files) == 2


@pytest.mark.slow
async def test_threads_share_a_reader(tmp_path: Path) -> None:
    """All of them get right bytes, while files are evicted and let go under them."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        reader, keys = await filled(gateway, local, 25)
        over = threading.Event()

        def read(seed: int) -> int:
            rng, wrong = random.Random(seed), 0
            while not over.is_set():
                numbers = [rng.randrange(25) for _ in range(8)]
                found = reader.read_many([keys[number] for number in numbers])
                wrong += [bytes(one) for one in found] != [content(number) for number in numbers]
            return wrong

        with ThreadPoolExecutor(4) as threads:
            reading = [threads.submit(read, seed) for seed in range(4)]
            for number in range(25):
                await gateway.blocks.evict(ObjectKey("bucket", f"k{number}"))
                await asyncio.to_thread(reader._let_go)
                await asyncio.sleep(0.01)
            over.set()
            assert [await asyncio.wrap_future(one) for one in reading] == [0] * 4


async def test_an_answer_that_nobody_took_is_not_the_next_ones(tmp_path: Path) -> None:
    """An interrupted read, as by Ctrl-C, leaves its answer in the socket: the next read asks anew."""

    class Interrupted:
        def __init__(self, connection: socket.socket) -> None:
            self.send, self.close = connection.send, connection.close

        def recvmsg_into(self, *_: object) -> None:
            raise KeyboardInterrupt

    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        reader, keys = await filled(gateway, local, 3)
        assert reader._link is not None
        own = reader._link._socket
        reader._link._socket = Interrupted(own)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            reader.read(keys[0])
        reader._link._socket = own
        assert await local.read(reader, keys[1], keys[2]) == [content(1), content(2)]
        assert await local.read(reader, keys[1]) == [content(1)]


async def test_no_thread_waits_for_anothers_question(tmp_path: Path) -> None:
    """Which may wait for an origin that does not answer: the others read by HTTP meanwhile."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        reader, keys = await filled(gateway, local, 3)
        http = reader.http_reads
        with reader._lock:
            assert await local.read(reader, *keys) == [content(number) for number in range(3)]
        assert reader.http_reads == http + 3
        assert await local.read(reader, *keys) == [content(number) for number in range(3)]
        assert reader.http_reads == http + 3


async def test_a_gateway_that_does_not_answer_holds_up_no_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while the read goes by HTTP."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        _, keys = await filled(gateway, local, 3)
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
        monkeypatch.setattr(local.port, "_resolve", lambda *_: None)
        reader = local.reader()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await local.read(reader, *keys) == [content(number) for number in range(3)]
        assert reader.http_reads == 3


async def test_names_may_be_urls(tmp_path: Path) -> None:
    """Only the scheme of a URL of the object itself is taken away."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        gateway.origin.put("bucket", "https://example.org/a", b"page")
        for prefix in ("", "s3://", "forebay://"):
            assert await local.read(local.reader(), f"{prefix}bucket/https://example.org/a") == [b"page"]


async def test_connections_that_have_died_fail_no_read(tmp_path: Path) -> None:
    """However many the reader keeps: when the gateway has started again, all of them are dead."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        gateway.origin.put("bucket", "k", b"bytes")
        reader = local.reader()
        dead = [reader.http._connection() for _ in range(2 * s3_get.ATTEMPTS_MAX)]
        for connection in dead:
            connection.sock, gone = socket.socketpair()
            gone.close()
        reader.http._idle += dead
        assert await local.read(reader, "bucket/k") == [b"bytes"]


async def test_a_fork_begins_with_a_connection_of_its_own(tmp_path: Path) -> None:
    """As the workers of a DataLoader do: the child has none of the parent's files, reads right, and the parent's
    connection goes on."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        reader, keys = await filled(gateway, local, 10)
        parent = reader._link
        assert parent is not None
        in_use = list(parent.files.values())  # as by a thread that reads at the time
        ends = []
        for seed in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads are there, as in every training job
                child = os.fork()
            if not child:
                status = 1
                with suppress(BaseException):
                    rng = random.Random(seed)
                    had = reader._link is not None or any(one.descriptor >= 0 for one in in_use)
                    for _ in range(20):
                        numbers = [rng.randrange(10) for _ in range(4)]
                        found = reader.read_many([keys[number] for number in numbers])
                        assert [bytes(one) for one in found] == [content(number) for number in numbers]
                    status = int(had or not reader.local_reads)
                os._exit(status)
            ends.append(child)
        for child in ends:
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert status == 0
        http = reader.http_reads
        assert await local.read(reader, *keys) == [content(number) for number in range(10)]
        assert (reader._link, reader.http_reads) == (parent, http)


async def test_a_reader_can_be_pickled(tmp_path: Path) -> None:
    """As a DataLoader does that spawns its workers."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        reader, keys = await filled(gateway, local, 3)
        copy: Reader = pickle.loads(pickle.dumps(reader))
        local.readers.append(copy)
        assert await local.read(copy, *keys) == [content(number) for number in range(3)]
        assert copy.local_reads == 3


@pytest.mark.slow
async def test_without_a_gateway_it_says_so_once_and_reads_by_http(tmp_path: Path) -> None:
    """And finds the gateway when it is there again."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as first:
        reader, keys = await filled(gateway, first, 3)
        bodies = [content(number) for number in range(3)]
        path, moved = str(first.path), str(first.path) + ".gone"
        os.rename(path, moved)
        for one in list(first.port._all):
            first.port._close(one)
        with pytest.warns(RuntimeWarning, match="by HTTP"):
            assert await first.read(reader, *keys) == bodies
        for _ in range(2):  # a warning would fail the test
            assert await first.read(reader, *keys) == bodies
        before = reader.http_reads
        assert before >= 9
        os.rename(moved, path)
        deadline = time.monotonic() + 60
        while reader.http_reads > before or reader._link is None:
            assert time.monotonic() < deadline
            before = reader.http_reads
            assert await first.read(reader, *keys) == bodies
            await asyncio.sleep(0.2)


async def test_what_the_gateway_refuses_is_an_error(tmp_path: Path) -> None:
    """A missing object, and a range behind the end."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        reader, keys = await filled(gateway, local, 2)
        with pytest.raises(FileNotFoundError):
            await local.read(reader, "bucket/missing")
        with pytest.raises(module.ReadError, match="416"):
            await local.read(reader, (keys[0], 5000, 10))
        with pytest.raises(ValueError, match="no range"):
            await local.read(reader, (keys[0], -1, 10))


def test_memory_that_is_in_use_is_not_used_again() -> None:
    """Large results come from memory that is used again only when all views of the last result are gone."""
    reader = Reader(credentials=KEYS)
    first = reader._room(1 << 20)
    part = first[10:20]
    second = reader._room(1 << 20)
    assert first.obj is not second.obj
    known = id(second.obj)
    del second
    assert id(reader._room(1 << 20).obj) == known
    del first
    third, fourth = reader._room(1 << 20), reader._room(1 << 20)
    assert len({id(part.obj), id(third.obj), id(fourth.obj)}) == 3


async def test_bytes_are_read_into_memory_that_is_given(tmp_path: Path) -> None:
    """From files as by HTTP, at any place, of the version that is asked for; damaged bytes are replaced."""
    async with gateway_app(tmp_path, slots=[FIXED]) as gateway, local_gateway(gateway) as local:
        reader, keys = await filled(gateway, local, 5)
        body, rng = content(4), random.Random(3)

        async def into(first: int, size: int, reader: Reader = reader) -> bytes:
            target = memoryview(bytearray(size))
            await asyncio.to_thread(reader.read_into, target, keys[4], first)
            return bytes(target)

        http = reader.http_reads
        for _ in range(50):
            first = rng.randrange(len(body))
            size = rng.randrange(len(body) - first + 1)
            assert await into(first, size) == body[first : first + size]
        assert reader.http_reads == http
        with pytest.raises(module.ReadError, match="ends after"):
            await into(len(body) - 5, 6)
        with pytest.raises(module.ReadError, match="412"):
            await asyncio.to_thread(reader.read_into, memoryview(bytearray(5)), keys[4], etag='"another"')
        for file in files_of(gateway):
            file.write_bytes(file.read_bytes().replace(body[70_000:70_032], bytes(32)))
        assert await into(0, len(body)) == body
        assert reader.http_reads > http

"""Worker processes on one cache directory, told what to read and when to leave: who fills, who follows, who dies.

    python -m tests.support.fill_worker DIRECTORY SLOT ENDPOINT CAPACITY PACKED

Says `ready`, then obeys the lines on its standard input: `read KEY ETAG SIZE READERS OWNER` has that many readers read
a whole generated object at once and says `right`, or `wrong` and what was; `warm KEY ETAG SIZE` fetches it for nobody
and says `warmed`; `leave` has all of them leave and says `left`. It ends with its standard input. `FillWorker` is the
test's end of the line.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway.blocks.cache import BlockCache
from gateway.core.clock import SystemClock
from gateway.core.model import ObjectKey, ObjectVersion
from gateway.origin.client import KeyPair, OriginSettings, Purpose
from gateway.origin.s3 import S3Origin
from gateway.origin.signing import StaticCredentials
from tests.support.blocks import BUCKET, KIB, open_cache, take, whole
from tests.support.memory_origin.content import GeneratedContent
from tests.support.prepared_process import PreparedProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY

BLOCK = 512 * KIB
_ANSWER_SECONDS = 60


class FillWorker:
    """One worker process, killed at the latest when the block that it is made for ends."""

    def __init__(
        self,
        directory: Path,
        slot: int,
        endpoint_url: str,
        *,
        capacity_bytes: int = 64 * 1024 * KIB,
        small_object_bytes_max: int = 0,
    ) -> None:
        arguments = [directory, slot, endpoint_url, capacity_bytes, small_object_bytes_max]
        self._process = PreparedProcess(
            ["tests.support.fill_worker", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def __enter__(self) -> Self:
        assert self.answer() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def read(self, version: ObjectVersion, readers: int = 1, *, owner: str = "-") -> None:
        self._say(f"read {version.key.key} {version.etag} {version.size_bytes} {readers} {owner}")

    def warm(self, version: ObjectVersion) -> None:
        self._say(f"warm {version.key.key} {version.etag} {version.size_bytes}")

    def leave(self) -> None:
        self._say("leave")

    def answer(self) -> str:
        return self._answers.get(timeout=_ANSWER_SECONDS)

    def stop(self) -> int:
        """End in order; the exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(_ANSWER_SECONDS)

    def freeze(self) -> None:
        """SIGSTOP, and wait until the process stands still."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Have a frozen process go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._listening.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line.strip())


class Obedient:
    """The worker's end."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._reading: set[asyncio.Task[None]] = set()

    async def obey(self, lines: asyncio.StreamReader) -> None:
        while line := (await lines.readline()).decode().split():
            if line[0] in ("read", "warm"):
                doing = self._read(*line[1:]) if line[0] == "read" else self._warm(*line[1:])
                task = asyncio.create_task(doing)
                self._reading.add(task)
                task.add_done_callback(self._reading.discard)
            else:
                await self._leave()

    async def _read(self, key: str, etag: str, size: str, readers: str, owner: str) -> None:
        version = ObjectVersion(ObjectKey(BUCKET, key), etag, int(size))
        headers = {} if owner == "-" else {"x-amz-request-payer": owner}
        results = await asyncio.gather(
            *(self._read_once(version, headers) for _ in range(int(readers))), return_exceptions=True
        )
        expected = GeneratedContent(version.size_bytes, 0).read(0, version.size_bytes)
        wrong = [repr(result)[:200] for result in results if result != expected]
        print("wrong" if wrong else "right", *wrong, flush=True)

    async def _warm(self, key: str, etag: str, size: str) -> None:
        version = ObjectVersion(ObjectKey(BUCKET, key), etag, int(size))
        for piece in self._cache.pieces(version, "default"):
            _, is_kept = await self._cache.fetch(version, piece, slot="default", purpose=Purpose.WARM)
            assert is_kept
        print("warmed", flush=True)

    async def _read_once(self, version: ObjectVersion, headers: dict[str, str]) -> bytes:
        return await take(await self._cache.open_range(version, whole(version), headers=headers))

    async def _leave(self) -> None:
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        print("left", flush=True)


async def work(directory: Path, slot: int, endpoint_url: str, capacity_bytes: int, small_object_bytes_max: int) -> None:
    credentials = StaticCredentials(KeyPair(ACCESS_KEY_ID, SECRET_ACCESS_KEY, None))
    settings = OriginSettings(endpoint_url=endpoint_url, region="us-east-1", addressing_style="path")
    origin = S3Origin(settings, credentials, SystemClock(), instance_id="test")
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with open_cache(
        directory,
        origin,
        worker=slot,
        capacity_bytes=capacity_bytes,
        block_size_bytes=BLOCK,
        small_object_bytes_max=small_object_bytes_max,
        clock=SystemClock(),
    ) as cache:
        print("ready", flush=True)
        await Obedient(cache).obey(lines)
    await origin.aclose()


def main() -> None:
    directory, slot, endpoint_url, capacity_bytes, small_object_bytes_max = sys.argv[1:]
    asyncio.run(work(Path(directory), int(slot), endpoint_url, int(capacity_bytes), int(small_object_bytes_max)))


if __name__ == "__main__":
    main()

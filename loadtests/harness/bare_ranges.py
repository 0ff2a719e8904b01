"""The least that fetching a large object into a file costs: blocking sockets, kept buffers and `pwrite`.

    python -m loadtests.harness.bare_ranges ORIGIN_URL PATH SIZE CONNECTIONS FILE

Threads fetch ranges of 8 MiB. No signature, no index, no checksum, no client. Prints seconds and CPU seconds.
"""

from __future__ import annotations

import http.client
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from loadtests.harness import bare
from loadtests.harness.bare_fetch import FetchFigures
from loadtests.harness.content import LoadObject

_RANGE_BYTES, _PIECE_BYTES = 8 * 1024**2, 1024**2


def run(origin_url: str, of: LoadObject, connections: int, file: Path) -> FetchFigures:
    """Fetch an object in a process of its own."""
    return FetchFigures(*bare.figures("bare_ranges", origin_url, of.path, of.size_bytes, connections, file))


def _fetch(origin_url: str, path: str, firsts: Iterator[int], size_bytes: int, descriptor: int) -> None:
    connection = http.client.HTTPConnection(urlsplit(origin_url).netloc)
    buffer = memoryview(bytearray(_PIECE_BYTES))
    for first in firsts:
        connection.request("GET", path, headers={"Range": f"bytes={first}-{first + _RANGE_BYTES - 1}"})
        answer, written = connection.getresponse(), first
        while received := answer.readinto(buffer):
            written += os.pwrite(descriptor, buffer[:received], written)
        assert written == min(first + _RANGE_BYTES, size_bytes)
    connection.close()


def main() -> None:
    origin_url, path, size, connections, file = sys.argv[1:]
    started, cpu = time.perf_counter(), time.process_time()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(descriptor, 0, int(size))
    firsts = iter(range(0, int(size), _RANGE_BYTES))
    with ThreadPoolExecutor(int(connections)) as threads:
        for one in [
            threads.submit(_fetch, origin_url, path, firsts, int(size), descriptor) for _ in range(int(connections))
        ]:
            one.result()
    print(time.perf_counter() - started, time.process_time() - cpu)


if __name__ == "__main__":
    main()

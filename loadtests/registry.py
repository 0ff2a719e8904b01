"""The registry of a cluster in Redis: how long a look takes, and what it costs. `python -m loadtests.registry`

One process asks a real server over the link that every process of a gateway has. CPU is that of the process and of the
server, so figures hold on a busy machine; times do not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from gateway.cluster.redis_link import RedisLink, RedisPlace
from gateway.cluster.scripts import Entry, key_bytes, prefix_of, question
from gateway.core.clock import SystemClock
from tests.support.redis_server import RedisServer, programs

KEYS = 100_000
"""Keys of 70 characters in the registry, half of them pending."""


def name(number: int) -> bytes:
    return key_bytes(f"train/imagenet/shard-{number:08d}/".ljust(70, "x"))


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def fill(link: RedisLink) -> None:
    for first in range(0, KEYS, 500):
        words = [name(number) for number in range(first, first + 500)]
        if first % 1000:
            await link.ask(question("stamp", "bucket", words))
        else:
            await link.ask(question("claim", "bucket", [word for one in words for word in (one, "1767225600.125")]))


async def measure(link: RedisLink, server_pid: int, at_once: int, seconds: float) -> str:
    """Let `at_once` requests look up one key each, again and again."""
    took: list[float] = []
    ends = time.monotonic() + seconds
    before, at_server, began = own_cpu(), cpu_of(server_pid), time.monotonic()

    async def ask(number: int) -> None:
        while (asked := time.monotonic()) < ends:
            number = (number * 7919 + 1) % KEYS
            answer = await link.ask(question("look", "bucket", [name(number)]))
            Entry.read(answer.value[0])
            took.append(time.monotonic() - asked)

    await asyncio.gather(*(ask(number) for number in range(at_once)))
    spent, count = time.monotonic() - began, len(took)
    client, server = (one / count * 1e6 for one in (own_cpu() - before, cpu_of(server_pid) - at_server))
    return (
        f"{at_once:4d} at once: {count / spent:8,.0f} looks/s   p50 {statistics.median(took) * 1e3:6.3f} ms   "
        f"client {client:5.1f} µs/look   Redis {server:5.2f} µs/look = {1e6 / server:8,.0f} looks/s on a core"
    )


async def run(server: RedisServer, seconds: float) -> None:
    link = RedisLink(RedisPlace((("127.0.0.1", server.port),)), prefix_of("load"), SystemClock(), "store")
    task = asyncio.create_task(link.run())
    await fill(link)
    for at_once in (1, 32, 256):
        print(await measure(link, server.pid, at_once, seconds))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    asked = parser.parse_args()
    for kind, program in programs().items():
        with tempfile.TemporaryDirectory() as directory, RedisServer(Path(directory), program=program) as server:
            print(f"{kind}, Python {sys.version.split()[0]}")
            asyncio.run(run(server, asked.seconds))


if __name__ == "__main__":
    main()

"""Ranks of a training job that restore at once: a process each, that reads objects of its own or shared ones."""

from __future__ import annotations

import multiprocessing
import queue
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loadtests.harness.reader import WrongAnswer
from loadtests.harness.signed_requests import Signer
from loadtests.harness.stream import receive

_BUFFER_BYTES = 1024 * 1024
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Restored:
    """When the first and the last rank had all its bytes, in seconds from the start of all; bytes of all together."""

    first_seconds: float
    last_seconds: float
    size_bytes: int

    @property
    def bytes_per_second(self) -> float:
        return self.size_bytes / self.last_seconds

    @property
    def spread(self) -> float:
        """How much longer the last rank took than the first."""
        return self.last_seconds / self.first_seconds


class Ranks:
    """Processes that wait to be told what to read. Use `ranks(...)`."""

    def __init__(self, processes: Sequence[tuple[Any, Any]], found: Any) -> None:
        self._processes = processes
        self._found = found

    def restore(self, paths: Sequence[Sequence[str]]) -> Restored:
        """Have each rank read its paths (`/bucket/key`), one after another over one connection.

        RuntimeError with what a rank has raised.
        """
        began = time.perf_counter()
        for (_, orders), one in zip(self._processes, paths, strict=True):
            orders.put(list(one))
        ends, size_bytes = [], 0
        for _ in self._processes:
            try:
                ended, count, failure = self._found.get(timeout=_TIMEOUT_SECONDS)
            except queue.Empty:
                raise RuntimeError("a rank does not come to an end") from None
            if failure:
                raise RuntimeError(failure)
            ends.append(ended - began)
            size_bytes += count
        return Restored(min(ends), max(ends), size_bytes)


@contextmanager
def ranks(count: int, address: tuple[str, int]) -> Iterator[Ranks]:
    """So many ranks, ready."""
    spawn = multiprocessing.get_context("spawn")
    found: Any = spawn.Queue()
    processes: list[tuple[Any, Any]] = []
    try:
        for _ in range(count):
            orders: Any = spawn.SimpleQueue()
            process = spawn.Process(target=_work, args=(address, orders, found), daemon=True)
            process.start()
            processes.append((process, orders))
        for _ in range(count):
            found.get(timeout=_TIMEOUT_SECONDS)
        yield Ranks(processes, found)
    finally:
        for process, orders in processes:
            orders.put(None)
            process.join(10)
            process.kill()


def _work(address: tuple[str, int], orders: Any, found: Any) -> None:
    buffer, signer = bytearray(_BUFFER_BYTES), Signer("{}:{}".format(*address))
    found.put(None)
    while (paths := orders.get()) is not None:
        count, failure = 0, ""
        try:
            with socket.create_connection(address, timeout=_TIMEOUT_SECONDS) as wire:
                for path in paths:
                    wire.sendall(signer.get(path))
                    count += receive(wire, buffer, path)
        except (OSError, WrongAnswer) as error:
            failure = f"{type(error).__name__}: {error}"
        found.put((time.perf_counter(), count, failure))

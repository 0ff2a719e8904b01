"""Clients that all write at the same moment, again and again: so many objects a second, whoever takes them."""

from __future__ import annotations

import http.client
import threading
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from loadtests.harness.burner import Fuel
from loadtests.harness.content import BUCKET
from loadtests.harness.signed_requests import Signer

_TAKEN = (200, 201, 204)


class Bursts:
    """`with Bursts(address, "a/1/", 64, content, period_seconds=1.0): ...` has each client PUT an object each period.

    With `fuel` each has so many CPU seconds used by the burner there, for each object. Who is late for a burst begins
    at once, so that what is written in all stays the same. RuntimeError at the end for any answer but success.
    """

    def __init__(
        self,
        address: tuple[str, int],
        prefix: str,
        clients: int,
        content: bytes,
        *,
        period_seconds: float,
        fuel: tuple[tuple[str, int], float] | None = None,
    ) -> None:
        self._address = address
        self._prefix = prefix
        self._content = content
        self._period_seconds = period_seconds
        self._fuel = fuel
        self._ended = threading.Event()
        self._failures: list[BaseException] = []
        self._taken = [0] * clients
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    @property
    def taken(self) -> int:
        """How many objects have been taken."""
        return sum(self._taken)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _run(self, client: int) -> None:
        try:
            with ExitStack() as stack:
                fuel = stack.enter_context(Fuel(self._fuel[0])) if self._fuel is not None else None
                connection = http.client.HTTPConnection(*self._address, timeout=120)
                stack.callback(connection.close)
                self._put_all(client, connection, fuel)
        except BaseException as error:
            self._failures.append(error)

    def _put_all(self, client: int, connection: http.client.HTTPConnection, fuel: Fuel | None) -> None:
        signer, number = Signer("{}:{}".format(*self._address)), 0
        while not self._ended.wait(max(0.0, self._began + number * self._period_seconds - time.monotonic())):
            path = f"/{BUCKET}/{self._prefix}{client}-{number}"
            connection.request("PUT", path, self._content, signer.headers("PUT", path, "", "UNSIGNED-PAYLOAD"))
            answer = connection.getresponse()
            told = answer.read()
            if answer.status not in _TAKEN:
                raise RuntimeError(f"PUT {path}: {answer.status} {told[:300]!r}")
            if fuel is not None and self._fuel is not None:
                fuel.burn(self._fuel[1])
            number += 1
            self._taken[client] = number

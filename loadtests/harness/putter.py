"""Clients that write empty objects one after another over a connection each, and time every one."""

from __future__ import annotations

import socket
import threading
import time

from loadtests.harness.content import BUCKET
from loadtests.harness.reader import WrongAnswer
from loadtests.harness.signed_requests import Signer

_ANSWER_BYTES_MAX = 64 * 1024


class Putter:
    """`with Putter(address, 4) as putter: ...` writes until it is left; `seconds` has every PUT's time then."""

    def __init__(self, address: tuple[str, int], clients: int, prefix: str) -> None:
        self._address = address
        self._prefix = prefix
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self.seconds: list[float] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Putter:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def _run(self, client: int) -> None:
        try:
            self._put_all(client)
        except (OSError, WrongAnswer) as error:
            self._failures.append(error)

    def _put_all(self, client: int) -> None:
        signer, number = Signer(f"{self._address[0]}:{self._address[1]}"), 0
        with socket.create_connection(self._address) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._stop.is_set():
                number += 1
                request = signer.get(f"/{BUCKET}/{self._prefix}{client}-{number:06d}", method="PUT")
                started = time.perf_counter()
                connection.sendall(request.replace(b"\r\n\r\n", b"\r\ncontent-length: 0\r\n\r\n"))
                _wait_for_answer(connection)
                self.seconds.append(time.perf_counter() - started)


def _wait_for_answer(connection: socket.socket) -> None:
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(_ANSWER_BYTES_MAX)
        if not piece:
            raise WrongAnswer("the server has closed the connection")
        received += piece
    if not received.startswith(b"HTTP/1.1 200"):
        raise WrongAnswer(f"PUT was answered {received[:200]!r}")

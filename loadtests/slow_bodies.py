"""PUT, GET and LIST of one credential while another sends 200 bodies at a kilobyte a second.

    python -m loadtests.slow_bodies [--seconds 3] [--rounds 5] [--scale 1] [--record]

Half of the slow bodies are DeleteObjects, which are received whole: most of a MiB comes at once, the rest so slowly.
Half are objects of 8 MiB, which stream. Whatever the gateway refuses or cuts is sent anew: there are always 200.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from loadtests.harness import command, machine
from loadtests.harness.command import Options, progress
from loadtests.harness.intervals import percentile, ratio_of
from loadtests.harness.report import Measured, Report, Verdict, at_most
from loadtests.harness.signed_requests import Signer
from tests.support.gateway_process import GatewayProcess
from tests.support.strict_origin import ACCESS_KEY_ID, SECRET_ACCESS_KEY, StrictOrigin

_SLOW_BODIES = 200
_PIECE_BYTES = 1024
_OBJECT_BYTES = 8 * 1024 * 1024
_DOCUMENT_BYTES = 1024 * 1024
_UNSIGNED = "UNSIGNED-PAYLOAD"
_SLOW = ("AKIASLOW", "slow+secret")
_OTHER = ("AKIAOTHER", "other+secret")
_BODY = bytes(1024)

Series = dict[str, list[float]]


class SlowSender:
    """200 connections, each with a body that comes at a kilobyte a second, while it runs."""

    def __init__(self, address: tuple[str, int], bodies: int) -> None:
        self._address = address
        self._signer = Signer("{}:{}".format(*address), *_SLOW)
        self._wires: dict[int, socket.socket] = {}
        self._bodies = bodies
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.ended = 0
        """How many the gateway has refused or cut."""

    def __enter__(self) -> SlowSender:
        self._thread.start()
        time.sleep(2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for wire in self._wires.values():
            wire.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            for number in range(self._bodies):
                self._send(number)
            self._stop.wait(max(0.0, 1.0 - (time.monotonic() - started)))

    def _send(self, number: int) -> None:
        wire = self._wires.get(number) or self._begin(number)
        try:
            wire.send(bytes(_PIECE_BYTES), socket.MSG_DONTWAIT)
            with suppress(BlockingIOError):
                if wire.recv(65536, socket.MSG_DONTWAIT) is not None:
                    self._end(number)
        except OSError:
            self._end(number)

    def _begin(self, number: int) -> socket.socket:
        method, path, query, size = ("POST", "/bucket", "delete=", _DOCUMENT_BYTES)
        if number % 2:
            method, path, query, size = ("PUT", f"/bucket/team-a/{number}", "", _OBJECT_BYTES)
        headers = self._signer.headers(method, path, query, _UNSIGNED) | {"content-length": str(size)}
        lines = [f"{method} {path}{'?delete' if query else ''} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        self._wires[number] = wire = socket.create_connection(self._address)
        wire.sendall("\r\n".join([*lines, "", ""]).encode())
        with suppress(BlockingIOError):
            wire.send(bytes(size // 10 * 9 if query else _PIECE_BYTES), socket.MSG_DONTWAIT)
        return wire

    def _end(self, number: int) -> None:
        self.ended += 1
        self._wires.pop(number).close()


class Prober:
    """The other credential's client: one request after the other."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._signer = Signer("{}:{}".format(*address), *_OTHER)
        self._connection = http.client.HTTPConnection(*address, timeout=120)
        self._numbers = count()

    def p99s(self, seconds: float) -> dict[str, float]:
        """Milliseconds of PUT, GET and LIST, in turns for so long."""
        taken: Series = {"PUT": [], "GET": [], "LIST": []}
        stop = time.monotonic() + seconds
        while time.monotonic() < stop:
            for name, one in taken.items():
                one.append(self._seconds(name) * 1000)
        return {name: percentile(one, 0.99) for name, one in taken.items()}

    def _seconds(self, name: str) -> float:
        body = _BODY if name == "PUT" else b""
        path = "/bucket" if name == "LIST" else f"/bucket/team-b/{next(self._numbers) % 50 if body else 0}"
        query = "list-type=2&prefix=team-b%2F" if name == "LIST" else ""
        method = "PUT" if body else "GET"
        headers = self._signer.headers(method, path, query, hashlib.sha256(body).hexdigest())
        started = time.perf_counter()
        self._connection.request(method, f"{path}?{query}" if query else path, body, headers)
        answer = self._connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{name} was answered {answer.status}")
        return time.perf_counter() - started


@contextmanager
def _gateway() -> Iterator[GatewayProcess]:
    directory = Path(tempfile.mkdtemp(prefix="forebay-load-"))
    try:
        with StrictOrigin() as origin:
            origin.model.put("bucket", "team-b/0", _BODY)
            gateway = GatewayProcess(_config(origin), directory=directory, is_prepared=False)
            with machine.on_cores(machine.server_core()), gateway as one:
                yield one
    finally:
        shutil.rmtree(directory)


def _config(origin: StrictOrigin) -> dict[str, Any]:
    keys = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY}
    credentials = [
        {"access_key_id": key, "secret_access_key": secret, "allow": [f"s3://bucket/{prefix}/"]}
        for (key, secret), prefix in ((_SLOW, "team-a"), (_OTHER, "team-b"))
    ]
    return {"origin": {"endpoint_url": origin.endpoint_url} | keys, "credentials": credentials}


def test(options: Options) -> Report:
    bodies = options.of(_SLOW_BODIES)
    report = Report("slow_bodies", f"another credential beside {bodies} slow bodies", options.command("slow_bodies"))
    names = ("PUT", "GET", "LIST")
    series: Series = {f"{name}, {beside}": [] for name in names for beside in ("alone", "beside")}
    ended = 0
    with _gateway() as ours:
        host, _, port = ours.s3_url.removeprefix("http://").rstrip("/").partition(":")
        address = host, int(port)
        Prober(address).p99s(0.5)
        for number in range(options.rounds):
            progress(f"round {number + 1}")
            _note(series, "alone", Prober(address).p99s(options.seconds))
            with SlowSender(address, bodies) as slow:
                _note(series, "beside", Prober(address).p99s(options.seconds))
            ended += slow.ended
    report.verdicts = [
        Verdict(
            f"p99 of {name}, beside / alone",
            ratio_of(series[f"{name}, beside"], series[f"{name}, alone"]),
            at_most(2),
        )
        for name in names
    ]
    report.tables = [Measured("p99", "ms", series)]
    report.notes.append(f"{ended} of the slow bodies were refused or cut, and sent anew.")
    return report


def _note(series: Series, beside: str, found: dict[str, float]) -> None:
    for name, value in found.items():
        series[f"{name}, {beside}"].append(value)


if __name__ == "__main__":
    command.main(test, __doc__)

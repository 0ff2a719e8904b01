"""Two servers that take parts: each is hashed (MD5), written to a file and fsynced before it is answered with its ETag.

python -m loadtests.harness.receiving_server forebay|bare|keeping PORT DIRECTORY

`forebay` is the S3 port's server with `receive_verified` behind it, and no operation around that. `bare` is the least
that can do the work: a thread a connection, a blocking socket, one buffer; `keeping` is the same, but leaves the files
where they are, as a gateway must (`forget` removes them).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from gateway.edge.receiving import RECEIVE_INTO, AsgiRequestBody
from gateway.edge.s3_server import Receive, S3Server, Scope, Send
from gateway.operations.context import RequestContext
from gateway.operations.payload import receive_verified
from gateway.s3.requests import parse_request
from loadtests.harness import machine
from loadtests.harness.server_process import ServerProcess

_REPOSITORY = Path(__file__).resolve().parents[2]
_BUFFER_BYTES = 1024 * 1024
_numbers = itertools.count()


class ReceivingServer(ServerProcess):
    """One of the two, on all cores: its threads are what is measured."""

    def __init__(self, name: str) -> None:
        super().__init__(cores=machine.all_cores())
        self.name = name

    def command(self) -> Sequence[str]:
        module = "loadtests.harness.receiving_server"
        return [sys.executable, "-m", module, self.name, str(self.port), str(self.directory)]

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(_REPOSITORY)}

    def forget(self) -> None:
        """Remove what it has kept."""
        for part in self.directory.glob("part-*"):
            part.unlink()


class _Part:
    """A file that lives as long as its upload: written, made durable, thrown away unless it is to be kept."""

    def __init__(self, directory: Path, *, keep: bool = False) -> None:
        self._keep = keep
        self._path = directory / f"part-{next(_numbers)}"
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._written_bytes = 0

    def write(self, data: memoryview) -> None:
        self._written_bytes += os.pwrite(self._descriptor, data, self._written_bytes)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
        if not self._keep:
            os.unlink(self._path)


class _Uploads:
    """The application."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = parse_request(scope["method"], scope["raw_path"], scope["query_string"], scope["headers"], ())
        body = AsgiRequestBody(receive, request.headers, receive_into=scope.get(RECEIVE_INTO))
        context = RequestContext(cast("Any", None), request, body, cast("Any", None), None, cast("Any", None))
        part = await asyncio.to_thread(_Part, self._directory)
        try:
            received = await receive_verified(context, part.write)
            await asyncio.to_thread(part.sync)
        finally:
            await asyncio.to_thread(part.close)
        headers = [(b"content-length", b"0"), (b"etag", f'"{received.md5.hex()}"'.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


async def _forebay(listener: socket.socket, directory: Path) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = S3Server(_Uploads(directory), sockets=[listener])
    await server.serve(stop, grace_seconds=1.0, on_ready=lambda: None)


def _bare(listener: socket.socket, directory: Path, *, keep: bool) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection, directory, keep), daemon=True).start()


def _serve(connection: socket.socket, directory: Path, keep: bool) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with connection:
        while count := connection.recv_into(buffer[:65536]):
            head, _, arrived = bytes(buffer[:count]).partition(b"\r\n\r\n")
            size_bytes = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            etag = _take(connection, buffer, arrived, size_bytes, _Part(directory, keep=keep))
            answer = f'HTTP/1.1 200 OK\r\nETag: "{etag}"\r\nContent-Length: 0\r\n\r\n'
            connection.sendall(answer.encode("ascii"))


def _take(connection: socket.socket, buffer: memoryview, arrived: bytes, size_bytes: int, part: _Part) -> str:
    digest, left_bytes, piece = hashlib.md5(usedforsecurity=False), size_bytes, memoryview(arrived)
    while left_bytes:
        digest.update(piece)
        part.write(piece)
        left_bytes -= len(piece)
        if left_bytes:
            piece = buffer[: connection.recv_into(buffer[:left_bytes])]
            if not piece:
                raise ConnectionError("the client left")
    part.sync()
    part.close()
    return digest.hexdigest()


def main(name: str, port: int, directory: Path) -> None:
    with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
        if name in ("bare", "keeping"):
            _bare(listener, directory, keep=name == "keeping")
        else:
            asyncio.run(_forebay(listener, directory))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

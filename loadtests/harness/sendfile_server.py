"""The least that can serve a file: a thread a connection, a blocking socket, `sendfile`. What one stream can reach.

python -m loadtests.harness.sendfile_server PORT DIRECTORY
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from loadtests.harness.content import LoadObject
from loadtests.harness.server_process import ServerProcess

_REPOSITORY = Path(__file__).resolve().parents[2]
_PIECE_BYTES = 4 * 1024 * 1024


class BareSendfile(ServerProcess):
    """Serves the given objects from files."""

    name = "bare sendfile"

    def __init__(self, objects: Sequence[LoadObject]) -> None:
        super().__init__()
        for one in objects:
            write_object(self.directory / one.path.replace("/", "_"), one)

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "loadtests.harness.sendfile_server", str(self.port), str(self.directory)]

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(_REPOSITORY)}


def write_object(path: Path, of: LoadObject) -> None:
    """The object's bytes as a file, on the disk and in the page cache."""
    with path.open("wb") as file:
        at = 0
        while at < of.size_bytes:
            at += file.write(of.piece(at, min(_PIECE_BYTES, of.size_bytes - at)))
        file.flush()
        os.fsync(file.fileno())


def _serve(connection: socket.socket, directory: Path) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = b""
    with connection:
        while True:
            while b"\r\n\r\n" not in head:
                data = connection.recv(65536)
                if not data:
                    return
                head += data
            target = head.split(b" ", 2)[1].decode("ascii")
            head = head.partition(b"\r\n\r\n")[2]
            _send(connection, directory / target.replace("/", "_"))


def _send(connection: socket.socket, path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode("ascii"))
        at = 0
        while at < size:
            at += os.sendfile(connection.fileno(), file.fileno(), at, size - at)


def main(port: int, directory: Path) -> None:
    with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, directory), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

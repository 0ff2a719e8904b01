"""An origin whose objects are made up from their keys, that counts what it is asked for."""

from __future__ import annotations

import hashlib
import random
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_CHUNK_BYTES = 64 * 1024
_SIZE = re.compile(r"/bucket/[a-z0-9]+-(\d+)")


class CountedOrigin:
    """`/bucket/NAME-SIZE` is an object of so many bytes.

    `chunks` are the numbers of the 64 KiB chunks of each object that each gateway has asked for.
    """

    def __init__(self) -> None:
        self.url = ""
        self.lock = threading.Lock()
        self.chunks: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._contents: dict[str, bytes] = {}

    def content(self, path: str) -> bytes | None:
        found = _SIZE.fullmatch(path)
        if found is None:
            return None
        with self.lock:
            if path not in self._contents:
                self._contents[path] = random.Random(path).randbytes(int(found[1]))
            return self._contents[path]

    def count(self, path: str, gateway: str, first: int, stop: int) -> None:
        with self.lock:
            self.chunks[path][gateway].update(range(first // _CHUNK_BYTES, -(-stop // _CHUNK_BYTES)))

    def repeated(self) -> dict[str, int]:
        """Return how many chunks of each object were asked for by more gateways than one."""
        of_all = {path: [len(chunks) for chunks in asked.values()] for path, asked in self.chunks.items()}
        wanted = {path: -(-len(self._contents[path]) // _CHUNK_BYTES) for path in of_all}
        return {path: sum(counts) - wanted[path] for path, counts in of_all.items() if sum(counts) != wanted[path]}


@contextmanager
def counted_origin() -> Iterator[CountedOrigin]:
    """Serve until the block ends."""
    origin = CountedOrigin()

    class Handler(_Handler):
        counted = origin

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    origin.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield origin
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    counted: CountedOrigin

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        content = self.counted.content(self.path.partition("?")[0])
        if content is None:
            self._head(404 if self.path.startswith("/bucket/") else 200, {"Content-Length": "0"})
            return
        etag = f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
        headers = {"ETag": etag, "Last-Modified": "Sat, 01 Jan 2022 00:00:00 GMT"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        body = content[int(asked[1]) : int(asked[2]) + 1] if asked else content
        if asked:
            last = int(asked[1]) + len(body) - 1
            headers["Content-Range"] = f"bytes {asked[1]}-{last}/{len(content)}"
        if with_body:
            first = int(asked[1]) if asked else 0
            self.counted.count(self.path.partition("?")[0], self.headers["x-forebay-hop"], first, first + len(body))
        self._head(206 if asked else 200, {**headers, "Content-Length": str(len(body))})
        if with_body:
            with suppress(ConnectionError):  # a gateway that has asked twice wants one answer only
                self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

"""An origin with one object, that holds back the second half of every body until it is told to go on."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONTENT = bytes(range(256)) * 512
ETAG = '"0123456789abcdef0123456789abcdef"'
_PATIENCE_SECONDS = 60.0


class GatedOrigin:
    """`halfway` is set when half of a body is out; the rest comes once `gate` is open."""

    def __init__(self) -> None:
        self.halfway = threading.Event()
        self.gate = threading.Event()
        self.url = ""


@contextmanager
def gated_origin() -> Iterator[GatedOrigin]:
    """Serve until the block ends."""
    origin = GatedOrigin()

    class Handler(_Handler):
        gated = origin

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    origin.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield origin
    finally:
        origin.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gated: GatedOrigin

    def do_HEAD(self) -> None:
        self._head(200, len(CONTENT))

    def do_GET(self) -> None:
        if self.path.startswith("/?"):  # which buckets there are
            self._head(200, 0)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), min(int(asked[2]), len(CONTENT) - 1)) if asked else (0, len(CONTENT) - 1)
        body = CONTENT[first : last + 1]
        content_range = {"Content-Range": f"bytes {first}-{last}/{len(CONTENT)}"} if asked else {}
        self._head(206 if asked else 200, len(body), content_range)
        self.wfile.write(body[: len(body) // 2])
        self.wfile.flush()
        self.gated.halfway.set()
        if not self.gated.gate.wait(_PATIENCE_SECONDS):
            raise TimeoutError("nobody opened the gate")
        self.wfile.write(body[len(body) // 2 :])

    def _head(self, status: int, length: int, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        fixed = {"ETag": ETAG, "Last-Modified": "Sat, 01 Jan 2022 00:00:00 GMT", "Content-Length": str(length)}
        for name, value in (fixed | (more or {})).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

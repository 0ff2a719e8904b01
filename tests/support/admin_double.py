"""An admin port that answers what it is told to, one answer after the other, and writes down what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson


class AdminDouble:
    """`answers` are status and document, in order; the last one is given again and again."""

    def __init__(self, answers: Sequence[tuple[int, Any]]) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        """Method, path with query, document."""
        self._answers = list(answers)
        double = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                double.asked.append((self.command, self.path, orjson.loads(body) if body else None))
                status, document = double.next_answer()
                content = orjson.dumps(document)
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _answer

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def next_answer(self) -> tuple[int, Any]:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


@contextmanager
def admin_double(*answers: tuple[int, Any]) -> Iterator[AdminDouble]:
    """One that runs."""
    double = AdminDouble(answers)
    thread = threading.Thread(target=double.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield double
    finally:
        double.server.shutdown()
        thread.join()
        double.server.server_close()

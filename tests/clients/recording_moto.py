"""moto's S3 as the origin, writing down every request it gets.

Run as `python -m tests.clients.recording_moto LOG_FILE`; prints `listening on PORT`. A line is
`METHOD<tab>TARGET`, and it is written before the request is answered: whoever has the answer finds the line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

WsgiApplication = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def recording(application: WsgiApplication, log: TextIO) -> WsgiApplication:
    """`application`, with every request written to `log` first."""

    def record(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        log.write(f"{environ['REQUEST_METHOD']}\t{environ['REQUEST_URI']}\n")
        log.flush()
        return application(environ, start_response)

    return record


def main(log_path: str) -> None:
    """Serve on a free port of 127.0.0.1 until killed."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with open(log_path, "a", encoding="utf-8") as log:
        application = recording(DomainDispatcherApplication(create_backend_app), log)
        server = make_server("127.0.0.1", 0, application, threaded=True)
        print(f"listening on {server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])

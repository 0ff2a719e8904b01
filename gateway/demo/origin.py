"""The demo's bucket: moto's S3, in its own process (`python -m gateway.demo.origin`); prints `listening on PORT`."""

from __future__ import annotations

import logging
import sys


def main() -> None:
    """Serve S3 on a free port of 127.0.0.1 until killed."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # one line per request would be the log's only content
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    sys.stdout.write(f"listening on {server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()

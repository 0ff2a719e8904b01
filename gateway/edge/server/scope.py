"""What the application is told about a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.edge.server.head_parser import RequestHead


def connection_scope(
    asgi_version: str,
    scheme: str | None,
    server: tuple[str, int | None] | None,
    client: tuple[str, int] | None,
    extensions: Mapping[str, Any],
) -> dict[str, object]:
    """What is the same for all requests of one connection."""
    return {
        "type": "http",
        "asgi": {"version": asgi_version, "spec_version": "2.3"},
        "server": server,
        "client": client,
        "scheme": scheme,
        "root_path": "",
        "extensions": extensions,
    }


def request_scope(of_connection: Mapping[str, object], head: RequestHead) -> dict[str, Any]:
    """The ASGI scope of one request; `path` and `forebay.authority` are as protocol.py says."""
    target = head.target
    scope: dict[str, Any] = {
        **of_connection,
        "http_version": head.version,
        "method": head.method,
        "path": target.raw_path.decode("ascii"),
        "raw_path": target.raw_path,
        "query_string": target.raw_query,
        "headers": head.headers,
    }
    if target.authority is not None:
        scope["forebay.authority"] = target.authority
    return scope

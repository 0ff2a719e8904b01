"""The dashboard at `/`, and the documentation as text: a node in a closed network has no other.

A browser asks once for the files; all figures come from `/api/v1/overview`. The files tell nothing about the gateway,
so they need no token; the page asks for it. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.admin.operations import TEXT, Operation

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_FILES = {
    "/": ("index.html", "text/html"),
    "/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard.js": ("dashboard.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


_CONTENTS = {name: files("gateway.admin").joinpath("dashboard", name).read_bytes() for name, _ in _FILES.values()}
"""Read while the code is loaded: a process that is forked later needs no file of the package, which may be gone."""


PAGE = Operation("GET /", "The dashboard.", {"text/html": TEXT}, {503: "Not ready."}, is_open=True)
_DOCS = [files("gateway").joinpath("docs"), Path(__file__).parents[2] / "docs"]  # in a wheel, and in a clone


def page_routes() -> list[Route]:
    routes = [Route(path, _served(name, media_type)) for path, (name, media_type) in _FILES.items()]
    return [*routes, Route("/docs/{name}", _documentation)]


async def _documentation(request: Request) -> Response:
    """One page of it, read when it is asked for."""
    name = request.path_params["name"]
    pages = [folder.joinpath(f"{name}.md") for folder in _DOCS if name.replace("-", "").isalnum()]
    page = next((one for one in pages if one.is_file()), None)
    if page is None:
        return Response("there is no such page", 404, headers=_HEADERS, media_type="text/plain")
    return Response(await asyncio.to_thread(page.read_bytes), headers=_HEADERS, media_type="text/plain")


def _served(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    content = _CONTENTS[name]
    headers = _HEADERS | {"etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return serve

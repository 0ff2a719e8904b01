"""Admits to the admin port the bearer of its token or, if it has none, any client on this machine."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.operations import problem
from gateway.config.defaults import are_same
from gateway.config.live import LiveSettings
from gateway.core.errors import S3Error
from gateway.telemetry.access_log import AuditLog

Endpoint = Callable[[Request], Awaitable[Response]]

_READS = frozenset({"GET", "HEAD"})


class Guard:
    """Wraps endpoints that ask for the bearer token (RFC 6750), if there is one.

    Without a token, requests must name this machine as their host: a web page whose name its owner lets point here (DNS
    rebinding) would otherwise read keys, and do with the gateway as it likes.
    """

    def __init__(self, live: LiveSettings, audit: AuditLog | None = None) -> None:
        self._live = live
        self._audit = audit
        self._directory = Path(os.path.realpath(live.now.cache.directory))

    @property
    def _token(self) -> bytes | None:
        token = self._live.now.admin.token
        return token.get_secret_value().encode() if token is not None else None

    def __call__(self, endpoint: Endpoint, *, any_host: bool = False) -> Endpoint:
        """`any_host`: it tells nothing of keys, and is asked for by names that this machine does not know."""

        async def guarded(request: Request) -> Response:
            answer = await answered(request)
            if self._audit is not None and request.method not in _READS:
                remote = request.client.host if request.client is not None else None
                path: str = request.scope["path"]
                self._audit.admin(remote=remote, method=request.method, path=path, status=answer.status_code)
            return answer

        async def answered(request: Request) -> Response:
            if not self._allows(request):
                message = "this needs the header 'Authorization: Bearer …' with admin.token"
                return problem(401, message, {"www-authenticate": 'Bearer realm="forebay"'})
            if not any_host:
                if not self._names_this_machine(request):
                    return problem(403, "the Host header must be this machine's address, or admin.token must be set")
                if self._live.now.admin.token is None and _is_of_another_site(request):
                    return problem(403, "a page of another site has sent this; admin.token is not set")
            meant = Path(os.fsdecode(unquote_to_bytes(request.headers.get("x-forebay-directory", ""))))
            if meant.is_absolute() and not are_same(meant, self._directory):  # another gateway had the port before
                told = f"this gateway works in {self._directory}, and the one of {meant} is meant"
                return problem(421, f"{told}; give the --config of that one, or --admin-url to ask this one")
            try:
                return await endpoint(request)
            except S3Error as error:  # of the body: late, malformed, or too long
                return problem(error.status, error.message)

        return guarded

    def _allows(self, request: Request) -> bool:
        token = self._token
        if token is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), token)

    def _names_this_machine(self, request: Request) -> bool:
        host = request.url.hostname or ""
        admin = self._live.now.admin
        if admin.token is not None or admin.insecure or host in ("localhost", admin.host):
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True


def _is_of_another_site(request: Request) -> bool:
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return True
    origin = request.headers.get("origin")
    return origin is not None and origin.lower().partition("://")[2] != request.headers.get("host", "").lower()

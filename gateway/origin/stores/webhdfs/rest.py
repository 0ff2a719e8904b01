"""WebHDFS's operations: of a namenode GETFILESTATUS and LISTSTATUS_BATCH, of a datanode the bytes that OPEN names.

    OPEN → 307 to a datanode → bytes; HttpFS and Knox may answer with the bytes themselves

It follows a redirect to known hosts only, and only here. What is asked changes nothing, so it is asked again when no
answer came; a datanode that failed is left out then.

Source: "WebHDFS REST API" of Hadoop 3.4.
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

import orjson

from gateway.core.clock import Clock
from gateway.core.errors import OriginBodyError, OriginBusy, OriginUnreachable, S3Error
from gateway.origin.client import ACCOUNT, OriginSettings
from gateway.origin.http1_client.client import Claim, Http1Client
from gateway.origin.http1_client.connection import Supervision
from gateway.origin.http1_client.response_stream import HttpResponse
from gateway.origin.retry import Failure, RetryBudget, RetryPolicy, RetrySeries
from gateway.origin.signing import Target
from gateway.s3.error_codes import s3_error
from gateway.s3.requests import encode_key, encode_query

T = TypeVar("T")

SCHEMES: Mapping[str, str] = {"webhdfs": "http", "swebhdfs": "https"}

_PREFIX = "/webhdfs/v1"
_DOCUMENT_BYTES_MAX = 32 * 1024 * 1024
_REFUSAL_BYTES_MAX = 64 * 1024
_DENIED = frozenset({"AccessControlException", "AuthorizationException"})
_ABSENT = frozenset({"FileNotFoundException", "InvalidPathException", "ParentNotDirectoryException"})
_IS_IP = re.compile(r"[\d.]+|\[?[0-9a-f:]+\]?")


class FileStatus(NamedTuple):
    """A file or directory; `modified` in milliseconds, `file_id` 0 if the namenode does not tell it (HttpFS)."""

    name: bytes
    is_directory: bool
    size_bytes: int
    modified: int
    file_id: int


class WebHdfs:
    """One namenode, or what stands for it. Must be made where an event loop runs."""

    def __init__(self, settings: OriginSettings, clock: Clock) -> None:
        url = urlsplit(settings.endpoint_url or "")
        self._scheme, self._host, self._root = SCHEMES[url.scheme], _host_of(url), url.path.rstrip("/")
        self._user = url.username
        self._datanodes = settings.datanodes or _near(url.hostname or "")
        self._clock = clock
        self._policy, self._budget = RetryPolicy(settings, random.Random()), RetryBudget()
        first_byte, stall = settings.first_byte_timeout_seconds, settings.stall_timeout_seconds
        self._quick, self._slow = Supervision(first_byte, stall), Supervision(settings.slow_timeout_seconds, stall)
        self._client = Http1Client(settings)

    def series(self) -> RetrySeries:
        return self._policy.new_series(self._budget, self._clock.monotonic())

    async def pause(self, series: RetrySeries, error: OriginUnreachable | OriginBodyError) -> None:
        """Wait before the next attempt; raise the error if there is none."""
        delay = series.delay_before_next(Failure(answered=False), self._clock.monotonic())
        if delay is None:
            raise error
        await self._clock.sleep(delay)

    async def status(self, path: bytes) -> FileStatus | None:
        """Return what a path names; None: nothing. A symlink names nothing."""
        try:
            told = await self._told("GETFILESTATUS", path, (), self._quick)
        except S3Error as error:
            if error.code == "NoSuchKey":
                return None
            raise
        return next(iter(_statuses([told.get("FileStatus")])), None)

    async def children(self, path: bytes, after: bytes) -> tuple[Sequence[FileStatus], bytes | None]:
        """Return a directory's names behind `after`, in the order of their bytes, and where the rest of them is."""
        query = [("startAfter", after.decode())] if after else []
        listing = (await self._told("LISTSTATUS_BATCH", path, query, self._slow)).get("DirectoryListing", {})
        listed = listing.get("partialListing", {}).get("FileStatuses", {}).get("FileStatus", [])
        last = str(listed[-1].get("pathSuffix", "")).encode() if listed else b""
        if not last or not listing.get("remainingEntries"):
            return _statuses(listed), None
        if last <= after:
            raise OriginBodyError("the namenode's pages of a directory do not lead on")
        return _statuses(listed), last

    async def open(self, path: bytes, offset: int, length: int, excluded: list[str]) -> tuple[HttpResponse, str]:
        """Return the answer with these bytes, and the host that gives it. S3Error, OriginUnreachable.

        A datanode that does not answer is `excluded` from then on.
        """
        query = [("offset", str(offset)), ("length", str(length))]
        if excluded:
            query.append(("excludedatanodes", ",".join(excluded)))
        response, host = await self._get(self._target("OPEN", path, query), self._quick), self._host
        try:
            if response.status in (302, 303, 307):
                target = self._redirected(response.headers.get("location", ""))
                await response.aclose()
                host = target.host
                response = await self._get(target, self._quick)
            if response.status != 200:
                raise await _failure(response)
        except BaseException as error:
            await response.aclose()
            if isinstance(error, OriginUnreachable) and not isinstance(error, OriginBusy) and host != self._host:
                excluded.append(host)
            raise
        return response, host

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _told(
        self, operation: str, path: bytes, query: Sequence[tuple[str, str]], limits: Supervision
    ) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            async with await self._get(self._target(operation, path, query), limits) as response:
                if response.status != 200:
                    raise await _failure(response)
                return _document(await response.read(_DOCUMENT_BYTES_MAX))

        return await self._tried(ask)

    async def _tried(self, ask: Callable[[], Awaitable[T]]) -> T:
        series = self.series()
        while True:
            try:
                found = await ask()
            except OriginBusy:
                raise
            except (OriginUnreachable, OriginBodyError) as error:
                await self.pause(series, error)
            else:
                series.succeeded()
                return found

    async def _get(self, target: Target, limits: Supervision) -> HttpResponse:
        claim = Claim(ACCOUNT.get())
        return HttpResponse(await self._client.exchange("GET", target, {"host": target.host}, b"", limits, claim))

    def _target(self, operation: str, path: bytes, query: Sequence[tuple[str, str]]) -> Target:
        user = [("user.name", self._user)] if self._user else []
        place = encode_key(f"{self._root}/{path.decode()}".lstrip("/"))
        return Target(self._scheme, self._host, f"{_PREFIX}/{place}", encode_query([("op", operation), *query, *user]))

    def _redirected(self, location: str) -> Target:
        """Return where a redirect leads; OriginUnreachable unless a datanode may be there."""
        url = urlsplit(location)
        name = url.hostname or ""
        if url.scheme not in ("http", "https") or not any(fnmatchcase(name, one) for one in self._datanodes):
            told = f"the namenode sends reads to {name or location!r}, which is none of its datanodes: set datanodes"
            raise OriginUnreachable(told, may_be_done=False)
        return Target(url.scheme, _host_of(url), url.path, url.query)


def _host_of(url: SplitResult) -> str:
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname or ""
    return host if url.port is None else f"{host}:{url.port}"


def _near(host: str) -> tuple[str, ...]:
    """Return the hosts that may be datanodes when none is configured: the namenode's, and those of its domain."""
    _, dot, domain = host.partition(".")
    return (host, f"*.{domain}") if dot and not _IS_IP.fullmatch(host) else (host,)


def _document(body: bytes) -> dict[str, Any]:
    try:
        told = orjson.loads(body)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise OriginBodyError("the namenode's answer is no JSON object")
    return told


def _statuses(listed: Sequence[Any]) -> list[FileStatus]:
    """Return files and directories; OriginBodyError for what is no status."""
    found = []
    try:
        for one in listed:
            if one["type"] in ("FILE", "DIRECTORY"):
                modified, file_id = int(one["modificationTime"]), int(one.get("fileId", 0))
                name = str(one["pathSuffix"]).encode()
                found.append(FileStatus(name, one["type"] == "DIRECTORY", int(one["length"]), modified, file_id))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OriginBodyError(f"the namenode's answer is no FileStatus: {error}") from None
    return found


async def _failure(response: HttpResponse) -> Exception:
    """Return what an answer that is no success says, as S3 says it, or that there is none for now."""
    try:
        told = _document(await response.read(_REFUSAL_BYTES_MAX)).get("RemoteException", {})
    except OriginBodyError:
        told = {}
    name, message = str(told.get("exception", "")), str(told.get("message", ""))[:300]
    status = response.status
    if name in _ABSENT or (status == 404 and not name):
        return s3_error("NoSuchKey")
    if status == 401:
        return s3_error("AccessDenied", "The namenode asks for Kerberos, which Forebay does not speak.")
    if name in _DENIED:
        return s3_error("AccessDenied", message or None)
    if status == 400:
        return s3_error("InvalidRequest", message or None)
    # 403 is any other IOException, such as that of a namenode on standby or without a datanode.
    return OriginUnreachable(f"HTTP {status} {name} {message}".strip(), may_be_done=False)

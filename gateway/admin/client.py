"""A client of the admin port of a running gateway.

A gateway of another version may lack a field that the command line needs: the client says so, and guesses nothing.
"""

from __future__ import annotations

import os
import re
import ssl
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import quote, urlencode

import httpx
import orjson
from pydantic import ValidationError

from gateway.api import documents as to
from gateway.core.errors import AdminPortError, NoAdminPort

ANSWER_TIMEOUT_SECONDS = 10.0
CHANGE_TIMEOUT_SECONDS = 60.0
"""For changed settings: the gateway reads files, and waits for its processes."""

CLUSTER_TIMEOUT_SECONDS = 60.0
"""For questions over all nodes: the gateway asks the others before it answers, and each may take 5 seconds."""

PAGE = 1000
CHECKPOINTS_PAGE = 100
_AGAIN_SECONDS = 0.5

_STRANGE_SECONDS = 10.0
"""Seconds for which the client retries a port that has never answered, whatever `patience_seconds` says."""

_STREAM_TIMEOUT_SECONDS = 600.0
"""Between pieces, and behind the last of them: a snapshot of many objects is read and synced as a whole."""


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


def _options(base_url: str, timeout_seconds: float) -> Mapping[str, Any]:
    """Return how to make a client. Over plain HTTP none reads every authority's certificate, which takes 24 ms."""
    verify = _tls() if base_url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return {"timeout": timeout_seconds, "trust_env": False, "verify": verify}


Answer = TypeVar("Answer", bound=to.Document)
Page = TypeVar("Page", to.PendingObjects, to.OpenUploadsDocument, to.CheckpointsDocument)
Entry = TypeVar("Entry")


class Sample(NamedTuple):
    """One number of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)",?')


def _labels(text: str) -> dict[str, str]:
    found, at = {}, 0
    while label := _LABEL.match(text, at):
        found[label[1]], at = label[2], label.end()
    return found


def samples(exposition: str, names: Collection[str]) -> Iterator[Sample]:
    """Yield the numbers of these metrics from the text of /metrics."""
    for line in exposition.splitlines():
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        if name in names:
            yield Sample(name, _labels(labels), float(value))


class AdminClient:
    """Asks the admin port at `base_url`, with its token where it has one. AdminPortError says what was wrong."""

    def __init__(self, base_url: str, token: str | None, directory: str | None = None) -> None:
        """Make a client that a gateway on another cache directory than `directory` refuses to answer."""
        self.base_url = base_url.rstrip("/")
        self._headers = _headers(token, directory)
        self._has_answered = False

    def status(self) -> to.Status:
        return self.get("/api/v1/status", to.Status)

    def slots(self) -> to.SlotsDocument:
        """Return the slots, after the second over which rates are taken."""
        return self.get("/api/v1/slots", to.SlotsDocument)

    def callers(self) -> to.CallersDocument:
        """Return the callers, after the second over which rates are taken."""
        return self.get("/api/v1/callers", to.CallersDocument)

    def cluster(self) -> to.ClusterDocument:
        return self.get("/api/v1/cluster", to.ClusterDocument)

    def forget_node(self, node: str, *, only_ask: bool) -> to.ForgottenNode:
        return self.post("/api/v1/cluster/forget", {"node": node, "only_ask": only_ask}, to.ForgottenNode)

    def reload(self) -> to.ReloadedDocument:
        return self._read(to.ReloadedDocument, "POST", "/api/v1/reload", timeout=CHANGE_TIMEOUT_SECONDS)

    def metrics(self) -> str:
        return self._ask("GET", "/metrics").text

    def requests(self, limit: int) -> to.RecentRequestsDocument:
        return self.get(f"/api/v1/requests?limit={limit}", to.RecentRequestsDocument)

    def explain(self, name: str) -> to.ExplanationDocument:
        return self.get("/api/v1/explain", to.ExplanationDocument, {"object": name})

    def jobs(self) -> list[to.JobDocument]:
        return self.get("/api/v1/jobs", to.JobsDocument).jobs

    def job(self, job_id: str) -> to.JobDocument:
        return self.get(f"/api/v1/jobs/{quote(job_id, safe='')}", to.JobDocument)

    def cancel_job(self, job_id: str) -> to.JobDocument:
        return self._read(to.JobDocument, "DELETE", f"/api/v1/jobs/{quote(job_id, safe='')}")

    def start_job(self, kind: str, prefix: str, *, allow_empty: bool = False, cluster: bool = False) -> to.JobDocument:
        """Begin to `warm`, `evict` or `pin` the objects under a prefix; `cluster`: at all nodes of it."""
        return self.post(
            _job_path(kind, cluster=cluster), {"prefix": prefix, "allow_empty": allow_empty}, to.JobDocument
        )

    def start_listed_job(
        self, kind: str, manifest: Iterator[bytes], media_type: str, *, cluster: bool = False
    ) -> to.JobDocument:
        return self._read(to.JobDocument, "POST", _job_path(kind, cluster=cluster), **_content(manifest, media_type))

    def unpin(self, prefix: str, *, cluster: bool = False) -> to.Unpinned:
        return self.post(_job_path("unpin", cluster=cluster), {"prefix": prefix}, to.Unpinned)

    def refresh(self, prefix: str) -> to.Refresh:
        """See what others have changed under a prefix. `indexes` tells when their crawls are over."""
        return self.post("/api/v1/refresh", {"prefix": prefix}, to.Refresh)

    def indexes(self) -> to.IndexesDocument:
        return self.get("/api/v1/indexes", to.IndexesDocument)

    def snapshots(self) -> to.Snapshots:
        return self.get("/api/v1/snapshots", to.Snapshots)

    def snapshot(self, name: str) -> to.SnapshotDocument:
        return self.get(_snapshot_path(name), to.SnapshotDocument)

    def create_snapshot(self, name: str, prefix: str, *, allow_empty: bool = False) -> to.JobDocument:
        return self.post(
            "/api/v1/snapshots", {"name": name, "prefix": prefix, "allow_empty": allow_empty}, to.JobDocument
        )

    def import_snapshot(self, name: str, lines: Iterator[bytes], media_type: str) -> to.SnapshotDocument:
        """Make a snapshot of any number of JSON lines."""
        content = _content(lines, media_type)
        return self._read(to.SnapshotDocument, "PUT", _snapshot_path(name), timeout=_STREAM_TIMEOUT_SECONDS, **content)

    def delete_snapshot(self, name: str, *, force: bool) -> to.SnapshotDeleted:
        """Delete a snapshot, with `force` one that freezes a slot, too."""
        path = _snapshot_path(name) + ("?force=true" if force else "")
        return self._read(to.SnapshotDeleted, "DELETE", path)

    def snapshot_lines(self, name: str) -> Iterator[bytes]:
        return self._lines(f"{_snapshot_path(name)}/objects", {})

    def snapshot_differences(self, name: str, other: str | None) -> Iterator[bytes]:
        """Yield the differences to another snapshot, or to the bucket now, line by line."""
        return self._lines(f"{_snapshot_path(name)}/diff", {"with": other} if other is not None else {})

    def flush(self, prefix: str, *, patience_seconds: float = 0.0) -> to.FlushProgress:
        return self.post("/api/v1/flush", {"prefix": prefix}, to.FlushProgress, patience_seconds=patience_seconds)

    def flush_progress(
        self, prefix: str, through: int, *, is_name: bool = False, patience_seconds: float = 0.0
    ) -> to.FlushProgress:
        asked = {"prefix": prefix, "through": str(through)} | ({"is_name": "true"} if is_name else {})
        return self.get("/api/v1/flush", to.FlushProgress, asked, patience_seconds=patience_seconds)

    def cluster_flush(
        self, prefix: str, begun: to.ClusterFlush | None = None, *, patience_seconds: float = 0.0
    ) -> to.ClusterFlush:
        """Flush all nodes; with `begun`, the answer before, look what is left of that."""
        asked: dict[str, Any] = {"prefix": prefix}
        if begun is not None:
            asked["begun"] = [
                {"address": one.address, "through": one.progress.through, "is_name": one.progress.is_name}
                for one in begun.nodes
                if one.progress is not None
            ]
        options = {"timeout": CLUSTER_TIMEOUT_SECONDS, "patience_seconds": patience_seconds}
        options |= _content(orjson.dumps(asked), "application/json")
        return self._read(to.ClusterFlush, "POST", "/api/v1/cluster/flush", **options)

    def cluster_checkpoints(self, prefix: str, state: str | None) -> Iterator[to.ClusterCheckpoints]:
        """Yield pages over all nodes."""
        asked = {"prefix": prefix} | ({"state": state} if state is not None else {})
        while True:
            path = f"/api/v1/cluster/checkpoints?{urlencode(asked)}"
            page = self._read(to.ClusterCheckpoints, "GET", path, timeout=CLUSTER_TIMEOUT_SECONDS)
            yield page
            if page.next is None:
                return
            asked["after"] = page.next

    def pending_objects(self, prefix: str, *, problems: bool = False) -> Iterator[to.PendingObject]:
        """Yield every one, read page by page; with `problems` only those that do not get to the origin."""
        asked = {"prefix": prefix} | ({"problems": "true"} if problems else {})
        return self._pages("writeback/objects", asked, to.PendingObjects, lambda page: page.objects)

    def open_uploads(self, prefix: str) -> Iterator[to.OpenUploadDocument]:
        return self._pages("writeback/uploads", {"prefix": prefix}, to.OpenUploadsDocument, lambda page: page.uploads)

    def checkpoints(self, prefix: str, state: str | None) -> Iterator[to.Checkpoint]:
        asked = {"prefix": prefix} | ({"state": state} if state is not None else {})
        return self._pages(
            "checkpoints", asked, to.CheckpointsDocument, lambda page: page.checkpoints, CHECKPOINTS_PAGE
        )

    def resolve(self, name: str, decision: str, sequence: int | None) -> to.Resolved:
        """Decide about `s3://bucket/key`; with `sequence` about this very write."""
        asked = {"object": name, "decision": decision} | ({} if sequence is None else {"sequence": sequence})
        return self.post("/api/v1/writeback/resolve", asked, to.Resolved)

    def abort_uploads(self, upload_ids: list[str]) -> to.AbortedDocument:
        """Abort 100 at most."""
        return self.post("/api/v1/writeback/abort", {"upload_ids": upload_ids}, to.AbortedDocument)

    def _pages(
        self, path: str, asked: Mapping[str, str], kind: type[Page], of: Callable[[Page], list[Entry]], size: int = PAGE
    ) -> Iterator[Entry]:
        query = {**asked, "limit": str(size)}
        while True:
            page = self.get(f"/api/v1/{path}", kind, query)
            yield from of(page)
            if page.next is None:
                return
            query["after"] = page.next

    def get(
        self, path: str, kind: type[Answer], query: Mapping[str, str] | None = None, *, patience_seconds: float = 0.0
    ) -> Answer:
        """Return a document. Retry for `patience_seconds` while the gateway does not answer, or says 503."""
        asked = f"{path}?{urlencode(query)}" if query else path
        return self._read(kind, "GET", asked, patience_seconds=patience_seconds)

    def post(
        self, path: str, document: Mapping[str, Any], kind: type[Answer], *, patience_seconds: float = 0.0
    ) -> Answer:
        """Ask for something to be done. With patience, as in `get`, it may be done twice."""
        content = _content(orjson.dumps(document), "application/json")
        return self._read(kind, "POST", path, patience_seconds=patience_seconds, **content)

    def _read(self, kind: type[Answer], method: str, path: str, **options: Any) -> Answer:
        return _parsed(kind, self._ask(method, path, **options), self.base_url)

    def _lines(self, path: str, query: Mapping[str, str]) -> Iterator[bytes]:
        try:
            with (
                httpx.Client(**_options(self.base_url, _STREAM_TIMEOUT_SECONDS)) as client,
                client.stream("GET", self.base_url + path, params=query, headers=self._headers) as answer,
            ):
                if answer.is_error:
                    answer.read()
                answer.raise_for_status()
                rest = b""
                for piece in answer.iter_bytes():
                    *lines, rest = (rest + piece).split(b"\n")
                    yield from lines
                if rest:
                    yield rest
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise_problem(self.base_url, error)

    def _ask(
        self,
        method: str,
        path: str,
        *,
        patience_seconds: float = 0.0,
        timeout: float = ANSWER_TIMEOUT_SECONDS,
        headers: dict[str, str] | None = None,
        content: bytes | Iterator[bytes] | None = None,
    ) -> httpx.Response:
        begun, headers = time.monotonic(), self._headers | (headers or {})
        while True:
            try:
                with httpx.Client(**_options(self.base_url, timeout)) as client:
                    answer = client.request(method, self.base_url + path, headers=headers, content=content)
                self._has_answered = True
                return answer.raise_for_status()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                is_strange = isinstance(error, httpx.ConnectError) and not self._has_answered
                bound_seconds = min(patience_seconds, _STRANGE_SECONDS) if is_strange else patience_seconds
                if time.monotonic() >= begun + bound_seconds or not _passes(error):
                    raise_problem(self.base_url, error)
            time.sleep(_AGAIN_SECONDS)


class LiveAdminClient:
    """A client on an event loop, over one connection, for a caller that looks again and again. Must be closed."""

    def __init__(self, base_url: str, token: str | None, directory: str | None, timeout_seconds: float) -> None:
        self.base_url = base_url.rstrip("/")
        headers = _headers(token, directory)
        self._client = httpx.AsyncClient(headers=headers, **_options(self.base_url, timeout_seconds))

    async def get(self, path: str, kind: type[Answer]) -> Answer:
        return _parsed(kind, await self._ask(path), self.base_url)

    async def text(self, path: str) -> str:
        return (await self._ask(path)).text

    async def _ask(self, path: str) -> httpx.Response:
        try:
            return (await self._client.get(self.base_url + path)).raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise_problem(self.base_url, error)

    async def aclose(self) -> None:
        await self._client.aclose()


def _parsed(kind: type[Answer], answer: httpx.Response, url: str) -> Answer:
    """Return the document of an answer; AdminPortError where it is of another kind."""
    try:
        return kind.model_validate(answer.json())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise AdminPortError(
            f"this version of the command does not understand the answer of {url} "
            f"({place}: {first['msg']}): is it a Forebay, and of the same version?"
        ) from None
    except ValueError as error:
        raise_problem(url, error)


def _job_path(kind: str, *, cluster: bool) -> str:
    return f"/api/v1/{kind}{'?cluster=true' if cluster else ''}"


def _snapshot_path(name: str) -> str:
    return f"/api/v1/snapshots/{quote(name, safe='')}"


def _content(content: bytes | Iterator[bytes], media_type: str) -> dict[str, Any]:
    return {"content": content, "headers": {"content-type": media_type}}


def _headers(token: str | None, directory: str | None) -> dict[str, str]:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return headers | ({"x-forebay-directory": quote(os.fsencode(directory))} if directory else {})


def _passes(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 503
    return isinstance(error, httpx.TransportError)


def raise_problem(base_url: str, error: Exception) -> NoReturn:
    if isinstance(error, httpx.HTTPStatusError):
        response = error.response
        hint = "; give it as FOREBAY_ADMIN__TOKEN, or in the file of --config" if response.status_code == 401 else ""
        raise AdminPortError(f"{_reason(response)}{hint} ({base_url} answered {response.status_code})") from error
    if isinstance(error, httpx.RemoteProtocolError):
        raise AdminPortError(f"the answer of {base_url} broke off: {error}") from error
    if isinstance(error, httpx.TimeoutException):
        raise AdminPortError(f"no gateway answers at {base_url} in time: {type(error).__name__}") from error
    if isinstance(error, httpx.ConnectError):
        raise NoAdminPort(
            f"no gateway answers at {base_url}: {error}; is `forebay serve` running there? --admin-url names another"
        ) from error
    raise AdminPortError(f"no gateway answers at {base_url}: {error}") from error


def _reason(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return response.text.strip()[:200]
